"""How long a saved recipe takes to start, beside the same recipe applied to the model's own files.

    python -m benchmarks.saved_start synthetic:flux-dev --recipe "quantize(fp8)" --folder /tmp/flux

A synthetic model is written as a folder of diffusers first, with the tokenizers of tiny-flux, whose ids every
vocabulary has. Then each start is a process of its own, in turns: `afresh` reads that folder and applies the recipe,
`saved` reads what `vivace save` made of it. Both are measured from the process's first line to a session on the device
and to its first image, with the files in the page cache or, with `--cold`, on the disk. Host memory is what the process
had at most of its own, without the pages of mapped files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.command import run
from benchmarks.record_files import write_text

RECORD = Path(__file__).parents[1] / "results" / "saved-start.json"
SIDES = ("afresh", "saved")
_START = "--start"


@click.command("saved_start")
@click.argument("model")
@click.option("--recipe", default="quantize(fp8)", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the files are written.")
@click.option("--turns", type=click.IntRange(1, 20), default=2, show_default=True)
@click.option("--size", type=click.IntRange(64, 2048), default=512, show_default=True, help="Of the image.")
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--cold", is_flag=True, help="Drop the files from the system's cache before each start (Linux)."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option(_START, "start", hidden=True, help="Start one side in this process, and print its row.")
def saved_start(
    model: str,
    recipe: str,
    folder: Path,
    turns: int,
    size: int,
    device: str,
    cold: bool,
    record: Path,
    start: str | None,
) -> int:
    """Compare the start of a saved recipe with the recipe applied to the model's own files."""
    if start is not None:
        click.echo(
            json.dumps(started(folder / start, recipe if start == "afresh" else "baseline", size, device))
        )
        return 0
    sides = {side: folder / side for side in SIDES}
    write_s = timed(lambda: write_model(model, sides["afresh"], device))
    click.echo(f"{model} is written to {sides['afresh']} in {write_s:.0f} s")
    save_s = timed(lambda: save_recipe(sides["afresh"], sides["saved"], recipe, device))
    click.echo(f"{recipe} is saved in {save_s:.0f} s")
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            if cold:
                drop_from_cache(sides[side])
            rows[side].append(row := start_of(side, model, recipe, folder, size, device))
            click.echo(
                f"{side}: ready in {row['ready_s']:.1f} s ({row['imports_s']:.1f} of imports), "
                f"first image after {row['first_image_s']:.1f} s, "
                f"{row['host_bytes'] / 1e9:.1f} GB of host memory"
            )
    ratio = best(rows["saved"], "ready_s") / best(rows["afresh"], "ready_s")
    click.echo(f"a saved recipe is ready in {ratio:.2f} of the time")
    answer = {
        "model": model,
        "recipe": recipe,
        "is_cold": cold,
        "files_bytes": {side: size_of(path) for side, path in sides.items()},
        "save_s": round(save_s, 2),
        "starts": rows,
        "environment": head(device),
    }
    write_text(record, json.dumps(answer, indent=1) + "\n")
    return 0


def best(rows: list[dict[str, Any]], key: str) -> float:
    """Return the smallest value: what other work on the machine adds is never negative."""
    return float(min(row[key] for row in rows))


def timed(work: Any) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def drop_from_cache(folder: Path) -> None:
    """Have the system forget the contents of files, so that they are read from the disk again."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_model(model: str, folder: Path, device: str) -> None:
    """Write a model as a folder of diffusers, unless it is there."""
    if folder.exists():
        return
    from vivace.models.find import find_model
    from vivace.models.load import load_pipeline

    pipe = load_pipeline(find_model(model), device)
    tiny = load_pipeline(find_model("tiny-flux"), "cpu")
    pipe.register_modules(tokenizer=tiny.tokenizer, tokenizer_2=tiny.tokenizer_2)
    pipe.save_pretrained(folder)


def save_recipe(source: Path, folder: Path, recipe: str, device: str) -> None:
    if folder.exists():
        return
    command = ["save", str(source), str(folder), "--recipe", recipe, "--device", device]
    ended = subprocess.run([sys.executable, "-m", "vivace", *command], check=False)
    if ended.returncode:
        raise click.ClickException(f"vivace save ended with {ended.returncode}")


def start_of(side: str, model: str, recipe: str, folder: Path, size: int, device: str) -> dict[str, Any]:
    """Start one side in a process of its own, and return its row.

    Raises:
        ClickException: it failed.
    """
    command = [
        *(sys.executable, "-m", "benchmarks.saved_start", model, "--recipe", recipe, "--folder", str(folder)),
        *("--size", str(size), "--device", device, _START, side),
    ]
    begun = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    if ended.returncode:
        raise click.ClickException(f"{side} failed: {ended.stderr.strip()[-500:]}")
    row: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return row | {"process_s": round(time.monotonic() - begun, 3)}


def started(folder: Path, recipe: str, size: int, device: str) -> dict[str, Any]:
    """Open a session and draw one image of two steps; return seconds and bytes of host memory."""
    begun = time.monotonic()
    with HostMemory() as memory:
        import diffusers.pipelines.pipeline_utils  # noqa: F401
        import transformers.modeling_utils  # noqa: F401

        imports_s = time.monotonic() - begun
        from vivace.models.find import find_model
        from vivace.recipes.resolve import resolve
        from vivace.runtime.opening import open_session

        session = open_session(find_model(str(folder)), resolve(recipe), device)
        ready_s = time.monotonic() - begun
        session("a lighthouse at dusk", height=size, width=size, num_inference_steps=2)
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
    seconds = {"ready_s": round(ready_s, 3), "first_image_s": round(time.monotonic() - begun, 3)}
    return seconds | {"imports_s": round(imports_s, 3), "host_bytes": memory.most_bytes}


class HostMemory:
    """The most anonymous memory of this process, looked at every 20 ms (Linux)."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            self.most_bytes = max(self.most_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def head(device: str) -> dict[str, Any]:
    from vivace.measure.this_environment import environment

    return environment(device).model_dump(mode="json")


if __name__ == "__main__":
    sys.exit(run(saved_start))
