"""Linear weights in 8-bit integers, one scale per output row (weight-only).

Why: half the memory of fp16 for the quantised layers; where reading weights is the limit, less to read.
Costs: rounding of the weights to 255 levels, and the work of widening them again in front of each product: without
    `compile` it is slower, not faster. Convolutions keep their precision.
Needs: torchao.
Source: torchao, Int8WeightOnlyConfig; Dettmers et al., LLM.int8(), arXiv 2208.07339.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.errors import NoEffect
from vivace.spec.technique import Component, Effect, Stage, Target, Technique, knob


class Quantize(Technique):
    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "Linear weights in fewer bits (torchao)"
    stage: ClassVar[Stage] = Stage.QUANTIZE
    owns: ClassVar[str] = "weights"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser", "text_encoder", "text_encoder_2")
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    scheme: Literal["int8"] = knob(tune=["int8"], about="int8: weights only, a scale per output row")

    def unsupported(self, target: Target) -> str | None:
        import importlib.util

        if importlib.util.find_spec("torchao") is None:
            return "quantising needs torchao (pip install torchao)"
        return None

    def apply(self, target: Target) -> Effect:
        import torch
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        changed: dict[str, int | float | str] = {}
        for component, module in target.modules().items():
            linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
            before = {id(m): type(m.weight) for m in linears}
            # torchao's default would change inductor's global settings for the whole process.
            quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
            num = sum(1 for m in linears if type(m.weight) is not before[id(m)])
            if num:
                changed[f"{component}.quantized_layers"] = num
                changed[f"{component}.layers_left_alone"] = len(linears) - num + _num_convolutions(module)
        if not changed:
            raise NoEffect("no Linear layer to quantise")
        return Effect(changed=changed)


def _num_convolutions(module: Any) -> int:
    import torch

    return sum(1 for m in module.modules() if isinstance(m, torch.nn.Conv2d))
