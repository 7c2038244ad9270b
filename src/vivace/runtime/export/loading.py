"""Script lines that load a model: `vivace.models.load` in public calls of diffusers."""

from __future__ import annotations

import inspect
from pathlib import Path

from vivace.architectures.entry import Embedded, Hub, StoredPart
from vivace.errors import UsageError
from vivace.machinery.technique.script import Script, literal, written_call
from vivace.models.find import LocatedModel
from vivace.models.gguf_file import SUFFIX
from vivace.models.load import precision
from vivace.models.model_files import component_class
from vivace.models.pipeline_defaults import read_config
from vivace.models.repository import INDEX, components_of

_EMBEDDED_WEIGHTS = "vivace.models.find:WEIGHTS"
_TORCH = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}


def check_loadable(located: LocatedModel) -> None:
    """Raise UsageError for weights that no public call can load: random ones, and those with scales beside them."""
    if located.model.is_synthetic and located.entry is not None:
        raise UsageError(
            f"{located.model.name} has random weights, which only vivace makes; export {located.entry.name} instead "
            f"(`--model {located.entry.name}`), whose script differs only in its weights"
        )
    if located.saved is not None:
        raise UsageError(
            f"{located.model.name} was saved by `vivace save`, and no public call of diffusers reads it; export "
            f"{located.saved.model.name} with the recipe {located.saved.recipe.text}"
        )
    if located.contents is not None and not located.contents.is_plain:
        why = "its weights have scales" if located.contents.codes else "its tensors have other names"
        raise UsageError(
            f"{located.model.name}: {why}, and no public call of diffusers reads it as vivace does; export a file in "
            "16 bits, or run this one with `vivace generate`"
        )


def loading(located: LocatedModel, device: str) -> Script:
    """Return lines that make `pipe` the pipeline that `load_pipeline` returns, still on the CPU.

    Args:
        located: a model whose weights are available locally.
        device: torch's type of device, where it will run; this sets the precision.
    """
    import diffusers

    check_loadable(located)
    assert located.folder is not None
    dtype = _TORCH[precision(located, device)]
    imports = ["torch"]
    lines: list[str] = []
    if located.model.source == "embedded":
        imports.append(_EMBEDDED_WEIGHTS)
        lines.append("# These weights ship with vivace. To run without vivace, export them to a folder:")
        lines.append(f"# vivace models --export {located.model.name} DIR")
    arguments = dict.fromkeys(located.without, "None")
    if "safety_checker" in located.without:
        arguments["requires_safety_checker"] = "False"
    pipeline = getattr(diffusers, located.pipeline)
    if "add_watermarker" in inspect.signature(pipeline.__init__).parameters:
        arguments["add_watermarker"] = (
            "False"  # SDXL adds a watermark if the watermarking library happens to be installed
        )
    for name, path in located.components.items():
        made = _component(located, name, path, dtype)
        imports += made.imports
        lines += made.lines
        arguments[name] = name
    if located.checkpoint is not None:
        imports.append(f"diffusers:{located.pipeline}")
        call = written_call(
            f"pipe = {located.pipeline}.from_single_file",
            literal(str(located.checkpoint)),
            **_configuration(located, "revision"),
            dtype=dtype,
            **arguments,
        )
    else:
        imports.append("diffusers:DiffusionPipeline")
        where, named = _source(located)
        if located.variant is not None:
            named["variant"] = literal(located.variant)
        call = written_call(
            "pipe = DiffusionPipeline.from_pretrained",
            where,
            **named,
            dtype=dtype,
            use_safetensors="True",
            **arguments,
        )
    lines += call.splitlines()
    entry = located.entry
    if entry is not None and entry.scheduler is not None:
        kind = entry.scheduler.class_name
        imports.append(f"diffusers:{kind}")
        overrides = {name: literal(value) for name, value in entry.scheduler.overrides.items()}
        made_scheduler = written_call(
            f"pipe.scheduler = {kind}.from_config", "pipe.scheduler.config", **overrides
        )
        lines += made_scheduler.splitlines()
    if located.lora is not None:
        lines += _lora(located)
    return Script(imports=tuple(imports), lines=tuple(lines))


def _component(located: LocatedModel, name: str, path: Path, dtype: str) -> Script:
    """Return lines that load a replacement for a component, as a variable of its name."""
    assert located.folder is not None
    entry = located.entry
    part = entry.origin.parts.get(name) if entry is not None and isinstance(entry.origin, Hub) else None
    if path.is_dir():
        kind = component_class(path)
        imports = [f"diffusers:{kind}"]
        if entry is not None and isinstance(entry.origin, Embedded):
            arguments, named = [f"WEIGHTS / {literal(entry.origin.folder)} / {literal(name)}"], {}
        else:
            assert part is not None
            arguments, named = [literal(part.repo)], {"revision": literal(part.revision)}
        if any(path.glob("*.fp16.safetensors")):
            named["variant"] = literal("fp16")
        call = written_call(
            f"{name} = {kind}.from_pretrained", *arguments, **named, dtype=dtype, use_safetensors="True"
        )
        return Script(tuple(imports), tuple(call.splitlines()))
    kind = components_of(read_config(located.folder / INDEX))[name][1]
    imports = [f"diffusers:{kind}"]
    lines = []
    if part is None:
        file = literal(str(path))
    else:
        imports.append("huggingface_hub:hf_hub_download")
        file = "file"
        lines += _download("file", part)
    named = _configuration(located, "config_revision") | {"subfolder": literal(name), "dtype": dtype}
    if path.suffix == SUFFIX:
        imports.append("diffusers:GGUFQuantizationConfig")
        named["quantization_config"] = f"GGUFQuantizationConfig(compute_dtype={dtype})"
    lines += written_call(f"{name} = {kind}.from_single_file", file, **named).splitlines()
    return Script(tuple(imports), tuple(lines))


def _source(located: LocatedModel) -> tuple[str, dict[str, str]]:
    """Return the pipeline's folder or repository, and its commit."""
    assert located.folder is not None
    if located.model.source == "embedded":
        return f"WEIGHTS / {literal(located.folder.name)}", {}
    if located.model.source == "folder":
        return literal(str(located.folder)), {}
    return literal(_repository(located)), {"revision": literal(located.folder.name)}


def _configuration(located: LocatedModel, revision: str) -> dict[str, str]:
    """Return the source of a single file's configuration: its folder, or a repository and commit.

    Args:
        revision: name of the argument for the commit.
    """
    assert located.folder is not None
    if located.checkpoint is not None and located.folder == located.checkpoint.parent:
        return {"config": literal(str(located.folder))}
    return {"config": literal(_repository(located)), revision: literal(located.folder.name)}


def _repository(located: LocatedModel) -> str:
    if located.entry is not None and isinstance(located.entry.origin, Hub):
        return located.entry.origin.repo
    return located.model.name.partition("@")[0]


def _download(name: str, part: StoredPart) -> list[str]:
    return written_call(
        f"{name} = hf_hub_download",
        literal(part.repo),
        literal(part.files[0]),
        revision=literal(part.revision),
    ).splitlines()


def _lora(located: LocatedModel) -> list[str]:
    assert located.entry is not None
    assert isinstance(located.entry.origin, Hub)
    assert located.entry.origin.lora is not None
    lora = located.entry.origin.lora
    load = written_call(
        "pipe.load_lora_weights",
        literal(lora.repo),
        weight_name=literal(lora.files[0]),
        revision=literal(lora.revision),
    )
    return [
        "# Needs peft. The LoRA is merged into the weights, so that it adds no cost per step;",
        "# vivace sums in fp32 and rounds once, so the last bits may differ.",
        *load.splitlines(),
        "pipe.fuse_lora()",
        "pipe.unload_lora_weights()",
    ]
