"""The torch peers."""
