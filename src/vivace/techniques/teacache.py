"""Skip a FLUX transformer's blocks while its input, as the step modulates it, changes little.

Why: how much a step's output will differ from the last one shows in the first block's input, modulated by the timestep
    embedding, before any block is computed: a polynomial rescales the one's relative change into the other's. The
    changes of skipped steps add up, so that a slow drift is seen too. A hit computes none of FLUX's 57 blocks.
Costs: the picture drifts with every hit. The change is read back from the GPU in every step, and a batch is decided as
    one. One residual is kept (FLUX at 1024 px: 25 MB a picture in bf16). The rival is always fewer plain steps: bench
    both.
Needs: FLUX, and a polynomial. FLUX.1 [dev]'s is published, and taken for all models of that architecture. For others
    `vivace calibrate teacache --model M` fits one, keeps it in $VIVACE_CACHE (else ~/.cache/vivace) and says how well
    it fits; it then counts before the published one. A fixed schedule needs none.
Source: Liu et al., Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model, CVPR 2025, arXiv 2411.19108;
    FLUX's coefficients: github.com/ali-vilab/TeaCache, TeaCache4FLUX.

`threshold` is the sum of rescaled changes at which a step is computed again: on FLUX.1 [dev] its authors found 1.5x at
0.25, 1.8x at 0.4, 2.0x at 0.6. The first and the last step are always computed. `hits` replaces it by a fixed schedule,
that share of the steps after the first, evenly spread. It is for random weights, whose changes say nothing, and for
comparing caches at equal cost.

It is decided in front of the transformer's forward. `compile` therefore makes graphs without a break: of the whole
forward, of a hit, and of the look at the modulated input; `cuda_graph` records each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vivace.contract import Effect, Target, knob
from vivace.step_caching.flux_residual import not_flux, residual_forward
from vivace.step_caching.step_cache import (
    ONE_AT_A_TIME,
    Cached,
    Look,
    Memory,
    StepCache,
    chosen_by,
    has_step_cache,
    hits_knob,
    is_scheduled_hit,
    nothing_learnt,
    relative_change,
)
from vivace.step_caching.teacache_fit import Fit, find_fit


class Teacache(StepCache):
    name: ClassVar[str] = "teacache"
    summary: ClassVar[str] = "skip a transformer's blocks while its modulated input changes little"
    replaced: ClassVar[tuple[str, ...]] = ("threshold",)
    replaced_in_words: ClassVar[str] = "a threshold"
    shares_tokens: ClassVar[bool] = True

    threshold: float = knob(
        0.25,
        ge=0,
        le=10,
        tune=[0.25, 0.4, 0.6],
        about="sum of rescaled changes at which a step is computed again",
    )
    hits: float | None = hits_knob("a threshold")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if (reason := not_flux(denoiser)) is not None:
            return reason
        if has_step_cache(denoiser):
            return ONE_AT_A_TIME
        if self.hits is not None or not target.model.has_weights:
            return None
        if target.model.has_random_weights:
            return nothing_learnt("the modulated input", "teacache(hits=0.5)")
        if find_fit(denoiser, target.model.name) is None:
            name = target.model.name.rpartition("@")[0] or "M"
            return (
                "no polynomial is known for this model, so its changes cannot be rescaled; fit one, once: "
                f"vivace calibrate teacache --model {name}; or give a fixed schedule, teacache(hits=0.5)"
            )
        return None

    def apply(self, target: Target) -> Effect:
        pipe, denoiser = target.pipe, target.module("denoiser")
        needs_fit = self.hits is None and target.model.has_weights
        fit = find_fit(denoiser, target.model.name) if needs_fit else None

        def decide(memory: Memory, look: Look) -> bool:
            if fit is None:
                return self.hits is not None and is_scheduled_hit(memory.step, self.hits)
            return _is_close(memory, look(), fit, self.threshold, getattr(pipe, "num_timesteps", None))

        cached = Cached(
            denoiser,
            residual_forward(denoiser),
            decide,
            always_compute=not target.model.has_weights,
        )
        changed: dict[str, int | float | str] = {"denoiser.teacache": chosen_by(self.hits, self.threshold)}
        if fit is not None:
            changed["denoiser.teacache_polynomial"] = fit.about()
        return cached.effect(changed)


def _is_close(memory: Memory, modulated: Any, fit: Fit, threshold: float, num_steps: int | None) -> bool:
    """Whether the changes since the last computed step are below the threshold. Every step is compared with the one
    before, computed or not."""
    previous = memory.notes.get("modulated")
    memory.notes["modulated"] = modulated
    is_last = memory.step + 1 == num_steps
    if not memory.kept or previous is None or is_last:
        memory.notes["distance"] = 0.0
        return False
    distance = memory.notes["distance"] + fit.rescaled(relative_change(modulated, previous))
    is_hit = bool(distance < threshold)
    memory.notes["distance"] = distance if is_hit else 0.0
    return is_hit


@contextmanager
def watching(transformer: Any) -> Iterator[tuple[list[tuple[float, float]], Callable[[], None]]]:
    """See how the output's changes follow the modulated input's, for a fit.

    Yields:
        The relative changes of (modulated input, output) between consecutive calls, which grow with each call, and a
        function to be called before each picture.
    """
    changes: list[tuple[float, float]] = []
    last: list[tuple[Any, Any]] = []
    modulated: list[Any] = []

    def modulates(_: Any, __: Any, output: Any) -> None:
        modulated.append(output[0].detach())

    def finishes(_: Any, __: Any, output: Any) -> None:
        now = modulated.pop(), (output[0] if isinstance(output, tuple) else output.sample).detach()
        if last:
            before = last.pop()
            changes.append((relative_change(now[0], before[0]), relative_change(now[1], before[1])))
        last.append(now)

    hooks = [
        transformer.transformer_blocks[0].norm1.register_forward_hook(modulates),
        transformer.register_forward_hook(finishes),
    ]
    try:
        yield changes, last.clear
    finally:
        for hook in hooks:
            hook.remove()
