"""vivace bench --endpoint: load on a server."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vivace.cli import options
from vivace.cli.failures import INTERRUPTED
from vivace.cli.spec_options import SpecCommand, collect
from vivace.errors import UsageError

if TYPE_CHECKING:
    from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage
    from vivace.benchmark.load_testing.load_target import LoadTarget
    from vivace.benchmark.load_testing.stages import LoadPlan

FLAG = "--endpoint"
_SOME_FAILED = 4
_SAY_EVERY_S = 5.0
_MOST_CLIENTS = 512
_USUAL_MINUTES = 5.0


def parse_clients(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `1,8`, each once."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= _MOST_CLIENTS for part in parts):
        raise click.BadParameter(
            f"{value!r} is not a list of whole numbers from 1 to {_MOST_CLIENTS}, separated by commas."
        )
    return tuple(dict.fromkeys(map(int, parts)))


def parse_fractions(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Return the numbers of a list such as `0.5,0.95`, each once; none for `none`."""
    if value == "none":
        return ()
    try:
        fractions = tuple(dict.fromkeys(float(part) for part in value.split(",")))
    except ValueError:
        fractions = ()
    if not fractions or not all(0.01 <= fraction <= 10 for fraction in fractions):
        raise click.BadParameter(
            f"{value!r} is not 'none' or a list of numbers from 0.01 to 10, separated by commas."
        )
    return fractions


@click.command()
@click.option(FLAG, "url", required=True, metavar="URL", help="An OpenAI images API: http://HOST:PORT/v1.")
@click.option(
    "--model", metavar="NAME", help="Model of the requests; default: the only one that the server lists."
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="WxH",
    help="Image size; repeat for a random one in each request.",
)
@click.option(
    "--num-inference-steps",
    "--steps",
    type=click.IntRange(1, 1000),
    help="Denoising steps; default: the server's own.",
)
@click.option(
    "--guidance-scale", type=options.FiniteFloat(0, 100), help="Guidance scale; default: the server's own."
)
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="NAME",
    help="A LoRA of a vivace server; repeat for a random one in each request.",
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=VALUE",
    help="Further field of each request, e.g. output_format=webp; repeat for more.",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(["seed", "n", "response_format", "model"]),
    help="Leave a field out of requests, for a server that does not know it; repeat for more.",
)
@options.prompts()
@click.option(
    "--prompt-set",
    type=click.Choice(["real", "tinyworld"]),
    help="Prompts that ship with vivace; default: tinyworld for the embedded models, real for others.",
)
@click.option(
    "--clients",
    callback=parse_clients,
    default="8",
    show_default=True,
    metavar="N[,N...]",
    help="Closed loops with this many clients, after one client alone. The best throughput is the capacity.",
)
@click.option(
    "--fractions",
    callback=parse_fractions,
    default="0.5,0.8,0.95",
    show_default=True,
    metavar="F[,F...]|none",
    help="Fractions of the capacity at which users come at random (Poisson).",
)
@click.option(
    "--num-requests",
    type=click.IntRange(2, 1_000_000),
    help="Requests of each load; default: as many as --minutes allow.",
)
@click.option(
    "--minutes",
    type=options.FiniteFloat(0.1, 10_000),
    help="Time for all loads, at least 6 requests each; default: 5, or no limit with --num-requests.",
)
@click.option(
    "--slo-factor",
    type=options.FiniteFloat(1, 1000),
    default=3.0,
    show_default=True,
    help="An image is in time if it takes at most this many times the latency of one client.",
)
@click.option(
    "--slo",
    "slo_s",
    type=options.FiniteFloat(0.001, 86_400),
    metavar="SECONDS",
    help="Longest time of an image that is in time, instead of --slo-factor.",
)
@click.option(
    "--timeout",
    type=options.FiniteFloat(0.1, 86_400),
    default=600.0,
    show_default=True,
    help="Time limit of a request, in seconds.",
)
@click.option(
    "--api-key-file",
    "key",
    callback=options.read_key,
    metavar="FILE",
    help="File with the key that requests carry (Authorization: Bearer).",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the arrivals."
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Independent loads of each kind: figures come with the least and the most of them.",
)
@click.option("--label", metavar="TEXT", help="Names the server in rows and tables; default: its URL.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep rows with raw samples; the same command again measures only what is missing.",
)
@click.option("--rerun", is_flag=True, help="Measure again what FILE already has.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Also compare with the rows of another file.",
)
@click.option(
    "--aiperf",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Measure nothing: show the figures of a run of AIPerf (its --artifact-dir).",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the result as an HTML page, with each request in a chart.",
)
@options.results_format
@collect(plan="vivace.benchmark.load_testing.stages:LoadPlan")
def bench_endpoint(
    url: str,
    model: str | None,
    sizes: tuple[str, ...],
    num_inference_steps: int | None,
    guidance_scale: float | None,
    loras: tuple[str, ...],
    fields: tuple[str, ...],
    without: tuple[str, ...],
    prompts: Sequence[str] | None,
    prompt_set: str | None,
    plan: LoadPlan,
    timeout: float,
    key: str | None,
    label: str | None,
    output: Path | None,
    rerun: bool,
    against: Path | None,
    aiperf: Path | None,
    page: Path | None,
    format_: str,
) -> int:
    """Measure an OpenAI images server (vivace's, sglang's, vllm-omni's) under load.

    One client alone, closed loops of several, then users who come at random at fractions of the capacity. The latency
    of users counts from their arrival, even if the server was behind. Each answer is decoded and looked at.

    Exit codes: 0 done, 4 some requests returned no image; others as for all commands.

    \b
        vivace bench --endpoint http://127.0.0.1:8000/v1
        vivace bench --endpoint http://127.0.0.1:8000/v1 --size 512x512 --size 2048x2048 --minutes 20 -o load.json
        vivace bench --endpoint http://gpu:30000/v1 --num-requests 200 --against load.json --format md
    """
    from vivace.benchmark.load_testing.load_rows import RequestSettings, read_rows
    from vivace.benchmark.load_testing.load_target import (
        LoadTarget,
        Variant,
        parse_fields,
        server_url,
        with_model,
    )
    from vivace.benchmark.load_testing.stages import measure
    from vivace.foundation.untrusted.destinations import check_writable, is_standard_output

    if prompts is not None and prompt_set is not None:
        raise UsageError("give prompts or --prompt-set, not both")
    for option, path in (("-o", output), ("--page", page)):
        if path is not None:
            check_writable(path)
            if is_standard_output(path):
                raise UsageError(f"{option} - would mix with the results; give the name of a file")
    further = parse_fields(fields)
    for name, value in (("num_inference_steps", num_inference_steps), ("guidance_scale", guidance_scale)):
        if value is not None:
            further[name] = value
    variants = tuple(Variant(size, lora) for lora in loras or (None,) for size in _checked(sizes) or (None,))
    others = read_rows(against) if against is not None else []
    earlier = read_rows(output) if output is not None else []
    kept = _Kept(output, earlier)
    if aiperf is not None:
        from vivace.benchmark.load_testing.aiperf import read_aiperf

        row = read_aiperf(aiperf, label or f"{server_url(url)} (AIPerf)", plan.slo_s)
        kept.add(row)
        return _show([row], others, format_, page)
    target = asyncio.run(
        with_model(
            LoadTarget(server_url(url), model, further, (), variants, frozenset(without), timeout, key)
        )
    )
    target = _with_prompts(target, prompts, prompt_set)
    settings = RequestSettings(
        model=target.model,
        fields=further,
        variants=tuple((variant.size, variant.lora) for variant in variants),
        prompts_sha256=hashlib.sha256("\n".join(target.prompts).encode()).hexdigest(),
        without=tuple(sorted(set(without))),
    )
    if plan.minutes is None and plan.num_requests is None:
        plan = replace(plan, minutes=_USUAL_MINUTES)
    try:
        rows = measure(
            target,
            plan,
            label or target.url,
            settings,
            [] if rerun else earlier,
            kept.add,
            _LoadProgress(),
        )
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished loads are kept. To continue, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return INTERRUPTED
    return _show(rows, others, format_, page)


def _checked(sizes: Sequence[str]) -> tuple[str, ...]:
    from vivace.foundation.spec.sizes import Size

    try:
        return tuple(dict.fromkeys(str(Size.of(size)) for size in sizes))
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None


def _with_prompts(target: LoadTarget, prompts: Sequence[str] | None, prompt_set: str | None) -> LoadTarget:
    """Return the target with its prompts: those of the user, else a set that the model understands."""
    from vivace.models.prompts import PROMPT_SETS

    is_embedded = (target.model or "").startswith("tiny-")
    own = PROMPT_SETS[prompt_set or ("tinyworld" if is_embedded else "real")]
    return replace(target, prompts=tuple(prompts) if prompts is not None else own)


class _Kept:
    """The rows of a file, written again with each new one."""

    def __init__(self, path: Path | None, rows: list[LoadRow]) -> None:
        self._path, self._rows = path, {row.key: row for row in rows}

    def add(self, row: LoadRow) -> None:
        from vivace.answers.terminal import table_lines
        from vivace.benchmark.load_testing.load_answer import loads_table
        from vivace.benchmark.load_testing.load_rows import write_rows

        self._rows[row.key] = row
        if self._path is not None:
            write_rows(self._path, list(self._rows.values()))
        click.echo(list(table_lines(loads_table([row])))[1][0], err=True)


class _LoadProgress:
    """Prints the progress of a load every few seconds."""

    def __init__(self) -> None:
        self._spoke_at = time.monotonic()

    def __call__(self, stage: LoadStage, number: int, elapsed_s: float) -> None:
        if time.monotonic() - self._spoke_at >= _SAY_EVERY_S:
            self._spoke_at = time.monotonic()
            click.echo(f"{stage.name}: {number} requests have ended in {elapsed_s:.0f} s", err=True)


def _show(rows: list[LoadRow], others: list[LoadRow], format_: str, page: Path | None) -> int:
    from vivace.benchmark.load_testing.load_answer import answer_of
    from vivace.cli.terminal import show

    answer = answer_of(rows, others, options.command_line())
    show(answer, format_, page)
    return 0 if answer.verdict == "done" else _SOME_FAILED


class ByEndpoint(SpecCommand):
    """A command that measures recipes, or a server where `--endpoint` is given, with options of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if any(arg == FLAG or arg.startswith(f"{FLAG}=") for arg in args):
            return bench_endpoint.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
