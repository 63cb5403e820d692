"""Which tiles a kernel takes."""
