"""The tangent kernel of dense attention for Hopper."""
