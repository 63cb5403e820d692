"""Runs and times implementations, one process per library."""
