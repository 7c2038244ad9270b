"""A pipeline with a recipe applied, called like the pipeline it wraps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from vivace.contract import (
    COMPONENTS,
    CallContext,
    Component,
    Effect,
    ModelFacts,
    Placement,
    Request,
    Script,
    Stage,
    Target,
    Technique,
    component_of,
    working_part,
)
from vivace.contract.traits import give, traits_of
from vivace.errors import NoEffect, Unsupported
from vivace.measure.machine import choose_device, this_machine
from vivace.models.find import Found, find_model
from vivace.models.load import load_pipeline, load_tiny_vae, tiny_vae_arguments
from vivace.models.lora import distillations
from vivace.models.prompts import PROMPT_SETS
from vivace.quantization.layers import move_to
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.spec.recipe import BASELINE

Write = Callable[[Technique, "Script | None", "str | None"], None]
"""Told of each technique in order: its script (see `Technique.script`), or why it was left out as already so."""


def load(model: str, recipe: str = BASELINE, *, device: str = "auto") -> Session:
    """Load a model by name, repository, folder or file, and apply a recipe.

    Args:
        model: e.g. "tiny-sd", "sdxl", "synthetic:sdxl" (its architecture with random weights), "org/repo@revision" on
            the Hugging Face hub, the path of a folder that holds a model_index.json, or of a .safetensors file.
        recipe: e.g. "bf16+cfg_cutoff(0.4)"; "baseline" is the model as published.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".

    Raises:
        UnknownModel, UnusableModel, RecipeError, Unsupported, NoEffect: see `vivace.errors`.
    """
    resolved = resolve(recipe)
    found = find_model(model)
    return open_session(found, resolved, choose_device(device))


def open_session(
    found: Found,
    recipe: Recipe,
    device: str,
    defaults: dict[str, Any] | None = None,
    prompts: Sequence[str] = (),
) -> Session:
    """`load` with everything resolved; `defaults` replace the catalogue's call defaults."""
    pipe = load_pipeline(found, device, keep_on_host=recipe.loads_from_host)
    return session_of(pipe, found, recipe, device, defaults, prompts)


def session_of(
    pipe: Any,
    found: Found,
    recipe: Recipe,
    device: str,
    defaults: dict[str, Any] | None = None,
    prompts: Sequence[str] = (),
    write: Write | None = None,
) -> Session:
    """A Session over a pipeline that was loaded from `found`; it draws the same noise whatever the recipe's dtype.

    Args:
        prompts: what will be drawn, for techniques that adapt to it; none: the catalogue's for this model.
        write: told of each technique, for a script of the recipe.
    """
    tiny = found.tiny_vae
    target = Target(
        where=Placement(
            machine=this_machine(device),
            on_host=recipe.loads_from_host and device == "cuda" and pipe.device.type == "cpu",
        ),
        pipe=pipe,
        model=ModelFacts(
            name=f"{found.model.name}@{found.model.revision}",
            defaults=_signature_defaults(pipe) | found.call | found.defaults | (defaults or {}),
            load_tiny_vae=(lambda: load_tiny_vae(tiny)) if tiny is not None else None,
            tiny_vae_arguments=tiny_vae_arguments(found),
            distillations=distillations(found.entry),
            has_random_weights=found.model.is_synthetic,
        ),
        asked=Request(
            prompts=tuple(prompts) or (PROMPT_SETS["real"] if found.entry is None else found.entry.prompts)
        ),
    )
    session = Session(pipe, recipe, target, write)
    draw_noise_in_fp32(pipe)
    return session


def apply(pipe: Any, recipe: str = BASELINE, *, prompts: Sequence[str] = ()) -> Session:
    """Apply a recipe to a diffusers pipeline that you already have. The pipeline itself is changed.

    It goes on drawing its noise as diffusers does, in the dtype of its latents (see `vivace.runtime.noise`;
    `vivace.load` and `vivace.bench` draw it in fp32 for all).

    Args:
        prompts: what will be drawn, for techniques that look at that first: quantize(fp8_static).

    Raises:
        RecipeError, Unsupported, NoEffect: see `vivace.errors`. Load the pipeline anew after Unsupported or
            NoEffect: techniques before the refused one have been applied.
    """
    resolved = resolve(recipe)
    device = "cuda" if str(getattr(pipe, "device", "cpu")).startswith("cuda") else "cpu"
    target = Target(
        Placement(this_machine(device)),
        pipe,
        ModelFacts(defaults=_signature_defaults(pipe)),
        Request(prompts=tuple(prompts)),
    )
    return Session(pipe, resolved, target)


class Session:
    """A pipeline with a recipe applied.

    Call it like the pipeline: `session("a red circle", generator=...).images[0]`. Steps and guidance that the recipe
    sets are defaults; what you pass to the call wins.

    Args:
        write: asks each technique for its script before it is applied; without it nobody does.

    Attributes:
        pipe: the diffusers pipeline.
        recipe: the resolved Recipe.
        effects: what each technique really changed, by the technique's name and targets.
        warnings: techniques whose wish was fulfilled already.
    """

    def __init__(self, pipe: Any, recipe: Recipe, target: Target, write: Write | None = None) -> None:
        self.pipe = pipe
        self.recipe = recipe
        self.effects: dict[str, dict[str, int | float | str]] = {}
        self.warnings: list[str] = []
        self._applied: list[tuple[str, Effect]] = []
        self._defaults = dict(target.model.defaults)
        try:
            self._apply(recipe, target, write)
        except BaseException:
            self.close()
            raise

    def _apply(self, recipe: Recipe, target: Target, write: Write | None) -> None:
        moves_later = any(technique.stage is Stage.OFFLOAD for technique in recipe)
        where = replace(target.where, home="cpu" if moves_later else target.machine.device)
        for place, technique in enumerate(recipe.techniques):
            if where.on_host and not any(t.loads_from_host for t in recipe.techniques[place:]):
                where = self._onloaded(where)
            asked = replace(
                target.asked, earlier=recipe.techniques[:place], later=recipe.techniques[place + 1 :]
            )
            here = replace(target, where=where, asked=asked).with_defaults(self._defaults)
            effect = self._applied_effect(technique, here, write, alone=len(recipe.techniques) == 1)
            if effect is not None:
                label = technique.name + (f"@{','.join(technique.targets)}" if technique.targets else "")
                self._applied.append((label, effect))
                self.effects[label] = dict(effect.changed)
                self._defaults |= effect.call
        if recipe.techniques and not self._applied:
            raise NoEffect("; ".join(self.warnings), already_so=True)
        self._onloaded(where)
        for _, effect in self._applied:
            if effect.finish is not None:
                effect.finish()
        self._enter_contexts()

    def _applied_effect(
        self, technique: Technique, target: Target, write: Write | None, *, alone: bool
    ) -> Effect | None:
        """Apply one technique; None if it was so already and other techniques remain.

        Raises:
            Unsupported, NoEffect: see `vivace.errors`.
        """
        reason = _excluded(technique, target) or technique.unsupported(target)
        if reason is not None:
            raise Unsupported(f"{technique.name}: {reason}")
        script = technique.script(target) if write is not None else None  # before the pipeline is changed
        try:
            effect = technique.apply(target) if target.model.has_weights else technique.predict(target)
        except NoEffect as error:
            if not error.already_so or alone:
                raise NoEffect(f"{technique.name}: {error}", already_so=error.already_so) from None
            self.warnings.append(f"{technique.name}: {error}")
            if write is not None:
                write(technique, None, str(error))
            return None
        for module in target.modules(technique.targets).values():
            give(module, technique.provides)
        if write is not None:
            write(technique, script, None)
        return effect

    def close(self) -> None:
        """End what techniques started: processes on other GPUs. Where there are none, nothing happens.

        A session that is forgotten, or whose process ends, leaves nothing running either. One that needs what was ended
        draws no more.
        """
        for _, effect in reversed(self._applied):
            if effect.close is not None:
                effect.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def defaults(self) -> dict[str, Any]:
        """Call defaults in force: the model's, changed by the recipe."""
        return dict(self._defaults)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the defaults that the pipeline's call takes."""
        accepted = inspect.signature(self.pipe.__call__).parameters
        return {k: v for k, v in self._defaults.items() if k in accepted}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draw. Arguments and result are the wrapped pipeline's own."""
        # What is passed by position must not be given a default by name as well.
        by_position = set(list(inspect.signature(self.pipe.__call__).parameters)[: len(args)])
        call = _of_each_prompt(
            {k: v for k, v in self.arguments.items() if k not in by_position}, args, kwargs
        )
        vae = getattr(self.pipe, "vae", None)
        dtype = getattr(vae, "dtype", None)
        try:
            with self.surroundings():
                return self.pipe(*args, **self._with_step_end(call))
        except BaseException:
            # SDXL's pipeline decodes in fp32 and casts its VAE back when that is done, but not where it fails: after
            # one picture too many for the memory, each later call would meet weights and latents of two dtypes.
            if vae is not None and vae.dtype != dtype:
                vae.to(dtype)
            raise

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """What techniques set for the whole process while the pipeline works, and set back after it.

        A call enters them by itself; they are for whoever calls a part of the pipeline alone.
        """
        with ExitStack() as stack:
            for _, effect in self._applied:
                if effect.around is not None:
                    stack.enter_context(effect.around())
            yield

    def evidence(self) -> dict[str, int | float | str | list[str]]:
        """What was seen to happen in the calls so far."""
        found: dict[str, int | float | str | list[str]] = {}
        for _, effect in self._applied:
            if effect.evidence is not None:
                found |= effect.evidence()
        return found

    def refuted(self, evidence: dict[str, Any]) -> str | None:
        """Why a technique had no effect after all, judged by the evidence of a run; None if all had."""
        for label, effect in self._applied:
            if effect.refuted is not None and (reason := effect.refuted(evidence)) is not None:
                return f"{label}: {reason}"
        return None

    def _onloaded(self, where: Placement) -> Placement:
        """Copy the weights to the GPU, unless they are there or a technique moves them."""
        if not where.on_host or where.home is None or where.home == "cpu":
            return where
        for part in self.pipe.components.values():
            if hasattr(part, "_parameters"):
                move_to(part, where.home)
        return replace(where, on_host=False)

    def _with_step_end(self, call: dict[str, Any]) -> dict[str, Any]:
        """Chain the techniques' step-end callbacks in front of the caller's own."""
        ours = [effect for _, effect in self._applied if effect.step_end is not None]
        if not ours:
            return call
        theirs = call.get("callback_on_step_end")
        wanted = list(call.get("callback_on_step_end_tensor_inputs") or (["latents"] if theirs else []))
        for effect in ours:
            wanted += [name for name in effect.step_end_inputs if name not in wanted]

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            merged = dict(tensors)
            for effect in ours:
                assert effect.step_end is not None
                merged |= effect.step_end(pipe, step, timestep, merged)
            if theirs is not None:
                merged |= theirs(pipe, step, timestep, merged) or {}
            return merged

        return call | {"callback_on_step_end": step_end, "callback_on_step_end_tensor_inputs": wanted}

    def _enter_contexts(self) -> None:
        """Wrap each component's forward, on the instance, in the contexts that techniques asked for."""
        by_component: dict[Component, list[CallContext]] = {}
        for _, effect in self._applied:
            for component, context in effect.contexts.items():
                by_component.setdefault(component, []).append(context)
        for component, contexts in by_component.items():
            part = working_part(component, component_of(self.pipe, component))
            part.forward = _inside(part.forward, contexts)


def _excluded(technique: Technique, target: Target) -> str | None:
    """Why the technique cannot work with what is already done to the pipeline's modules, or None."""
    if target.pipe is None:
        return None
    for component, module in target.modules(technique.targets or COMPONENTS).items():
        there = traits_of(module)
        for rule in technique.excludes:
            applies = not rule.components or component in rule.components
            if applies and rule.trait in there and rule.unless not in there:
                return f"the {component} is {rule.trait} already: {rule.because}"
    return None


def _of_each_prompt(
    defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments. A negative prompt by default is one for each prompt: FLUX's pipeline makes one row of one
    text, however many prompts there are. It gives way to embeddings, with which it may not be passed."""
    if kwargs.get("negative_prompt_embeds") is not None:
        defaults = {name: value for name, value in defaults.items() if name != "negative_prompt"}
    call = defaults | kwargs
    prompts = kwargs.get("prompt", args[0] if args else None)
    if prompts is None:
        prompts = kwargs.get("prompt_embeds")
    negative = defaults.get("negative_prompt")
    if "negative_prompt" not in kwargs and negative is not None and not isinstance(prompts, str | None):
        call["negative_prompt"] = [negative] * len(prompts)
    return call


def _inside(forward: Any, contexts: list[CallContext]) -> Any:
    def forward_in_contexts(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return forward(*args, **kwargs)

    return forward_in_contexts


def _signature_defaults(pipe: Any) -> dict[str, Any]:
    """Steps and guidance that the pipeline's own __call__ would use."""
    parameters = inspect.signature(pipe.__call__).parameters
    return {
        name: parameters[name].default
        for name in ("num_inference_steps", "guidance_scale")
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
