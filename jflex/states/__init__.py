"""Results of attention over some of the keys: states that merge, the lse in other bases, statistics of rows."""
