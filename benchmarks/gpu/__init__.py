"""What a GPU is asked besides speed, one question a file; ``python -m benchmarks.gpu`` runs them."""
