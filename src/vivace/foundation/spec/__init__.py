"""The data that vivace stores and passes between processes. Frozen, with a JSON round trip; imports no torch."""
