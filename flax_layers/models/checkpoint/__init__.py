"""Hugging Face checkpoints: folders, tensor files, names, configs."""
