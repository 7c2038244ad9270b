"""Select the kernel for softmax(QK^T)V in the denoiser or the VAE.

Why: `math` writes the whole score matrix to memory, the fused kernels do not. Which fused kernel is fastest depends on
    GPU, precision and head size. On one H200 cuDNN's takes 0.40 ms in bf16 and 0.29 ms in fp8 for FLUX.1's 4608 tokens
    (results/flux-fused-probe.jsonl, without quantising); no whole recipe with `cudnn_fp8` or `flash3_fp8` has a record.
Costs: another order of summation, so the last bits differ; `sage` also rounds Q and K to 8 bits, `flash3_fp8` and
    `cudnn_fp8` round Q, K, V and the softmax to fp8 (e4m3), which takes a pass over Q, K and V. The memory of `math`
    is quadratic in the number of tokens. `flex` is compiled once per shape.
Needs: fp16 or bf16 on GPUs for `flash`, `cudnn`, `flash3`, `flash4`, `sage` and those in fp8, which take heads of 128;
    packages for `flash3`, `flash3_fp8`, `cudnn_fp8` (Hopper), `flash4`, `sage`, `xformers`. On CPUs: `math`, `flash`
    and, with a C++ compiler, `flex`. On a GPU only `math`, `efficient` and `xformers` support the single head of 512 of
    a VAE.
Source: PyTorch, torch.nn.attention.sdpa_kernel and flex_attention; Dao, FlashAttention-2, arXiv 2307.08691; Shah et
    al., FlashAttention-3, arXiv 2407.08608; Zhang et al., SageAttention, arXiv 2410.02367; xFormers.

The choice applies only inside the component's forward, since flash does not support the text encoders' masks.
diffusers' `set_attention_backend` is a silent no-op on UNets and VAEs, so it is not used. Calls that a kernel does not
support (masks, other head sizes) are computed by PyTorch and counted. PyTorch's own four kernels have no such fallback,
so components that they do not support are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vivace.architectures import family_of
from vivace.errors import NoEffect
from vivace.machinery.attention_backends.kernels import (
    CACHE_TAG,
    KERNELS,
    OF_PYTORCH,
    attention_layers,
    chosen_by_pytorch,
    head_sizes,
    refused_by_pytorch,
    selected,
    unsupported_for,
    unsupported_on,
)
from vivace.machinery.compilation.compiled_code import counting_graphs, keep_compiled_code
from vivace.machinery.technique import (
    COMPONENTS,
    Arithmetic,
    CallContext,
    Component,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    knob,
    working_part,
)
from vivace.machinery.technique.pipeline_code import never_asks_pytorch
from vivace.machinery.technique.script import Script
from vivace.machinery.technique.traits import traits_of

if TYPE_CHECKING:
    from vivace.machinery.attention_backends.redirection import RedirectedAttention

_FP8 = ("flash3_fp8", "cudnn_fp8")
_OPERATORS = {
    "math": "_scaled_dot_product_attention_math",
    "efficient": "_scaled_dot_product_efficient_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


class Attention(Technique):
    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "the attention kernel of the denoiser or the VAE"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.KERNEL,
        owns="attention kernel",
        same_picture=True,
        targetable=("denoiser", "vae"),
        default_targets=("denoiser",),
        provides=frozenset({Trait.KERNEL_CHOSEN}),
    )

    backend: Literal[
        "math",
        "efficient",
        "flash",
        "cudnn",
        "flex",
        "flash3",
        "flash3_fp8",
        "cudnn_fp8",
        "flash4",
        "sage",
        "xformers",
    ] = knob(
        tune=["flash", "cudnn"],
        about="of PyTorch math, efficient, flash (FA2), cudnn, flex; of packages flash3, flash3_fp8, cudnn_fp8, "
        "flash4, sage, xformers",
    )
    bf16_blocks: int = knob(
        0,
        new=True,
        ge=0,
        le=100,
        about="the first and last blocks of flash3_fp8 and cudnn_fp8, whose attention stays PyTorch's",
    )

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            arithmetic=Arithmetic(products=KERNELS[self.backend].products),
            attention_precision=self._attention_precision,
        )

    @property
    def _attention_precision(self) -> str | None:
        if self._is_fp8:
            return "fp8"
        return "int8" if self.backend == "sage" else None

    @property
    def _is_fp8(self) -> bool:
        return self.backend in _FP8

    def unsupported(self, target: Target) -> str | None:
        if (reason := unsupported_on(self.backend, target.machine, target.model.has_weights)) is not None:
            return reason
        if self.bf16_blocks and not self._is_fp8:
            return f"bf16_blocks goes with attention in fp8, {' or '.join(_FP8)}; leave it out"
        if target.pipe is None:
            return None
        for component, module in target.modules(self.targets).items():
            layers = attention_layers(working_part(component, module))
            if layers and all(map(never_asks_pytorch, layers)):
                names = " and ".join(sorted({type(layer.processor).__name__ for layer in layers}))
                return (
                    f"the {component}'s attention is computed by {names}, which asks no kernel; first undo attention "
                    "slicing or xFormers, or set AttnProcessor2_0"
                )
            if self.bf16_blocks and not _chain(module):
                return f"the {component} has no chain of blocks for bf16_blocks to count; leave it out"
            reason = unsupported_for(self.backend, component, module, target.machine)
            if (
                reason is None
                and target.machine.is_gpu
                and target.model.has_weights
                and self.backend in OF_PYTORCH
            ):
                reason = refused_by_pytorch(self.backend, component, module, _device(target, module))
            if reason is not None:
                return reason
        return None

    def apply(self, target: Target) -> Effect:
        from vivace.machinery.attention_backends.redirection import RedirectedAttention

        modules = self._modules(target)
        changed = self._changed(
            {c: _joined(chosen_by_pytorch(m, _device(target, m))) for c, m in modules.items()}
        )
        if self.backend in OF_PYTORCH:
            return self._select(changed, list(modules), *_compiled_later(target))
        keep_compiled_code()
        redirected = {component: RedirectedAttention(self.backend) for component in modules}
        if self.bf16_blocks:
            for component, module in modules.items():
                left = _ends(_chain(module), self.bf16_blocks)
                redirected[component].leave_out(part for block in left for part in attention_layers(block))
                changed[f"{component}.blocks_in_fp8"] = len(_chain(module)) - len(left)
        return self._redirect(changed, redirected)

    def predict(self, target: Target) -> Effect:
        """Predict any kernel as PyTorch's fused ones: they take as little, and its choice depends on a device."""
        modules = self._modules(target)
        changed = self._changed(dict.fromkeys(modules, "unknown"))
        return self._select(changed, list(modules)) if self.backend in OF_PYTORCH else Effect(changed=changed)

    def _modules(self, target: Target) -> dict[Component, Any]:
        """Return the targets that have attention layers.

        Raises:
            NoEffect: there is none.
        """
        modules = {c: m for c, m in target.modules(self.targets).items() if head_sizes(working_part(c, m))}
        if not modules:
            raise NoEffect(f"no diffusers attention layer in {', '.join(self.targets)}")
        return modules

    def _changed(self, before: dict[Component, str]) -> dict[str, int | float | str]:
        """Return facts for the Record.

        Args:
            before: the kernels that PyTorch would choose.

        Raises:
            NoEffect: it is this one everywhere.
        """
        changed: dict[str, int | float | str] = {}
        for component, chosen in before.items():
            if chosen != self.backend:
                changed |= {f"{component}.attention": self.backend, f"{component}.attention_before": chosen}
        if not changed:
            raise NoEffect(f"PyTorch already picks {self.backend} attention here", already_so=True)
        return changed

    def _select(
        self,
        changed: dict[str, int | float | str],
        components: list[Component],
        compiled: frozenset[Component] = frozenset(),
        eager: frozenset[Component] = frozenset(),
    ) -> Effect:
        """Select one of PyTorch's own kernels.

        Args:
            compiled: components that a later technique compiles and nothing captures. The compiler keeps calls of fused
                kernels, and takes `math` to pieces, which a trace cannot tell from other matmuls.
            eager: components that nothing compiles or captures, whose kernels are all in a trace.
        """
        operator_name = _OPERATORS[self.backend]

        def context() -> Any:
            return selected(self.backend)

        def refuted(evidence: dict[str, Any]) -> str | None:
            for component in components:
                names = [n for n in evidence.get("attention_kernels", []) if n.startswith(f"{component}: ")]
                if names and not any(operator_name in name for name in names):
                    return f"{self.backend} attention was asked for, but {', '.join(names)} ran"
                is_silent = "attention_kernels" in evidence and not names
                if is_silent and (component in eager or (component in compiled and self.backend != "math")):
                    asked = "layers asked for no" if component in eager else "compiled code calls no fused"
                    return f"{self.backend} attention was asked for, but the {component}'s {asked} kernel"
            return None

        contexts: dict[Component, CallContext] = dict.fromkeys(components, context)
        return Effect(changed=changed, contexts=contexts, refuted=refuted)

    def _redirect(
        self, changed: dict[str, int | float | str], redirected: dict[Component, RedirectedAttention]
    ) -> Effect:
        """Redirect calls to a kernel outside PyTorch's dispatcher."""
        counted = counting_graphs() if self.backend == "flex" else dict

        def evidence() -> dict[str, int | float | str]:
            facts: dict[str, int | float | str] = {}
            for component, calls in redirected.items():
                facts[f"{component}.attention_calls_{self.backend}"] = calls.num_redirected
                facts[f"{component}.attentions_compiled_{self.backend}"] = calls.num_compiled
                if calls.left:
                    facts[f"{component}.attention_calls_left"] = _joined(calls.left)
            return facts | counted()

        def refuted(_: dict[str, Any]) -> str | None:
            for component, calls in redirected.items():
                if not calls.num_redirected and not calls.num_compiled:
                    why = f": PyTorch computed all calls ({_joined(calls.left)})" if calls.left else ""
                    return f"no call of the {component} reached {self.backend} attention{why}"
            return None

        return Effect(
            changed=changed,
            contexts={component: calls.inside for component, calls in redirected.items()},
            evidence=evidence,
            refuted=refuted,
        )

    def script(self, target: Target) -> Script | None:
        if self.backend not in OF_PYTORCH:
            return None
        lines = [
            "# The compiler's cache does not know which kernel is chosen, and would return another one's code.",
            f'torch.compiler.config.cache_key_tag += " {CACHE_TAG}{self.backend}"',
            "# Only for these: fused kernels do not support text masks, nor heads as large as a VAE's.",
        ]
        for component, module in target.modules(self.targets).items():
            if head_sizes(working_part(component, module)):
                forward = f"{target.working_path(component)}.forward"
                lines.append(f"{forward} = sdpa_kernel(SDPBackend.{OF_PYTORCH[self.backend]})({forward})")
        return Script(
            imports=("torch", "torch.nn.attention:SDPBackend", "torch.nn.attention:sdpa_kernel"),
            lines=tuple(lines),
        )


def _compiled_later(target: Target) -> tuple[frozenset[Component], frozenset[Component]]:
    """Return the components that a later technique compiles, without those captured in a CUDA graph, and the components
    that nothing compiles or captures."""

    def having(trait: Trait) -> set[Component]:
        return {
            c
            for technique in target.request.later
            if trait in technique.facts.provides
            for c in technique.targets
        }

    compiled, captured = having(Trait.COMPILED), having(Trait.CAPTURED)
    opaque = {
        component
        for component, module in target.modules(COMPONENTS).items()
        if {Trait.COMPILED, Trait.CAPTURED} & traits_of(module)
    }
    return frozenset(compiled - captured), frozenset(COMPONENTS) - compiled - captured - opaque


def _chain(module: Any) -> list[Any]:
    """Return a transformer's blocks in the order in which they run; empty for other modules."""
    family = family_of(module)
    chains = family.blocks.chains if family is not None and family.blocks is not None else ()
    return [block for chain in chains for block in getattr(module, chain)]


def _ends(blocks: list[Any], number: int) -> list[Any]:
    """Return the first and the last `number` blocks.

    Raises:
        NoEffect: these are all.
    """
    if 2 * number >= len(blocks):
        raise NoEffect(f"bf16_blocks={number} leaves none of the {len(blocks)} blocks to attention in fp8")
    return blocks[:number] + blocks[len(blocks) - number :]


def _device(target: Target, module: Any) -> Any:
    """Return the device on which the module will run."""
    # Where other libraries offload it, its weights are on the meta device.
    return target.machine.device if target.where.on_host or module.device.type == "meta" else module.device


def _joined(names: set[str] | dict[str, int]) -> str:
    """Return e.g. "efficient, flash", or "heads of 40 x6, masked x3"."""
    if isinstance(names, set):
        return ", ".join(sorted(names))
    return ", ".join(f"{name} x{count}" for name, count in sorted(names.items()))
