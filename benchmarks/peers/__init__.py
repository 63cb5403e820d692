"""The implementations that are measured."""
