"""The process that keeps a session and draws."""
