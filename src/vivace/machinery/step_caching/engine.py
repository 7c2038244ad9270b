"""A denoiser that computes a step or skips it: the engine of every step cache.

Its settings have two axes: when a step is skipped (`when`), and what takes the place of its result (`what`).

The denoiser's forward has two or three modes, each a function of tensors without state: one computes everything and
returns what could be reused, one reuses it, one only looks; the first two may go on from what was computed by looking.
Hooks in front of the forward choose the mode. So torch.compile makes one graph of each mode without a break, a CUDA
graph can be captured of each, and offloading, which also wraps the forward, onloads weights for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass
class CacheState:
    """The state of one kind of the denoiser's calls, from the start of a pipeline's call to its end; guidance that
    takes two calls per step makes two kinds.

    Attributes:
        step: the step that is being decided, from 0; `args` and `inputs` are the denoiser's arguments meanwhile.
        kept, shape: tensors that a hit can reuse, and the shape of the input that they were computed for.
        previous: what was kept before, while a step is computed, for a `keep` that builds on it.
        notes: whatever the technique wants to remember.
    """

    step: int = -1
    kept: tuple[torch.Tensor, ...] = ()
    previous: tuple[torch.Tensor, ...] = ()
    shape: Hashable = None
    args: tuple[Any, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


Tensors = tuple["torch.Tensor", ...]
Look = Callable[[], Any]
"""Computes the input of a hit's decision, e.g. the modulated input of the first block."""
IsHit = Callable[[CacheState, Look], bool]
"""Whether the step can be skipped. Called in every step; a step for which nothing is kept is computed all the same."""


def timestep_of(pipe: Any, state: CacheState) -> float:
    """Return the timestep of the step that is being decided; the scheduler is read once per call."""
    if "timesteps" not in state.notes:
        state.notes["timesteps"] = pipe.scheduler.timesteps.tolist()[-pipe.num_timesteps :]
    timesteps = state.notes["timesteps"]
    return float(timesteps[min(state.step, len(timesteps) - 1)])


def number_of_steps(pipe: Any) -> int | None:
    """Return how many times the current call goes through its loop of steps; None where the pipeline does not say."""
    number = getattr(pipe, "num_timesteps", None)
    return None if number is None else int(number)


def noise_levels(pipe: Any, state: CacheState) -> list[float]:
    """Return the noise level at the start of each step, and at the end of the last; read once per call.

    A flow's are its times. Others' are the ratio of noise and image, in which a deterministic sampler is Euler's
    method.
    """
    if "levels" not in state.notes:
        scheduler, number = pipe.scheduler, int(pipe.num_timesteps)
        if getattr(scheduler, "sigmas", None) is not None:
            levels = scheduler.sigmas.tolist()[-number - 1 :]
        else:
            kept = scheduler.alphas_cumprod[scheduler.timesteps[-number:].long().cpu()].double()
            levels = [*((1 - kept) / kept).sqrt().tolist(), 0.0]
        state.notes["levels"] = levels
    known: list[float] = state.notes["levels"]
    return known


def steps_before(pipe: Any) -> int:
    """Return how many steps of the schedule are not run: image-to-image begins in the middle of it."""
    order = getattr(pipe.scheduler, "order", 1)
    return max(0, (len(pipe.scheduler.timesteps) - int(pipe.num_timesteps)) // order)


def relative_change(new: torch.Tensor, old: torch.Tensor) -> float:
    """Return the L1 norm of the difference, divided by that of the older tensor."""
    return float((new.float() - old.float()).abs().mean() / old.float().abs().mean())


MODE, _KEPT, _LOOKED = "step_cache_mode", "step_cache_kept", "step_cache_looked"
"""Keyword arguments added to the forward's own: "compute", "reuse" or "look"; the tensors to reuse; the result of
looking."""


@dataclass
class StepCounter:
    """Computed and skipped steps since the cache was applied; where guidance takes two calls per step, each counts."""

    computed: int = 0
    skipped: int = 0

    def count(self, is_hit: bool) -> None:
        self.skipped += is_hit
        self.computed += not is_hit

    def evidence(self) -> dict[str, int | float | str]:
        calls = self.computed + self.skipped
        return {"cache_hit_rate": self.skipped / calls if calls else 0.0, "cache_calls": calls}

    def refuted(self, _: dict[str, Any]) -> str | None:
        if self.computed and not self.skipped:
            calls = "1 call" if self.computed == 1 else f"{self.computed} calls"
            return (
                f"the cache never hit in {calls} of the denoiser: an image has too few steps for its share of hits, or "
                "they differ too much for its threshold"
            )
        return None


@dataclass(frozen=True)
class StepForwards:
    """The denoiser's forward, by what the step does, of its own arguments with `return_dict=False`.

    Attributes:
        compute: returns the output, and the tensors that a hit can reuse.
        reuse: takes those tensors first, and returns the output.
        look: returns what the hit is decided by; None where nothing is looked at.
        compute_on, reuse_on: the same, but they take what `look` returned first, and go on from there; None without
            use.
    """

    compute: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    reuse: Callable[..., torch.Tensor]
    look: Callable[..., Any] | None = None
    compute_on: Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]] | None = None
    reuse_on: Callable[..., torch.Tensor] | None = None


class Predictor(Protocol):
    """What takes the place of a skipped step's result, made of the results of computed ones."""

    def keep(self, state: CacheState, computed: Tensors) -> Tensors:
        """Return what is kept of a computed step; `state.previous` is what was kept of the one before."""

    def predict(self, state: CacheState) -> Tensors:
        """Return the tensors for the current step, which is skipped, made of `state.kept`."""


class CachedDenoiser:
    """Replaces a denoiser's forward, on the instance, by one that computes or reuses as `is_hit` decides, if
    `can_reuse` says so of a call's keyword arguments; without a `predictor` what was kept is repeated."""

    def __init__(
        self,
        denoiser: torch.nn.Module,
        forwards: StepForwards,
        is_hit: IsHit,
        *,
        predictor: Predictor | None = None,
        can_reuse: Callable[[dict[str, Any]], bool] = lambda kwargs: True,
        counter: StepCounter | None = None,
    ) -> None:
        self.counter = counter if counter is not None else StepCounter()
        from diffusers.models.modeling_outputs import Transformer2DModelOutput
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        is_unet = hasattr(denoiser, "up_blocks")
        self._output_class: Any = UNet2DConditionOutput if is_unet else Transformer2DModelOutput
        self._is_hit = is_hit
        self._predictor = predictor
        self._can_reuse = can_reuse
        self._goes_on = forwards.compute_on is not None
        self._states: dict[str, CacheState] = {}
        self._context = "cond"
        denoiser.forward = _by_mode(forwards)
        denoiser.register_forward_pre_hook(self._before, with_kwargs=True)
        denoiser.register_forward_hook(self._after, with_kwargs=True)
        # Pipelines tell diffusers' own caches by these names which call is which, and that a call has ended.
        denoiser.cache_context = self._in_context
        denoiser._reset_stateful_cache = self.reset

    def reset(self, recurse: bool = True) -> None:
        self._states.clear()

    @contextmanager
    def _in_context(self, name: str, **_: Any) -> Iterator[None]:
        before, self._context = self._context, name
        try:
            yield
        finally:
            self._context = before

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        state = self._states.setdefault(self._context, CacheState())
        state.step += 1
        shape = _kind_of_input(args, kwargs)
        if shape != state.shape or not self._can_reuse(kwargs):
            state.kept = ()  # guidance that ended halves the batch
        state.shape = shape

        announced: dict[str, Any] = {}

        def look() -> Any:
            looked = module.forward(*args, **kwargs, **{MODE: "look"})
            if self._goes_on:
                announced[_LOOKED] = looked
            return looked

        state.args, state.inputs = args, kwargs
        is_hit = self._is_hit(state, look) and bool(state.kept)
        state.args, state.inputs = (), {}
        self.counter.count(is_hit)
        if is_hit:
            reused = self._predictor.predict(state) if self._predictor is not None else state.kept
            return args, kwargs | announced | {MODE: "reuse", _KEPT: reused}
        # Freed while new tensors are computed, unless those build on the old ones.
        state.previous, state.kept = (state.kept if self._predictor is not None else ()), ()
        return args, kwargs | announced | {MODE: "compute"}

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        output, computed = result
        if kwargs[MODE] == "compute":
            state = self._states[self._context]
            state.kept = (
                self._predictor.keep(state, computed) if self._predictor is not None else tuple(computed)
            )
            state.previous = ()
        return self._output_class(sample=output) if kwargs.get("return_dict", True) else (output,)


def _by_mode(forwards: StepForwards) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        mode, kept, looked = kwargs.pop(MODE), kwargs.pop(_KEPT, ()), kwargs.pop(_LOOKED, None)
        kwargs["return_dict"] = False
        if looked is not None:
            assert forwards.compute_on is not None
            assert forwards.reuse_on is not None
            if mode == "compute":
                return forwards.compute_on(looked, *args, **kwargs)
            return forwards.reuse_on(looked, kept, *args, **kwargs), ()
        if mode == "compute":
            return forwards.compute(*args, **kwargs)
        if mode == "reuse":
            return forwards.reuse(kept, *args, **kwargs), ()
        assert forwards.look is not None
        return forwards.look(*args, **kwargs)

    return forward


def latents_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the noisy latents among a denoiser's arguments; of Z-Image it is a list, one for each row."""
    return (
        args[0] if args else next(kwargs[name] for name in ("sample", "hidden_states", "x") if name in kwargs)
    )


def last_tokens(kept: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the last tokens (batch, tokens, channels), as many as another tensor has.

    What Qwen-Image 2.1's first step makes of the text is in front of the image's; later steps have the image's alone.
    """
    return kept[:, -like.shape[1] :] if kept.ndim == like.ndim == 3 else kept


def _kind_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    latents = latents_of(args, kwargs)
    rows = latents if isinstance(latents, list) else [latents]
    return tuple((tuple(row.shape), row.dtype, row.device) for row in rows)
