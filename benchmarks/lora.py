"""What a LoRA beside the weights costs in each step, and how long an exchange takes.

    python -m benchmarks.lora --limit-s 500                       tiny-sd, or on a GPU SD 1.5, SDXL and FLUX.1 [dev]
    python -m benchmarks.lora --model synthetic:sdxl --recipe "fused(fp8, convolutions=fp8)+cuda_graph" --mlps

For each model and recipe there are three sessions: without a LoRA (`plain`), with one merged, and with one beside the
weights (`hot=True`). They generate the same latents in turn, and every turn gives one ratio to `plain`. Then another
file is exchanged into the hot session, and its scale changed; the record counts the graphs that were compiled or
captured before and after.

The LoRAs are random, of `--rank`, on every attention projection, with `--mlps` also on the MLPs and what stands before
and behind a UNet's transformers, in fp16, as trainers write them;
`--reserve` is the rank that is announced. Text is encoded beforehand, and nothing is decoded.

On a GPU three sessions need memory for three pipelines (FLUX.1-dev: 105 GB). On a CPU the times are the process's CPU
time with one thread, which other programs disturb less than the clock.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

import vivace
from benchmarks.command import record_on, run
from benchmarks.record_files import read_lines
from vivace.answers.formatting import seconds
from vivace.benchmark.rounds.worker import import_all
from vivace.errors import StoreError, VivaceError
from vivace.foundation.spec.environment import Environment
from vivace.foundation.stats import median_interval
from vivace.machinery.lora.layer_names import named_layers
from vivace.machinery.technique import attribute_of
from vivace.measure.machine import choose_device
from vivace.measure.this_environment import environment
from vivace.runtime.calls import encode
from vivace.runtime.session import Session

RECORD = Path(__file__).parents[1] / "results" / "lora.jsonl"
MODELS = {"cpu": ("tiny-sd",), "cuda": ("synthetic:sd15", "synthetic:sdxl", "synthetic:flux-dev")}
RECIPES = {
    "cpu": ("inference_mode", "compile", "quantize(int8)+compile"),
    "cuda": (
        "quantize(fp8)+compile(blocks=repeated)",
        "compile(blocks=repeated)",
        "inference_mode",
        "compile+cuda_graph",
        "quantize(fp8)+compile",
        "fused(fp8)+cuda_graph",
    ),
}
SIDES = ("plain", "merged", "hot")
FAILED_IN_PART = 4
_PROJECTIONS = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    "to_qkv_mlp_proj", "attn.to_out",
)  # fmt: skip
"""The last two are of FLUX.2's single blocks."""
_MLPS = (
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "proj_mlp",
    "proj_in",
    "proj_out",
)
_COUNTED = ("compiled_graphs", "cuda_graphs_recorded")
_PROMPT = "a red circle above a blue square"

Key = tuple[str, str, int, int, bool]  # model, recipe, rank, reserve, mlps


@dataclass(frozen=True)
class LoraSettings:
    """How a case is measured: see the options of the same names."""

    rank: int
    reserve: int
    mlps: bool
    turns: int
    swaps: int
    steps: int


@click.command("lora")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: results/lora.jsonl, on a GPU results/lora-cuda.jsonl.",
)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no case after this many seconds.")
@click.option(
    "--model", "models", multiple=True, help="Default: tiny-sd on a CPU, else SDXL and FLUX.1 [dev]."
)
@click.option("--recipe", "recipes", multiple=True, help="What the LoRA is added to. Default: several.")
@click.option("--rank", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--reserve", type=click.IntRange(1, 1024), default=32, show_default=True, help="max_rank.")
@click.option("--mlps", is_flag=True, help="LoRAs of the MLPs as well.")
@click.option("--turns", type=click.IntRange(1, 1000), default=8, show_default=True)
@click.option("--swaps", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option("--steps", type=click.IntRange(1, 1000), default=8, show_default=True, help="Of each call.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def lora(
    record: Path | None,
    limit_s: float | None,
    models: Sequence[str],
    recipes: Sequence[str],
    device: str,
    **settings: Any,
) -> int:
    """Compare a hot LoRA with none and with a merged one, one line per case; resumable."""
    import_all()
    chosen, how = choose_device(device), LoraSettings(**settings)
    record = record or record_on(RECORD, chosen)
    stored = read_cases(record)
    if chosen == "cpu":
        import torch

        torch.set_num_threads(1)
    here = environment(chosen)
    _check_device(stored, here, record)
    started = time.monotonic()
    failed, left = 0, []
    for model in models or MODELS[chosen]:
        for recipe in recipes or RECIPES[chosen]:
            key = (model, recipe, how.rank, how.reserve, how.mlps)
            if key in stored:
                click.echo(f"{line(stored[key])} (in the record already)")
            elif limit_s is not None and time.monotonic() - started >= limit_s:
                left.append(f"{model} {recipe}")
            else:
                click.echo(f"{model} {recipe}: loading, warming up", err=True)
                try:
                    case = measure(model, recipe, chosen, how)
                except (
                    VivaceError,
                    RuntimeError,
                ) as error:  # unsupported, or out of memory: the others go on
                    click.echo(f"{model} {recipe}: failed: {(str(error).splitlines() or [repr(error)])[0]}")
                    failed += 1
                else:
                    _append(record, case | {"environment": here.model_dump(mode="json")})
                    click.echo(line(case))
                _free(chosen)
    if left:
        click.echo(f"{limit_s:g} s are over; the same command goes on with {', '.join(left)}", err=True)
    return FAILED_IN_PART if failed else 0


def measure(model: str, recipe: str, device: str, how: LoraSettings) -> dict[str, Any]:
    """Measure one case: seconds per step of each side, in turns, then seconds per exchange and rescaling."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.safetensors" for name in ("one", "other")]
        plain = vivace.load(model, recipe, device=device)
        num_layers, _ = (
            write_random(plain.pipe, file, how.rank, seed, how.mlps) for seed, file in enumerate(files)
        )
        paths = [literal_path(file) for file in files]
        sides = {
            "plain": plain,
            "merged": vivace.load(model, f"lora({paths[0]})+{recipe}", device=device),
            "hot": vivace.load(
                model, f"lora({paths[0]}, hot=True, max_rank={how.reserve})+{recipe}", device=device
            ),
        }
        calls = {side: _call(session, how.steps) for side, session in sides.items()}
        first = {side: _timed(call, device, clock) for side, call in calls.items()}
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(how.turns):
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                times[side].append(_timed(calls[side], device, clock) / how.steps)
        hot = sides["hot"]
        before = _graphs(hot)
        exchanges, rescalings = [], []
        for number in range(how.swaps):
            path, scale = files[(number + 1) % 2].as_posix(), 0.5 + number / how.swaps
            exchanges.append(_timed(partial(hot.set_lora, path), device, clock))
            rescalings.append(_timed(partial(hot.set_lora, scale=scale), device, clock))
        calls["hot"]()
        file_bytes = files[0].stat().st_size
        after = _graphs(hot)
        for session in sides.values():
            session.close()
    return {
        "model": model,
        "recipe": recipe,
        "rank": how.rank,
        "reserve": how.reserve,
        "layers": num_layers,
        "mlps": how.mlps,
        "file_bytes": file_bytes,
        "num_inference_steps": how.steps,
        "clock": clock.__name__,
        "first_call_s": first,
        "step_s": times,
        "exchange_s": exchanges,
        "rescaling_s": rescalings,
        "graphs_before": before,
        "graphs_after": after,
    }


def write_random(pipe: Any, file: Path, rank: int, seed: int, mlps: bool = False) -> int:
    """Write a random LoRA for every attention projection of the denoiser; return the number of layers."""
    import torch
    from safetensors.torch import save_file

    name = attribute_of(pipe, "denoiser")
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, module in named_layers(getattr(pipe, name)).items():
        if layer.endswith(_PROJECTIONS + (_MLPS if mlps else ())) and hasattr(module, "in_features"):
            for role, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                values = 0.02 * torch.randn(shape, generator=generator)
                state[f"{name}.{layer}.lora_{role}.weight"] = values.half()
    save_file(state, file)
    return len(state) // 2


def literal_path(file: Path) -> str:
    return repr(file.as_posix())


def ratios(case: dict[str, Any], side: str) -> list[float]:
    """Return a side's seconds per step over those without a LoRA, for each turn."""
    return [own / none for own, none in zip(case["step_s"][side], case["step_s"]["plain"], strict=True)]


def line(case: dict[str, Any]) -> str:
    """Describe a case in one line; ratios are medians over the turns, with their intervals."""
    sides = []
    for side in SIDES[1:]:
        interval = median_interval([ratios(case, side)])
        between = "" if interval.low is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
        sides.append(f"{side} {interval.point:.3f}{between}")
    made = sum(case["graphs_after"].values()) - sum(case["graphs_before"].values())
    return (
        f"{case['model']} {case['recipe']}, rank {case['rank']} of {case['reserve']}: a step "
        f"{seconds(_middle(case['step_s']['plain']))}, {', '.join(sides)} of it; exchange "
        f"{seconds(_middle(case['exchange_s']))}, rescaling {seconds(_middle(case['rescaling_s']))}, {made} new graphs"
    )


def read_cases(path: Path) -> dict[Key, dict[str, Any]]:
    """Read the cases of a record; empty if there is no such file.

    Raises:
        StoreError: the file holds something else.
    """

    def key_of(case: dict[str, Any]) -> Key:
        return case["model"], case["recipe"], case["rank"], case["reserve"], case.get("mlps", False)

    return read_lines(path, line, key_of)


def _call(session: Session, steps: int) -> Callable[[], None]:
    import torch

    with torch.no_grad():
        inputs = encode(session, [_PROMPT])

    def once() -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        session(**inputs, num_inference_steps=steps, output_type="latent", generator=generator)

    return once


def _timed(work: Callable[[], None], device: str, clock: Callable[[], float]) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def _graphs(session: Session) -> dict[str, int]:
    """Return how many graphs the session has compiled and captured; the process's count includes other sessions."""
    evidence = session.evidence()
    return {name: int(str(evidence[name])) for name in _COUNTED if name in evidence}


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _free(device: str) -> None:
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _append(record: Path, case: dict[str, Any]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(case) + "\n")


def _check_device(cases: dict[Key, dict[str, Any]], here: Environment, path: Path) -> None:
    for case in cases.values():
        there = case["environment"]["device_name"]
        if there != here.device_name:
            raise StoreError(
                f"{path} was made on {there}, and this is {here.device_name}; give --record another file"
            )


if __name__ == "__main__":
    raise SystemExit(run(lora))
