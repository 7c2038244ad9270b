"""Find impossible and unbelievable rows in tables of latencies, whoever made them."""
