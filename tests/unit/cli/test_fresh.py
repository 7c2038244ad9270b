"""A fresh process goes through a command again, and does one part of it."""

import sys
from pathlib import Path

import click
import pytest

from vivace.cli.watched.fresh import CommandPart, has_command_line, run_part, settings_of


def _context(part: CommandPart | None) -> click.Context:
    return click.Context(click.Command("prove"), obj=settings_of(["prove"], part))


def _never(*_: object) -> int:
    raise AssertionError("no process is started, and no other part is done")


def test_parts_before_are_left_out_and_the_command_ends_after_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = CommandPart(2, tmp_path / "read")
    context = _context(part)
    part.keep_silent()
    print("printed by the process that started this one")
    assert run_part(context, _never, _never) == 0

    def draw(is_read: object) -> int:
        assert callable(is_read)
        is_read()
        is_read()  # once more is no error
        print("drawn")
        return 4

    with pytest.raises(click.exceptions.Exit) as ended:
        run_part(context, draw, _never)
    part.end()
    assert ended.value.exit_code == 4
    assert part.is_read.exists()
    assert capsys.readouterr().out == "drawn\n"


def test_what_ends_a_process_before_its_part_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = CommandPart(1, tmp_path / "read")
    part.keep_silent()
    print("vivace: the folder is gone", file=sys.stderr)
    part.end()
    assert capsys.readouterr().err == "vivace: the folder is gone\n"


def test_only_what_was_typed_can_be_gone_through_again() -> None:
    assert has_command_line(_context(None))
    assert not has_command_line(None)
    assert not has_command_line(click.Context(click.Command("prove")))
