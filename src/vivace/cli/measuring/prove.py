"""vivace prove"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from vivace.cli.command import CiFiles, command, command_line, interrupted
from vivace.cli.watched.failures import INTERRUPTED
from vivace.errors import UsageError
from vivace.foundation.spec.settings import FILE, Option, Positional
from vivace.foundation.untrusted.destinations import check_writable, is_standard_output
from vivace.proofs.prover import ProveSettings

if TYPE_CHECKING:
    from vivace.proofs.prover import Prover
    from vivace.proofs.sides.proof_store import Letter

_SAY_EVERY_S = 5.0


class ProveCommand(CiFiles, ProveSettings):
    a: Annotated[str, Positional()]
    b: Annotated[str, Positional()]
    output: Annotated[
        Path | None,
        Option(
            "Also write the result as an HTML page, with images.", "-o --output", metavar="FILE", path=FILE
        ),
    ] = None
    format_: Annotated[
        Literal["text", "json"], Option("Format of the result on standard output.", "--format")
    ] = "text"


@command(ProveCommand)
def prove(settings: ProveCommand) -> int:
    """Prove that B draws the same images as A, or as good ones, and does what it is asked for.

    A, the reference, and B are each MODEL:RECIPE, a folder of images, an OpenAI images endpoint
    (http://HOST:PORT/v1, with ?model=NAME&FIELD=VALUE for more fields), a ComfyUI server
    (comfyui:http://HOST:PORT?workflow=FILE), or python:MODULE:FUNCTION. Both draw the same
    prompts and seeds. Images go to A and B only. An interrupted command goes on where it stopped.

    Exit codes: 0 proven, 1 a claim failed, 4 undecided or images are missing; others as for all commands.

    \b
        vivace prove tiny-sd:baseline tiny-sd:tiny_vae -o page.html
        vivace prove tiny-sd:baseline http://127.0.0.1:8000/v1 --claim same
        vivace prove old new --prompts prompts.txt --seeds 1
    """
    from vivace.answers.formatting import date
    from vivace.proofs.prover import Prover

    settings.check_ci_files()
    if settings.output is not None:
        check_writable(settings.output)
        if is_standard_output(settings.output):
            raise UsageError("-o - would mix the page with the result; give the name of a file")
    prover = Prover.of(settings.a, settings.b, settings)
    if prover.store.num_resumed:
        since = date(prover.store.since)
        click.echo(f"going on with {prover.store.num_resumed} images, drawn since {since}", err=True)
    try:
        for letter, again in prover.passes:
            status = _draw(prover, letter, again=again)
            if status == INTERRUPTED:  # in another process
                raise KeyboardInterrupt
            if status != 0:
                return status
        prover.measure_loads(lambda text: click.echo(text, err=True))
        return _conclude(prover, settings)
    except KeyboardInterrupt:
        return interrupted("the images are kept")


def _draw(prover: Prover, letter: Letter, *, again: bool) -> int:
    """Draw a side; return the exit code. If one of both models is foreign, a side is drawn in a watched process.

    A model of vivace's own is then drawn in another process too: after CUDA is used here, no process can be forked.
    """
    from vivace.cli.watched.guarded import guarded, guarded_reading
    from vivace.models.reading_limits import ReadingLimits, is_trusted

    side = prover.plan.side(letter)

    def draw(is_read: Callable[[], None]) -> int:
        progress = ProofProgress(side.text)
        say = f"note: {letter.upper()}: "
        prover.draw(letter, progress, is_read, lambda note: click.echo(say + note, err=True), again=again)
        return 0

    models = [each.located for each in (prover.plan.a, prover.plan.b) if each.located is not None]
    if side.located is None or all(is_trusted(model) for model in models):
        return guarded(None, draw)
    return guarded_reading(side.located.model.name, ReadingLimits.of(side.located), draw)


class ProofProgress:
    def __init__(self, name: str = "") -> None:
        self._name = name
        self._spoke_at = time.monotonic()

    def __call__(self, letter: Letter, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._spoke_at >= _SAY_EVERY_S:
            self._spoke_at = now
            click.echo(f"{f'{letter.upper()} {self._name}'.rstrip()}: {done} of {total} images", err=True)


def _conclude(prover: Prover, settings: ProveCommand) -> int:
    from vivace.cli.display.terminal import show
    from vivace.cli.watched.guarded import guarded_scorers
    from vivace.proofs.verdicts.proof import answer_of

    def judge(is_read: Callable[[], None]) -> int:
        proof = prover.conclude(is_read)
        answer = answer_of(proof, command_line())
        show(answer, settings.format_, settings.output)
        settings.write_ci_files(answer)
        return proof.exit_code

    return guarded_scorers(prover.judges.all, judge)
