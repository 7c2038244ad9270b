"""Linear weights in fewer bits (weight-only): int8 with a scale per output row, int4 with one per 32 weights.

Why: half the memory of fp16 (int8) for the quantised layers; where reading weights is the limit, less to read.
Costs: rounding of the weights to 255 or 15 levels, and the work of widening them again in front of each product:
    without `compile` it is slower, not faster. Convolutions keep their precision. int4 is kept unpacked, one weight a
    byte, the form that runs on any device: it costs int8's memory and int4's quality.
Needs: torchao; int4 leaves alone layers whose inputs are no multiple of 32.
Source: torchao, Int8WeightOnlyConfig and IntxWeightOnlyConfig; Dettmers et al., LLM.int8(), arXiv 2208.07339.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from vivace.errors import NoEffect
from vivace.spec.script import Script, written_call
from vivace.spec.technique import Component, Effect, Stage, Target, Technique, knob

_GROUP = 32  # weights that share a scale in int4


class Quantize(Technique):
    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "Linear weights in fewer bits (torchao)"
    stage: ClassVar[Stage] = Stage.QUANTIZE
    owns: ClassVar[str] = "weights"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser", "text_encoder", "text_encoder_2")
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)
    from_host: ClassVar[bool] = True
    when_memory_is_short: ClassVar[tuple[str, ...]] = (
        "quantize(int8)",
        "quantize(int8)@denoiser,text_encoder_2",
    )

    scheme: Literal["int8", "int4"] = knob(
        tune=["int8"], about="int8: a scale per output row; int4: a scale per 32 weights"
    )

    def unsupported(self, target: Target) -> str | None:
        import importlib.util

        if importlib.util.find_spec("torchao") is None:
            return "quantising needs torchao (pip install torchao)"
        return None

    def apply(self, target: Target) -> Effect:
        import torch

        changed: dict[str, int | float | str] = {}
        for component, module in target.modules().items():
            linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
            before = {id(m): type(m.weight) for m in linears}
            _convert(module, _config(self.scheme), _FITS[self.scheme], target)
            num = sum(1 for m in linears if type(m.weight) is not before[id(m)])
            if num:
                changed[f"{component}.quantized_layers"] = num
                changed[f"{component}.layers_left_alone"] = len(linears) - num + _num_convolutions(module)
        if not changed:
            raise NoEffect("no Linear layer to quantise")
        return Effect(changed=changed)

    def script(self, target: Target) -> Script | None:
        if self.scheme not in _WRITTEN:
            return None
        imports, config, filter_fn = _WRITTEN[self.scheme]
        calls = [
            written_call("quantize_", target.path(component), config, **filter_fn)
            for component, module in target.modules().items()
        ]
        lines = [line for call in calls for line in call.splitlines()]
        return Script(imports=("torchao.quantization:quantize_", *imports), lines=tuple(lines))


# By scheme: what is imported, and the arguments of torchao's `quantize_`.
_WRITTEN: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "int8": (
        ("torchao.quantization:Int8WeightOnlyConfig",),
        "Int8WeightOnlyConfig(set_inductor_config=False)",
        {},
    ),
    "int4": (
        ("torch", "torchao.quantization:IntxWeightOnlyConfig", "torchao.quantization:PerGroup"),
        f"IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup({_GROUP}))",
        {
            "filter_fn": "lambda layer, name: isinstance(layer, torch.nn.Linear) and "
            f"layer.in_features % {_GROUP} == 0"
        },
    ),
}


def _convert(module: Any, config: Any, fits: Any, target: Target) -> None:
    """A module that waits in the host's memory is brought to the GPU layer by layer, each converted there."""
    from torchao.quantization import quantize_

    if not target.waits:
        quantize_(module, config, filter_fn=fits)
        return
    for name, layer in list(module.named_modules()):
        if fits(layer, name):
            layer.to(target.machine.device)
            quantize_(layer, config, filter_fn=lambda *_: True)
            layer.to(target.home)
    if target.home != "cpu":
        module.to(target.home)


def _config(scheme: str) -> Any:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if scheme == "int4":
        return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(_GROUP))
    # torchao's default would change inductor's global settings for the whole process.
    return Int8WeightOnlyConfig(set_inductor_config=False)


def _fits_int8(module: Any, name: str) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def _fits_int4(module: Any, name: str) -> bool:
    return _fits_int8(module, name) and module.in_features % _GROUP == 0


_FITS = {"int8": _fits_int8, "int4": _fits_int4}


def _num_convolutions(module: Any) -> int:
    import torch

    return sum(1 for m in module.modules() if isinstance(m, torch.nn.Conv2d))
