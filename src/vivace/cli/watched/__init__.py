"""Running a command: exit codes, and the processes that read models of others within limits."""
