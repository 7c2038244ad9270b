"""Rich consoles that keep their own escape codes and remove those in the text; and how a command shows its answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vivace.foundation.untrusted.streams import plain, unchecked

if TYPE_CHECKING:
    from vivace.answers.answer import Answer


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on standard output or error, whose text is cleaned and whose styles are kept."""
    return _PlainConsole(file=unchecked(sys.stderr if stderr else sys.stdout))


def show(answer: Answer, format_: str, page: Path | None = None, *, details: bool = True) -> None:
    """Print an answer on standard output, and write its page if one is asked for.

    Args:
        details: whether to add what a short answer leaves out.
    """
    from vivace.answers.data import written
    from vivace.answers.terminal import print_answer, text_of

    terminal, is_text = console(), format_ in ("table", "text")
    if is_text and terminal.is_terminal:
        print_answer(answer, terminal, details=details)
    else:
        click.echo(text_of(answer, details=details) if is_text else written(answer, format_), nl=False)
    if format_ in ("json", "csv"):
        for note in answer.notes:
            click.echo(f"note: {note}", err=True)
    if page is not None:
        from vivace.answers.page import page_of
        from vivace.foundation.untrusted.destinations import replace

        replace(page, page_of(answer).encode())
        click.echo(f"page: {page}", err=True)
    if answer.reproduce and format_ not in ("json", "csv"):
        click.echo(f"reproduce: {answer.reproduce}", err=True)


class _PlainConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)
