"""Rich consoles that keep their own escape codes and remove those in the text."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vivace.foundation.untrusted.streams import plain, unchecked
from vivace.report.value_text import whole_words


def console(*, stderr: bool = False) -> Console:
    """Return a rich console on standard output or error, whose text is cleaned and whose styles are kept."""
    return _PlainConsole(file=unchecked(sys.stderr if stderr else sys.stdout))


def say(text: str) -> None:
    """Print a text on standard error. A terminal's lines end between words, and long recipes after a plus sign."""
    terminal = console(stderr=True)
    if terminal.is_terminal:
        terminal.print(Text(whole_words(text, terminal.width)))
    else:
        click.echo(text, err=True)


class _PlainConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)
