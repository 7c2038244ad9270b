"""vivace generate"""

from __future__ import annotations

import io
import json
import re
import time
import unicodedata
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource

from vivace import __version__
from vivace.cli.command import RecipeName, command
from vivace.errors import OutputError, UsageError
from vivace.foundation.spec.settings import (
    FILE,
    CallSettings,
    DeviceName,
    ModelName,
    NumSeeds,
    Option,
    Positional,
    Seed,
    SourceSettings,
    Threads,
)
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.untrusted.destinations import (
    check_folder,
    check_writable,
    is_standard_output,
    is_stream,
    replace,
    write_new,
)

if TYPE_CHECKING:
    from vivace.foundation.spec.workload import Workload
    from vivace.runtime.workloads import CheckedRequest

Write = Callable[[Any, dict[str, str], str], Path]
"""Takes an image, its facts and a name, writes a file and returns its path."""
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_IMAGE_DESCRIPTION = 0x010E  # of EXIF
_QUALITY = 95


class GenerateCommand(SourceSettings, CallSettings):
    prompt: Annotated[str, Positional()]
    model: ModelName = "tiny-sd"
    recipe: RecipeName = "baseline"
    seed: Annotated[Seed, Option("Seed of the first image.")] = 0
    num_seeds: Annotated[
        NumSeeds, Option("Number of images; image k, from 0, has seed + k.", "--num-images")
    ] = 1
    out: Annotated[Path, Option("Folder for the PNGs.")] = Path("pictures")
    output: Annotated[
        Path | None,
        Option(
            "Write the single image to this file instead, replacing it: .png, .jpg or .webp.",
            "-o --output",
            metavar="FILE",
            path=FILE,
        ),
    ] = None
    device: DeviceName = "auto"
    threads: Threads = None


@command(GenerateCommand)
def generate(settings: GenerateCommand) -> int:
    """Generate images and print their paths.

    Each PNG contains its model, recipe, prompt and seed as text. The same command on the same machine writes the same
    bytes. In a folder an existing file is never overwritten: a different image gets a number. Standard error says how
    long an image took; the first may include compilation.

    With --image that image is changed: the result has its size, if the model can draw it, and --strength sets how
    much may change. With --mask only the white area is repainted.

    \b
        vivace generate "a red circle above a blue square" --recipe tiny_vae --num-images 4
        vivace generate "a red circle above a blue square" -o circle.png
        vivace generate "a red circle above a blue square" --image old.png --mask hole.png
    """
    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.workloads import checked_request, default_threads

    prepared = checked_request(
        settings.model, settings.recipe, workload=settings.part(WorkloadRequest, prompts=(settings.prompt,))
    )
    num_images = prepared.workload.num_images
    write = _writer(click.get_current_context(), settings.out, settings.output, num_images)
    chosen = (
        settings.device,
        settings.threads if settings.threads is not None else default_threads(prepared.located),
    )
    return guarded(
        prepared.located,
        lambda is_read: _draw(prepared, settings.prompt, num_images, write, *chosen, is_read),
    )


def _writer(context: click.Context, out: Path, output: Path | None, num_images: int) -> Write:
    """Check that the output can be written, and return the function that writes an image."""
    if output is None:
        if out.exists() and not out.is_dir():
            raise OutputError(f"--out {out} is a file; give a folder")
        check_folder(out)
        return lambda image, facts, name: save(image, facts, out, name)
    if context.get_parameter_source("out") is not ParameterSource.DEFAULT:
        raise UsageError("-o names the one file to write, and --out a folder; give one of them")
    if num_images > 1:
        raise UsageError(f"-o {output} is one file, for one image; give --out FOLDER for {num_images}")
    if output.suffix.lower() not in _FORMATS and (output.suffix or not is_stream(output)):
        raise UsageError(f"-o {output}: give a name that ends in {', '.join(_FORMATS)}")
    check_writable(output)

    def write(image: Any, facts: dict[str, str], name: str) -> Path:
        replace(output, encoded(image, facts, _FORMATS.get(output.suffix.lower(), "PNG")))
        return output

    return write


def _draw(
    prepared: CheckedRequest,
    prompt: str,
    num_images: int,
    write: Write,
    device: str,
    threads: int,
    is_read: Callable[[], None],
) -> int:
    import torch

    from vivace.answers.formatting import seconds
    from vivace.measure.machine import choose_device
    from vivace.models.controlnet import RANDOM
    from vivace.models.load import explained
    from vivace.runtime.finite_images import EmptyImageWarning, why_empty

    # The last bits of an image depend on the number of threads, so it is set and recorded.
    torch.set_num_threads(threads)
    workload = prepared.workload
    chosen = choose_device(device)
    click.echo(f"loading {prepared.located.model.name}", err=True)
    with explained(prepared.located):
        session = prepared.open(chosen)
        notes = truncation(session.pipe, prompt, session.arguments)
    is_read()
    notes += [] if prepared.sources is None else prepared.sources.notes
    for warning in [*session.warnings, *notes]:
        click.echo(f"note: {warning}", err=True)
    if prepared.located.model.is_synthetic:
        click.echo(
            f"note: {prepared.located.model.name} has random weights: its images show nothing", err=True
        )
    if workload.controlnet == RANDOM:
        click.echo(
            "note: the ControlNet has random weights: it disturbs the images and follows nothing", err=True
        )
    silence_diffusers()  # it prints every token that it truncates
    took: list[float] = []
    for index, text, image_seed in workload.images():
        with explained(prepared.located, "does not run"):
            arguments = prepared.arguments([(index, text, image_seed)])
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EmptyImageWarning)  # said below, with the image's path
                output = session(**arguments)
            took.append(time.perf_counter() - began)
            image = output.images[0]
        facts = {
            "software": f"vivace {__version__}",
            "model": prepared.located.model.name,
            "recipe": session.recipe.text,
            "prompt": text,
            "seed": str(image_seed),
            "num_inference_steps": str(session.defaults["num_inference_steps"]),
            "guidance_scale": f"{session.defaults['guidance_scale']:g}",
            "scheduler": type(getattr(session.pipe, "scheduler", None)).__name__,
            "size": f"{workload.width}x{workload.height}",
            "num_threads": str(torch.get_num_threads()),
            **_source_facts(workload),
        }
        path = write(image, facts, f"{slug(text)}-{image_seed}")
        click.echo(path, err=is_standard_output(path))
        for reason in filter(None, why_empty(output)):
            click.echo(f"warning: {path} is {reason} of seed {image_seed}", err=True)
        if num_images > 1:
            click.echo(f"[{index + 1}/{num_images}] {seconds(took[-1])}", err=True)
    click.echo(_in_seconds(took), err=True)
    return 0


def _in_seconds(took: list[float]) -> str:
    """Describe the time of an image and of the first one, which may include compilation."""
    from vivace.answers.formatting import seconds

    if len(took) == 1:
        return f"{seconds(took[0])} an image"
    return f"{seconds(median(took[1:]))} an image, the first {seconds(took[0])}"


def _source_facts(workload: Workload) -> dict[str, str]:
    """Return the hashes of an image's source images: file names stay private."""
    if workload.task == "text":
        return {}
    facts: dict[str, str] = {"task": workload.task}
    if workload.strength is not None:
        facts["strength"] = f"{workload.strength:g}"
    source = workload.source_of(0)
    assert source is not None
    shas = {name: getattr(source, name) for name in ("image", "mask", "control")}
    return facts | {f"{name}_sha256": sha for name, sha in shas.items() if sha is not None}


def truncation(pipe: Any, prompt: str, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """Return a note if the model truncates the prompt, for some or all of its text encoders."""
    counts: dict[str, tuple[int, int]] = {}
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        tokenizer = getattr(pipe, name, None)
        encoder = name.replace("tokenizer", "text_encoder")
        if tokenizer is not None:
            limit = _prompt_limit(pipe, getattr(pipe, encoder, None), tokenizer, arguments or {})
            counts[encoder] = len(tokenizer(prompt).input_ids), limit
    cut = {encoder: count for encoder, count in counts.items() if count[0] > count[1]}
    if not cut:
        return []
    if len(cut) == len(counts):
        number, limit = max(cut.values(), key=lambda count: count[1])
        return [f"the prompt has {number} tokens; the model reads the first {limit} and ignores the rest"]
    parts = [
        f"{encoder} reads the first {limit} of its {number} tokens"
        for encoder, (number, limit) in cut.items()
    ]
    whole = " and ".join(encoder for encoder in counts if encoder not in cut)
    return [
        f"the prompt is long: {', '.join(parts)}, but {whole} reads all of it, so nothing of it is ignored"
    ]


def _prompt_limit(pipe: Any, encoder: Any, tokenizer: Any, arguments: Mapping[str, Any]) -> int:
    """Return how many tokens of a prompt an encoder reads: CLIP's as many as it has positions."""
    from vivace.machinery.technique import call_parameters

    own = int(tokenizer.model_max_length)
    parameter = call_parameters(pipe).get("max_sequence_length")
    if parameter is None or getattr(getattr(encoder, "config", None), "model_type", "").startswith("clip"):
        return own
    length = arguments.get("max_sequence_length", parameter.default)
    return min(own, length) if isinstance(length, int) else own


def silence_diffusers() -> None:
    from diffusers.utils import logging

    logging.set_verbosity_error()


def save(image: Any, facts: dict[str, str], folder: Path, name: str) -> Path:
    """Write a PNG with `facts` as text chunks; if another image has that name, add a number to it."""
    png = encoded(image, facts, "PNG")
    number = 1
    while True:
        path = folder / (f"{name}.png" if number == 1 else f"{name}-{number}.png")
        if write_new(path, png) or (path.is_file() and path.read_bytes() == png):
            return path
        number += 1


def encoded(image: Any, facts: dict[str, str], format_: str) -> bytes:
    """Return an image file with `facts`: as text chunks of a PNG, else as the description in EXIF."""
    buffer = io.BytesIO()
    if format_ == "PNG":
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        for key, value in facts.items():
            info.add_itxt(key, value)
        image.save(buffer, format="PNG", pnginfo=info)
    else:
        exif = image.getexif()
        exif[_IMAGE_DESCRIPTION] = json.dumps(facts)
        image.convert("RGB").save(buffer, format=format_, quality=_QUALITY, exif=exif)
    return buffer.getvalue()


def slug(prompt: str) -> str:
    """Return the prompt as a file name: ASCII letters and digits, at most 48 characters."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:48].strip("-") or "picture"
