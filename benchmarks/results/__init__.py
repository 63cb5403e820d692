"""The schema of the result files, targets and the report."""
