"""Benchmarks of jflex beside its peers; `README.md` says how to run them."""
