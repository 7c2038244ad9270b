"""Weights in fewer bits; in some schemes the matmuls too.

Why: half (8 bits) or a quarter (4 bits) of the memory of fp16 for the layers that are quantised. Where reading weights
    is the limit, there is less to read; where matmuls are, `int8_dynamic`, `fp8`, `int4_gemm`, `nvfp4` and `mxfp8`
    compute in fewer bits.
Costs: rounding. Schemes that store in fewer bits and compute as before dequantise the weights before each matmul:
    without `compile` they are slower, not faster. `nvfp4` and `mxfp8` round inputs in several passes, which `compile`
    makes one of.
Needs: torchao, which comes with vivace, or with `backend=` bitsandbytes, sdnq or gguf, which are extras. `fp8` wants a
    GPU of compute capability 8.9 or later, and bf16 for a scale per row; `nvfp4` and `mxfp8` want Blackwell. Layers
    that a scheme cannot take stay as they are; the evidence lists them with the reason.
Source: torchao; Dettmers et al., LLM.int8(), arXiv 2208.07339; Dettmers et al., QLoRA (NF4, double quantisation),
    arXiv 2305.14314; Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; Rouhani et al., Microscaling
    Data Formats, arXiv 2310.10537; Li et al., SVDQuant, arXiv 2411.05007; ConvRot, arXiv 2512.03673.

torchao's `int8`, `fp8_weight`, `nf4` (with double quantisation: its scales are in 8 bits too) and `int4` store weights
in fewer bits and compute as before. `int8_dynamic` and `fp8` scale the inputs in each call and multiply in 8 bits.
`int8_dynamic, rotation=hadamard` multiplies inputs and weights by ConvRot's matrix first, in blocks of 256 channels or
64, and leaves layers of other widths: for GPUs without fp8 (RTX 20 and 30, A100), where outliers of the inputs harm
int8 alone. One Triton kernel rotates and quantises the inputs; it was computed against a reference and compiled for
compute capabilities 7.5 to 8.9, and measured on no GPU. Another program's rotated int8 (inference-atlas, DGX Spark)
kept none of 24 cases of Qwen-Image 2.1 near bf16: the recipe counts as one that changes the image, to be proven on each
model.
`fp8_static` does too, with scales calibrated once on `pictures` images of the workload's prompts and cached in
$VIVACE_CACHE (else ~/.cache/vivace). On a GPU `int4` is vivace's own: two weights to a byte, dequantised by one Triton
kernel; on a CPU it is torchao's, one weight to a byte. `int4_gemm` multiplies int4 weights by fp8 inputs, in kernels of
PyTorch's mslk: Hopper's tensor cores have no int4, and torchao 0.16 removed its int4 by int4 matmul.
`nvfp4` and `mxfp8` are vivace's own, and were measured on no GPU: Blackwell's tensor cores multiply numbers in four or
eight bits with a scale per block, and a CPU computes with the same rounded numbers. `nvfp4` stores layers with one row
an image (embeddings of time, modulation) in MXFP8. `rank=32` keeps a weight's 32 largest singular directions in a
branch in 16 bits, and quantises the rest (SVDQuant, without its smoothing).
bitsandbytes' `int8` is LLM.int8(), which multiplies in int8, and its `nf4` is QLoRA's. SDNQ's `int8`, `fp8_weight` and
`int4` also take convolutions. No scheme computes convolutions in fewer bits; docs/adr/0005 lists the alternatives to
TensorRT for that.
`skip=auto` leaves the denoiser's most sensitive layers as they are. It generates `pictures` images, keeps a call of the
denoiser of each, repeats these calls with each layer quantised alone, and leaves the layers that change the output most
for their cost: at most `skip_share` of the multiplications and of the weights. The record names them with their errors,
which are cached in $VIVACE_CACHE, so that every process chooses the same. It needs weights and prompts: not for
`vivace plan`, random weights, or checkpoints that are quantised already. Patterns may stand beside it,
`skip='auto, proj_out'`. `compile(blocks=repeated)` compiles blocks in which other layers are left apart.
GGUF's `q8_0`, `q5_1`, `q5_0`, `q4_1` and `q4_0` are the formats of GGUF files: llama.cpp's Python package quantises the
weights, and diffusers dequantises them in each call. A denoiser in such a file, of any kind, is given as the model
itself (`--model FILE.gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from vivace.errors import Unpredictable, Unsupported
from vivace.machinery.quantization import (
    SCHEMES,
    Scheme,
    backends_of,
    schemes_of,
    sensitivity,
)
from vivace.machinery.quantization.calibration import Scales, calibrate_choices
from vivace.machinery.quantization.layers import (
    LayerChoice,
    QuantizedLayers,
    casts_its_vae,
    choose,
    kinds_of,
    layers_of,
    matches,
    move_to,
    patterns_of,
    refuse,
    replace_layer,
    summarise,
)
from vivace.machinery.quantization.scheme import SchemeSettings
from vivace.machinery.quantization.script_lines import script_of
from vivace.machinery.quantization.sensitivity import KeptLayers
from vivace.machinery.technique import (
    COMPONENTS,
    Arithmetic,
    Component,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    knob,
)
from vivace.machinery.technique.script import Script

if TYPE_CHECKING:
    import torch

Changed = dict[str, int | float | str]

_AUTO = "auto"
_SKIP_SHARE = 0.05


class Quantize(Technique):
    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "weights (and matmuls) in fewer bits"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.QUANTIZE,
        owns="weights",
        same_picture=True,
        targetable=COMPONENTS,
        default_targets=("denoiser",),
        saves_memory=(
            "quantize(int8)",
            "quantize(int8)@denoiser,text_encoder_2",
            "quantize(nf4)@denoiser,text_encoder_2",
        ),
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
        "nvfp4",
        "mxfp8",
        "q8_0",
        "q5_1",
        "q5_0",
        "q4_1",
        "q4_0",
    ] = knob(tune=["int8"], about="how weights are stored, and the precision of matmuls")
    backend: Literal["torchao", "bitsandbytes", "sdnq", "gguf"] = knob(
        "torchao", about="the library that quantises"
    )
    granularity: Literal["row", "tensor"] = knob("row", about="fp8 schemes: a scale per row, or one for all")
    convolutions: bool = knob(False, about="quantise convolutions too, where the scheme can")
    double_quantization: bool = knob(True, about="nf4 of bitsandbytes: scales in 8 bits too, instead of 32")
    rank: int = knob(
        0,
        new=True,
        ge=0,
        le=1024,
        about="nvfp4, mxfp8: of a branch in 16 bits with the largest singular directions",
    )
    rotation: Literal["none", "hadamard"] = knob(
        "none",
        new=True,
        about="int8_dynamic of torchao: of the input channels, in blocks of 256 or 64, against outliers",
    )
    skip: str = knob(
        "",
        about="layers that stay as they are: names or patterns, e.g. 'proj_out, *.ff.*', or auto: by sensitivity",
    )
    min_weights: int = knob(0, ge=0, about="layers of fewer weights stay as they are")
    pictures: int = knob(
        4,
        ge=1,
        le=1000,
        about="fp8_static and skip=auto: images generated first, to calibrate scales and measure sensitivity",
    )
    skip_share: float = knob(
        _SKIP_SHARE,
        new=True,
        gt=0,
        le=0.5,
        about="skip=auto: share of the work, and of the weights, that may stay unquantised",
    )

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
                f"{self.scheme} of {self.backend} does not take convolutions; those that do: {', '.join(able)}"
            )
        if not self.double_quantization and not scheme.has_single_scales:
            raise ValueError(
                "double_quantization=False is for nf4 of bitsandbytes; torchao's nf4 always quantises its scales"
            )
        if self.rank and not scheme.has_low_rank:
            raise ValueError(f"rank is for nvfp4 and mxfp8; {self.scheme} has no low-rank branch")
        if self.rotation != "none" and not scheme.has_rotation:
            raise ValueError(
                f"rotation is for int8_dynamic of torchao; {self.scheme} of {self.backend} has none"
            )
        if self.pictures != 4 and not (scheme.is_calibrated or self._is_auto):
            raise ValueError(f"pictures is for schemes that are calibrated; {self.scheme} is not")
        if self.skip_share != _SKIP_SHARE and not self._is_auto:
            raise ValueError("skip_share is for skip=auto")
        if self._is_auto and self.targets != ("denoiser",):
            raise ValueError(
                "skip=auto measures what reaches the denoiser's output; aim it at the denoiser alone, and give other "
                "components a quantize of their own"
            )
        return self

    @property
    def _is_auto(self) -> bool:
        return _AUTO in patterns_of(self.skip)

    @property
    def _patterns(self) -> list[str]:
        """Return the layers that are skipped by name."""
        return [pattern for pattern in patterns_of(self.skip) if pattern != _AUTO]

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            same_picture=self.rotation == "none",  # until it is proven on the model
            arithmetic=self._arithmetic,
            provides=self._provides,
            loads_from_host=not self._needs_prompts,  # which run the model as it is
            needs_prompts=self._needs_prompts,
            is_stored=self.backend == "torchao" and self.scheme != "int4_gemm",
        )

    @property
    def _needs_prompts(self) -> bool:
        return self._scheme().is_calibrated or self._is_auto

    @property
    def _arithmetic(self) -> Arithmetic:
        scheme = self._scheme()
        scales = {"row": ", a scale per output row", "tensor": ", one scale"}[self.granularity]
        branch = f", beside a branch of rank {self.rank} in 16 bits" if self.rank else ""
        rotated = "" if self.rotation == "none" else ", input channels rotated in blocks of 256 or 64"
        return Arithmetic(
            scheme.weights + (scales if scheme.has_tensor_scales else "") + branch + rotated,
            scheme.matmuls + rotated,
        )

    @property
    def _provides(self) -> frozenset[Trait]:
        repacked = {Trait.REPACKED} if self.backend != "bitsandbytes" else set()
        copies = {Trait.COPIES_FROM_HOST} if self.backend == "gguf" and self.scheme != "q8_0" else set()
        return frozenset({Trait.QUANTIZED} | repacked | copies)

    def unsupported(self, target: Target) -> str | None:
        scheme, settings = self._scheme(), self._settings(target)
        module, package = scheme.package
        if not target.machine.has_package(module):
            return f"{self.backend} is not installed (pip install {package})"
        reason = scheme.unsupported(settings)
        if reason is not None:
            return reason
        if target.pipe is not None and scheme.cannot_be_cast and casts_its_vae(target, self.targets):
            return (
                f"the pipeline casts its fp16 VAE to fp32 in each call, and {self.scheme} of {self.backend} cannot be "
                "cast; add bf16, or take int8 of torchao"
            )
        if target.pipe is not None and self._is_auto and target.model.has_random_weights:
            return (
                f"skip=auto: {target.model.name.partition('@')[0]} has random weights, so there is nothing to measure; "
                "name the layers, e.g. skip='proj_out, *.ff.*'"
            )
        if target.pipe is not None:
            names = [name for part in target.modules(self.targets).values() for name in layers_of(part)]
            for pattern in self._patterns:
                if not any(matches(name, pattern) for name in names):
                    layer_names = ", ".join(summarise(names)[:8])
                    return f"skip: no layer of {', '.join(self.targets)} is called '{pattern}' (there is {layer_names})"
        return None

    def apply(self, target: Target) -> Effect:
        scheme, settings = self._scheme(), self._settings(target)
        modules, choices = target.modules(self.targets), self._choices(target)
        if self._needs_prompts and not target.request.prompts:
            why = "calibrate its scales" if scheme.is_calibrated else "measure which layers are sensitive"
            raise Unsupported(
                f"quantize: {self.scheme} generates images first, to {why}, and there are no prompts; "
                "give some: vivace.apply(pipe, recipe, prompts=[...])"
            )
        scales = calibrate_choices(target, modules, choices, self.pictures) if scheme.is_calibrated else None
        kept = self._keep_sensitive(target, choices["denoiser"], scales) if self._is_auto else None
        for component, choice in choices.items():
            module = modules[component]
            for name in choice.chosen:
                scale = None if scales is None else scales.by_layer[f"{component}.{name}"]
                layer = module.get_submodule(name)
                if target.where.on_host:  # one layer at a time, so that the GPU never holds the whole
                    move_to(layer, target.machine.device)
                here = replace(settings, layer_name=name, input_scale=scale)
                replace_layer(module, name, scheme.convert(layer, here))
                if target.where.on_host:
                    move_to(module.get_submodule(name), target.where.home)
            if target.where.on_host and target.where.home != "cpu":
                move_to(module, target.where.home)
        changed = self._changed(modules, choices)
        if target.machine.backend in scheme.emulated_on:
            changed["matmuls"] = "in fp32, of the same rounded numbers (no GPU)"
        if scales is not None:
            changed["scales"] = scales.origin
            changed["scales_file"] = "not kept" if scales.file is None else scales.file.name
        if kept is not None:
            changed |= kept.changed()
        layers = QuantizedLayers.of(modules, choices)

        def evidence() -> dict[str, int | float | str | list[str]]:
            sensitive = {} if kept is None else {"denoiser.sensitive": kept.listed()}
            return {**layers.listed(), **sensitive}

        return Effect(changed=changed, evidence=evidence, refuted=lambda _: layers.no_longer())

    def predict(self, target: Target) -> Effect:
        """Quantise a pipeline on the meta device, whose layers have shapes and no values."""
        if self._is_auto:
            raise Unpredictable(
                "quantize: skip=auto measures the weights, and there are none here; leave it out, and add "
                f"{self.skip_share:.0%} of what quantising saves"
            )
        scheme, settings = self._scheme(), self._settings(target)
        describe = scheme.describe or scheme.convert
        modules, choices = target.modules(self.targets), self._choices(target)
        for component, choice in choices.items():
            for name in choice.chosen:
                layer = modules[component].get_submodule(name)
                described = describe(layer, replace(settings, layer_name=name))
                replace_layer(modules[component], name, described)
        return Effect(changed=self._changed(modules, choices))

    def _choices(self, target: Target) -> dict[Component, LayerChoice]:
        """Return the layers to quantise, by component.

        Raises:
            NoEffect: there are none.
        """
        choices = self._sorted_layers(target)
        if not any(choice.chosen for choice in choices.values()):
            refuse(choices)
        return choices

    def layers(self, target: Target) -> dict[Component, LayerChoice]:
        """Return the quantised layers, without `skip=auto`, and the reasons for the others."""
        return self._sorted_layers(target)

    def _sorted_layers(self, target: Target) -> dict[Component, LayerChoice]:
        scheme, settings, skip = self._scheme(), self._settings(target), self._patterns
        return {
            component: choose(module, scheme, settings, skip, self.min_weights)
            for component, module in target.modules(self.targets).items()
        }

    def _changed(
        self, modules: Mapping[Component, torch.nn.Module], choices: Mapping[Component, LayerChoice]
    ) -> Changed:
        changed: Changed = {}
        for component, choice in choices.items():
            if choice.chosen:
                changed[f"{component}.quantized_layers"] = len(choice.chosen)
                changed[f"{component}.layers_left_alone"] = len(choice.skipped)
                kinds = kinds_of(modules[component], choice).values()
                changed[f"{component}.weights_are"] = ", ".join(dict.fromkeys(weight for _, weight in kinds))
        if not changed:
            refuse(choices)
        changed["how"] = f"weights {self._arithmetic.weights}; matmuls {self._arithmetic.products}"
        return changed

    def _keep_sensitive(self, target: Target, choice: LayerChoice, scales: Scales | None) -> KeptLayers:
        """Move the layers that are most sensitive for their work to the skipped ones."""
        scheme, settings = self._scheme(), self._settings(target)
        denoiser = target.module("denoiser")
        layers = {name: denoiser.get_submodule(name) for name in choice.chosen}

        def convert(name: str, layer: torch.nn.Module) -> torch.nn.Module:
            scale = None if scales is None else scales.by_layer[f"denoiser.{name}"]
            return scheme.convert(layer, replace(settings, layer_name=name, input_scale=scale))

        how = f"{self.backend} {self.scheme} {self.granularity} {self.double_quantization}"
        # What was cached before there were ranks and rotations stays valid.
        how += (f" rank {self.rank}" if self.rank else "") + (f" {self.rotation}" * (self.rotation != "none"))
        measured = sensitivity.measure(target, layers, convert, how, self.pictures)
        weights = {name: float(layer.weight.numel()) for name, layer in layers.items()}
        kept = KeptLayers.of(measured, weights, self.skip_share)
        for name in kept.names:
            choice.chosen.remove(name)
            choice.skipped[name] = "sensitive"
        return kept

    def _scheme(self) -> Scheme:
        return SCHEMES[self.backend, self.scheme]

    def _settings(self, target: Target) -> SchemeSettings:
        return SchemeSettings(
            target.machine,
            self.granularity,
            self.convolutions,
            self.double_quantization,
            self.rank,
            self.rotation,
        )

    def script(self, target: Target) -> Script | None:
        if self._is_auto:
            return None  # a measurement of vivace's own
        choices = {
            component: choice for component, choice in self._sorted_layers(target).items() if choice.chosen
        }
        if not choices:
            return None
        return script_of(target, (self.backend, self.scheme), self._settings(target), choices)
