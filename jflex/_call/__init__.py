"""What every public call goes through: the spec, checks of arguments, dispatch."""
