"""The process that does a part of a command; see `vivace.cli.watched.fresh`."""

from __future__ import annotations

import sys
from pathlib import Path

from vivace.cli.commands import run
from vivace.cli.watched.fresh import CommandPart, settings_of
from vivace.foundation.processes.resident import die_with_parent


def main() -> None:
    die_with_parent()
    number, is_read, *arguments = sys.argv[1:]
    sys.argv = ["vivace", *arguments]
    run(settings_of(arguments, CommandPart(int(number), Path(is_read))))


if __name__ == "__main__":
    main()
