"""What somebody types, in this process."""

import sys

import pytest

from vivace.cli import main


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`vivace ARGUMENTS`; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["vivace", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)
