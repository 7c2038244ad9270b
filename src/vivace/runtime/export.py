"""Write a model with a recipe as a plain Python script that generates the same image as vivace.

Each technique writes itself in public calls (`Technique.script`); those without any are applied by one `vivace.apply`.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.architectures.entry import Embedded, Hub
from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.files import user_path
from vivace.foundation.untrusted.image_files import open_image, open_mask
from vivace.machinery.technique import Stage, Technique, call_parameters, without_clashes
from vivace.machinery.technique.script import WIDTH, Script, literal, written_call
from vivace.models.checkpoints.gguf_file import SUFFIX
from vivace.models.controlnet import RANDOM
from vivace.models.find import LocatedModel
from vivace.models.load import precision
from vivace.models.model_files import component_class
from vivace.models.repository import INDEX, components_of, read_config
from vivace.models.tasks import names_of, pipeline_of
from vivace.recipes.recipe import Recipe
from vivace.runtime.calls import takes_prompts_first
from vivace.runtime.opening import session_of
from vivace.runtime.pipelines import pipeline_for
from vivace.runtime.session import Session

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class SourceFile:
    """An image that the script opens."""

    name: str
    file: str
    is_mask: bool = False


@dataclass(frozen=True)
class Step:
    """One technique of the recipe.

    Attributes:
        script: its public calls; None if it has none, so that vivace must apply it.
    """

    technique: Technique
    script: Script | None
    left_out: str | None = None


@dataclass(frozen=True)
class Written:
    """A script.

    Attributes:
        own: the techniques for which it needs vivace; without any it needs only diffusers, torch and torchao.
    """

    text: str
    own: list[str]
    warnings: list[str] = field(default_factory=list)


def write_script(
    located: LocatedModel,
    recipe: Recipe,
    device: str,
    *,
    prompt: str,
    seed: int = 0,
    call: dict[str, Any] | None = None,
    threads: int | None = None,
    about: Iterable[str] = (),
    workload: Workload | None = None,
    sources: Sequence[SourceFile] = (),
) -> Written:
    """Load the model, apply the recipe and return a script that does the same.

    Args:
        located: a model whose weights are on this machine.
        device: torch's type of device, where the script is to run.
        prompt, seed: of the image that it generates.
        call: size, steps and guidance that differ from the model's own; the recipe's take precedence.
        threads: CPU threads that the script sets; None for torch's default.
        about: further lines of the script's docstring.
        workload: whose task it does; None for text.
        sources: the images that it opens.
    """
    check_loadable(located)
    steps: list[Step] = []
    session = session_of(
        pipeline_for(
            located,
            recipe,
            device,
            None if workload is None else workload.task,
            None if workload is None else workload.controlnet,
        ),
        located,
        recipe,
        device,
        call,
        [prompt],
        lambda step, script, left_out: steps.append(Step(step, script, left_out)),
    )
    stages = {step.technique.facts.stage for step in steps if step.left_out is None}
    steps = [
        replace(step, script=None) if step.script is not None and step.script.unless_stage in stages else step
        for step in steps
    ]
    inside = _applied_by_vivace(steps)
    own = [step.technique.text for step in inside if step.script is None]
    plain = [step.script for step in steps if step.script is not None and step not in inside]
    call_contexts = [script.around for script in plain if script.around]
    load = loading(located, device)
    made = Script() if workload is None else conversion(located, workload)
    opened = Script() if workload is None else opening(sources, workload.width, workload.height)
    imports = {
        "torch",
        *load.imports,
        *made.imports,
        *opened.imports,
        *(name for script in plain for name in script.imports),
    }
    imports |= {"vivace"} if inside else set()
    blocks = [[f"torch.set_num_threads({threads})  # the image's last bits depend on it"]] if threads else []
    blocks += [list(load.lines), list(made.lines)]
    blocks += _technique_blocks(steps, inside, device, prompt)
    parts = [part for part in session.pipe.components.values() if hasattr(part, "parameters")]
    if any(str(p.dtype) in ("torch.float16", "torch.bfloat16") for part in parts for p in part.parameters()):
        noise = _noise_in_fp32(session.pipe, encodes=bool(sources))
        imports |= set(noise.imports)
        blocks.append(list(noise.lines))
    blocks.append(list(opened.lines))
    source_names = [each.name for each in sources]
    blocks.append(
        _call_block(session, "draw" if inside else "pipe", prompt, seed, call_contexts, source_names)
    )
    needs = [f"Needs vivace: there are no public calls for {', '.join(own)}."] if own else []
    session.close()
    header = docstring(
        [f"Generate an image with {located.model.name}.", "", f"Recipe: {recipe.text}", *needs, *about]
    )
    body = spaced(block for block in blocks if block)
    return Written(f"{header}\n\n{imports_of(imports)}\n\n{body}\n", own, session.warnings)


def _applied_by_vivace(steps: list[Step]) -> list[Step]:
    """Return the techniques that vivace applies: those without a script, and all techniques between them, to keep the
    order."""
    applied = [step for step in steps if step.left_out is None]
    own = [index for index, step in enumerate(applied) if step.script is None]
    if not own:
        return []
    return [
        step for step in applied[own[0] : own[-1] + 1] if step.script is None or not step.script.is_call_only
    ]


def _technique_blocks(steps: list[Step], inside: list[Step], device: str, prompt: str) -> list[list[str]]:
    """Return every technique's lines in order, and the move to the GPU. Components are replaced before the move, and
    weights are quantised on their way to the GPU. Weights that a technique keeps in host memory are not moved, unless
    vivace applies a technique: it checks techniques against the device that the pipeline is on."""
    stays = not inside and any(step.script is not None and step.script.places_weights for step in steps)
    on_host = len(list(takewhile(lambda s: s.technique.facts.stage is Stage.SWAP and s not in inside, steps)))
    shrinking = [k for k, step in enumerate(steps) if step.script is not None and step.script.from_host]
    shrinks = bool(shrinking) and not any(step in inside for step in steps[: shrinking[-1] + 1])
    if shrinks:
        on_host = shrinking[-1] + 1
    blocks = [_block(step, inside) for step in steps[:on_host]]
    if device != "cpu" and not stays:
        rest = [line.replace("cuda", device) for line in _REST_TO_GPU]
        blocks.append(rest if shrinks else [f'pipe.to("{device}")'])
    for step in steps[on_host:]:
        block = _block(step, inside)
        if block and step.script is not None and step.script.places_weights and not stays:
            block.insert(1, 'pipe.to("cpu", silence_dtype_warnings=True)')
        blocks.append(block)
        if inside and step is inside[-1]:
            blocks.append(_apply_own(inside, prompt))
    return blocks


# `pipe.to` would also call `to` on quantised weights, which dequantises some of them even on the same device.
_REST_TO_GPU = (
    "# Move the other weights; the quantised ones are on the GPU already.",
    "for part in pipe.components.values():",
    "    if isinstance(part, torch.nn.Module):",
    "        for tensor in (*part.parameters(), *part.buffers()):",
    '            if tensor.device.type == "cpu":',
    '                tensor.data = tensor.data.to("cuda")',
)


def _block(step: Step, inside: list[Step]) -> list[str]:
    """Return a technique's lines below a comment with its name."""
    if step.left_out is not None:
        return [f"# {step.technique.text}: {step.left_out}"]
    if step in inside or step.script is None or step.script.is_call_only or not step.script.lines:
        return []
    title = textwrap.wrap(
        f"# {step.technique.text}: {step.technique.summary}",
        WIDTH,
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [*title, *step.script.lines]


def _apply_own(inside: list[Step], prompt: str) -> list[str]:
    lines = ["# Techniques without public calls; the image is generated through this session."]
    if any(step.script is not None for step in inside):
        lines = [
            "# Techniques without public calls, and those to be applied between them; the image",
            "# is generated through this session.",
        ]
    recipe = literal("+".join(step.technique.text for step in inside))
    arguments = {}
    if any(step.technique.facts.needs_prompts for step in inside):
        lines.append("# Images of the prompts are generated first, for calibration: give prompts like yours.")
        arguments["prompts"] = literal([prompt])
    return [*lines, *written_call("draw = vivace.apply", "pipe", recipe, **arguments).splitlines()]


# Like `vivace.runtime.noise`.
_PREPARE = """
prepare_latents = pipe.prepare_latents


def prepare_in_fp32(*args, **kwargs):
    given = inspect.signature(prepare_latents).bind(*args, **kwargs)
    dtype, given.arguments["dtype"] = given.arguments["dtype"], torch.float32
    made = prepare_latents(*given.args, **given.kwargs)
    if not isinstance(made, tuple):
        return made.to(dtype)
    return tuple(part.to(dtype) if part.is_floating_point() else part for part in made)


pipe.prepare_latents = prepare_in_fp32
"""
_STEP = """
scheduler_step = pipe.scheduler.step


@functools.wraps(scheduler_step)  # pipelines inspect its signature
def step_in_fp32(model_output, timestep, sample, *args, **kwargs):
    made = scheduler_step(model_output.float(), timestep, sample, *args, **kwargs)
    return tuple(part.to(sample.dtype) for part in made)


pipe.scheduler.step = step_in_fp32
"""
_ENCODE = """
encode = pipe.vae.encode


@functools.wraps(encode)
def encode_in_fp32(x, *args, **kwargs):
    output = encode(x.to(next(pipe.vae.encoder.parameters()).dtype), *args, **kwargs)
    found = getattr(output, "latent_dist", None)
    if found is not None:  # a distribution, which is sampled
        output.latent_dist = type(found)(found.parameters.float())
    return output


pipe.vae.encode = encode_in_fp32
"""
_CAST_BACK = """    if pipe.vae.dtype != own:
        pipe.vae.to(own)  # the pipeline casts it to the dtype that it was given
"""


def _noise_in_fp32(pipe: DiffusionPipeline, *, encodes: bool = False) -> Script:
    prepare = getattr(type(pipe), "prepare_latents", None)
    takes_dtype = prepare is not None and "dtype" in inspect.signature(prepare).parameters
    comment = (
        "# In half precision a seed may give other noise than in fp32. So noise is drawn in fp32",
        "# and rounded. The scheduler may draw more noise, so it computes in fp32 too.",
    )
    step = _STEP.strip().splitlines()
    prepare = _PREPARE
    if encodes:
        made = "    made = prepare_latents(*given.args, **given.kwargs)\n"
        prepare = prepare.replace(made, f"    own = pipe.vae.dtype\n{made}{_CAST_BACK}")
        step = [*_ENCODE.strip().splitlines(), "", *step]
    if not takes_dtype:
        return Script(imports=("functools",), lines=(*comment, *step))
    return Script(
        imports=("functools", "inspect"), lines=(*comment, *prepare.strip().splitlines(), "", *step)
    )


def _call_block(
    session: Session, function: str, prompt: str, seed: int, call_contexts: list[str], source_names: list[str]
) -> list[str]:
    plain = without_clashes(session.pipe, session.arguments)
    arguments = {name: literal(value) for name, value in plain.items()}
    if "max_area" in call_parameters(session.pipe):
        height, width = session.arguments["height"], session.arguments["width"]
        arguments |= {"max_area": literal(height * width), "_auto_resize": "False"}
    arguments |= {name: name for name in source_names}
    # On the CPU, so that a seed gives the same noise on every device.
    arguments["generator"] = f'torch.Generator("cpu").manual_seed({seed})'
    result = "drawn" if source_names else "image"
    if source_names or not takes_prompts_first(session.pipe):
        arguments = {"prompt": literal(prompt)} | arguments
        call = written_call(f"{result} = {function}", end=").images[0]", **arguments)
    else:
        call = written_call(f"{result} = {function}", literal(prompt), end=").images[0]", **arguments)
    lines = call.splitlines()
    if call_contexts:
        lines = [f"with {', '.join(call_contexts)}:", *(f"    {line}" for line in lines)]
    return [*lines, f'{"drawn" if source_names else "image"}.save("picture.png")']


# Written by hand, since ruff is not a runtime dependency. Tests check every exported script with ruff.
def docstring(lines: Iterable[str]) -> str:
    """Return a module docstring with these lines, escaped so that no text can end it early."""
    escaped = [line.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') for line in lines]
    printable = ["".join(c if c.isprintable() else "?" for c in line) for line in escaped]
    wrapped = [
        part
        for line in printable
        for part in textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    ]
    if len(wrapped) == 1:
        return f'"""{wrapped[0]}"""'
    return "\n".join([f'"""{wrapped[0]}', *wrapped[1:], '"""'])


def imports_of(names: Iterable[str]) -> str:
    """Return import statements: first the standard library, then the others, each sorted."""
    modules: set[str] = set()
    members: dict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, member = name.partition(":")
        if member:
            members[module].add(member)
        else:
            modules.add(module)
    sections = []
    for is_standard in (True, False):
        lines = [f"import {module}" for module in sorted(modules) if _is_standard(module) is is_standard]
        for module in sorted(members, key=str.lower):
            if _is_standard(module) is is_standard:
                lines.append(f"from {module} import {', '.join(sorted(members[module], key=_member_order))}")
        if lines:
            sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _member_order(name: str) -> tuple[int, str]:
    """Sort constants, classes, functions, as isort does."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name.lower()


def spaced(blocks: Iterable[list[str]]) -> str:
    """Join blocks of statements with a blank line between them, and two around each function. Comments and decorators
    right before a function belong to it."""
    written: list[str] = []
    in_function = False
    for block in blocks:
        if written:
            written.append("")
        for line in block:
            if line.startswith("def ") and not in_function:
                start = len(written)
                while start and written[start - 1].startswith(("#", "@")):
                    start -= 1
                while start and not written[start - 1]:
                    del written[start - 1]
                    start -= 1
                written[start:start] = ["", ""]
                in_function = True
            elif in_function and line and not line.startswith((" ", ")")):
                while not written[-1]:
                    del written[-1]
                written += ["", ""]
                in_function = line.startswith("def ")
            written.append(line)
    return "\n".join(written)


def source_files(located: LocatedModel, workload: Workload, request: WorkloadRequest) -> list[SourceFile]:
    """Return the images that a script of this workload opens."""
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
    """Return lines that turn `pipe`, as the model is published, into the pipeline of the workload's task."""
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
    """Return lines that make `pipe` the pipeline that `load_pipeline` returns, still on the CPU."""
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
        named: dict[str, str] = {}
        if located.model.source == "embedded":
            where = f"WEIGHTS / {literal(located.folder.name)}"
        elif located.model.source == "folder":
            where = literal(str(located.folder))
        else:
            where, named = literal(_repository(located)), {"revision": literal(located.folder.name)}
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
        assert entry is not None
        assert isinstance(entry.origin, Hub)
        lora = entry.origin.lora
        assert lora is not None
        load = written_call(
            "pipe.load_lora_weights",
            literal(lora.repo),
            weight_name=literal(lora.files[0]),
            revision=literal(lora.revision),
        )
        lines += [
            "# Needs peft. The LoRA is merged into the weights, so that it adds no cost per step;",
            "# vivace sums in fp32 and rounds once, so the last bits may differ.",
            *load.splitlines(),
            "pipe.fuse_lora()",
            "pipe.unload_lora_weights()",
        ]
    return Script(imports=tuple(imports), lines=tuple(lines))


def _component(located: LocatedModel, name: str, path: Path, dtype: str) -> Script:
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
        lines += written_call(
            "file = hf_hub_download",
            literal(part.repo),
            literal(part.files[0]),
            revision=literal(part.revision),
        ).splitlines()
    named = _configuration(located, "config_revision") | {"subfolder": literal(name), "dtype": dtype}
    if path.suffix == SUFFIX:
        imports.append("diffusers:GGUFQuantizationConfig")
        named["quantization_config"] = f"GGUFQuantizationConfig(compute_dtype={dtype})"
    lines += written_call(f"{name} = {kind}.from_single_file", file, **named).splitlines()
    return Script(tuple(imports), tuple(lines))


def _configuration(located: LocatedModel, revision: str) -> dict[str, str]:
    assert located.folder is not None
    if located.checkpoint is not None and located.folder == located.checkpoint.parent:
        return {"config": literal(str(located.folder))}
    return {"config": literal(_repository(located)), revision: literal(located.folder.name)}


def _repository(located: LocatedModel) -> str:
    if located.entry is not None and isinstance(located.entry.origin, Hub):
        return located.entry.origin.repo
    return located.model.name.partition("@")[0]
