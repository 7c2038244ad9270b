"""Transformers, UNets and VAEs as few, fused kernels, in bf16 or fp8.

Why: of a compiled fp8 step of FLUX.1 [dev] (1024 px, one H200), a third is neither matmul nor attention: quantising,
    norms, modulation, GELU, rotary embedding, copies and gaps. Kernels of vivace's own take each of these in one pass
    over memory, together with its neighbours; the modulations of all steps are computed at once, before the first. So
    are a UNet's keys and values of the text, whose weights in SDXL are 680 MB. A UNet's step has 46 GroupNorms with
    SiLU and 70 GEGLUs (SDXL), each of which is several passes in PyTorch. Nothing is compiled for minutes: a first call
    takes seconds.
Costs: other rounding than diffusers'; with fp8 also that of weights and activations, with one scale a tensor, in
    UNets one a row behind attention and GEGLU. `attention=fp8` rounds queries, keys, values and the softmax as well,
    and `convolutions=fp8` what residual blocks convolve. The blocks are replaced, so adapters of diffusers must be
    merged before (vivace's `lora(hot=True)` goes with it), and techniques that work on blocks do not go
    with it. The rest of a VAE is computed in bf16, also of one that diffusers would compute in fp32 (SDXL's). With
    `offload(model)` FLUX's hoisted modulations are copied as well, 135 MB a call.
Needs: a transformer of a family that has a fused form (the summary names them), a UNet of Stable Diffusion's blocks
    (1.5, 2, XL), or the VAE of FLUX.1, FLUX.2 or Stable Diffusion. On GPUs Triton and cuBLASLt; fp8 compute capability
    8.9; `attention=fp8` Hopper, a transformer with heads of 128 channels and the package nvidia-cudnn-frontend;
    `convolutions=fp8` a UNet or a VAE. Elsewhere plain PyTorch computes the same, which is right and slow. On GPUs
    other than Hopper it is compiled, and not measured (docs/hardware.md).
Source: Peebles and Xie, DiT (adaLN-Zero), arXiv 2212.09748; Micikevicius et al., FP8 Formats for Deep Learning, arXiv
    2209.05433; Shah et al., FlashAttention-3, arXiv 2407.08608 (attention in fp8). Kernels: vivace.machinery.kernels.

Scales need no calibration: norms' outputs, queries and keys are bounded by their norms, values and the MLP's hidden
channels by those of tokens and weights. e4m3 has an exponent of its own, so a bound that is a hundred times too large
costs it nothing. The product of two bounds, as GEGLU has, would: there each row's scale is its own.
An image of 28 steps still takes 21,682 kernels, text encoders and VAE included (results/flux-fused-profiles.jsonl);
`cuda_graph` replays those of a step in one launch. Measured: docs/performance/flux.md, docs/performance/today.md and
docs/performance/unets.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from vivace.architectures import FAMILIES, family_of
from vivace.errors import NoEffect
from vivace.machinery.compilation.compiled_code import keep_compiled_code
from vivace.machinery.fused.forms import Fusing, form_of, heads_of
from vivace.machinery.quantization.layers import is_quantised
from vivace.machinery.technique import (
    Arithmetic,
    Effect,
    Rule,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    knob,
)

if TYPE_CHECKING:
    from vivace.machinery.fused.operations import Places

    _Evidence = Callable[[], Mapping[str, int | float | str | list[str]]]

_MIN_CAPABILITY = {"bf16": (8, 0), "fp8": (8, 9)}
_HOPPER = (9, 0)
_FP8_HEAD = 128
_ATTRIBUTE = "vivace_fused"


def _families(last: str) -> str:
    """Return the names of the families whose transformers have a fused form."""
    *names, end = [family.name for family in FAMILIES if family.fused and family.is_transformer]
    return f"{', '.join(names)}{last}{end}"


class Fused(Technique):
    name: ClassVar[str] = "fused"
    summary: ClassVar[str] = f"a transformer of {_families(' or ')}, or a UNet, as few, fused kernels"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.FUSE,
        owns="attention projections",
        same_picture=True,
        targetable=("denoiser", "vae"),
        default_targets=("denoiser",),
        provides=frozenset({Trait.FUSED}),
        excludes=(
            Rule(
                Trait.COMPILED, "the fused kernels leave the compiler nothing to fuse; add cuda_graph instead"
            ),
            Rule(Trait.QUANTIZED, "its weights are stored anew; fused(fp8) quantises them"),
            Rule(Trait.KERNEL_CHOSEN, "fused has its own attention; choose by fused(attention=...)"),
            Rule(Trait.HOOKED, "the layers that hooks are attached to are replaced"),
            Rule(
                Trait.KEEPS_BLOCK_TENSORS,
                "this cache works within diffusers' blocks, which are replaced; one that keeps the residual of all "
                "blocks goes with it, such as teacache",
            ),
            Rule(Trait.CACHED, "the blocks are replaced, and the cache with them", earlier_only=True),
            Rule(Trait.OFFLOADED, "apply both by the same recipe, to a fresh pipeline", earlier_only=True),
        ),
    )

    precision: Literal["bf16", "fp8"] = knob(
        "bf16", tune=["bf16", "fp8"], about="of the matmuls; everything between them is computed in fp32"
    )
    attention: Literal["bf16", "fp8"] = knob(
        "bf16", tune=["bf16", "fp8"], about="of attention; fp8 is cuDNN's, on Hopper"
    )
    convolutions: Literal["bf16", "fp8"] = knob(
        "bf16",
        tune=["bf16", "fp8"],
        about="of the residual blocks of a UNet and a VAE; fp8 is vivace's own",
    )
    bf16_blocks: int = knob(
        0, ge=0, le=100, about="attention=fp8: the first and last blocks whose attention stays in bf16"
    )

    @model_validator(mode="after")
    def _knobs_go_together(self) -> Self:
        for name in ("attention", "convolutions"):
            if getattr(self, name) == "fp8" and self.precision != "fp8":
                raise ValueError(f"{name}=fp8 goes with fp8 matmuls; write fused(fp8, {name}=fp8)")
        return self

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            arithmetic=self._arithmetic,
            attention_precision=self.attention,
            made_for=_HOPPER if self.convolutions == "fp8" else None,  # matmuls are cuBLASLt's
        )

    @property
    def _arithmetic(self) -> Arithmetic:
        weights = {"bf16": "in bf16", "fp8": "in fp8 (e4m3), one scale a tensor"}[self.precision]
        return Arithmetic(weights, f"in {self.precision}")

    def unsupported(self, target: Target) -> str | None:
        machine, runs_here = target.machine, target.model.has_weights
        if self.attention == "fp8":
            from vivace.machinery.attention_backends.cudnn_fp8 import unsupported_on

            if (reason := unsupported_on(machine, runs_here)) is not None:
                return reason
        if machine.is_gpu and not machine.is_cuda:
            return f"the fused kernels are written for NVIDIA's GPUs, and this one is {machine.maker}'s; take compile"
        if machine.is_cuda:
            have = machine.capability
            least = _MIN_CAPABILITY[self.precision]
            if have is not None and have < least:
                return (
                    f"matmuls in {self.precision} need a GPU of compute capability {least[0]}.{least[1]}, and this "
                    f"one has {have[0]}.{have[1]}"
                )
            if runs_here and not machine.has_package("triton"):
                return "the fused kernels are Triton's, which is not installed (pip install triton)"
        if target.pipe is None:
            return None
        if "vae" in self.targets and (vae := target.module("vae")) is not None:
            from vivace.machinery.fused.models.vae import unsuited

            if not hasattr(vae, _ATTRIBUTE) and (reason := unsuited(vae)) is not None:
                return f"{reason}; leave vae out of fused's components"
        if "denoiser" not in self.targets:
            return None
        denoiser = target.module("denoiser")
        if (reason := _unsuited(denoiser, machine.is_cuda, self.precision == "fp8")) is not None:
            return reason
        if self.convolutions == "fp8" and not _is_unet(denoiser) and "vae" not in self.targets:
            return (
                "a transformer has no convolutions; with convolutions=fp8 fuse the VAE as well, @denoiser,vae"
            )
        if self.attention == "fp8":
            if _is_unet(denoiser):
                return f"attention=fp8 is for heads of {_FP8_HEAD} channels, and a UNet's are others"
            if (form := form_of(denoiser)) is not None and form.always_masked:
                return "attention=fp8 is for attention without a mask, which this transformer's has; leave it out"
            _, head = heads_of(denoiser)
            if head != _FP8_HEAD:
                return f"attention=fp8 is for heads of {_FP8_HEAD} channels, and these have {head}"
        return None

    def apply(self, target: Target) -> Effect:
        if target.machine.is_cuda:
            keep_compiled_code()
        modules = target.modules(self.targets)
        new = {name: module for name, module in modules.items() if not hasattr(module, _ATTRIBUTE)}
        if not new:
            raise NoEffect("its blocks are fused already", already_so=True)
        effect, changed = Effect(), dict[str, int | float | str]()
        by = "Triton" if target.machine.is_cuda else "PyTorch (no GPU)"
        for name, module in new.items():
            if name == "vae":
                changed |= self._fuse_vae(target, _places(target, module))
            else:
                fuse = self._fuse_unet if _is_unet(module) else self._fuse_transformer
                effect = fuse(target, _places(target, module))
                changed |= {**effect.changed, "denoiser.matmuls": self.precision}
            changed[f"{name}.fused_by"] = by
        return replace(effect, changed=changed, evidence=_with_passes(effect.evidence))

    def _fuse_vae(self, target: Target, places: Places) -> dict[str, int | float | str]:
        import torch

        from vivace.machinery.fused.calls import cast_all, cast_inputs
        from vivace.machinery.fused.convolutions import num_own
        from vivace.machinery.fused.models.vae import fuse_vae

        vae = target.module("vae")
        torch.nn.Module.to(vae, torch.bfloat16)
        cast_inputs(cast_all, vae.encoder, vae.decoder, vae.quant_conv, vae.post_quant_conv)
        with torch.no_grad():
            num_blocks = fuse_vae(vae, self.convolutions, _enlarges(target), places)
        setattr(vae, _ATTRIBUTE, True)
        return {"vae.fused_blocks": num_blocks, "vae.own_convolutions": num_own(vae)}

    def _fuse_unet(self, target: Target, places: Places) -> Effect:
        import torch

        from vivace.machinery.fused.calls import SampleCasts
        from vivace.machinery.fused.convolutions import num_own
        from vivace.machinery.fused.models.unet import fuse_unet
        from vivace.machinery.fused.text_projections import TextHoisting

        unet = target.module("denoiser")
        torch.nn.Module.to(unet, torch.bfloat16)
        with torch.no_grad():
            num_blocks = fuse_unet(
                unet, self.precision == "fp8", self.convolutions, _enlarges(target), places
            )
        hoisting = TextHoisting(unet.vivace_text_projections)
        if not _is_sent(target):
            # Before the cast, which makes a new tensor of the same text in each step.
            unet.register_forward_pre_hook(hoisting, with_kwargs=True)
        casts = SampleCasts()
        unet.register_forward_pre_hook(casts.before, with_kwargs=True)
        unet.register_forward_hook(casts.after)
        setattr(unet, _ATTRIBUTE, True)
        return Effect(
            changed={
                "denoiser.fused_blocks": num_blocks,
                "denoiser.attention": "bf16",
                "denoiser.own_convolutions": num_own(unet),
            },
            evidence=lambda: {"denoiser.texts_projected": hoisting.num_projected},
        )

    def _fuse_transformer(self, target: Target, places: Places) -> Effect:
        import torch

        from vivace.machinery.fused.calls import cast_output

        transformer = target.module("denoiser")
        form = form_of(transformer)
        assert form is not None
        num_blocks = form.num_blocks(transformer)
        bounded = tuple(
            self.attention == "fp8" and self.bf16_blocks <= index < num_blocks - self.bf16_blocks
            for index in range(num_blocks)
        )
        form.to_bf16(transformer)
        transformer.register_forward_hook(cast_output, with_kwargs=True)
        with torch.no_grad():
            fused = form.fuse(transformer, target.pipe, Fusing(self.precision == "fp8", bounded, places))
        setattr(transformer, _ATTRIBUTE, fused.weights)
        num_fp8 = sum(bounded)

        def refuted(_: dict[str, Any]) -> str | None:
            return None if fused.num_calls() else "the fused forward was never called"

        return Effect(
            changed={
                "denoiser.fused_blocks": num_blocks,
                "denoiser.attention": f"cuDNN fp8 in {num_fp8} of {num_blocks} blocks" if num_fp8 else "bf16",
            },
            evidence=lambda: {name: count() for name, count in fused.counts.items()},
            refuted=refuted,
        )


def _with_passes(evidence: _Evidence | None) -> _Evidence:
    from vivace.machinery.fused import cublas_lt

    return lambda: {**(evidence() if evidence else {}), **cublas_lt.evidence()}


def _places(target: Target, module: Any) -> Places:
    import torch

    from vivace.machinery.fused.operations import Places

    now, where = module.device, target.where
    if not where.on_host:
        return Places(now, now)
    work = torch.device(target.machine.device)
    return Places(work, torch.device(where.home or now))


def _is_sent(target: Target) -> bool:
    """Whether the UNet's inputs will be sent to other processes in each step.

    Keys and values are 33 times (SD 1.5) to 81 times (SDXL) as large as the text, and GPUs may have no NVLink.
    """
    return any(Trait.SHARDED in technique.facts.provides for technique in target.request.later)


def _enlarges(target: Target) -> bool:
    machine = target.machine
    return not machine.is_cuda or enlarges_on(machine.capability)


def enlarges_on(capability: tuple[int, int] | None) -> bool:
    """Return whether images are enlarged by vivace's own kernel, which is made for Hopper and measured there."""
    return capability == _HOPPER


def _is_unet(denoiser: Any) -> bool:
    family = family_of(denoiser)
    return family is not None and not family.is_transformer


def _unsuited(denoiser: Any, on_gpu: bool, quantize: bool) -> str | None:
    """Return why this denoiser has no fused form, or None."""
    kind = type(denoiser).__name__
    form = form_of(denoiser)
    if form is None and not _is_unet(denoiser):
        families = _families(" and ")
        return (
            f"the fused kernels are made for transformers of {families}, and for UNets, and this is a {kind}"
        )
    if hasattr(denoiser, _ATTRIBUTE):
        return None
    for name, layer in denoiser.named_modules():
        if type(layer).__name__ == "Linear" and is_quantised(layer):
            return f"a layer is quantised already ({name}), and quantised weights cannot be fused"
    if _is_unet(denoiser):
        from vivace.machinery.fused.models.unet import unsuited

        channels = denoiser.config.block_out_channels
        if quantize and on_gpu and any(number % 16 for number in channels):
            return "matmuls in fp8 need channels in multiples of 16"
        return unsuited(denoiser)
    assert form is not None
    if (reason := form.unsuited(denoiser)) is not None:
        return reason
    num_heads, head = heads_of(denoiser)
    if quantize and on_gpu and num_heads * head % 16:
        return "matmuls in fp8 need channels in multiples of 16"
    if on_gpu and (head & (head - 1) or head < 16):
        return f"the kernels take heads whose channels are a power of two from 16 on; these have {head}"
    return None
