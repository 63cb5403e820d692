"""What attention over some of the keys hands on: states that merge, the lse in other bases, statistics of rows."""
