"""What was measured, by whom, on what: one type of table, and where tables come from."""
