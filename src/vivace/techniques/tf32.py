"""Run fp32 matmuls and convolutions on tensor cores, with inputs rounded to TF32.

Why: tensor cores do not support fp32. With inputs rounded to a 10-bit mantissa (fp32's range, fp16's precision, fp32
    accumulation) they can be used: 156 TFLOP/s against 19.5 by the A100's data sheet. The weights stay in fp32.
Costs: rounding, about that of fp16 but without overflows. bf16 and fp16 are faster still and halve the memory.
Needs: an NVIDIA GPU of compute capability 8.0, and something that computes in fp32: a recipe with fp32, or a VAE that
    overflows in fp16 and therefore runs in fp32 (SDXL's).
Source: NVIDIA, A100 Tensor Core GPU architecture; PyTorch, "Numerical accuracy" and "CUDA semantics" notes.

PyTorch allows TF32 by default for convolutions, but not for matmuls. The setting is process-wide, so it is set during a
call and restored afterwards. It uses `allow_tf32`: if only the newer `fp32_precision` is set, reading `allow_tf32`
raises an error, and PyTorch's compiler reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import (
    COMPONENTS,
    Arithmetic,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    component_of,
    is_cast_in_call,
)
from vivace.machinery.technique.script import Script


class Tf32(Technique):
    name: ClassVar[str] = "tf32"
    summary: ClassVar[str] = "fp32 matmuls and convolutions on tensor cores"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.KERNEL,
        owns="fp32 arithmetic",
        same_picture=True,
        arithmetic=Arithmetic(weights="in fp32, as before", products="in TF32 where they were in fp32"),
        provides=frozenset({Trait.PROCESS_WIDE}),
    )

    def unsupported(self, target: Target) -> str | None:
        machine = target.machine
        if not machine.is_cuda:
            has_none = f"{machine.maker}'s GPUs do not have" if machine.is_gpu else "a CPU does not have"
            return f"TF32 is a mode of NVIDIA's tensor cores, which {has_none}"
        if machine.capability is not None and machine.capability < (8, 0):
            return f"TF32 needs an NVIDIA GPU of compute capability 8.0; {machine.device_name} has less"
        return None

    def apply(self, target: Target) -> Effect:
        changed: dict[str, int | float | str] = {
            f"{component}.fp32_layers": num
            for component in COMPONENTS
            if (num := _num_fp32_layers(target.pipe, component_of(target.pipe, component)))
        }
        if not changed:
            raise NoEffect("nothing computes in fp32, so there is nothing to round to TF32", already_so=True)
        if _flags() == (True, True):
            raise NoEffect("PyTorch uses TF32 already", already_so=True)
        counts = {"tf32_denoiser_calls": 0}

        def look(module: Any, args: Any) -> None:
            counts["tf32_denoiser_calls"] += _flags() == (True, True)

        target.module("denoiser").register_forward_pre_hook(look)
        return Effect(changed=changed, around=_allowed, evidence=lambda: dict(counts))

    def script(self, target: Target) -> Script:
        return Script(
            imports=("torch",),
            lines=(
                "# For the whole process.",
                "torch.backends.cuda.matmul.allow_tf32 = True",
                "torch.backends.cudnn.allow_tf32 = True",
            ),
        )


@contextmanager
def _allowed() -> Iterator[None]:
    before = _flags()
    _set_flags(True, True)
    try:
        yield
    finally:
        _set_flags(*before)


def _flags() -> tuple[bool, bool]:
    """Return whether TF32 is allowed for matmuls, and for convolutions."""
    from torch import backends

    return bool(backends.cuda.matmul.allow_tf32), bool(backends.cudnn.allow_tf32)


def _set_flags(matmuls: bool, convolutions: bool) -> None:
    from torch import backends

    backends.cuda.matmul.allow_tf32 = matmuls
    backends.cudnn.allow_tf32 = convolutions


def _num_fp32_layers(pipe: Any, module: Any) -> int:
    import torch

    if module is None:
        return 0
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    layers = [part for part in module.modules() if isinstance(part, kinds)]
    if module is getattr(pipe, "vae", None) and is_cast_in_call(pipe):
        return len(layers)
    return sum(1 for layer in layers if layer.weight.dtype == torch.float32)
