"""What the CPU is asked, one question a file; ``python -m benchmarks.cpu`` runs them."""
