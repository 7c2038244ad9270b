"""The overhead of vivace's harness: its timed calls compared with a plain script's, interleaved on one GPU.

    python -m benchmarks.overhead --limit-s 500

The plain script is a diffusers pipeline with random embeddings on the device, `inference_mode`, and a clock with the
device synchronised before and after; its compiled case is `denoiser.compile()`. vivace's side is what `vivace bench
--text embeddings` runs: a Session, its timer with marks inside the call, noise from the CPU; its recipe is
`inference_mode`, with `compile` in the compiled case. Both have separate pipelines with the same random weights, size,
steps, guidance and scheduler. The order is plain, vivace, vivace, plain, ...; every pair gives one ratio. It needs
memory for two pipelines (FLUX.1-dev: about 60 GB).

If the GPU waits for Python (eager UNets), calls are as noisy as the CPU. Many short calls are then better than few long
ones: `--steps 8 --pairs 30`, which also emphasises the cost per call of the harness.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.command import run
from benchmarks.record_files import read_lines
from vivace.answers.formatting import seconds
from vivace.architectures import ARCHITECTURES, CATALOGUE
from vivace.architectures.components import Architecture
from vivace.benchmark.rounds.round import OpenTrial, draw
from vivace.benchmark.rounds.worker import import_all
from vivace.errors import StoreError, UnknownModel, nearest
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.trial import Trial
from vivace.foundation.spec.workload import Workload
from vivace.foundation.stats import median_interval
from vivace.measure.accelerator import PipelineTimer
from vivace.measure.machine import choose_device
from vivace.measure.this_environment import environment, python_ms
from vivace.models.find import SYNTHETIC, find_model
from vivace.models.synthetic import build
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import encode

RECORD = Path(__file__).parents[1] / "results" / "overhead.jsonl"
MODELS = ("sd15", "sdxl", "flux-dev")
MODES = ("eager", "compiled")
FAILED_IN_PART = 4
_PROMPT = "a red circle above a blue square"
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

Timed = Callable[[], float]
"""One call; returns its seconds."""
Key = tuple[str, str, str, int]  # model, mode, output, steps


def plain(name: str, device: str, backend: str | None, output: str, steps: int) -> Timed:
    """Return the plain script. It uses vivace only to build the weights.

    Args:
        backend: torch.compile's, or None for eager.
        output: the pipeline's output_type.
    """
    import torch

    entry = CATALOGUE[name]
    dtype = getattr(torch, _DTYPES[entry.cuda_dtype]) if device == "cuda" else torch.float32
    pipe = build(_without_text_encoders(ARCHITECTURES[name]), device, dtype)
    call = _embeddings(ARCHITECTURES[name], device, dtype) | {
        "height": entry.height,
        "width": entry.width,
        "num_inference_steps": steps,
        "guidance_scale": entry.guidance_scale,
        "output_type": output,
    }
    if backend is not None:
        (pipe.transformer if hasattr(pipe, "transformer") else pipe.unet).compile(backend=backend)

    def once() -> float:
        with torch.inference_mode():
            _synchronise(device)
            start = time.perf_counter()
            pipe(**call)
            _synchronise(device)
            return time.perf_counter() - start

    return once


def harness(name: str, device: str, backend: str | None, output: str, steps: int) -> Timed:
    """Return the same call as timed by `vivace bench`; arguments as in `plain`."""
    entry = CATALOGUE[name]
    # Pipelines use no_grad by default, which is measurably slower with eager steps of a small model.
    recipe = "inference_mode" + ("" if backend is None else f"+compile(backend={backend})")
    trial = Trial(
        model=find_model(SYNTHETIC + name).model,
        recipe=resolve(recipe).spec,
        workload=Workload(
            prompts=(_PROMPT,),
            seeds=(0,),
            height=entry.height,
            width=entry.width,
            num_inference_steps=steps,
            guidance_scale=entry.guidance_scale,
            text="embeddings",
        ),
        device=device,
    )
    session = OpenTrial(trial).session
    timer = PipelineTimer(session.pipe, device)
    (call,) = trial.workload.calls()
    inputs = encode(session, [_PROMPT])

    def once() -> float:
        _, sample = timer.time_call(lambda: draw(session, call, inputs, output_type=output), 0)
        return sample.total_s

    return once


@click.command("overhead")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no case after this many seconds.")
@click.option("--only", multiple=True, default=MODELS, show_default=True, metavar="NAME", help="This model.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES, show_default=True)
@click.option("--pairs", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option(
    "--warmup", type=click.IntRange(1, 100), default=3, show_default=True, help="Warm-up calls of each."
)
@click.option("--steps", type=click.IntRange(1, 1000), help="Default: the model's own number.")
@click.option("--output", type=click.Choice(["pil", "pt"]), default="pil", show_default=True)
@click.option("--backend", default="inductor", show_default=True, help="torch.compile's.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def overhead(
    record: Path,
    limit_s: float | None,
    only: Sequence[str],
    modes: Sequence[str],
    pairs: int,
    warmup: int,
    steps: int | None,
    output: str,
    backend: str,
    device: str,
) -> int:
    """Compare the harness's calls with a plain script's, one line per case; resumable."""
    for name in only:
        if name not in ARCHITECTURES:
            names = ", ".join(ARCHITECTURES)
            raise UnknownModel(
                f"--only {name[:80]}: no such architecture{nearest(name, ARCHITECTURES)} (there are {names})"
            )
    known_cases = read_cases(record)
    import_all()
    chosen = choose_device(device)
    here = environment(chosen)
    _check_device(known_cases, here, record)
    started = time.monotonic()
    failed, left = 0, []
    for name in dict.fromkeys(only):
        for mode in dict.fromkeys(modes):
            num_steps = steps or CATALOGUE[name].num_inference_steps
            key = (name, mode, output, num_steps)
            if key in known_cases:
                click.echo(f"{line(known_cases[key])} (in the record already)")
            elif limit_s is not None and time.monotonic() - started >= limit_s:
                left.append(f"{name} {mode}")
            else:
                click.echo(f"{name} {mode}: building, warming up", err=True)
                try:
                    through = backend if mode == "compiled" else None
                    case = measure(name, mode, output, chosen, through, pairs, warmup, num_steps)
                except RuntimeError as error:  # out of memory, or a compiler that gave up: the others go on
                    click.echo(f"{name} {mode}: failed: {(str(error).splitlines() or [repr(error)])[0]}")
                    failed += 1
                else:
                    _append(record, case | {"environment": here.model_dump(mode="json")})
                    click.echo(line(case))
                _free_case(chosen)
    if left:
        click.echo(f"{limit_s:g} s are over; the same command goes on with {', '.join(left)}", err=True)
    return FAILED_IN_PART if failed else 0


def measure(
    name: str,
    mode: str,
    output: str,
    device: str,
    backend: str | None,
    pairs: int,
    warmup: int,
    steps: int,
) -> dict[str, Any]:
    """Measure one case: warm both sides up, then time them alternately, in seconds."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    python_before = python_ms()
    sides = {
        "plain": plain(name, device, backend, output, steps),
        "vivace": harness(name, device, backend, output, steps),
    }
    first = {side: once() for side, once in sides.items()}
    for _ in range(warmup - 1):
        for once in sides.values():
            once()
    times: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in ("plain", "vivace") if pair % 2 == 0 else ("vivace", "plain"):
            times[side].append(sides[side]())
    entry = CATALOGUE[name]
    return {
        "model": SYNTHETIC + name,
        "mode": mode,
        "output": output,
        "backend": backend,
        "height": entry.height,
        "width": entry.width,
        "num_inference_steps": steps,
        "guidance_scale": entry.guidance_scale,
        "started_at": started,
        "python_ms": [python_before, python_ms()],
        "first_call_s": first,
        "plain_s": times["plain"],
        "vivace_s": times["vivace"],
    }


def ratios(case: dict[str, Any]) -> list[float]:
    """Return vivace's time over the plain script's for each pair."""
    return [ours / theirs for ours, theirs in zip(case["vivace_s"], case["plain_s"], strict=True)]


def line(case: dict[str, Any]) -> str:
    """Describe a case in one line; the ratio is the median over the pairs, with its interval."""
    interval = median_interval([ratios(case)])
    between = "" if interval.low is None else f" [{interval.low:.4f}, {interval.high:.4f}]"
    middle = {side: sorted(case[side])[len(case[side]) // 2] for side in ("plain_s", "vivace_s")}
    name = case["model"].removeprefix(SYNTHETIC)
    return (
        f"{name} {case['mode']}, {case['num_inference_steps']} steps: plain {seconds(middle['plain_s'])}, "
        f"vivace {seconds(middle['vivace_s'])}, ratio {interval.point:.4f}{between} over {len(case['plain_s'])} pairs"
    )


def read_cases(path: Path) -> dict[Key, dict[str, Any]]:
    """Read the cases of a record; empty if there is no such file.

    Raises:
        StoreError: the file holds something else.
    """
    return read_lines(path, line, _key)


def _key(case: dict[str, Any]) -> Key:
    return case["model"].removeprefix(SYNTHETIC), case["mode"], case["output"], case["num_inference_steps"]


def _without_text_encoders(architecture: Architecture) -> Architecture:
    kept = {name: part for name, part in architecture.components.items() if "text_encoder" not in name}
    absent = [name for name in architecture.components if name not in kept]
    absent += [name.replace("text_encoder", "tokenizer") for name in absent]
    return architecture.model_copy(
        update={"components": kept, "arguments": architecture.arguments | dict.fromkeys(absent)}
    )


def _embeddings(architecture: Architecture, device: str, dtype: Any) -> dict[str, Any]:
    """Return random embeddings of one prompt, in the shapes of the pipeline's text encoders."""
    import torch

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=dtype)

    parts = architecture.components
    clip = parts["text_encoder"].config
    length = max(architecture.text_lengths.values())
    if architecture.pipeline == "FluxPipeline":
        width = parts["text_encoder_2"].config["d_model"]
        return {
            "prompt_embeds": random(1, length, width),
            "pooled_prompt_embeds": random(1, clip["hidden_size"]),
        }
    width = parts["unet"].config["cross_attention_dim"]
    embeddings = {name: random(1, length, width) for name in ("prompt_embeds", "negative_prompt_embeds")}
    if "text_encoder_2" in parts:
        pooled = parts["text_encoder_2"].config["projection_dim"]
        embeddings |= {
            name: random(1, pooled) for name in ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
        }
    return embeddings


def _synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _free_case(device: str) -> None:
    """Free the memory and graphs of a finished case."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _check_device(cases: dict[Key, dict[str, Any]], here: Environment, path: Path) -> None:
    for case in cases.values():
        there = case["environment"]["device_name"]
        if there != here.device_name:
            raise StoreError(
                f"{path} was made on {there}, and this is {here.device_name}; give --record another file"
            )


def _append(path: Path, case: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(case) + "\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    raise SystemExit(run(overhead))
