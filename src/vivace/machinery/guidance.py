"""The end of guidance within a call: after it, the denoiser computes the conditional branch alone.

The pipeline goes on as before. It makes its batch, and gets one: where guidance is rows, each input of the denoiser and
of the ControlNets is cut to the conditional rows, whatever carries them, and the output is repeated for the others.
Where guidance is two calls, the second one returns the output of the first. In both cases what the pipeline makes of
the branches, uncond + scale * (cond - uncond), is exactly the conditional one.

This happens in front of hooks, of compiled and captured code and of step caches: in the slot of
`torch.nn.Module.compile`'s compiled call, which is dropped when a module is copied or pickled. It only concerns calls
of the denoiser that are made by a call of the session, in its thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from vivace.architectures import family_of
from vivace.errors import Unsupported
from vivace.machinery.step_caching.engine import latents_of
from vivace.machinery.technique import component_of
from vivace.machinery.technique.pipeline_code import call_code, number_of_denoiser_calls, skips_layers

SHOWN = ("prompt_embeds",)
"""Tensors that a step's callback can replace by their conditional rows, where the pipeline only passes them on."""
_CUT: WeakSet[Any] = WeakSet()
"""Denoisers in a call that has dropped its unconditional rows."""
# Names of the cache contexts in which pipelines make the two calls.
CONDITIONAL, UNCONDITIONAL = "cond", "uncond"
_TAKEN_APART = re.compile(r"^\s*(\w+(?:, \w+)+) = \w+\.chunk\((\d)(?:, dim=0)?\)\s*$", re.MULTILINE)
_OF_THE_TEXT = ("text", "cond")
_RUNGE_KUTTA_STEPS, _RUNGE_KUTTA_CALLS = 3, 4
"""PNDM's first steps, unless it skips them, and the calls of each."""


# How a pipeline guides is read from the code of its call, where the denoiser's output is taken apart. All inputs of the
# denoiser have the same rows in the same order, whatever they are called, so nothing else needs to be known of it.
@dataclass(frozen=True)
class GuidanceRows:
    """Guidance as one call for a batch with `number` rows for each image, of which `conditional` follows the prompt; or
    lists."""

    number: int
    conditional: int
    as_list: bool = False


def is_cut(denoiser: Any) -> bool:
    """Whether a denoiser is in a call whose batch has only the conditional rows, unknown to the pipeline."""
    return denoiser in _CUT


class GuidanceProgress:
    """Counts the steps of a pipeline's latest call, guided and unguided, by the calls of its denoiser."""

    def __init__(self, pipe: Any, fraction: float) -> None:
        self._pipe = pipe
        self._fraction = fraction
        self._thread: int | None = None
        self._calls = 0
        self._steps: list[int] = []
        self.guided: set[int] = set()
        self.unguided: set[int] = set()

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Watch a call of the pipeline, which starts with guidance even if the one before failed."""
        self._thread, self._calls, self._steps = threading.get_ident(), 0, []
        self.guided, self.unguided = set(), set()
        try:
            yield
        finally:
            self._thread = None

    @property
    def is_running(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def is_over(self) -> bool:
        """Whether the next call of the denoiser belongs to a step without guidance."""
        return self._step >= max(1, round(self._fraction * (1 + self._schedule[-1])))

    def count(self, is_guided: bool) -> None:
        (self.guided if is_guided else self.unguided).add(self._step)
        self._calls += 1

    def count_second(self) -> None:
        """Count the step of the latest call as guided: it has a second, unconditional call."""
        step = self._schedule[min(self._calls, len(self._schedule)) - 1]
        self.unguided.discard(step)
        self.guided.add(step)

    @property
    def _schedule(self) -> list[int]:
        if not self._steps:
            self._steps = step_of_each_call(self._pipe.scheduler, num_calls(self._pipe)) or [0]
        return self._steps

    @property
    def _step(self) -> int:
        return self._schedule[min(self._calls, len(self._schedule) - 1)]

    def evidence(self) -> dict[str, int]:
        return {"guided_steps": len(self.guided), "unguided_steps": len(self.unguided)}


class CutRows:
    """Cuts the rows of a pipeline's denoiser and of its ControlNets to the conditional ones."""

    def __init__(self, pipe: Any, rows: GuidanceRows, progress: GuidanceProgress) -> None:
        self._pipe = pipe
        self._rows = rows
        self._progress = progress
        self._batch = 0
        self._denoiser = denoiser = component_of(pipe, "denoiser")
        self._denoise = _take_slot(denoiser, self._call_denoiser)
        controlnet = getattr(pipe, "controlnet", None)
        if controlnet is not None:
            self._control = _take_slot(controlnet, self._call_controlnet)

    def _call_denoiser(self, *args: Any, **kwargs: Any) -> Any:
        progress = self._progress
        # A call that leaves out layers is another guidance, of rows that are conditional already.
        if not progress.is_running or kwargs.get("skip_layers") is not None:
            return self._denoise(*args, **kwargs)
        if not self._pipe.do_classifier_free_guidance:
            progress.count(False)
            return self._denoise(*args, **kwargs)
        batch = len(latents_of(args, kwargs))
        if not progress.guided:
            self._batch = self._checked(batch, kwargs)
        if batch != self._batch:  # a pipeline's own end of guidance
            progress.count(False)
            return self._denoise(*args, **kwargs)
        if not progress.is_over:
            progress.count(True)
            return self._denoise(*args, **kwargs)
        _CUT.add(self._denoiser)
        try:
            output = self._denoise(*self._cut(args), **self._cut(kwargs))
        finally:
            _CUT.discard(self._denoiser)
        progress.count(False)
        return self._repeated(output)

    def step_end(self, _: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Pass callers' callbacks the text that the denoiser goes on with."""
        progress = self._progress
        if not (progress.is_running and progress.guided and progress.is_over):
            return {}
        return {name: self._cut(tensors[name]) for name in SHOWN if name in tensors}

    def _call_controlnet(self, *args: Any, **kwargs: Any) -> Any:
        progress = self._progress
        is_cut = progress.is_running and progress.guided and self._pipe.do_classifier_free_guidance
        # In guess mode a ControlNet gets the conditional rows alone.
        if is_cut and progress.is_over and len(latents_of(args, kwargs)) == self._batch:
            args, kwargs = self._cut(args), self._cut(kwargs)
        return self._control(*args, **kwargs)

    def _checked(self, batch: int, kwargs: dict[str, Any]) -> int:
        """Return the number of rows of a call's first batch; Unsupported where they are not those of guidance alone."""
        text = kwargs.get("encoder_hidden_states")
        others = batch if text is None or isinstance(text, list | tuple) else len(text)
        if batch % self._rows.number or others != batch:
            raise Unsupported(
                f"cfg_cutoff: {type(self._pipe).__name__} gives its denoiser {batch} rows of latents and {others} of "
                f"text, which are not {self._rows.number} for each image; leave cfg_cutoff out"
            )
        return batch

    def _cut(self, value: Any) -> Any:
        """Return arguments with the conditional rows of everything that has the batch's rows."""
        import torch

        size = self._batch // self._rows.number
        chosen = slice(self._rows.conditional * size, (self._rows.conditional + 1) * size)
        if isinstance(value, torch.Tensor):
            return value[chosen] if value.dim() and len(value) == self._batch else value
        if isinstance(value, dict):
            # Tables of positions are of one image, however long they are.
            return {key: item if "rotary" in str(key) else self._cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            if self._rows.as_list and isinstance(value, list) and len(value) == self._batch:
                return value[chosen]
            parts = [self._cut(item) for item in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    def _repeated(self, output: Any) -> Any:
        import torch

        first = output[0]
        if isinstance(first, torch.Tensor):
            whole: Any = torch.cat([first] * self._rows.number)
        else:
            whole = list(first) * self._rows.number
        if isinstance(output, tuple):
            return (whole, *output[1:])
        return type(output)(sample=whole)


class CutCalls:
    """Makes the unconditional call of each step, or returns the output of the conditional call before it instead."""

    def __init__(self, denoiser: Any, progress: GuidanceProgress) -> None:
        self._progress = progress
        self._context: str | None = None
        self._conditional: Any = None
        self._was_guided = False
        self._name = denoiser.cache_context
        denoiser.cache_context = self._cache_context
        self._denoise = _take_slot(denoiser, self._call)

    @contextmanager
    def _cache_context(self, name: str, **others: Any) -> Iterator[None]:
        before, self._context = self._context, name
        try:
            with self._name(name, **others):
                yield
        finally:
            self._context = before

    @contextmanager
    def around_call(self) -> Iterator[None]:
        try:
            with self._progress.around_call():
                yield
        finally:
            self._conditional = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        progress = self._progress
        if not progress.is_running:
            return self._denoise(*args, **kwargs)
        if self._context == UNCONDITIONAL:
            if self._conditional is not None:
                return self._conditional
            progress.count_second()
            return self._denoise(*args, **kwargs)
        is_over = progress.is_over
        output = self._denoise(*args, **kwargs)
        progress.count(False)
        # Kept only while it is needed: it is as large as the latents.
        self._conditional = output if is_over and self._context == CONDITIONAL else None
        return output


def _take_slot(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    before: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    # A module that `torch.compile` wrapped passes plain assignments on to what it wraps.
    vars(module)["_compiled_call_impl"] = call
    return before


def rows_of(pipe: Any) -> GuidanceRows | str:
    """Return the rows in which the pipeline guides, or the reason why they are unknown."""
    name, code = type(pipe).__name__, call_code(pipe)
    if not hasattr(type(pipe), "do_classifier_free_guidance"):
        return f"{name} does not say whether a call is guided"
    denoiser = component_of(pipe, "denoiser")
    if denoiser is None:
        return f"{name} has no unet or transformer"
    if hasattr(type(pipe), "do_perturbed_attention_guidance"):
        return f"{name} guides by perturbed attention too, in rows of its own; take its pipeline without PAG"
    family = family_of(denoiser)
    if family is not None and family.rows_in_lists and family.doubled is not None:
        return GuidanceRows(2, 0, as_list=True)
    layouts = {layout for match in _TAKEN_APART.finditer(code) if (layout := _layout(match)) is not None}
    if len(layouts) != 1:
        where = "in no batch of two or three rows" if not layouts else "in batches of several kinds"
        return f"{name} guides {where} that is known here"
    calls = number_of_denoiser_calls(pipe)
    # Stable Diffusion 3's second call leaves out layers: another guidance, which says so by an argument.
    if calls > 1 and not skips_layers(pipe):
        return f"{name} calls its denoiser {calls} times a step"
    return layouts.pop()


def guides_in_two_calls(pipe: Any) -> bool:
    """Whether the pipeline makes a conditional and then an unconditional denoiser call, in named cache contexts."""
    if not hasattr(getattr(pipe, "transformer", None), "cache_context"):
        return False
    code = call_code(pipe)
    first, second = (code.find(f'cache_context("{name}")') for name in (CONDITIONAL, UNCONDITIONAL))
    return 0 <= first < second


def _layout(match: re.Match[str]) -> GuidanceRows | None:
    """Return the rows that a line of code splits; None for other lines, such as those that halve a mask."""
    names = [name.split("_") for name in match[1].split(", ")]
    without = [index for index, words in enumerate(names) if "uncond" in words]
    texts = [index for index, words in enumerate(names) if words[-1] in _OF_THE_TEXT]
    if len(names) != int(match[2]) or len(without) != 1 or len(texts) != 1:
        return None
    return GuidanceRows(len(names), texts[0])


def num_calls(pipe: Any) -> int:
    """Return how many steps of its sampler the pipeline's current call makes: its loop's length."""
    number = getattr(pipe, "num_timesteps", None)
    if number is not None:
        return int(number)
    return len(pipe.scheduler.timesteps) - int(getattr(pipe.scheduler, "begin_index", None) or 0)


def step_of_each_call(scheduler: Any, calls: int) -> list[int]:
    """Return the step of each call of the denoiser: some samplers' steps have two calls, PNDM begins with four each."""
    if hasattr(scheduler, "prk_timesteps"):
        return _of_pndm(scheduler, calls)
    order = int(getattr(scheduler, "order", 1))
    return [call // order for call in range(calls)]


def _of_pndm(scheduler: Any, calls: int) -> list[int]:
    if scheduler.config.skip_prk_steps:
        return [max(0, call - 1) for call in range(calls)]
    first = _RUNGE_KUTTA_STEPS * _RUNGE_KUTTA_CALLS
    return [
        call // _RUNGE_KUTTA_CALLS if call < first else call - first + _RUNGE_KUTTA_STEPS
        for call in range(calls)
    ]
