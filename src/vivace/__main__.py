"""`python -m vivace` is the `vivace` command."""

from vivace.cli import main

main()
