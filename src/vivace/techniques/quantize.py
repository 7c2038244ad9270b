"""Weights in fewer bits; in some schemes the products too.

Why: half (8 bits) or a quarter (4 bits) of the memory of fp16 for the layers that are quantised. Where reading weights
    is the limit there is less to read; where products are, `int8_dynamic`, `fp8`, `int4_gemm` multiply in fewer bits.
Costs: rounding. Schemes that store in fewer bits and compute as before widen the weights in front of each product:
    without `compile` they are slower, not faster.
Needs: torchao, which comes with vivace, or by `backend=` bitsandbytes, optimum-quanto, sdnq, gguf or nvidia-modelopt,
    which are extras. `fp8` wants a GPU of compute capability 8.9 or later, and bf16 for a scale per row. Layers that a
    scheme cannot take are left alone; the evidence names them and says why.
Source: torchao; Dettmers et al., LLM.int8(), arXiv 2208.07339; Dettmers et al., QLoRA (NF4, double quantisation),
    arXiv 2305.14314; Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433.

torchao's schemes: `int8`, `fp8_weight`, `nf4` (its scales are in 8 bits too: double quantisation) and `int4` store in
fewer bits and multiply as before. `int8_dynamic` and `fp8` scale the inputs anew in each call and multiply in 8 bits.
So does `fp8_static`, with scales that were chosen once, by drawing `pictures` of the workload's prompts, and are kept
in $VIVACE_CACHE (else ~/.cache/vivace) for the next time. `int4` is our own on a GPU, two weights a byte which one pass
widens; on a CPU it is torchao's, a byte for each. `int4_gemm`: Hopper's tensor cores know no int4, and torchao 0.16
took its int4 by int4 product out; the nearest that is left is int4 weights by fp8 inputs, in kernels that PyTorch's
mslk brings.
bitsandbytes' `int8` multiplies in int8, its `nf4` is QLoRA's own; Quanto's and SDNQ's `int8`, `fp8_weight`, `int4`
take convolutions too. No scheme multiplies those in fewer bits: docs/adr/0005 says what stands in for TensorRT.
GGUF's `q8_0`, `q5_1`, `q5_0`, `q4_1`, `q4_0` are what files of that name hold: the weights are quantised by llama.cpp's
own package, and widened by diffusers in each call. A FLUX.1 transformer that comes in such a file, of any kind, is
given as the model itself (`--model FILE.gguf`). ModelOpt's `int8`, `fp8_weight`, `int4` and `nvfp4` store in fewer
bits, its `fp8_static` multiplies in fp8. It can simulate more (int8 and fp4 products), which saves neither memory nor
time and is therefore not offered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, NoReturn, Self, cast

from pydantic import model_validator

from vivace.contract import (
    COMPONENTS,
    Arithmetic,
    Component,
    Effect,
    MemoryAdvice,
    Stage,
    Target,
    Technique,
    knob,
)
from vivace.contract.script import Script
from vivace.errors import NoEffect
from vivace.quantization import SCHEMES, Scheme, backends_of, schemes_of
from vivace.quantization.calibration import Scales, scales_of
from vivace.quantization.layers import (
    Choice,
    briefly,
    briefly_why,
    bring,
    choose,
    is_named,
    layers_of,
    patterns_of,
    put,
)
from vivace.quantization.scheme import Settings
from vivace.quantization.script import script_of


class Quantize(Technique):
    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "weights (and products) in fewer bits"
    stage: ClassVar[Stage] = Stage.QUANTIZE
    owns: ClassVar[str] = "weights"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = COMPONENTS
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)
    memory_advice: ClassVar[MemoryAdvice] = MemoryAdvice(
        saving=(
            "quantize(int8)",
            "quantize(int8)@denoiser,text_encoder_2",
        )
    )

    scheme: Literal[
        "int8",
        "int8_dynamic",
        "fp8_weight",
        "fp8",
        "fp8_static",
        "nf4",
        "int4",
        "int4_gemm",
        "q8_0",
        "q5_1",
        "q5_0",
        "q4_1",
        "q4_0",
        "nvfp4",
    ] = knob(tune=["int8"], about="how weights are stored, and what products are computed in")
    backend: Literal["torchao", "bitsandbytes", "quanto", "sdnq", "gguf", "modelopt"] = knob(
        "torchao", about="the library that does it"
    )
    granularity: Literal["row", "tensor"] = knob("row", about="fp8 schemes: a scale per row, or one for all")
    convolutions: bool = knob(False, about="quantise convolutions too, where the scheme can")
    double_quantization: bool = knob(True, about="nf4 of bitsandbytes: scales in 8 bits too, not in 32")
    skip: str = knob("", about="layers left alone: names or patterns, e.g. 'proj_out, *.ff.*'")
    min_weights: int = knob(0, ge=0, about="layers of fewer weights are left alone")
    pictures: int = knob(4, ge=1, le=1000, about="fp8_static: drawn first, to choose its scales")

    @model_validator(mode="after")
    def _knobs_go_together(self) -> Self:
        scheme = SCHEMES.get((self.backend, self.scheme))
        if scheme is None:
            raise ValueError(
                f"{self.backend} has no {self.scheme}; it has {', '.join(schemes_of(self.backend))}, "
                f"and {self.scheme} comes with {', '.join(backends_of(self.scheme))}"
            )
        if self.granularity == "tensor" and not scheme.has_tensor_scales:
            raise ValueError(f"granularity=tensor is for fp8 schemes; {self.scheme} has its own scales")
        if self.convolutions and not scheme.takes_convolutions:
            able = [f"{name} of {library}" for (library, name), s in SCHEMES.items() if s.takes_convolutions]
            raise ValueError(
                f"{self.scheme} of {self.backend} knows no convolutions; those that do: {', '.join(able)}"
            )
        if not self.double_quantization and not scheme.has_single_scales:
            raise ValueError(
                "double_quantization=False is for nf4 of bitsandbytes; torchao's nf4 always quantises its scales"
            )
        if self.pictures != 4 and not scheme.is_calibrated:
            raise ValueError(f"pictures is for schemes that are calibrated; {self.scheme} is not")
        return self

    @property
    def arithmetic(self) -> Arithmetic:
        scheme = self._scheme()
        scales = {"row": ", a scale per output row", "tensor": ", one scale"}[self.granularity]
        return Arithmetic(scheme.weights + (scales if scheme.has_tensor_scales else ""), scheme.products)

    @property
    def loads_from_host(self) -> bool:
        return not self._scheme().is_calibrated  # which draws with the model as it is

    @property
    def needs_prompts(self) -> bool:
        return self._scheme().is_calibrated

    def unsupported(self, target: Target) -> str | None:
        scheme, settings = self._scheme(), self._settings(target)
        module, package = scheme.package
        if not target.machine.has_package(module):
            return f"{self.backend} is not installed (pip install {package})"
        reason = scheme.lacks(settings)
        if reason is not None:
            return reason
        if (
            scheme.is_calibrated
            and target.pipe is not None
            and target.model.has_weights
            and not target.asked.prompts
        ):
            return (
                f"{self.scheme} looks at what is drawn to choose its scales, and there are no prompts; "
                "give some: vivace.apply(pipe, recipe, prompts=[...])"
            )
        if target.pipe is not None and scheme.keeps_dtype and _casts_its_vae(target, self.targets):
            return (
                f"the pipeline casts its fp16 VAE to fp32 in each call, and {self.scheme} of {self.backend} cannot be "
                "cast; add bf16, or take int8 of torchao"
            )
        if target.pipe is not None:
            names = [name for part in target.modules(self.targets).values() for name in layers_of(part)]
            for pattern in patterns_of(self.skip):
                if not any(is_named(name, pattern) for name in names):
                    shown = ", ".join(briefly(names)[:8])
                    return f"skip: no layer of {', '.join(self.targets)} is called '{pattern}' (there is {shown})"
        return None

    def apply(self, target: Target) -> Effect:
        scheme, settings = self._scheme(), self._settings(target)
        modules = target.modules(self.targets)
        choices = {
            component: choose(module, scheme, settings, patterns_of(self.skip), self.min_weights)
            for component, module in modules.items()
        }
        changed: dict[str, int | float | str] = {}
        scales = (
            self._calibrate(target, choices) if scheme.is_calibrated and target.model.has_weights else None
        )
        for component, choice in choices.items():
            module = modules[component]
            for name in choice.taken:
                scale = None if scales is None else scales.of[f"{component}.{name}"]
                layer = module.get_submodule(name)
                if target.where.on_host:  # each layer is brought alone, so that the GPU never holds the whole
                    bring(layer, target.machine.device)
                put(module, name, scheme.change(layer, replace(settings, scale=scale)))
                if target.where.on_host:
                    bring(module.get_submodule(name), target.where.home)
            if target.where.on_host and target.where.home != "cpu":
                bring(module, target.where.home)
            if choice.taken:
                changed[f"{component}.quantized_layers"] = len(choice.taken)
                changed[f"{component}.layers_left_alone"] = len(choice.kept)
                changed[f"{component}.weights_are"] = _kind(module, choice)
        if changed:
            numbers = self.arithmetic
            changed["how"] = f"weights {numbers.weights}; products {numbers.products}"
        else:
            _refuse(choices)
        if scales is not None:
            changed["scales"] = scales.how
            changed["scales_file"] = "not kept" if scales.file is None else scales.file.name
        done = {c: _kinds(modules[c], choice) for c, choice in choices.items() if choice.taken}

        def evidence() -> dict[str, int | float | str | list[str]]:
            found: dict[str, int | float | str | list[str]] = {}
            for component, kinds in done.items():
                still = [
                    n
                    for n, kind in _kinds(modules[component], choices[component]).items()
                    if kind == kinds[n]
                ]
                found[f"{component}.quantized"] = briefly(still)
                if choices[component].kept:
                    found[f"{component}.left_alone"] = briefly_why(choices[component].kept)
            return found

        def refuted(_: dict[str, Any]) -> str | None:
            for component, kinds in done.items():
                lost = [
                    n
                    for n, kind in _kinds(modules[component], choices[component]).items()
                    if kind != kinds[n]
                ]
                if lost:
                    return f"{len(lost)} of {component}'s layers are no longer quantised: {', '.join(briefly(lost))}"
            return None

        return Effect(changed=changed, evidence=evidence, refuted=refuted)

    def _calibrate(self, target: Target, choices: Mapping[Component, Choice]) -> Scales:
        """The scales of what was chosen; layers that have none are left alone."""
        modules = target.modules(self.targets)
        layers = {
            f"{component}.{name}": modules[component].get_submodule(name)
            for component, choice in choices.items()
            for name in choice.taken
        }
        if not layers:
            _refuse(choices)
        scales = scales_of(target, layers, self.pictures)
        for full, reason in scales.missing.items():
            component, _, name = full.partition(".")
            choice = choices[cast("Component", component)]
            choice.taken.remove(name)
            choice.kept[name] = reason
        return scales

    def _scheme(self) -> Scheme:
        return SCHEMES[self.backend, self.scheme]

    def _settings(self, target: Target) -> Settings:
        return Settings(
            target.machine,
            target.model.has_weights,
            self.granularity,
            self.convolutions,
            self.double_quantization,
        )

    def script(self, target: Target) -> Script | None:
        settings = self._settings(target)
        choices = {
            component: choose(module, self._scheme(), settings, patterns_of(self.skip), self.min_weights)
            for component, module in target.modules(self.targets).items()
        }
        choices = {component: choice for component, choice in choices.items() if choice.taken}
        return script_of(target, (self.backend, self.scheme), settings, choices) if choices else None


def _casts_its_vae(target: Target, components: tuple[Component, ...]) -> bool:
    """Whether a call casts the VAE, which is a target, to fp32 and back: SDXL's do in fp16."""
    vae = target.modules(components).get("vae")
    if vae is None or not hasattr(target.pipe, "upcast_vae"):
        return False
    return bool(getattr(vae.config, "force_upcast", False)) and str(vae.dtype) == "torch.float16"


def _kinds(module: Any, choice: Choice) -> dict[str, tuple[str, str]]:
    """What the layers that were taken are now: class of the layer, class of its weight."""
    layers = {name: module.get_submodule(name) for name in choice.taken}
    return {name: (type(layer).__name__, type(layer.weight).__name__) for name, layer in layers.items()}


def _kind(module: Any, choice: Choice) -> str:
    return ", ".join(dict.fromkeys(weight for _, weight in _kinds(module, choice).values()))


def _refuse(choices: Mapping[Component, Choice]) -> NoReturn:
    """Raises NoEffect: there was no layer to take."""
    kept = {name: reason for choice in choices.values() for name, reason in choice.kept.items()}
    num_before = sum(choice.num_before for choice in choices.values())
    if num_before and num_before == sum(reason != "convolution" for reason in kept.values()):
        raise NoEffect("the weights are quantised already", already_so=True)
    if not kept:
        raise NoEffect(f"no Linear layer to quantise in {', '.join(choices) or 'this pipeline'}")
    counts = Counter(kept.values()).most_common()
    # Of a UNet most layers are convolutions, which is no news; what one can mend comes first.
    counts.sort(key=lambda found: found[0] == "convolution")
    said = "; ".join(f"{number} layer{'s' * (number != 1)}: {reason}" for reason, number in counts[:5])
    more = f" and {len(counts) - 5} other reasons" if len(counts) > 5 else ""
    raise NoEffect(f"no layer could be quantised: {said}{more}")
