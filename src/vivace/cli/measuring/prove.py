"""vivace prove"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from vivace.cli.command import command, command_line, interrupted
from vivace.cli.watched.failures import INTERRUPTED
from vivace.errors import UsageError
from vivace.foundation.spec.settings import FILE, Option, Positional
from vivace.foundation.untrusted.destinations import check_writable, is_standard_output
from vivace.proofs.prover import ProveSettings

if TYPE_CHECKING:
    from vivace.models.find import LocatedModel
    from vivace.proofs.sides.plan import ProofPlan
    from vivace.proofs.sides.proof_store import Letter, ProofStore
    from vivace.proofs.verdicts.scoring import Judges

_SAY_EVERY_S = 5.0


class ProveCommand(ProveSettings):
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
    from vivace.proofs.checks.side_loads import check_loads, measure_loads
    from vivace.proofs.prover import FOLDER, find_judges, passes
    from vivace.proofs.sides.plan import prepare
    from vivace.proofs.sides.proof_store import ProofStore
    from vivace.proofs.verdicts.conclude import Options

    if settings.output is not None:
        check_writable(settings.output)
        if is_standard_output(settings.output):
            raise UsageError("-o - would mix the page with the result; give the name of a file")
    plan = prepare(settings.a, settings.b, settings)
    judges = find_judges(plan, settings.claims, settings.scorer, settings.witness)
    check_loads(plan, settings)
    kept = ProofStore(settings.store / FOLDER, plan.identity, settings.reuse)
    if kept.num_resumed:
        click.echo(f"going on with {kept.num_resumed} images, drawn since {date(kept.since)}", err=True)
    try:
        for letter, again in passes(settings.claims):
            status = _draw(plan, letter, kept, again=again)
            if status == INTERRUPTED:  # in another process
                raise KeyboardInterrupt
            if status != 0:
                return status
        loads = measure_loads(plan, kept, settings, lambda text: click.echo(text, err=True))
        judging = Options(tuple(settings.claims), settings.fail_under, tuple(loads))
        return _conclude(plan, kept, judges, judging, settings.output, settings.format_)
    except KeyboardInterrupt:
        return interrupted("the images are kept")


def _draw(plan: ProofPlan, letter: Letter, kept: ProofStore, *, again: bool) -> int:
    """Draw a side; return the exit code. A foreign model is read in a watched process."""
    from vivace.proofs.prover import draw_side

    side = plan.side(letter)

    def draw(is_read: Callable[[], None]) -> int:
        draw_side(
            plan,
            letter,
            kept,
            ProofProgress(side.text),
            is_read,
            lambda note: click.echo(f"note: {letter.upper()}: {note}", err=True),
            again=again,
        )
        return 0

    status = _guarded(plan, side.located, draw)
    kept.reload()
    return status


def _guarded(plan: ProofPlan, located: LocatedModel | None, draw: Callable[[Callable[[], None]], int]) -> int:
    """Run the drawing of a side in a watched process, if one of both models is foreign.

    A model of vivace's own is then drawn in another process too: after CUDA is used here, no process can be forked.
    """
    from vivace.cli.watched.guarded import guarded, guarded_reading
    from vivace.models.reading_limits import ReadingLimits, is_trusted

    models = [side.located for side in (plan.a, plan.b) if side.located is not None]
    if located is None or all(is_trusted(model) for model in models):
        return guarded(None, draw)
    return guarded_reading(located.model.name, ReadingLimits.of(located), draw)


class ProofProgress:
    """Prints the progress of a side's images every few seconds."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._spoke_at = time.monotonic()

    def __call__(self, letter: Letter, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._spoke_at >= _SAY_EVERY_S:
            self._spoke_at = now
            click.echo(f"{f'{letter.upper()} {self._name}'.rstrip()}: {done} of {total} images", err=True)


def _conclude(
    plan: ProofPlan, kept: ProofStore, judges: Judges, judging: Any, output: Path | None, format_: str
) -> int:
    from vivace.cli.display.terminal import show
    from vivace.cli.watched.guarded import guarded_scorers
    from vivace.proofs.verdicts.conclude import conclude
    from vivace.proofs.verdicts.proof_answer import answer_of

    def judge(is_read: Callable[[], None]) -> int:
        proof = conclude(plan, kept, judges, judging, is_read)
        show(answer_of(proof, command_line()), format_, output)
        kept.end()
        return proof.exit_code

    return guarded_scorers(judges.all, judge)
