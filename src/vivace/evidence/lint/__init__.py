"""Find impossible and doubtful rows in tables of latencies from any source."""
