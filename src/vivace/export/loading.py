"""Script lines that load a model: `vivace.models.load` in public calls of diffusers."""

from __future__ import annotations

import inspect
from pathlib import Path

from vivace.contract.script import Script, literal, written_call
from vivace.errors import UsageError
from vivace.models.entry import Embedded, Hub, Part
from vivace.models.files import component_class
from vivace.models.find import Found
from vivace.models.gguf_file import SUFFIX
from vivace.models.load import precision
from vivace.models.pipelines import read_config
from vivace.models.repository import INDEX, components_of

_EMBEDDED_WEIGHTS = "vivace.models.find:WEIGHTS"
_TORCH = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}


def check_loadable(found: Found) -> None:
    """Raise UsageError for weights that no public call can load: random ones, and those with scales beside them."""
    if found.model.is_synthetic and found.entry is not None:
        raise UsageError(
            f"{found.model.name} has random weights, which only vivace makes; export {found.entry.name} instead "
            f"(`--model {found.entry.name}`), whose script differs only in its weights"
        )
    if found.contents is not None and not found.contents.is_plain:
        why = "its weights have scales" if found.contents.scales else "its tensors have another prefix"
        raise UsageError(
            f"{found.model.name}: {why}, and no public call of diffusers reads it as vivace does; export a file in 16 "
            "bits, or run this one with `vivace generate`"
        )


def loading(found: Found, device: str) -> Script:
    """Return lines that make `pipe` the pipeline that `load_pipeline` returns, still on the CPU.

    Args:
        found: a model whose weights are available locally.
        device: torch's type of device, where it will run; this sets the precision.
    """
    import diffusers

    check_loadable(found)
    assert found.folder is not None
    dtype = _TORCH[precision(found, device)]
    imports = ["torch"]
    lines: list[str] = []
    if found.model.source == "embedded":
        imports.append(_EMBEDDED_WEIGHTS)
        lines.append("# These weights ship with vivace. To run without vivace, export them to a folder:")
        lines.append(f"# vivace models --export {found.model.name} DIR")
    given = dict.fromkeys(found.without, "None")
    if "safety_checker" in found.without:
        given["requires_safety_checker"] = "False"
    pipeline = getattr(diffusers, found.pipeline)
    if "add_watermarker" in inspect.signature(pipeline.__init__).parameters:
        given["add_watermarker"] = (
            "False"  # SDXL adds a watermark if the watermarking library happens to be installed
        )
    for name, path in found.components.items():
        made = _component(found, name, path, dtype)
        imports += made.imports
        lines += made.lines
        given[name] = name
    if found.checkpoint is not None:
        imports.append(f"diffusers:{found.pipeline}")
        call = written_call(
            f"pipe = {found.pipeline}.from_single_file",
            literal(str(found.checkpoint)),
            **_configuration(found, "revision"),
            dtype=dtype,
            **given,
        )
    else:
        imports.append("diffusers:DiffusionPipeline")
        where, named = _source(found)
        if found.variant is not None:
            named["variant"] = literal(found.variant)
        call = written_call(
            "pipe = DiffusionPipeline.from_pretrained",
            where,
            **named,
            dtype=dtype,
            use_safetensors="True",
            **given,
        )
    lines += call.splitlines()
    entry = found.entry
    if entry is not None and entry.scheduler is not None:
        kind = entry.scheduler.class_name
        imports.append(f"diffusers:{kind}")
        overrides = {name: literal(value) for name, value in entry.scheduler.overrides.items()}
        made_scheduler = written_call(
            f"pipe.scheduler = {kind}.from_config", "pipe.scheduler.config", **overrides
        )
        lines += made_scheduler.splitlines()
    if found.lora is not None:
        lines += _lora(found)
    return Script(imports=tuple(imports), lines=tuple(lines))


def _component(found: Found, name: str, path: Path, dtype: str) -> Script:
    """Return lines that load a replacement for a component, as a variable of its name."""
    assert found.folder is not None
    entry = found.entry
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
    kind = components_of(read_config(found.folder / INDEX))[name][1]
    imports = [f"diffusers:{kind}"]
    lines = []
    if part is None:
        file = literal(str(path))
    else:
        imports.append("huggingface_hub:hf_hub_download")
        file = "file"
        lines += _download("file", part)
    named = _configuration(found, "config_revision") | {"subfolder": literal(name), "dtype": dtype}
    if path.suffix == SUFFIX:
        imports.append("diffusers:GGUFQuantizationConfig")
        named["quantization_config"] = f"GGUFQuantizationConfig(compute_dtype={dtype})"
    lines += written_call(f"{name} = {kind}.from_single_file", file, **named).splitlines()
    return Script(tuple(imports), tuple(lines))


def _source(found: Found) -> tuple[str, dict[str, str]]:
    """Return the pipeline's folder or repository, and its commit."""
    assert found.folder is not None
    if found.model.source == "embedded":
        return f"WEIGHTS / {literal(found.folder.name)}", {}
    if found.model.source == "folder":
        return literal(str(found.folder)), {}
    return literal(_repository(found)), {"revision": literal(found.folder.name)}


def _configuration(found: Found, revision: str) -> dict[str, str]:
    """Return the source of a single file's configuration: its folder, or a repository and commit.

    Args:
        revision: name of the argument for the commit.
    """
    assert found.folder is not None
    if found.checkpoint is not None and found.folder == found.checkpoint.parent:
        return {"config": literal(str(found.folder))}
    return {"config": literal(_repository(found)), revision: literal(found.folder.name)}


def _repository(found: Found) -> str:
    if found.entry is not None and isinstance(found.entry.origin, Hub):
        return found.entry.origin.repo
    return found.model.name.partition("@")[0]


def _download(name: str, part: Part) -> list[str]:
    return written_call(
        f"{name} = hf_hub_download",
        literal(part.repo),
        literal(part.files[0]),
        revision=literal(part.revision),
    ).splitlines()


def _lora(found: Found) -> list[str]:
    assert found.entry is not None
    assert isinstance(found.entry.origin, Hub)
    assert found.entry.origin.lora is not None
    lora = found.entry.origin.lora
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
