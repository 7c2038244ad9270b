"""What commands show on a terminal while they run, and in which words."""
