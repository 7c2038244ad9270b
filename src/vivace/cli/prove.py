"""vivace prove"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vivace.cli import options
from vivace.cli.failures import INTERRUPTED
from vivace.cli.spec_options import IMAGE_SETTINGS, LOAD, PROOF, TIMING, WORKLOAD, collect, option
from vivace.errors import UsageError
from vivace.foundation.untrusted.destinations import check_writable, is_standard_output, replace

if TYPE_CHECKING:
    from vivace.foundation.spec.sizes import Size
    from vivace.models.find import LocatedModel
    from vivace.proofs.checks.side_loads import LoadRequest
    from vivace.proofs.sides.prepare_sides import DrawRequest, Prepared
    from vivace.proofs.sides.proof_store import Letter, ProofStore
    from vivace.proofs.verdicts.proof import Proof
    from vivace.proofs.verdicts.scoring import Judges

_SAY_EVERY_S = 5.0


def parse_fail_under(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> dict[str, float]:
    """Return the limits of --fail-under by metric."""
    from vivace.proofs.verdicts.proof import METRICS

    limits: dict[str, float] = {}
    for part in value.split(",") if value is not None else ():
        name, _, number = (text.strip() for text in part.partition("="))
        if name not in METRICS:
            raise click.BadParameter(
                f"{part.strip()!r} is not NAME=VALUE; NAME is one of {', '.join(METRICS)}."
            )
        low, high = METRICS[name]
        try:
            limits[name] = float(number)
        except ValueError:
            raise click.BadParameter(f"{number!r} for {name} is not a number.") from None
        if not low <= limits[name] <= high:
            raise click.BadParameter(f"{name}={number} is not from {low:g} to {high:g}.")
    return limits


def parse_sizes(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[Size, ...]:
    """Return the sizes of --sizes, each once."""
    from vivace.foundation.spec.sizes import Size

    texts = [text.strip() for value in values for text in value.split(",")]
    try:
        return tuple(dict.fromkeys(Size.of(text) for text in texts))
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


@options.command()
@click.argument("a")
@click.argument("b")
@options.prompts()
@click.option(
    "--prompt-set",
    type=click.Choice(["real", "tinyworld"]),
    help="Prompts that ship with vivace; default: those that the model understands, else real.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(1, 1000),
    default=13,
    show_default=True,
    help="Prompts of the set; each set has 39.",
)
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Seeds of each prompt.",
)
@option(WORKLOAD, "seed", type=click.IntRange(0, 2**31 - 1))
@options.workload
@click.option(
    "--sizes",
    multiple=True,
    callback=parse_sizes,
    metavar="WxH,...",
    help="Draw every prompt at each of these sizes, e.g. 512x512,512x768.",
)
@click.option(
    "--claim",
    "claims",
    type=click.Choice(["same", "as-good", "legible", "honest", "fast"]),
    multiple=True,
    help="Claim to prove, for the exit code; repeat for more. Default: as-good, legible where words "
    "are read, honest for a server. fast draws A once more, after B.",
)
@click.option(
    "--fail-under",
    callback=parse_fail_under,
    metavar="NAME=VALUE,...",
    help="Limits on B's mean distances to A: psnr_db, ssim, match (least), lpips (most).",
)
@options.scorer
@options.witness
@option(TIMING, "timeout_s", "--timeout", help="Longest wait for an answer of a server, in seconds.")
@click.option(
    "--key-a",
    callback=options.read_key,
    metavar="FILE",
    help="File with the key that requests to A carry (Authorization: Bearer).",
)
@click.option("--key-b", callback=options.read_key, metavar="FILE", help="Likewise, to B.")
@click.option(
    "--requests",
    "--num-requests",
    "num_requests",
    type=click.IntRange(8, 100_000),
    metavar="N",
    help="Also put load on each images endpoint: N requests of one client, of eight, and of users.",
)
@click.option(
    "--aiperf-a",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Also show a run of AIPerf on A (its --artifact-dir).",
)
@click.option(
    "--aiperf-b",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Likewise, on B.",
)
@click.option("--reuse", is_flag=True, help="Also reuse the images of an earlier run that has ended.")
@options.device
@options.threads
@options.store
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the result as an HTML page, with images.",
)
@options.text_or_json("result")
@collect(settings=IMAGE_SETTINGS, request=PROOF, load=LOAD)
def prove(
    a: str,
    b: str,
    request: DrawRequest,
    load: LoadRequest,
    claims: tuple[Any, ...],
    fail_under: dict[str, float],
    scorer: str | None,
    witness: str | None,
    reuse: bool,
    store: Path,
    output: Path | None,
    format_: str,
) -> int:
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
    from vivace.proofs.prover import FOLDER, find_judges
    from vivace.proofs.proving import Options, open_store
    from vivace.proofs.sides.prepare_sides import prepare

    if output is not None:
        check_writable(output)
        if is_standard_output(output):
            raise UsageError("-o - would mix the page with the result; give the name of a file")
    prepared = prepare(a, b, request)
    judges = find_judges(prepared, claims, scorer, witness)
    check_loads(prepared, load)
    kept = open_store(prepared, store / FOLDER, reuse)
    if kept.num_resumed:
        click.echo(f"going on with {kept.num_resumed} images, drawn since {date(kept.since)}", err=True)
    try:
        for letter, again in _passes(claims):
            status = _draw(prepared, letter, kept, again=again)
            if status == INTERRUPTED:  # in another process
                raise KeyboardInterrupt
            if status != 0:
                return status
        loads = measure_loads(prepared, kept, load, lambda text: click.echo(text, err=True))
        judging = Options(claims, fail_under, tuple(loads))
        return _conclude(prepared, kept, judges, judging, output, format_)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; the images are kept. To continue, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return INTERRUPTED


def _passes(claims: tuple[Any, ...]) -> list[tuple[Letter, bool]]:
    """Return the order in which the sides are drawn: A, B, and A once more for its latency."""
    passes: list[tuple[Letter, bool]] = [("a", False), ("b", False)]
    return [*passes, ("a", True)] if "fast" in claims else passes


def _draw(prepared: Prepared, letter: Letter, kept: ProofStore, *, again: bool) -> int:
    """Draw a side; return the exit code. A foreign model is read in a watched process."""
    from vivace.proofs.proving import draw_side

    source = prepared.a if letter == "a" else prepared.b

    def draw(is_read: Callable[[], None]) -> int:
        draw_side(
            prepared,
            letter,
            kept,
            ProofProgress(source.side.text),
            is_read,
            lambda note: click.echo(f"note: {letter.upper()}: {note}", err=True),
            again=again,
        )
        return 0

    status = _guarded(prepared, source.located, draw)
    kept.reload()
    return status


def _guarded(
    prepared: Prepared, located: LocatedModel | None, draw: Callable[[Callable[[], None]], int]
) -> int:
    """Run the drawing of a side in a watched process, if one of both models is foreign.

    A model of vivace's own is then drawn in another process too: after CUDA is used here, no process can be forked.
    """
    from vivace.cli.guarded import guarded, guarded_reading
    from vivace.models.reading_limits import ReadingLimits, is_trusted

    models = [source.located for source in (prepared.a, prepared.b) if source.located is not None]
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
    prepared: Prepared, kept: ProofStore, judges: Judges, judging: Any, output: Path | None, format_: str
) -> int:
    from vivace.cli.guarded import guarded_scorers
    from vivace.proofs.proving import conclude

    def judge(is_read: Callable[[], None]) -> int:
        proof = conclude(prepared, kept, judges, judging, is_read)
        _write(proof, output, format_)
        kept.end()
        return proof.exit_code

    return guarded_scorers(judges.all, judge)


def _write(proof: Proof, output: Path | None, format_: str) -> None:
    click.echo(json.dumps(proof.to_dict(), indent=2) if format_ == "json" else str(proof))
    if output is not None:
        replace(output, proof.page(options.command_line()).encode())
        click.echo(f"page: {output}", err=True)
