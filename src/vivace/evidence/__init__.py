"""Measurements with their source and device: one type of table, and its sources."""
