"""Training data: files, documents, and rows of them."""
