"""The step on the device: model, sampling, speculation."""
