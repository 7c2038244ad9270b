"""Prove that what `vivace plan --card N` answers runs inside N GB: five models by four cards, on one GPU.

    python -m benchmarks.memory_caps --plan             write the twenty answers; needs no GPU
    python -m benchmarks.memory_caps --limit-s 500      run those that have no row yet, until the time limit
    python -m benchmarks.memory_caps --jobs 3           three at a time; their times are no measurement

Each answer is drawn with random weights at its own size and steps, twice, in a process of its own whose memory is
capped: PyTorch's allocator gets what a card of N GB has beside the CUDA context (`set_per_process_memory_fraction`).
The context is measured, not assumed: with several at a time before the first, while nothing else is on the GPU. Rows
are appended as they are made, and the same command goes on. Times are those of the GPU that is capped, not of a card of
that size; docs/hardware.md shows both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.command import MEASURED_IN_PART, locked, run
from benchmarks.record_files import write_text
from vivace.errors import StoreError
from vivace.models.find import SYNTHETIC

RESULTS = Path(__file__).parents[1] / "results"
PLAN = RESULTS / "memory-caps-plan.json"
RECORD = RESULTS / "memory-caps.jsonl"
MODELS = ("sdxl", "z-image-turbo", "flux2-klein-4b", "flux-dev", "qwen-image")
"""The cheap ones first."""
CARDS_GB = (8, 12, 16, 24)
Key = tuple[str, int, str]  # model, card, recipe
_CASE = "--case"


@click.command("memory_caps")
@click.option("--plan", "only_plan", is_flag=True, help="Run nothing; write what `vivace plan` answers.")
@click.option("--only", multiple=True, type=click.Choice(MODELS), help="This model; repeat for more.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--answers", type=click.Path(path_type=Path, dir_okay=False), default=PLAN, show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no case after this many seconds.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Of a case, s."
)
@click.option("--steps", type=click.IntRange(1, 1000), help="Default: the model's own number.")
@click.option("--jobs", type=click.IntRange(1, 16), default=1, show_default=True, help="Cases at a time.")
@click.option(_CASE, "case", hidden=True, help="Run one case in this process, and print its row.")
def memory_caps(
    only_plan: bool,
    only: Sequence[str],
    record: Path,
    answers: Path,
    limit_s: float | None,
    timeout: float,
    steps: int | None,
    jobs: int,
    case: str | None,
) -> int:
    """Run what `vivace plan --card` answers under a cap on the GPU's memory; resumable."""
    if case is not None:
        click.echo(json.dumps(row_of(json.loads(case))))
        return 0
    if only_plan:
        return _write_answers(only or MODELS, answers)
    have = {key_of(row) for row in read_rows(record)}
    cases = [
        answer | {"steps": steps}
        for answer in read_answers(answers)
        if (not only or answer["model"] in only)
        and key_of(answer) not in have
        and answer["recipe"] is not None
    ]
    if cases and jobs > 1:
        context = run_case({"context": True}, timeout)
        _refuse_without_gpu(context)
        cases = [case | {"context_bytes": context["context_bytes"]} for case in cases]
    left = _run_all(cases, jobs, timeout, limit_s, record)
    if left:
        click.echo(f"{limit_s:g} s are over; the same command goes on with {', '.join(left)}", err=True)
    rows = read_rows(record)
    return 0 if not left and all(row["outcome"] == "ran" for row in rows) else MEASURED_IN_PART


def _run_all(
    cases: Sequence[dict[str, Any]], jobs: int, timeout_s: float, limit_s: float | None, record: Path
) -> list[str]:
    """Run cases, append their rows, and return the names of those that the time limit left out.

    Raises:
        ClickException: there is no GPU.
    """
    started = time.monotonic()

    def run_and_append(case: dict[str, Any]) -> str | None:
        if limit_s is not None and time.monotonic() - started >= limit_s:
            return f"{case['model']} in {case['card_gb']} GB"
        row = run_case(case, timeout_s) | ({} if jobs == 1 else {"jobs": jobs})
        _refuse_without_gpu(row)
        append(record, row)
        click.echo(line(row))
        return None

    with ThreadPoolExecutor(jobs) as pool:
        return [name for name in pool.map(run_and_append, cases) if name is not None]


def _refuse_without_gpu(row: dict[str, Any]) -> None:
    if row["outcome"] == "no_gpu":
        raise click.ClickException(row["reason"])


def key_of(row: dict[str, Any]) -> Key:
    return row["model"], row["card_gb"], row["recipe"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a record, or none if there is none yet."""
    return (
        [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Return what `vivace plan --card` answered.

    Raises:
        StoreError: it was not written yet.
    """
    if not path.exists():
        raise StoreError(f"there is no {path}; `python -m benchmarks.memory_caps --plan` writes it")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    with locked(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def line(row: dict[str, Any]) -> str:
    """Describe a case in one line."""
    case = f"{row['model']} in {row['card_gb']} GB, {row['recipe']}"
    if row["outcome"] != "ran":
        return f"{case}: {row['outcome']}: {row['reason']}"
    peak = f"{row['reserved_bytes'] / 1e9:.2f} of {row['cap_bytes'] / 1e9:.2f} GB"
    return f"{case}: ran, {row['image_s']:.2f} s an image, {peak}, applied in {row['load_s']:.0f} s"


# What vivace plan answers


def _write_answers(models: Sequence[str], path: Path) -> int:
    rows = {(row["model"], row["card_gb"]): row for row in (read_answers(path) if path.exists() else [])}
    for model in models:
        for card in CARDS_GB:
            rows[model, card] = answer = answer_of(model, card)
            # After each, so that an interrupted command loses nothing.
            ordered = [rows[m, c] for m in MODELS for c in CARDS_GB if (m, c) in rows]
            write_text(path, json.dumps(ordered, indent=1) + "\n")
            click.echo(f"{model} in {card} GB: {answer['recipe']}, {answer['predicted_s']} s")
    return 0


def answer_of(model: str, card_gb: int) -> dict[str, Any]:
    """Return what `vivace plan MODEL --card N` answers, as it says in JSON."""
    command = [sys.executable, "-m", "vivace", "plan", model, "--card", str(card_gb), "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    if printed.returncode:
        raise StoreError(f"{' '.join(command[2:])}: {printed.stderr.strip()[-500:]}")
    return {"model": model, "card_gb": card_gb} | answer_in(json.loads(printed.stdout))


def answer_in(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe that `vivace plan` says to use, its memory, its time and where that is from.

    The time is that of the first of the ranking: a change that only copies fewer weights takes less.
    """
    fitting = [change for change in facts["changes"] if change["fits_card"]]
    last = fitting[-1] if fitting else facts if facts["fits_card"] else None
    ranking = facts["ranking"]
    best = ranking[0] if ranking else {}
    return {
        "recipe": None if last is None else last["recipe"],
        "height": None if last is None else last["height"],
        "width": None if last is None else last["width"],
        "peak_bytes": None if last is None else last["peak_bytes"],
        "loading_bytes": None if last is None else last["loading_bytes"],
        "predicted_s": best.get("latency_s"),
        "is_at_most": bool(fitting) and bool(fitting[-1]["fills"]),
        "predicted_from": best.get("predicted_from"),
        "measured_in": facts["records_of"] if ranking and best.get("predicted_from") is None else None,
        "times_of": facts["times_of"],
    }


# Running one


def run_case(answer: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run an answer in a process of its own, and return its row."""
    command = [sys.executable, "-m", "benchmarks.memory_caps", _CASE, json.dumps(answer)]
    case = {key: answer[key] for key in ("model", "card_gb", "recipe", "height", "width") if key in answer}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return case | {"outcome": "timed_out", "reason": f"more than {timeout_s:g} s"}
    printed = ended.stdout.strip().splitlines()
    if ended.returncode or not printed:
        return case | {"outcome": "crashed", "reason": (ended.stderr.strip() or "no output")[-500:]}
    row: dict[str, Any] = json.loads(printed[-1])
    return case | row


def row_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Cap this process's GPU, draw the case twice, and return what to add to its row."""
    import torch

    from vivace.errors import VivaceError

    if not torch.cuda.is_available():
        return {"outcome": "no_gpu", "reason": "no CUDA GPU is visible; `--plan` needs none"}
    if answer.get("context"):
        return {"outcome": "ran", "context_bytes": context_bytes()}
    context = answer.get("context_bytes")
    pipe = built(answer["model"])
    cap = cap_memory(answer["card_gb"] * 1_000_000_000, context_bytes() if context is None else context)
    try:
        measured = drawn(pipe, answer)
    except torch.OutOfMemoryError as error:
        return cap | {"outcome": "out_of_memory", "reason": str(error).splitlines()[0][:300]}
    except VivaceError as error:
        return cap | {"outcome": "refused", "reason": str(error)[:300]}
    return cap | measured | {"outcome": "ran"}


def built(model: str) -> Any:
    """Return a model with random weights in host memory, where files would be read to.

    They are made on the GPU, which takes seconds instead of minutes, before it is capped.
    """
    import torch

    from vivace.measure.machine import choose_device
    from vivace.models.find import find_model
    from vivace.models.load import load_pipeline

    pipe = load_pipeline(find_model(SYNTHETIC + model), choose_device("auto"))
    pipe.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return pipe


def context_bytes() -> int:
    """Return what the CUDA context takes; what other processes have on the GPU would be counted with it."""
    import torch

    torch.ones(1, device="cuda").sum().item()  # the context, and a kernel's module
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def cap_memory(card_bytes: int, context: int) -> dict[str, Any]:
    """Leave PyTorch's allocator what a card of such a size has beside the CUDA context.

    Raises:
        ValueError: the GPU is smaller than the card.
    """
    import torch

    _, total = torch.cuda.mem_get_info()
    cap = card_bytes - context
    if not 0 < cap <= total:
        raise ValueError(f"a cap of {cap:,} bytes is none of a GPU with {total:,}")
    torch.cuda.set_per_process_memory_fraction(cap / total)
    return {
        "gpu": torch.cuda.get_device_name(),
        "context_bytes": context,
        "cap_bytes": cap,
        "torch": torch.__version__,
    }


def drawn(pipe: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """Apply the recipe to a model in host memory, and draw two images."""
    import torch

    from vivace.measure.machine import choose_device
    from vivace.models.find import find_model
    from vivace.recipes.resolve import resolve
    from vivace.runtime.opening import session_of

    located, device = find_model(SYNTHETIC + answer["model"]), choose_device("auto")
    recipe = resolve(answer["recipe"])
    started = time.monotonic()
    if not recipe.loads_from_host:
        pipe.to(device)
    session = session_of(pipe, located, recipe, device)
    load_s = time.monotonic() - started
    call: dict[str, Any] = {"height": answer["height"], "width": answer["width"]}
    if answer.get("steps"):
        call["num_inference_steps"] = answer["steps"]
    seconds = list(_timed(lambda: session("a lighthouse at dusk", **call), 2))
    is_cuda = torch.cuda.is_available()
    return {
        "num_inference_steps": answer.get("steps") or located.defaults["num_inference_steps"],
        "load_s": round(load_s, 2),
        "first_s": round(seconds[0], 3),
        "image_s": round(seconds[1], 3),
        "allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
    }


def _timed(draw: Any, times: int) -> Iterator[float]:
    import torch

    for _ in range(times):
        started = time.monotonic()
        draw()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        yield time.monotonic() - started


if __name__ == "__main__":
    sys.exit(run(memory_caps))
