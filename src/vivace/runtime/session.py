"""A pipeline with a recipe applied, called like the pipeline it wraps."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from vivace.errors import Cancelled, NoEffect, Unsupported, WorkloadError
from vivace.foundation.processes.resident import in_each_child
from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task
from vivace.machinery.compilation.compiled_code import counting_graphs
from vivace.machinery.lora.hot import exchange
from vivace.machinery.quantization.layers import move_to
from vivace.machinery.samplers import refused_steps
from vivace.machinery.technique import (
    CallContext,
    Component,
    Effect,
    ModelFacts,
    Placement,
    Script,
    Stage,
    Target,
    Technique,
    call_parameters,
    component_of,
    weights_dtype,
    without_clashes,
    working_part,
)
from vivace.machinery.technique.traits import exclusion, give
from vivace.measure.accelerator import synchronise
from vivace.measure.machine import this_machine
from vivace.models.sources import example_images
from vivace.models.tasks import for_task, pipeline_of
from vivace.recipes.recipe import Recipe
from vivace.runtime.calls import (
    Call,
    accepted_by,
    as_the_pipeline_takes,
    call_in_words,
    generators_of,
    in_contexts,
    prompts_of,
    refuse_ignored,
    why_no_steps,
    with_negative_prompts,
    with_size_of_image,
)
from vivace.runtime.copying import guard
from vivace.runtime.finite_images import FiniteCheck, warn_of_empty
from vivace.runtime.noise import draw_noise_in_fp32

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

# Kernels of attention, TF32 and memory formats of the process are changed around a call and restored after it. Calls of
# several threads, of one session or of several, therefore wait for each other. In one thread sessions may be nested, as
# where a callback of one calls another; if they are left in another order than that, all settings are restored when the
# last of them is left.
_TURN = threading.RLock()


@dataclass
class _Entered:
    settings: ExitStack = field(default_factory=ExitStack)
    is_left: bool = False


_ENTERED: list[_Entered] = []


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread is in a call of a session."""
    with _TURN:
        yield


@contextmanager
def settings_of_a_turn() -> Iterator[ExitStack]:
    """Yield a stack of settings of the process, which are restored after those that were made later."""
    with turn():
        entered = _Entered()
        _ENTERED.append(entered)
        try:
            yield entered.settings
        finally:
            entered.is_left = True
            while _ENTERED and _ENTERED[-1].is_left:
                _ENTERED.pop().settings.close()


def _begin_anew() -> None:
    """Reset the lock: a forked child has one thread, which holds nothing."""
    global _TURN
    _TURN = threading.RLock()
    _ENTERED.clear()


in_each_child(_begin_anew)


OnStep = Callable[[int, Any, int, int], None]
"""Called after each denoising step with its number, counted from 1, the latents, and the height and width in pixels."""


class CallInProgress:
    """The call in progress of a session: whether it was cancelled, and its callback."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._is_running = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin a call. An earlier cancel does not end it."""
        with self._lock:
            self._cancelled.clear()
            self._is_running = True

    def end(self) -> None:
        with self._lock:
            self._is_running = False

    def cancel(self) -> bool:
        """Let the call in progress end at its next step; return whether there is one."""
        with self._lock:
            if self._is_running:
                self._cancelled.set()
            return self._is_running

    def check(self) -> None:
        """Raise Cancelled if the call was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled("the call was cancelled")

    def watching(self, on_step: OnStep | None, call: dict[str, Any]) -> Effect:
        """Return an effect whose step end checks for a cancel and calls `on_step`."""

        def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self.check()
            if on_step is not None:
                height, width = (int(call.get(name) or 0) for name in ("height", "width"))
                on_step(step + 1, tensors.get("latents"), height, width)
            return {}

        return Effect(step_end=step_end, step_end_inputs=("latents",) if on_step is not None else ())


OnTechnique = Callable[[Technique, "Script | None", "str | None"], None]
"""Called for each technique in order with its script (see `Technique.script`), or with the reason why it was left
out."""


@dataclass(frozen=True)
class WarmedSize:
    """The result of warming one size.

    Attributes:
        size: None for the pipeline's own default.
        first_call_s: of the first call, compilation included.
        graphs: how many graphs the first call compiled; 0 if the recipe compiles nothing, or had code for this size.
        from_cache: how many of all of them the cache had already.
    """

    size: Size | None
    first_call_s: float
    second_call_s: float
    graphs: int
    graphs_later: int
    from_cache: int


class PipelineOutput(Protocol):
    """The return value of a diffusers pipeline.

    Attributes:
        images: one for each prompt; with another `output_type` than "pil" an array, a tensor or latents.
    """

    images: list[Image]


class Session:
    """A pipeline with a recipe applied.

    Call it like the pipeline: `session("a red circle", generator=...).images[0]`. Steps and guidance that the recipe
    sets are defaults; arguments of the call take precedence.

    Args:
        pipe: what is called: the pipeline, or a wrapper around it.
        target: the pipeline, the machine and the model, as techniques see them.
        on_technique: called for each technique; techniques write scripts only if it is given.

    Attributes:
        pipe: the diffusers pipeline; of a wrapper, the one inside.
        recipe: the resolved Recipe.
        device: torch's type of the device that it computes on.
        effects: what each technique changed, by its name and targets.
        on_step: called after each denoising step of a call, in its thread; see `OnStep`.
        check: of the last call's images. A call waits for its answer and raises NotFinite, unless `defers_check` says
            that the caller does that.
        warnings: assumptions about the model's files, techniques that were left out because the pipeline already had
            their effect, and other remarks on the recipe.
        idle: the techniques that were left out, by their text, with the reason.
    """

    def __init__(
        self, pipe: DiffusionPipeline, recipe: Recipe, target: Target, on_technique: OnTechnique | None = None
    ) -> None:
        self.pipe = target.pipe
        self._called = pipe
        self.recipe = recipe = recipe.pinned()
        self.device = target.machine.device
        self.effects: dict[str, dict[str, int | float | str]] = {}
        self.warnings: list[str] = []
        self.idle: dict[str, str] = {}
        self.on_step: OnStep | None = None
        self.check = FiniteCheck()
        self.defers_check = False
        self._calls = CallInProgress()
        self._applied: list[tuple[str, Effect]] = []
        self._defaults = dict(target.model.defaults)
        try:
            self._apply(recipe, target, on_technique)
        except BaseException:
            self.close()
            raise

    def _apply(self, recipe: Recipe, target: Target, on_technique: OnTechnique | None) -> None:
        """Apply all techniques in order, then copy the weights to the GPU and wrap the components' forwards."""
        moves_later = any(technique.facts.stage is Stage.OFFLOAD for technique in recipe)
        where = replace(target.where, home="cpu" if moves_later else target.machine.device)
        for index, technique in enumerate(recipe.techniques):
            if where.on_host and not any(t.facts.loads_from_host for t in recipe.techniques[index:]):
                where = self._onload(where)
            request = replace(
                target.request, earlier=recipe.techniques[:index], later=recipe.techniques[index + 1 :]
            )
            current = replace(target, where=where, request=request).with_defaults(self._defaults)
            effect = self._apply_technique(
                technique, current, on_technique, alone=len(recipe.techniques) == 1
            )
            if effect is not None:
                for module in current.modules(technique.targets).values():
                    give(module, technique.facts.provides)
                self._applied.append((technique.label, effect))
                self.effects[technique.label] = dict(effect.changed)
                self.warnings += [f"{technique.name}: {note}" for note in effect.notes]
                if effect.call and not effect.call.keys() & call_parameters(self._called).keys():
                    words = f"{call_in_words(self._called)} no {' or '.join(effect.call)}"
                    raise Unsupported(f"{technique.name}: {words}")
                self._defaults |= effect.call
        if recipe.techniques and not self._applied:
            raise NoEffect("; ".join(self.warnings), already_so=True)
        self._onload(where)
        for _, effect in self._applied:
            if effect.finish is not None:
                effect.finish()
        self._enter_contexts()
        if recipe.techniques and target.model.has_weights:
            guard(target.pipe)

    def _apply_technique(
        self, technique: Technique, target: Target, on_technique: OnTechnique | None, *, alone: bool
    ) -> Effect | None:
        """Apply one technique; return None if it had nothing to change and the recipe has other techniques."""
        if (stored := target.model.stored.get(technique.text)) is not None:
            technique.resume(target)
            return stored
        reason = exclusion(technique, target) or technique.unsupported(target)
        if reason is not None:
            raise Unsupported(f"{technique.name}: {reason}")
        script = (
            technique.script(target) if on_technique is not None else None
        )  # before the pipeline is changed
        try:
            effect = technique.apply(target) if target.model.has_weights else technique.predict(target)
        except NoEffect as error:
            if not error.already_so or alone:
                raise NoEffect(f"{technique.name}: {error}", already_so=error.already_so) from None
            self.warnings.append(f"{technique.name}: {error}")
            self.idle[technique.text] = str(error)
            if on_technique is not None:
                on_technique(technique, None, str(error))
            return None
        if on_technique is not None:
            on_technique(technique, script, None)
        return effect

    def set_lora(
        self, path: str | None = None, *, scale: float | None = None, instead_of: str | None = None
    ) -> None:
        """Exchange or rescale a LoRA that the recipe loaded by `lora(PATH, hot=True)`, for the calls that follow.

        Nothing is compiled or captured anew: the matrices are replaced in place. If it raises, nothing has changed.

        Args:
            path: another LoRA, as in a recipe; None keeps the file. Unused parts of it are added to `warnings`.
            scale: its factor; None keeps the factor.
            instead_of: path or name of the LoRA to change, if there are several.

        Raises:
            UsageError: the recipe has no hot LoRA, or several and none is named.
            Unsupported: the file is not one for this pipeline, or its layers or ranks were not reserved.
            UnusableModel: the file is damaged, or not a LoRA.
        """
        with turn():  # not during a call
            notes = exchange(self.pipe, path, scale, instead_of)
        self.warnings += [f"lora: {path}: {note}" for note in notes]

    def warm_up(self, prompt: str | Sequence[str] = "", **call: Any) -> tuple[WarmedSize, ...]:
        """Draw twice at each size that the recipe announces, `compile(sizes=[...])`, or at the default size if none is,
        and once with a prompt of each length that graphs are kept of.

        Later calls of these sizes, with as many prompts, compile and capture nothing. Pipelines that start from images
        get examples of each size.

        Args:
            prompt: one, or a list for a batch.
            call: other arguments of the call; `num_inference_steps=2` saves time where later steps need no other code.

        Raises:
            As a call of the session.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        return self.draw_twice([(index, text, index) for index, text in enumerate(prompts)], **call)

    def draw_twice(self, images: Call, **call: Any) -> tuple[WarmedSize, ...]:
        """Draw twice at each announced size, or at the default size."""
        defaults = self.defaults
        own = Size(defaults["width"], defaults["height"]) if {"width", "height"} <= defaults.keys() else None
        sizes: tuple[Size | None, ...] = self.recipe.announced_sizes or (own,)
        return tuple(self._draw_twice(images, size, call) for size in sizes)

    @property
    def prompts_to_warm(self) -> list[str]:
        """A prompt of each length that techniques keep graphs of, so that a new one need not wait for them."""
        numbers = sorted({number for _, effect in self._applied for number in effect.prompt_words})
        return [" ".join(["star"] * number) for number in numbers]

    def _draw_twice(self, images: Call, size: Size | None, call: dict[str, Any]) -> WarmedSize:
        size_arguments = {} if size is None else {"width": size.width, "height": size.height}
        sources = {} if size is None else example_images(type(self.pipe).__name__, size_arguments)
        counted = counting_graphs()
        seconds, graphs = [], []
        for _ in range(2):
            arguments = prompts_of(images) | generators_of(images) | size_arguments | sources | call
            start = time.perf_counter()
            self(**arguments)
            synchronise(self.device)
            seconds.append(time.perf_counter() - start)
            graphs.append(int(str(counted()["compiled_graphs"])))
        for prompt in self.prompts_to_warm:
            self(**(arguments | {"prompt": prompt if len(images) == 1 else [prompt] * len(images)}))
        in_cache = int(str(counted().get("graphs_from_cache", 0)))
        return WarmedSize(size, seconds[0], seconds[1], graphs[0], graphs[1] - graphs[0], in_cache)

    def sharing_weights(self, task: Task, model: str) -> Session:
        """Return a session that does another task with the components of this one; both stay usable, in turns.

        It draws what a session that was opened for the task draws with the same recipe, bit by bit, unless a technique
        adapts to the images: then it has adapted to the first session's task.

        Args:
            task: of a session for text-to-image that `open_session` returned.
            model: its name, for messages.

        Raises:
            Unsupported: diffusers has no such pipeline, or a technique belongs to the pipeline of the first session.
        """
        kind = pipeline_of(type(self.pipe).__name__, task, model)
        if kind == type(self.pipe).__name__:  # its calls take images, too
            return self
        own = [technique.text for technique in self.recipe if technique.facts.belongs_to_pipeline]
        if own:
            raise Unsupported(
                f"{', '.join(own)} belongs to the text-to-image pipeline, and the task '{task}' has another; open the "
                f"model for that task alone, or leave {'it' if len(own) == 1 else 'them'} out"
            )
        pipe = for_task(self.pipe, kind)
        target = Target(Placement(this_machine(self.device)), pipe, ModelFacts(model, defaults=self.defaults))
        for technique in self.recipe:
            if (
                technique.facts.stage is Stage.SCHEDULE
                and (reason := technique.unsupported(target)) is not None
            ):
                raise Unsupported(f"{technique.name}: {reason}")
        draw_noise_in_fp32(pipe, shares_scheduler=True)
        shared = copy.copy(self)
        shared.pipe = shared._called = pipe
        shared.on_step = None
        shared.warnings = []
        shared._calls = CallInProgress()
        return shared

    def close(self) -> None:
        """End the processes on other GPUs that techniques started, if there are any.

        They also end when the session is garbage collected or this process ends. A session that needs them cannot be
        called afterwards.
        """
        for _, effect in reversed(self._applied):
            if effect.close is not None:
                effect.close()

    def __deepcopy__(self, _: object) -> Session:
        raise Unsupported(
            "a session cannot be copied; apply the recipe to a copy of the pipeline it was made of"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def applied(self) -> dict[str, Effect]:
        """The change of each technique, by its name and targets."""
        return dict(self._applied)

    @property
    def defaults(self) -> dict[str, Any]:
        """The call's defaults: the model's, changed by the recipe."""
        return dict(self._defaults)

    @property
    def arguments(self) -> dict[str, Any]:
        """The defaults that the pipeline's call accepts."""
        accepted = accepted_by(self._called)
        return {k: v for k, v in self._defaults.items() if k in accepted}

    @overload
    def __call__(self, *args: Any, return_dict: Literal[True] = True, **kwargs: Any) -> PipelineOutput: ...
    @overload
    def __call__(self, *args: Any, return_dict: Literal[False], **kwargs: Any) -> tuple[Any, ...]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> PipelineOutput | tuple[Any, ...]:
        """Generate images. Arguments and result are those of the wrapped pipeline; prompts may always come first.

        Calls of all sessions of a process take turns, in whatever thread.

        Raises:
            Cancelled: by `cancel`, from another thread.
            NotFinite: the images would be of NaN or infinity.
            UsageError: the pipeline would ignore an argument.
        """
        with turn():
            self._calls.begin()
            try:
                return self._call(args, kwargs)
            finally:
                self._calls.end()

    def cancel(self) -> bool:
        """End the call in progress at its next step, from another thread; return whether there is one.

        That call raises Cancelled, and the next one is not affected.
        """
        return self._calls.cancel()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineOutput | tuple[Any, ...]:
        refuse_ignored(self._called, kwargs)
        args, kwargs = as_the_pipeline_takes(self._called, args, kwargs)
        by_position = set(list(call_parameters(self._called))[: len(args)])
        call = with_negative_prompts(
            with_size_of_image(
                self._called, {k: v for k, v in self.arguments.items() if k not in by_position}, kwargs
            ),
            args,
            kwargs,
        )
        if (reason := why_no_steps(self.pipe, call)) is not None:
            raise Unsupported(f"{self.recipe.text}: {reason}")
        if (reason := refused_steps(self.pipe, call)) is not None:
            raise WorkloadError(f"{self.recipe.text}: {reason}")
        sigmas: Any = self._defaults.get("sigmas")
        steps = call.get("num_inference_steps")
        number = steps if sigmas is None else len(sigmas)
        if "sigmas" not in kwargs and steps != number:
            # The pipeline would draw with as many steps as there are sigmas, whatever is asked.
            raise WorkloadError(
                f"{self.recipe.text}: it has sigmas of its own, for {number} steps, not {steps}"
            )
        vae = getattr(self.pipe, "vae", None)
        dtype = weights_dtype(vae)
        effects = [effect for _, effect in self._applied]
        if "callback_on_step_end" in accepted_by(self._called):
            effects.append(self._calls.watching(self.on_step, call))
        self.check = FiniteCheck()
        try:
            with self.surroundings(), self.check.watching(self.pipe):
                output: PipelineOutput | tuple[Any, ...] = self._called(
                    *args, **with_step_ends(without_clashes(self._called, call), effects)
                )
        except BaseException:
            # SDXL's pipeline decodes in fp32 and casts its VAE back afterwards, but not if decoding fails. After an
            # out-of-memory error, later calls would mix weights and latents of two dtypes.
            if vae is not None and weights_dtype(vae) != dtype:
                vae.to(dtype)
            raise
        self.check.look(output[0] if isinstance(output, tuple) else getattr(output, "images", None))
        if not self.defers_check:
            self.check.refuse()
        warn_of_empty(output)
        return output

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Apply the process-wide settings of techniques, and restore the old ones on exit.

        Calling the session does this. Use it to call a part of the pipeline alone. Other threads wait meanwhile.
        """
        with settings_of_a_turn() as stack:
            for _, effect in self._applied:
                if effect.around is not None:
                    stack.enter_context(effect.around())
            yield

    def evidence(self) -> dict[str, int | float | str | list[str]]:
        """Return the techniques' observations during the calls so far."""
        evidence: dict[str, int | float | str | list[str]] = {}
        for _, effect in self._applied:
            if effect.evidence is not None:
                evidence |= effect.evidence()
        return evidence

    def forget_prompts(self) -> None:
        """Let the prompts of the next call count as new, for techniques that remember those of earlier calls."""
        for _, effect in self._applied:
            if effect.forget is not None:
                effect.forget()

    def refuted(self, evidence: dict[str, Any]) -> str | None:
        """Return why a technique had no effect, judged by a run's evidence; None if all had one."""
        for label, effect in self._applied:
            if effect.refuted is not None and (reason := effect.refuted(evidence)) is not None:
                return f"{label}: {reason}"
        return None

    def _onload(self, where: Placement) -> Placement:
        """Copy the weights to the GPU, unless they are there or a later technique moves them."""
        if not where.on_host or where.home is None or where.home == "cpu":
            return where
        for part in self.pipe.components.values():
            if hasattr(part, "_parameters"):
                move_to(part, where.home)
        return replace(where, on_host=False)

    def _enter_contexts(self) -> None:
        by_component: dict[Component, list[CallContext]] = {}
        for _, effect in self._applied:
            for component, context in effect.contexts.items():
                by_component.setdefault(component, []).append(context)
        for component, contexts in by_component.items():
            part = working_part(component, component_of(self.pipe, component))
            part.forward = in_contexts(part.forward, contexts)


def with_step_ends(call: dict[str, Any], effects: Sequence[Effect]) -> dict[str, Any]:
    """Return a pipeline's call with the effects' step-end callbacks chained before the caller's own."""
    ours = [effect for effect in effects if effect.step_end is not None]
    if not ours:
        return call
    theirs = call.get("callback_on_step_end")
    # diffusers' callback objects declare their tensors themselves; functions are given those that the call names.
    declared = getattr(theirs, "tensor_inputs", None)
    if declared is None:
        declared = call.get("callback_on_step_end_tensor_inputs") or (["latents"] if theirs else [])
    inputs = list(dict.fromkeys([*declared, *(name for effect in ours for name in effect.step_end_inputs)]))

    def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        merged = dict(tensors)
        for effect in ours:
            assert effect.step_end is not None
            merged |= effect.step_end(pipe, step, timestep, merged)
        if theirs is not None:
            merged |= theirs(pipe, step, timestep, merged) or {}
        return merged

    return call | {"callback_on_step_end": step_end, "callback_on_step_end_tensor_inputs": inputs}
