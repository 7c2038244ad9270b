"""Commands that measure: each a class of settings, a call and what it prints."""
