"""Which kernel computes softmax(QK^T)V in the denoiser.

Why: `math` writes the whole score matrix to memory, the fused kernels never do; among those, the fastest depends
    on GPU, precision and head size (one H200, bf16, 4608 tokens: cuDNN 632, flash 325, efficient 166 TFLOP/s).
Costs: another order of summation, so the last bits differ. `math` needs memory quadratic in the tokens.
Needs: `flash` and `cudnn` on CUDA want fp16 or bf16; `efficient` and `cudnn` have no CPU kernel.
Source: PyTorch, torch.nn.attention.sdpa_kernel; Dao, FlashAttention-2, arXiv 2307.08691.

The choice holds around the denoiser's forward alone: flash refuses the text encoders' masks and the VAE's head
size. diffusers' own `set_attention_backend` is a silent no-op on UNets, so it is not used here.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.errors import NoEffect
from vivace.spec.script import Script
from vivace.spec.technique import Component, Effect, Stage, Target, Technique, knob

_BACKENDS = {  # members of torch.nn.attention.SDPBackend
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
_OPERATORS = {
    "math": "_scaled_dot_product_attention_math",
    "efficient": "_scaled_dot_product_efficient_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


class Attention(Technique):
    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "the denoiser's attention kernel"
    stage: ClassVar[Stage] = Stage.KERNEL
    owns: ClassVar[str] = "attention kernel"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    backend: Literal["math", "efficient", "flash", "cudnn"] = knob(
        tune=["flash", "cudnn"], about="math, efficient, flash or cudnn"
    )

    def unsupported(self, target: Target) -> str | None:
        machine = target.machine
        if not machine.is_cuda:
            if self.backend in {"efficient", "cudnn"}:
                return f"PyTorch has no {self.backend} attention kernel for CPUs; flash and math run here"
            return None
        if self.backend in {"flash", "cudnn"}:
            if machine.capability is not None and machine.capability < (8, 0):
                return (
                    f"{self.backend} attention needs compute capability 8.0, {machine.device_name} has less"
                )
            if target.pipe is not None:
                dtype = str(target.module("denoiser").dtype).removeprefix("torch.")
                if dtype not in {"float16", "bfloat16"}:
                    return f"{self.backend} attention needs fp16 or bf16, the denoiser is {dtype}; add bf16 or fp16"
        return None

    def apply(self, target: Target) -> Effect:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, _BACKENDS[self.backend])
        # PyTorch's own choice depends on a real device.
        chosen = "unknown"
        if target.has_data:
            denoiser = target.module("denoiser")
            chosen = _default_choice(denoiser, target.machine.device if target.waits else denoiser.device)
        if chosen == self.backend:
            raise NoEffect(f"PyTorch already picks {self.backend} attention here", already_so=True)
        wanted = _OPERATORS[self.backend]

        def refuted(evidence: dict[str, Any]) -> str | None:
            seen = [name for name in evidence.get("attention_kernels", []) if "denoiser" in name]
            if seen and not any(wanted in name for name in seen):
                return f"{self.backend} attention was asked for, but {', '.join(seen)} ran"
            return None

        return Effect(
            changed={"denoiser.attention": self.backend, "denoiser.attention_before": chosen},
            contexts={"denoiser": lambda: sdpa_kernel(backend)},
            refuted=refuted,
        )

    def script(self, target: Target) -> Script:
        forward = f"{target.path('denoiser')}.forward"
        return Script(
            imports=("torch.nn.attention:SDPBackend", "torch.nn.attention:sdpa_kernel"),
            lines=(
                "# The denoiser's alone: fused kernels refuse text masks and the VAE's head size.",
                f"{forward} = sdpa_kernel(SDPBackend.{_BACKENDS[self.backend]})({forward})",
            ),
        )


def _default_choice(denoiser: Any, device: Any) -> str:
    """Which kernel PyTorch would choose by itself for this denoiser's dtype, device and head size."""
    import torch
    from torch.nn.attention import SDPBackend

    config = denoiser.config
    head_dim = _head_size(config)
    query = torch.zeros(1, 2, 256, head_dim, dtype=denoiser.dtype, device=device)
    with torch.inference_mode():
        # The dispatcher's own question; it has no public name (torch.nn.functional asks it the same way).
        choice = torch._fused_sdp_choice(query, query, query)
    names = {
        int(SDPBackend.MATH): "math",
        int(SDPBackend.EFFICIENT_ATTENTION): "efficient",
        int(SDPBackend.FLASH_ATTENTION): "flash",
        int(SDPBackend.CUDNN_ATTENTION): "cudnn",
    }
    return names.get(int(choice), f"backend {int(choice)}")


def _head_size(config: Any) -> int:
    """Channels per attention head: a transformer states it; a UNet's `attention_head_dim` is a number of heads."""
    heads = config.get("num_attention_heads")
    widths = config.get("block_out_channels")
    size = config.get("attention_head_dim") or 64
    if widths is None:
        return int(size)
    count = heads or size  # diffusers' historical misnomer, kept for its checkpoints
    count = count[0] if isinstance(count, list | tuple) else count
    return int(widths[0]) // int(count)
