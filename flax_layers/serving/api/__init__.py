"""The HTTP interface: bodies, answers, streams, access."""
