"""Weights and activations of convolutions in NHWC order instead of NCHW.

Why: convolution kernels for tensor cores, and oneDNN's on CPUs, need channels to be contiguous; otherwise each
    convolution transposes its input and output.
Costs: nothing in image quality; networks without convolutions gain nothing. On an H200 an eager UNet waits for the CPU,
    so combine it with `cuda_graph` or `compile` (docs/techniques-measured.md).
Needs: convolutions.
Source: PyTorch tutorial "Channels Last Memory Format in PyTorch".
"""

from __future__ import annotations

from typing import Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.technique import Arithmetic, Effect, Stage, Target, Technique, TechniqueFacts
from vivace.machinery.technique.script import Script


class ChannelsLast(Technique):
    name: ClassVar[str] = "channels_last"
    summary: ClassVar[str] = "convolution weights and activations in NHWC order"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.LAYOUT,
        owns="memory format",
        same_picture=True,
        targetable=("denoiser", "vae"),
        default_targets=("denoiser", "vae"),
        saves_memory=("channels_last@vae",),
        arithmetic=Arithmetic(weights="as before, in NHWC order"),
    )

    def unsupported(self, target: Target) -> str | None:
        for component, module in target.modules(self.targets).items() if target.pipe is not None else ():
            if any(p.dim() == 5 for p in module.parameters()):
                return f"the {component} has 3-D convolutions, and NHWC is the order of 2-D ones; leave it out with @"
        return None

    def apply(self, target: Target) -> Effect:
        import torch

        changed: dict[str, int | float | str] = {}
        for component, module in target.modules(self.targets).items():
            if num := _num_to_convert(module):
                for (
                    layer
                ) in module.modules():  # not the whole, which may have quantised layers that cannot be cast
                    if any(weight is not None and weight.dim() == 4 for weight in layer._parameters.values()):
                        torch.nn.Module.to(layer, memory_format=torch.channels_last)
                changed[f"{component}.converted_convolutions"] = num
        if not changed:
            raise NoEffect("no convolution to convert")
        return Effect(changed=changed)

    def script(self, target: Target) -> Script:
        return Script(
            imports=("torch",),
            lines=tuple(
                f"{target.path(component)}.to(memory_format=torch.channels_last)"
                for component, module in target.modules(self.targets).items()
                if _num_to_convert(module)
            ),
        )


def _num_to_convert(module: Any) -> int:
    """Count the convolutions whose weights are not in NHWC order yet."""
    import torch

    weights = [p for p in module.parameters() if p.dim() == 4 and p.shape[1] > 1]
    return sum(1 for p in weights if not p.is_contiguous(memory_format=torch.channels_last))
