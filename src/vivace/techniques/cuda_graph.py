"""The denoiser's step captured once as a CUDA graph, and replayed as a whole.

Why: an eager step launches its kernels one by one, each through Python and the driver. Where the GPU waits for
    them (small models, few tokens, batch 1), a replay, which is one launch, lets it run without gaps. It needs no
    compiler and seconds instead of minutes; `compile` (mode default) may run inside the graph.
Costs: each graph keeps a step's activations, in a pool that all graphs share. The first step of each shape takes three
    steps' work. Inputs are copied in and outputs copied out. Qwen-Image and Z-Image take prompts at their own length:
    each new length captures anew, and prompts of more than `max_graphs` lengths in turn do so with every image. On an
    H200 that made 8 steps of Qwen-Image longer, 3.4 s instead of 2.9 (docs/models-measured.md).
Needs: a CUDA device, and a denoiser that decides nothing on the CPU: a step cache that reads back whether to skip a
    step cannot be captured, nor can layers that copy from the host (most of GGUF's). Weights must stay at their
    addresses, so offloading them does not go with it.
Source: PyTorch, "Accelerating PyTorch with CUDA Graphs"; CUDA C++ Programming Guide, CUDA Graphs.

A replay reads and writes the same memory each time. Inputs are therefore copied into the graph's buffers, and callers
get copies of its outputs: schedulers keep earlier ones. Tensors of another shape, dtype or layout, another structure of
arguments, or another value of any argument that is not a tensor make another graph; the most recently used graphs are
kept, `max_graphs` for each size that a technique announces (`compile(sizes=[...])`). Guidance that ends halfway
(`cfg_cutoff`) takes two of each size. With `parallel` each GPU captures its own graph, which includes its collectives.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.compilation.captured import CapturedFunction, cuda_capturer, replace_forward
from vivace.contract import Component, Effect, Rule, Stage, Target, Technique, Trait, knob
from vivace.contract.traits import is_compiled
from vivace.errors import Unsupported
from vivace.quantization.gguf_schemes import why_not_capturable


class CudaGraph(Technique):
    name: ClassVar[str] = "cuda_graph"
    summary: ClassVar[str] = "the denoiser's step captured once, and replayed in one launch"
    stage: ClassVar[Stage] = Stage.CAPTURE
    owns: ClassVar[str] = "graph capture"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    max_graphs: int = knob(
        4,
        ge=1,
        le=64,
        tune=[4],
        about="how many graphs are kept for each announced size, the most recently used",
    )

    @property
    def provides(self) -> frozenset[Trait]:
        return frozenset({Trait.CAPTURED})

    @property
    def excludes(self) -> tuple[Rule, ...]:
        return (
            Rule(
                Trait.CAPTURED_BY_COMPILER,
                "in this mode torch.compile captures CUDA graphs itself; keep one of the two",
            ),
            Rule(
                Trait.DECIDES_ON_HOST,
                "a step cache that reads a value back to the CPU in each step cannot be part of a graph",
            ),
            Rule(
                Trait.COPIES_FROM_HOST,
                "these layers copy constants from the host in each call, which a graph cannot contain; take q8_0, or "
                "add compile",
                unless=Trait.COMPILED_WHOLE,
            ),
        )

    def unsupported(self, target: Target) -> str | None:
        if not target.machine.captures_graphs:
            return "graphs are captured on NVIDIA GPUs, and on AMD's as HIP graphs; there is none here"
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if not is_compiled(denoiser):
            for name, layer in denoiser.named_modules():
                if (reason := why_not_capturable(layer)) is not None:
                    return f"a layer cannot be captured ({name}): {reason}"
        return None

    def apply(self, target: Target) -> Effect:
        denoiser = target.module("denoiser")
        announced = {size for technique in target.asked.earlier for size in technique.announced_sizes}
        kept = self.max_graphs * max(1, len(announced))
        captured = CapturedFunction(denoiser.forward, denoiser.device, cuda_capturer(), kept)
        replace_forward(denoiser, captured)

        def refuted(_: dict[str, Any]) -> str | None:
            if captured.num_captured > 1 and captured.num_replays == captured.num_captured:
                return (
                    f"none of {captured.num_captured} graphs was used twice: every step had other arguments"
                )
            return None

        return Effect(
            changed={"denoiser.cuda_graphs": f"up to {kept}"},
            evidence=lambda: {
                "cuda_graphs_recorded": captured.num_captured,
                "cuda_graph_replays": captured.num_replays,
            },
            refuted=refuted,
        )

    def predict(self, target: Target) -> Effect:
        """Refuse to predict memory.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(
            "cuda_graph: what a CUDA graph's memory pool holds cannot be predicted; predict the recipe without it, and "
            "keep a step's activations in reserve"
        )
