"""Script lines that turn a pipeline into that of a task, and open the pictures that it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.contract.script import Script, literal, written_call
from vivace.errors import Unsupported, UsageError
from vivace.foreign.files import user_path
from vivace.models.controlnet import RANDOM
from vivace.models.files import component_class
from vivace.models.find import Found
from vivace.models.tasks import names_of, pipeline_of
from vivace.spec.study import AskedWorkload
from vivace.spec.workload import Workload


@dataclass(frozen=True)
class SourceFile:
    """A picture that the script opens.

    Attributes:
        name: of the pipeline's argument.
        is_mask: black and white.
    """

    name: str
    file: str
    is_mask: bool = False


def source_files(found: Found, workload: Workload, asked: AskedWorkload) -> list[SourceFile]:
    """Return the pictures that a script of this workload opens.

    Raises:
        UsageError: no file was given.
    """
    if workload.task == "text":
        return []
    names = names_of(found.pipeline, workload.task)
    kinds = ((names.image, asked.images), (names.mask, asked.masks), (names.control, asked.controls))
    files = [
        SourceFile(name, str(user_path(given[0]).resolve()), is_mask=name == names.mask)
        for name, given in kinds
        if name and given
    ]
    if not files:
        flag = "--control" if workload.task == "control" else "--image"
        raise UsageError(f"--task {workload.task}: a script needs a file to open; give {flag} FILE")
    return files


def conversion(found: Found, workload: Workload) -> Script:
    """Return lines that turn `pipe`, as the model is published, into the pipeline of the workload's task.

    Raises:
        Unsupported: the ControlNet has random weights, which only vivace makes.
    """
    kind = pipeline_of(found.pipeline, workload.task, found.model.name)
    if kind == found.pipeline:
        return Script()
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
    if found.pipeline == "StableDiffusionPipeline":
        more["requires_safety_checker"] = "False"
    if found.pipeline == "StableDiffusionXLPipeline":
        more["add_watermarker"] = "False"
    lines += written_call(f"pipe = {kind}", "**pipe.components", **more).splitlines()
    return Script(imports=tuple(imports), lines=tuple(lines))


def opening(files: Sequence[SourceFile], width: int, height: int) -> Script:
    """Return lines that open pictures as variables of their arguments' names, in the size of the image."""
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
