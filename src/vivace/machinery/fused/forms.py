"""The transformers that have a fused form, by the name of their class in diffusers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vivace.machinery.fused.operations import Places

Evidence = dict[str, int | float | str]


@dataclass(frozen=True)
class FusedTransformer:
    """A transformer whose blocks were replaced.

    Attributes:
        weights: what holds them; True where that is in the place of the blocks.
        num_calls: returns how often the fused forward was called.
        evidence: returns further facts of the run.
    """

    weights: Any
    num_calls: Callable[[], int]
    evidence: Callable[[], Evidence] = dict


class Fuse(Protocol):
    def __call__(
        self, transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
    ) -> FusedTransformer: ...


@dataclass(frozen=True)
class FusedForm:
    """How a transformer is fused.

    Attributes:
        chains: its lists of blocks, in the order in which `bounded` counts: for each block, whether attention's inputs
            are to be bounded, for fp8.
        fuse: replaces the blocks.
        unsuited: why a transformer of this class has no fused form after all, or None.
        exact: buffers that keep their dtype, while all else becomes bf16 but what diffusers keeps in fp32.
    """

    chains: tuple[str, ...]
    fuse: Fuse
    unsuited: Callable[[Any], str | None] = lambda _: None
    exact: tuple[str, ...] = ()

    def to_bf16(self, transformer: Any) -> None:
        import torch

        kept = {name: transformer.get_buffer(name) for name in self.exact}
        in_fp32 = set(transformer._keep_in_fp32_modules or ())
        parameters = [
            (parameter, parameter.data)
            for name, parameter in transformer.named_parameters()
            if in_fp32.intersection(name.split("."))
        ]
        torch.nn.Module.to(transformer, torch.bfloat16)  # diffusers' own `to` warns
        for name, buffer in kept.items():
            path, _, attribute = name.rpartition(".")
            setattr(transformer.get_submodule(path), attribute, buffer)
        for parameter, values in parameters:
            parameter.data = values

    def num_blocks(self, transformer: Any) -> int:
        return sum(len(getattr(transformer, name)) for name in self.chains)


def form_of(denoiser: Any) -> FusedForm | None:
    """Return how a denoiser is fused; None if it is no transformer, or has no fused form."""
    return _FORMS.get(type(denoiser).__name__)


def heads_of(transformer: Any) -> tuple[int, int]:
    """Return the number of heads, and their channels."""
    config = transformer.config
    if "n_heads" in config:
        return config.n_heads, config.dim // config.n_heads
    return config.num_attention_heads, config.attention_head_dim


def _flux(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.flux import fuse_flux

    return _hoisted(*fuse_flux(transformer, pipe, quantize, bounded, places))


def _flux2(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.flux2 import fuse_flux2

    fused, forward = fuse_flux2(transformer, quantize, bounded, places)
    return FusedTransformer(fused, lambda: forward.num_calls)


def _sd3(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.sd3 import fuse_sd3

    return _hoisted(*fuse_sd3(transformer, pipe, quantize, bounded, places))


def _qwen_image(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.qwen_image import fuse_qwen_image

    return _hoisted(*fuse_qwen_image(transformer, pipe, quantize, bounded, places))


def _qwen_image21(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.qwen_image21 import fuse_qwen_image21

    chain = fuse_qwen_image21(transformer, quantize, bounded, places)
    return FusedTransformer(True, lambda: chain.num_calls)


def _krea2(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.krea2 import fuse_krea2

    chain, dropped = fuse_krea2(transformer, quantize, bounded, places)
    evidence: Callable[[], Evidence] = lambda: {"denoiser.padding_left_out": dropped.num_dropped}  # noqa: E731
    return FusedTransformer(True, lambda: chain.num_calls, evidence)


def _z_image(
    transformer: Any, pipe: Any, quantize: bool, bounded: tuple[bool, ...], places: Places
) -> FusedTransformer:
    from vivace.machinery.fused.z_image import fuse_z_image

    chains = fuse_z_image(transformer, quantize, bounded, places)
    return FusedTransformer(True, lambda: min(chain.num_calls for chain in chains))


def _hoisted(fused: Any, forward: Any, hoisting: Any) -> FusedTransformer:
    def evidence() -> Evidence:
        return {
            "denoiser.modulations_hoisted": hoisting.num_hoisted,
            "denoiser.modulations_computed_in_the_loop": int(fused.modulations.num_computed),
        }

    return FusedTransformer(fused, lambda: forward.num_calls, evidence)


def _unsuited_sd3(transformer: Any) -> str | None:
    from vivace.machinery.fused.sd3 import unsuited

    return unsuited(transformer)


def _unsuited_qwen_image(transformer: Any) -> str | None:
    from vivace.machinery.fused.qwen_image import unsuited

    return unsuited(transformer)


_DOUBLE_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")
_FORMS = {
    "FluxTransformer2DModel": FusedForm(_DOUBLE_AND_SINGLE, _flux),
    "Flux2Transformer2DModel": FusedForm(_DOUBLE_AND_SINGLE, _flux2),
    "QwenImageTransformer2DModel": FusedForm(("transformer_blocks",), _qwen_image, _unsuited_qwen_image),
    "QwenImage21Transformer2DModel": FusedForm(
        # In bf16 frequencies would give every timestep another phase.
        ("transformer_blocks",),
        _qwen_image21,
        exact=("time_text_embed.time_proj.freqs",),
    ),
    "SD3Transformer2DModel": FusedForm(("transformer_blocks",), _sd3, _unsuited_sd3),
    "Krea2Transformer2DModel": FusedForm(("transformer_blocks",), _krea2),
    "ZImageTransformer2DModel": FusedForm(("noise_refiner", "context_refiner", "layers"), _z_image),
}
