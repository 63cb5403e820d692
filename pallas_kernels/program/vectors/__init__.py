"""Programs of vector mods, on rows in parts."""
