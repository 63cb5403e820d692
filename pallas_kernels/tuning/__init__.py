"""Choice of tile sizes: measured tables, and rules where no table has an entry."""
