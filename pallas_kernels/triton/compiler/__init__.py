"""Official Triton: kernels traced by Pallas, emitted as Triton source, compiled by Triton and launched from XLA."""
