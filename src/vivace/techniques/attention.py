"""Which kernel computes softmax(QK^T)V, in the denoiser or the VAE.

Why: `math` writes the whole score matrix to memory, the fused kernels never do; among those, the fastest depends
    on GPU, precision and head size (one H200, bf16, 4608 tokens: cuDNN 632, flash 325, efficient 166 TFLOP/s).
Costs: another order of summation, so the last bits differ; `sage` also rounds Q and K to 8 bits. `math` needs memory
    quadratic in the tokens. `flex` is compiled, once for each shape.
Needs: fp16 or bf16 on GPUs for `flash`, `cudnn`, `flash3`, `flash4`, `sage`; packages for `flash3` (Hopper), `flash4`,
    `sage`, `xformers`. On CPUs there are `math`, `flash` and, with a C++ compiler, `flex`. A VAE's one head of 512 is
    too large for all but `math`, `efficient` and `xformers` on a GPU.
Source: PyTorch, torch.nn.attention.sdpa_kernel and flex_attention; Dao, FlashAttention-2, arXiv 2307.08691; Shah et
    al., FlashAttention-3, arXiv 2407.08608; Zhang et al., SageAttention, arXiv 2410.02367; xFormers.

The choice holds around the component's forward alone: flash refuses the text encoders' masks. diffusers' own
`set_attention_backend` is a silent no-op on UNets and VAEs, so it is not used here. Calls that a kernel does not take
(masks, other sizes of heads) stay PyTorch's and are counted; with one of PyTorch's own four kernels there is no such
way out, and such a component is refused.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.attention_backends.calls import Led
from vivace.attention_backends.kernels import (
    KERNELS,
    OF_PYTORCH,
    chosen_by_pytorch,
    head_sizes,
    refused_by_pytorch,
    sdp_backend,
    unsupported_for,
    unsupported_on,
)
from vivace.compilation.compiled_code import counting_graphs, keep_compiled_code
from vivace.contract import (
    Arithmetic,
    CallContext,
    Component,
    Effect,
    Stage,
    Target,
    Technique,
    knob,
    working_part,
)
from vivace.contract.script import Script
from vivace.errors import NoEffect

_OPERATORS = {
    "math": "_scaled_dot_product_attention_math",
    "efficient": "_scaled_dot_product_efficient_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


class Attention(Technique):
    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "the attention kernel of the denoiser or the VAE"
    stage: ClassVar[Stage] = Stage.KERNEL
    owns: ClassVar[str] = "attention kernel"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser", "vae")
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    backend: Literal[
        "math", "efficient", "flash", "cudnn", "flex", "flash3", "flash4", "sage", "xformers"
    ] = knob(
        tune=["flash", "cudnn"],
        about="of PyTorch math, efficient, flash (FA2), cudnn, flex; of packages flash3, flash4, sage, xformers",
    )

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(products=KERNELS[self.backend].products)

    def unsupported(self, target: Target) -> str | None:
        if (reason := unsupported_on(self.backend, target.machine)) is not None:
            return reason
        if target.pipe is None:
            return None
        for component, module in target.modules(self.targets).items():
            reason = unsupported_for(self.backend, component, module, target.machine)
            if (
                reason is None
                and target.machine.is_cuda
                and target.model.has_weights
                and self.backend in OF_PYTORCH
            ):
                reason = refused_by_pytorch(self.backend, component, module, _device(target, module))
            if reason is not None:
                return reason
        return None

    def apply(self, target: Target) -> Effect:
        modules = {c: m for c, m in target.modules(self.targets).items() if head_sizes(working_part(c, m))}
        if not modules:
            raise NoEffect(f"no attention that diffusers built in {', '.join(self.targets)}")
        # PyTorch's own choice depends on a real device.
        before = {
            c: _words(chosen_by_pytorch(m, _device(target, m))) if target.model.has_weights else "unknown"
            for c, m in modules.items()
        }
        changed: dict[str, int | float | str] = {}
        for component, chosen in before.items():
            if chosen != self.backend:
                changed |= {f"{component}.attention": self.backend, f"{component}.attention_before": chosen}
        if not changed:
            raise NoEffect(f"PyTorch already picks {self.backend} attention here", already_so=True)
        if self.backend in OF_PYTORCH:
            return self._chosen(changed, list(modules))
        if not target.model.has_weights:  # the eager call stands for a kernel that needs memory for as little
            return Effect(changed=changed)
        keep_compiled_code()
        return self._led(changed, {component: Led(self.backend) for component in modules})

    def _chosen(self, changed: dict[str, int | float | str], components: list[Component]) -> Effect:
        """One of PyTorch's own kernels."""
        from torch.nn.attention import sdpa_kernel

        wanted = _OPERATORS[self.backend]

        def context() -> Any:
            return sdpa_kernel(sdp_backend(self.backend))

        def refuted(evidence: dict[str, Any]) -> str | None:
            for component in components:
                seen = [n for n in evidence.get("attention_kernels", []) if n.startswith(f"{component}: ")]
                if seen and not any(wanted in name for name in seen):
                    return f"{self.backend} attention was asked for, but {', '.join(seen)} ran"
            return None

        contexts: dict[Component, CallContext] = dict.fromkeys(components, context)
        return Effect(changed=changed, contexts=contexts, refuted=refuted)

    def _led(self, changed: dict[str, int | float | str], led: dict[Component, Led]) -> Effect:
        """A kernel that calls must be led to."""
        counted = counting_graphs() if self.backend == "flex" else dict

        def evidence() -> dict[str, int | float | str]:
            found: dict[str, int | float | str] = {}
            for component, calls in led.items():
                found[f"{component}.attention_calls_{self.backend}"] = calls.num_led
                found[f"{component}.attentions_compiled_{self.backend}"] = calls.num_compiled
                if calls.left:
                    found[f"{component}.attention_calls_left"] = _words(calls.left)
            return found | counted()

        def refuted(_: dict[str, Any]) -> str | None:
            for component, calls in led.items():
                if not calls.num_led and not calls.num_compiled:
                    why = f": {_words(calls.left)} calls stayed PyTorch's" if calls.left else ""
                    return f"no call of the {component} reached {self.backend} attention{why}"
            return None

        return Effect(
            changed=changed,
            contexts={component: calls.inside for component, calls in led.items()},
            evidence=evidence,
            refuted=refuted,
        )

    def script(self, target: Target) -> Script | None:
        if self.backend not in OF_PYTORCH:
            return None
        lines = ["# Around these alone: fused kernels refuse text masks, and heads as large as a VAE's."]
        for component, module in target.modules(self.targets).items():
            if head_sizes(working_part(component, module)):
                forward = f"{target.working_path(component)}.forward"
                lines.append(f"{forward} = sdpa_kernel(SDPBackend.{OF_PYTORCH[self.backend]})({forward})")
        return Script(
            imports=("torch.nn.attention:SDPBackend", "torch.nn.attention:sdpa_kernel"), lines=tuple(lines)
        )


def _device(target: Target, module: Any) -> Any:
    """Where the module will work."""
    return target.machine.device if target.where.on_host else module.device


def _words(found: set[str] | dict[str, int]) -> str:
    """ "flash", "efficient, flash", or "masked x3, heads of 40 x6"."""
    if isinstance(found, set):
        return ", ".join(sorted(found))
    return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))
