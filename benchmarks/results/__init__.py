"""The schema of the result files, and the report."""
