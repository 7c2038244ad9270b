"""vivace save"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from vivace.cli.command import RecipeName, command
from vivace.foundation.spec.settings import DEFAULT_STORE, DeviceName, Option, Positional, Settings, Store

if TYPE_CHECKING:
    from vivace.foundation.spec.record import Record
    from vivace.models.find import LocatedModel
    from vivace.recipes.recipe import Recipe


class SaveCommand(Settings):
    model: Annotated[str, Positional()]
    destination: Annotated[Path, Positional("DIR")]
    recipe: RecipeName
    kind: Annotated[
        Literal["folder", "comfyui"],
        Option(
            "comfyui: the denoiser alone, as one .safetensors file that ComfyUI reads, with weights in fp8.",
            "--format",
        ),
    ] = "folder"
    device: DeviceName = "auto"
    store: Store = Path(DEFAULT_STORE)


@command(SaveCommand)
def save(settings: SaveCommand) -> int:
    """Save a model with its recipe in a new folder DIR, quantised and merged for good.

    Techniques that change weights are saved: dtype, quantize (torchao), tiny_vae, prune, fuse_qkv, distilled, lora.
    The rest of the recipe is written down and applied when the folder is loaded: caches, compilation, schedulers.
    `--model DIR` of generate, bench and plan takes the folder, with its recipe; --recipe then adds to it. Records of
    the recipe in --store are put beside the weights.

    \b
        vivace save tiny-sd small --recipe "bf16+quantize(int8)"
        vivace generate "a red circle" --model small
        vivace save tiny-flux flux.safetensors --recipe "quantize(fp8_weight)" --format comfyui
    """
    from vivace.benchmark.store import proving_records
    from vivace.cli.watched.guarded import guarded
    from vivace.models.find import find_model, obtain
    from vivace.recipes.resolve import resolve

    resolved = resolve(settings.recipe)
    located = obtain(find_model(settings.model))
    is_folder = settings.kind == "folder"
    proof = proving_records(settings.store, located.model, resolved.pinned().text) if is_folder else ()
    status = guarded(located, lambda is_read: _write(settings, located, resolved, proof, is_read))
    if status == 0 and is_folder and not proof:
        bench = ["vivace", "bench", "--model", settings.model, "--recipe", "baseline", "--recipe"]
        measure = shlex.join([*bench, settings.recipe])
        click.echo(f"note: {settings.store} has no record of it; `{measure}` makes one", err=True)
    return status


def _write(
    settings: SaveCommand,
    located: LocatedModel,
    recipe: Recipe,
    proof: Sequence[Record],
    is_read: Callable[[], None],
) -> int:
    """Load, apply, write, and say what was written."""
    import torch

    from vivace.answers.formatting import size
    from vivace.measure.machine import choose_device
    from vivace.models.load import explained
    from vivace.runtime.denoiser_file import write_denoiser
    from vivace.runtime.saving import save as save_model
    from vivace.runtime.workloads import default_threads

    torch.set_num_threads(default_threads(located))
    click.echo(f"loading {located.model.name}", err=True)
    device = choose_device(settings.device)
    later: tuple[str, ...] = ()
    with explained(located):
        if settings.kind == "comfyui":
            written = write_denoiser(located, recipe, device, settings.destination, is_read)
            weights = f"{written.num_quantised} weights in fp8, {size(written.num_bytes)}"
            notes, text = written.notes, f"{written.path}: the denoiser of {located.model.name}, {weights}"
        else:
            saved = save_model(located, recipe, device, settings.destination, is_read, proof)
            notes, later, name = saved.notes, saved.later, saved.model.model.name
            sizes = f"{size(saved.num_bytes)}; the weights of {name} are {size(saved.source_bytes)}"
            text = f"{saved.folder}: {name} with {saved.model.recipe.text}, {sizes}"
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if later:
        click.echo(f"note: applied when it is loaded: {'+'.join(later)}", err=True)
    click.echo(f"wrote {text}")
    return 0
