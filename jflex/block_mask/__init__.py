"""BlockMask: the class, building it, its lists, algebra, indexing and drawing."""
