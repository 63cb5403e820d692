"""The path of every public call: checks of its arguments, its spec, dispatch."""
