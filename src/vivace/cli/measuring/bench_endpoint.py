"""vivace bench --endpoint: load on a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
from pydantic import BeforeValidator, Field

from vivace.cli.command import ResultsFormat, command, command_line, interrupted
from vivace.errors import UsageError
from vivace.foundation.spec.settings import (
    FILE,
    Guidance,
    Key,
    Option,
    Prompts,
    Seed,
    Settings,
    Steps,
    Texts,
    one_of_many,
    read_by,
    read_key,
)
from vivace.foundation.spec.sizes import Size, each_once

if TYPE_CHECKING:
    from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage
    from vivace.benchmark.load_testing.load_target import LoadTarget

FLAG = "--endpoint"
_SOME_FAILED = 4
_SAY_EVERY_S = 5.0
_MOST_CLIENTS = 512
_USUAL_MINUTES = 5.0


def parse_clients(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `1,8`, each once."""
    try:
        return tuple(
            dict.fromkeys(int(one_of_many(part.strip(), 1, _MOST_CLIENTS)) for part in text.split(","))
        )
    except ValueError:
        raise ValueError(
            f"{text!r} is not a list of whole numbers from 1 to {_MOST_CLIENTS}, separated by commas"
        ) from None


def parse_fractions(text: str) -> tuple[float, ...]:
    """Return the numbers of a list such as `0.5,0.95`, each once; none for `none`."""
    if text == "none":
        return ()
    try:
        fractions = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        fractions = ()
    if not fractions or not all(0.01 <= fraction <= 10 for fraction in fractions):
        raise ValueError(f"{text!r} is not 'none' or a list of numbers from 0.01 to 10, separated by commas")
    return fractions


class EndpointCommand(Settings):
    url: Annotated[str, Option("An OpenAI images API: http://HOST:PORT/v1.", FLAG, metavar="URL")]
    model: Annotated[
        str | None,
        Option("Model of the requests; default: the only one that the server lists.", metavar="NAME"),
    ] = None
    sizes: Annotated[
        tuple[Size, ...],
        BeforeValidator(each_once),
        Option(
            "Image size; repeat for a random one in each request.", "--size", metavar="WxH", multiple=True
        ),
    ] = ()
    num_inference_steps: Annotated[
        Steps, Option("Denoising steps; default: the server's own.", "--num-inference-steps --steps")
    ] = None
    guidance_scale: Annotated[Guidance, Option("Guidance scale; default: the server's own.")] = None
    loras: Annotated[
        Texts,
        Option(
            "A LoRA of a vivace server; repeat for a random one in each request.", "--lora", metavar="NAME"
        ),
    ] = ()
    fields_: Annotated[
        Texts,
        Option(
            "Further field of each request, e.g. output_format=webp; repeat for more.",
            "--field",
            metavar="NAME=VALUE",
        ),
    ] = ()
    without: Annotated[
        tuple[Literal["seed", "n", "response_format", "model"], ...],
        Option("Leave a field out of requests, for a server that does not know it; repeat for more."),
    ] = ()
    prompts: Prompts = None
    prompt_set: Annotated[
        Literal["real", "tinyworld"] | None,
        Option("Prompts that ship with vivace; default: tinyworld for the embedded models, real for others."),
    ] = None
    clients: Annotated[
        tuple[int, ...],
        read_by(parse_clients),
        Option(
            "Closed loops with this many clients, after one client alone. The best throughput is the capacity.",
            metavar="N[,N...]",
            default="8",
        ),
    ] = (8,)
    fractions: Annotated[
        tuple[float, ...],
        read_by(parse_fractions),
        Option(
            "Fractions of the capacity at which users come at random (Poisson).",
            metavar="F[,F...]|none",
            default="0.5,0.8,0.95",
        ),
    ] = (0.5, 0.8, 0.95)
    num_requests: Annotated[
        int | None,
        Field(ge=2, le=1_000_000),
        Option("Requests of each load; default: as many as --minutes allow."),
    ] = None
    minutes: Annotated[
        float | None,
        Field(ge=0.1, le=10_000),
        Option("Time for all loads, at least 6 requests each; default: 5, or no limit with --num-requests."),
    ] = None
    slo_factor: Annotated[
        float,
        Field(ge=1, le=1000),
        Option("An image is in time if it takes at most this many times the latency of one client."),
    ] = 3.0
    slo_s: Annotated[
        float | None,
        Field(ge=0.001, le=86_400),
        Option(
            "Longest time of an image that is in time, instead of --slo-factor.", "--slo", metavar="SECONDS"
        ),
    ] = None
    timeout: Annotated[float, Field(ge=0.1, le=86_400), Option("Time limit of a request, in seconds.")] = (
        600.0
    )
    key: Annotated[
        Key,
        Option(
            "File with the key that requests carry (Authorization: Bearer).",
            "--api-key-file",
            metavar="FILE",
            read=read_key,
        ),
    ] = None
    seed: Annotated[Seed, Option("Seed of the arrivals.")] = 0
    repeats: Annotated[
        int,
        Field(ge=1, le=100),
        Option("Independent loads of each kind: figures come with the least and the most of them."),
    ] = 1
    label: Annotated[
        str | None, Option("Names the server in rows and tables; default: its URL.", metavar="TEXT")
    ] = None
    output: Annotated[
        Path | None,
        Option(
            "Keep rows with raw samples; the same command again measures only what is missing.",
            "-o --output",
            metavar="FILE",
            path=FILE,
        ),
    ] = None
    rerun: Annotated[bool, Option("Measure again what FILE already has.")] = False
    against: Annotated[
        Path | None,
        Option(
            "Also compare with the rows of another file.",
            metavar="FILE",
            path={"dir_okay": False, "exists": True},
        ),
    ] = None
    page: Annotated[
        Path | None,
        Option(
            "Also write the result as an HTML page, with each request in a chart.", metavar="FILE", path=FILE
        ),
    ] = None
    format_: ResultsFormat = "table"


@command(EndpointCommand)
def bench_endpoint(settings: EndpointCommand) -> int:
    """Measure an OpenAI images server (vivace's, sglang's, vllm-omni's) under load.

    One client alone, closed loops of several, then users who come at random at fractions of the capacity. The latency
    of users counts from their arrival, even if the server was behind. Each answer is decoded and looked at.

    Exit codes: 0 done, 4 some requests returned no image; others as for all commands.

    \b
        vivace bench --endpoint http://127.0.0.1:8000/v1
        vivace bench --endpoint http://127.0.0.1:8000/v1 --size 512x512 --size 2048x2048 --minutes 20 -o load.json
        vivace bench --endpoint http://gpu:30000/v1 --num-requests 200 --against load.json --format md
    """
    from vivace.benchmark.load_testing.images_endpoint import ImagesEndpoint
    from vivace.benchmark.load_testing.load_rows import read_rows
    from vivace.benchmark.load_testing.load_target import LoadTarget, Variant, parse_fields, server_url
    from vivace.benchmark.load_testing.stages import LoadPlan, measure
    from vivace.foundation.untrusted.destinations import check_writable, is_standard_output

    if settings.prompts is not None and settings.prompt_set is not None:
        raise UsageError("give prompts or --prompt-set, not both")
    for option, path in (("-o", settings.output), ("--page", settings.page)):
        if path is not None:
            check_writable(path)
            if is_standard_output(path):
                raise UsageError(f"{option} - would mix with the results; give the name of a file")
    further = parse_fields(settings.fields_)
    plan = settings.part(LoadPlan)
    further |= settings.model_dump(include={"num_inference_steps", "guidance_scale"}, exclude_none=True)
    variants = tuple(
        Variant(size, lora)
        for lora in settings.loras or (None,)
        for size in [str(size) for size in settings.sizes] or (None,)
    )
    others = read_rows(settings.against) if settings.against is not None else []
    earlier = read_rows(settings.output) if settings.output is not None else []
    kept = _Kept(settings.output, earlier)
    endpoint = ImagesEndpoint(server_url(settings.url), settings.timeout, settings.key)
    target = LoadTarget(
        endpoint, settings.model, further, (), variants, frozenset(settings.without)
    ).find_model()
    target = _with_prompts(target, settings.prompts, settings.prompt_set)
    if plan.minutes is None and plan.num_requests is None:
        plan = replace(plan, minutes=_USUAL_MINUTES)
    try:
        rows = measure(
            target,
            plan,
            settings.label or endpoint.url,
            target.settings,
            [] if settings.rerun else earlier,
            kept.add,
            _LoadProgress(),
        )
    except KeyboardInterrupt:
        return interrupted("finished loads are kept")
    return _show(rows, others, settings.format_, settings.page)


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
    def __init__(self) -> None:
        self._spoke_at = time.monotonic()

    def __call__(self, stage: LoadStage, number: int, elapsed_s: float) -> None:
        if time.monotonic() - self._spoke_at >= _SAY_EVERY_S:
            self._spoke_at = time.monotonic()
            click.echo(f"{stage.name}: {number} requests have ended in {elapsed_s:.0f} s", err=True)


def _show(rows: list[LoadRow], others: list[LoadRow], format_: str, page: Path | None) -> int:
    from vivace.benchmark.load_testing.load_answer import answer_of, compare
    from vivace.cli.display.terminal import show

    answer = answer_of(rows, others, command_line())
    show(answer, format_, page)
    for line in compare(rows, others) if format_ in ("json", "csv") else ():
        click.echo(line, err=True)
    return 0 if answer.verdict == "done" else _SOME_FAILED


class ByEndpoint(click.Command):
    """A command that measures recipes, or a server where `--endpoint` is given, with options of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if any(arg == FLAG or arg.startswith(f"{FLAG}=") for arg in args):
            return bench_endpoint.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
