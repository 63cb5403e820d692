"""Split-KV: work items, kernels for few queries and for pages through Triton, merge and repair; both engines use it."""
