"""Script lines that turn a pipeline into that of a task, and open the images that it starts from."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.files import user_path
from vivace.foundation.untrusted.image_files import open_image, open_mask
from vivace.machinery.technique.script import Script, literal, written_call
from vivace.models.controlnet import RANDOM
from vivace.models.find import LocatedModel
from vivace.models.model_files import component_class
from vivace.models.tasks import names_of, pipeline_of


@dataclass(frozen=True)
class SourceFile:
    """An image that the script opens.

    Attributes:
        name: of the pipeline's argument.
        is_mask: black and white.
    """

    name: str
    file: str
    is_mask: bool = False


def source_files(located: LocatedModel, workload: Workload, request: WorkloadRequest) -> list[SourceFile]:
    """Return the images that a script of this workload opens.

    Raises:
        UsageError: no file was given, or one that PIL's own conversion reads otherwise than vivace.
    """
    if workload.task == "text":
        return []
    names = names_of(located.pipeline, workload.task)
    kinds = ((names.image, request.images), (names.mask, request.masks), (names.control, request.controls))
    files = [
        SourceFile(name, str(user_path(paths[0]).resolve()), is_mask=name == names.mask)
        for name, paths in kinds
        if name and paths
    ]
    for each in files:
        _check_plain(each)
    if not files:
        flag = "--control" if workload.task == "control" else "--image"
        raise UsageError(f"--task {workload.task}: a script needs a file to open; give {flag} FILE")
    return files


def _check_plain(source: SourceFile) -> None:
    """Raise UsageError for a file that the script's plain lines would read otherwise: 16 bits, transparency."""
    from PIL import Image, ImageOps

    path = Path(source.file)
    read = open_mask(path) if source.is_mask else open_image(path)
    with Image.open(path) as image:
        plain = ImageOps.exif_transpose(image).convert("L" if source.is_mask else "RGB")
    if source.is_mask:
        plain = plain.point(lambda light: 255 if light >= 128 else 0)
    if plain.tobytes() != read.tobytes():
        raise UsageError(
            f"{source.file}: a script would read its 16 bits or its transparency otherwise than vivace; save it in 8 "
            "bits without transparency"
        )


def conversion(located: LocatedModel, workload: Workload) -> Script:
    """Return lines that turn `pipe`, as the model is published, into the pipeline of the workload's task.

    Raises:
        Unsupported: the ControlNet has random weights, which only vivace makes.
    """
    kind = pipeline_of(located.pipeline, workload.task, located.model.name)
    if kind == located.pipeline:
        return Script()
    import diffusers

    imports, lines, more = [f"diffusers:{kind}"], [], {}
    if workload.task == "control":
        if workload.controlnet in (None, RANDOM):
            raise Unsupported(
                "the ControlNet has random weights, which only vivace makes; give --controlnet FOLDER"
            )
        assert workload.controlnet is not None
        folder = workload.controlnet.rpartition("@")[0]
        own = component_class(user_path(folder))
        imports.append(f"diffusers:{own}")
        lines += written_call(
            f"controlnet = {own}.from_pretrained", literal(folder), dtype="pipe.dtype", use_safetensors="True"
        ).splitlines()
        more["controlnet"] = "controlnet"
    accepted = inspect.signature(getattr(diffusers, kind).__init__).parameters
    more |= {name: "False" for name in ("requires_safety_checker", "add_watermarker") if name in accepted}
    lines += written_call(f"pipe = {kind}", "**pipe.components", **more).splitlines()
    return Script(imports=tuple(imports), lines=tuple(lines))


def opening(files: Sequence[SourceFile], width: int, height: int) -> Script:
    """Return lines that open images as variables of their arguments' names, in the size of the image."""
    if not files:
        return Script()
    lines = []
    for each in files:
        method = "NEAREST" if each.is_mask else "LANCZOS"
        mode = "L" if each.is_mask else "RGB"
        lines += written_call(f"{each.name} = Image.open", literal(each.file)).splitlines()
        lines += [f"{each.name} = ImageOps.exif_transpose({each.name}).convert({literal(mode)})"]
        if each.is_mask:
            lines += [f"{each.name} = {each.name}.point(lambda light: 255 if light >= 128 else 0)"]
        lines += [
            f"if {each.name}.size != ({width}, {height}):",
            f"    {each.name} = ImageOps.fit({each.name}, ({width}, {height}), Image.Resampling.{method})",
        ]
    return Script(imports=("PIL:Image", "PIL:ImageOps"), lines=tuple(lines))
