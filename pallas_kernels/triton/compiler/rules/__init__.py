"""Rules from the operations of a kernel to the source of official Triton."""
