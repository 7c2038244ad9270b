"""A model with a recipe as a plain Python script, which draws the picture that vivace draws.

The recipe is applied to the loaded model, as for drawing: only what works here and has an effect is written. A
technique says by itself what it is in public calls (`Technique.script`); those that are vivace's own go into one
`vivace.apply`, through whose session the script then draws.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from vivace.contract import Stage, Technique
from vivace.contract.script import WIDTH, Script, literal, written_call
from vivace.export.layout import docstring, imports_of, spaced
from vivace.export.loading import check_loadable, loading
from vivace.models.find import Found
from vivace.models.load import load_pipeline
from vivace.recipes.recipe import Recipe
from vivace.runtime.session import Session, session_of


@dataclass(frozen=True)
class Step:
    """One technique of the recipe. `script` is None where it is vivace's own; `left_out` says why it is not applied."""

    technique: Technique
    script: Script | None
    left_out: str | None = None

    @property
    def text(self) -> str:
        return self.technique.text

    @property
    def is_swap(self) -> bool:
        return self.technique.stage is Stage.SWAP


@dataclass(frozen=True)
class Written:
    """A script.

    own: the techniques for which it needs vivace; without any, plain diffusers, torch and torchao do.
    warnings: techniques that were left out, since what they ask for holds already.
    """

    text: str
    own: list[str]
    warnings: list[str] = field(default_factory=list)


def write_script(
    found: Found,
    recipe: Recipe,
    device: str,
    *,
    prompt: str,
    seed: int = 0,
    call: dict[str, Any] | None = None,
    threads: int | None = None,
    about: Iterable[str] = (),
) -> Written:
    """Load the model, apply the recipe, and write what was done.

    Args:
        found: a model whose weights are on this machine.
        device: "cpu" or "cuda", where the script is to run.
        prompt, seed: of the one picture that it draws.
        call: the call's own size, steps and guidance, where they are not the model's; the recipe's win.
        threads: CPU threads to draw with; None leaves them to torch.
        about: lines for the script's docstring, after the first.

    Raises:
        UsageError: a model with random weights.
        Unsupported, NoEffect, UnusableModel: as when the recipe is applied for drawing.
    """
    check_loadable(found)
    steps: list[Step] = []
    session = session_of(
        load_pipeline(found, device, keep_on_host=recipe.loads_from_host),
        found,
        recipe,
        device,
        call,
        [prompt],
        lambda step, script, left_out: steps.append(Step(step, script, left_out)),
    )
    stages = {step.technique.stage for step in steps if step.left_out is None}
    steps = [_own_if_met(step, stages) for step in steps]
    inside = _in_session(steps)
    own = [step.text for step in inside if step.script is None]
    plain = [step for step in steps if step.script is not None and step not in inside]
    arounds = [around for step in plain if (around := _script(step).around)]
    load = loading(found, device)
    imports = {"torch", *load.imports, *(name for step in plain for name in _script(step).imports)}
    imports |= {"vivace"} if inside else set()
    blocks = [[f"torch.set_num_threads({threads})  # a picture's last bits depend on it"]] if threads else []
    blocks.append(list(load.lines))
    blocks += _applied(steps, inside, device, prompt)
    if _computes_below_fp32(session.pipe):
        noise = _noise_in_fp32(session.pipe)
        imports |= set(noise.imports)
        blocks.append(list(noise.lines))
    blocks.append(_draw(session, "draw" if inside else "pipe", prompt, seed, arounds))
    needs = [f"Needs vivace: no public calls do {', '.join(own)}."] if own else []
    session.close()
    header = docstring(
        [f"Draw a picture with {found.model.name}.", "", f"Recipe: {recipe.text}", *needs, *about]
    )
    body = spaced(block for block in blocks if block)
    return Written(f"{header}\n\n{imports_of(imports)}\n\n{body}\n", own, session.warnings)


def _script(step: Step) -> Script:
    assert step.script is not None
    return step.script


def _own_if_met(step: Step, stages: set[Stage]) -> Step:
    """Vivace's own, if its script is not for what else is applied."""
    met = step.script is not None and step.script.unless_stage in stages
    return replace(step, script=None) if met else step


def _in_session(steps: list[Step]) -> list[Step]:
    """The techniques that vivace applies: its own, and whatever stands between them, since order matters."""
    applied = [step for step in steps if step.left_out is None]
    own = [place for place, step in enumerate(applied) if step.script is None]
    if not own:
        return []
    return [
        step for step in applied[own[0] : own[-1] + 1] if step.script is None or not step.script.is_call_only
    ]


def _applied(steps: list[Step], inside: list[Step], device: str, prompt: str) -> list[list[str]]:
    """Every technique's lines in order, and the move to the GPU.

    What is exchanged need not go there before, nor need what makes weights smaller on their way there. Nor need weights
    that are to wait in the host's memory, unless vivace applies something: it judges a technique by the device that it
    finds the pipeline on.
    """
    stays = not inside and any(step.script is not None and step.script.places_weights for step in steps)
    on_host = len(list(takewhile(lambda step: step.is_swap and step not in inside, steps)))
    shrinking = [k for k, step in enumerate(steps) if step.script is not None and step.script.from_host]
    shrinks = bool(shrinking) and not any(step in inside for step in steps[: shrinking[-1] + 1])
    if shrinks:
        on_host = shrinking[-1] + 1
    blocks = [_block(step, inside) for step in steps[:on_host]]
    if device == "cuda" and not stays:
        blocks.append(list(_REST_TO_GPU) if shrinks else ['pipe.to("cuda")'])
    for step in steps[on_host:]:
        block = _block(step, inside)
        if block and step.script is not None and step.script.places_weights and not stays:
            block.insert(1, 'pipe.to("cpu", silence_dtype_warnings=True)')
        blocks.append(block)
        if inside and step is inside[-1]:
            blocks.append(_apply_own(inside, prompt))
    return blocks


# `pipe.to` would touch the quantised weights too, and some are widened by that, even where they are.
_REST_TO_GPU = (
    "# The rest of the weights follows; what is quantised is there already.",
    "for part in pipe.components.values():",
    "    if isinstance(part, torch.nn.Module):",
    "        for tensor in (*part.parameters(), *part.buffers()):",
    '            if tensor.device.type == "cpu":',
    '                tensor.data = tensor.data.to("cuda")',
)


def _block(step: Step, inside: list[Step]) -> list[str]:
    """A technique's lines under its name."""
    if step in inside or (step.script is not None and step.script.is_call_only):
        return []
    if step.left_out is not None:
        return [f"# {step.text}: {step.left_out}"]
    summary = step.technique.summary
    title = textwrap.wrap(
        f"# {step.text}: {summary}",
        WIDTH,
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [*title, *_script(step).lines] if _script(step).lines else []


def _apply_own(inside: list[Step], prompt: str) -> list[str]:
    """One session for what has no public calls."""
    lines = ["# What no public calls do; pictures are drawn through it."]
    if any(step.script is not None for step in inside):
        lines = [
            "# What no public calls do, with what has to be applied between; pictures are drawn",
            "# through it.",
        ]
    recipe = literal("+".join(step.text for step in inside))
    named = {}
    if any(step.technique.needs_prompts for step in inside):
        lines.append(
            "# The prompts are drawn first, to adapt to them: take some of those that you will draw."
        )
        named["prompts"] = literal([prompt])
    return [*lines, *written_call("draw = vivace.apply", "pipe", recipe, **named).splitlines()]


def _computes_below_fp32(pipe: Any) -> bool:
    import torch

    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return any(
        str(p.dtype) in ("torch.float16", "torch.bfloat16") for part in parts for p in part.parameters()
    )


# As `vivace.runtime.noise`.
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


@functools.wraps(scheduler_step)  # pipelines read from its signature what it takes
def step_in_fp32(model_output, timestep, sample, *args, **kwargs):
    made = scheduler_step(model_output.float(), timestep, sample, *args, **kwargs)
    return tuple(part.to(sample.dtype) for part in made)


pipe.scheduler.step = step_in_fp32
"""


def _noise_in_fp32(pipe: Any) -> Script:
    prepare = getattr(type(pipe), "prepare_latents", None)
    takes_dtype = prepare is not None and "dtype" in inspect.signature(prepare).parameters
    why = (
        "# In half precision one seed may be other noise than in fp32. So noise is drawn in fp32 and",
        "# rounded, and the scheduler, which may draw more, computes in fp32 too.",
    )
    step = _STEP.strip().splitlines()
    if not takes_dtype:
        return Script(imports=("functools",), lines=(*why, *step))
    return Script(imports=("functools", "inspect"), lines=(*why, *_PREPARE.strip().splitlines(), "", *step))


def _draw(session: Session, drawer: str, prompt: str, seed: int, arounds: list[str]) -> list[str]:
    arguments = {name: literal(value) for name, value in session.arguments.items()}
    # On the CPU, so that one seed is one noise on every device.
    arguments["generator"] = f'torch.Generator("cpu").manual_seed({seed})'
    call = written_call(f"image = {drawer}", literal(prompt), end=").images[0]", **arguments)
    lines = call.splitlines()
    if arounds:
        lines = [f"with {', '.join(arounds)}:", *(f"    {line}" for line in lines)]
    return [*lines, 'image.save("picture.png")']
