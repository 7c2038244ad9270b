"""Command line: `commands` has the commands. Importing this imports none, so that Ctrl-C is heard meanwhile."""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Run the `vivace` command. Errors that a user can cause print one message; --debug adds the traceback."""
    from vivace.cli.commands import run
    from vivace.cli.watched.fresh import settings_of

    run(settings_of(sys.argv[1:]))


def __getattr__(name: str) -> Any:
    if name == "app":
        from vivace.cli.commands import app

        return app
    raise AttributeError(name)
