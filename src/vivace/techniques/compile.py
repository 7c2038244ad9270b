"""torch.compile: kernels generated for this model and shape, launches fused.

Why: fusion of the many small memory-bound operations between matrix products, and fewer launches (eager FLUX
    launches 3,705 kernels a step). `reduce-overhead` also records CUDA graphs, which decides for small models
    (SD 1.5 on an H200: 10.0 -> 6.2 ms a step).
Costs: the first call takes 20 to 340 s on full-size models, 10 to 50 s a graph on a CPU; a new shape compiles again.
Needs: on CPUs a C++ compiler; on GPUs Triton.
Source: Ansel et al., PyTorch 2, ASPLOS 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.errors import NoEffect
from vivace.spec.script import Script, literal, written_call
from vivace.spec.technique import COMPONENTS, Component, Effect, Stage, Target, Technique, knob


class Compile(Technique):
    name: ClassVar[str] = "compile"
    summary: ClassVar[str] = "kernels generated for this model and shape (torch.compile)"
    stage: ClassVar[Stage] = Stage.COMPILE
    owns: ClassVar[str] = "compilation"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = COMPONENTS
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = knob(
        "default", tune=["default", "reduce-overhead"], about="torch.compile's mode"
    )
    backend: Literal["inductor", "aot_eager", "eager"] = knob(
        "inductor", about="eager and aot_eager only trace: for finding graph breaks, not for speed"
    )

    def unsupported(self, target: Target) -> str | None:
        machine = target.machine
        if self.backend != "inductor":
            if self.mode != "default":
                return f"mode {self.mode} belongs to the inductor backend, not to {self.backend}"
            return None
        if not machine.is_cuda and machine.compiler is None:
            return "compiling for a CPU needs a C++ compiler, and none was found (install g++ or clang++)"
        if not machine.is_cuda and self.mode == "reduce-overhead":
            return "reduce-overhead records CUDA graphs, and there is no CUDA device"
        return None

    def apply(self, target: Target) -> Effect:
        import torch

        changed: dict[str, int | float | str] = {}
        options = {"mode": self.mode} if self.backend == "inductor" and self.mode != "default" else {}
        graphs = self.mode in {"reduce-overhead", "max-autotune"} and target.machine.is_cuda
        for component, module in target.modules().items():
            # A pipeline calls vae.decode, never vae.forward: the decoder is what it spends its time in.
            part = module.decoder if component == "vae" else module
            if target.has_data:  # without, the eager call stands for the compiled one
                compiled = torch.compile(part.forward, backend=self.backend, **options)
                part.forward = _own_outputs(compiled) if graphs else compiled
            changed[f"{component}.compiled"] = self.backend if not options else f"{self.backend}, {self.mode}"
        if not changed:
            raise NoEffect(f"this pipeline has none of {', '.join(target.components)}")
        return Effect(changed=changed, evidence=_graphs_compiled)

    def script(self, target: Target) -> Script | None:
        graphs = self.mode in {"reduce-overhead", "max-autotune"} and target.machine.is_cuda
        if graphs and target.components != ("denoiser",):
            return None  # what others return is no plain tuple of tensors
        given = {} if self.backend == "inductor" else {"backend": literal(self.backend)}
        given |= {} if self.mode == "default" else {"mode": literal(self.mode)}
        lines: list[str] = []
        for component in target.modules():
            # A pipeline calls vae.decode, never vae.forward.
            path = f"{target.path(component)}{'.decoder' if component == 'vae' else ''}.forward"
            if graphs:
                lines += written_call("compiled = torch.compile", path, **given).splitlines()
                lines += [*_CLONES, f"{path} = forward_with_own_outputs"]
            else:
                lines += written_call(f"{path} = torch.compile", path, **given).splitlines()
        return Script(imports=("torch",), lines=tuple(lines))


# As `_own_outputs`, for denoisers, which pipelines ask for a tuple.
_CLONES = (
    "# A CUDA graph writes its outputs to the same memory at each replay, and some schedulers keep",
    "# earlier ones.",
    "def forward_with_own_outputs(*args, **kwargs):",
    "    torch.compiler.cudagraph_mark_step_begin()",
    "    return tuple(output.clone() for output in compiled(*args, **kwargs))",
)


def _own_outputs(compiled: Any) -> Any:
    """A CUDA graph writes its outputs to the same memory at each replay. Schedulers that keep earlier outputs
    (PNDM, without guidance) would find them overwritten, so the caller gets copies."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map_only

        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

    forward.replays_graphs = True  # type: ignore[attr-defined]  # for whoever would record or move it
    return forward


def _graphs_compiled() -> dict[str, int | float | str]:
    from torch._dynamo.utils import counters

    return {
        "compiled_graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": int(sum(counters["graph_break"].values())),
    }
