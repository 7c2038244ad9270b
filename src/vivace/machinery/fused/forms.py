"""How the transformers are fused whose family has a fused form."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vivace.architectures import family_of

if TYPE_CHECKING:
    from vivace.machinery.fused.operations import Places


@dataclass(frozen=True)
class FusedTransformer:
    """A transformer whose blocks were replaced by `weights` (True: in the place of the blocks), and numbers of the
    run."""

    weights: Any
    num_calls: Callable[[], int]
    counts: Mapping[str, Callable[[], int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fusing:
    """How weights are taken over: in e4m3 with one scale for each, or in bf16; for each block of `FusedForm.chains`,
    whether attention's inputs are to be bounded, for fp8; and to where."""

    quantize: bool
    bounded: tuple[bool, ...]
    places: Places


Fuse = Callable[[Any, Any, Fusing], FusedTransformer]
"""Takes the weights over from a transformer's blocks, which are removed from it; also given its pipeline."""


@dataclass(frozen=True)
class FusedForm:
    """How a transformer is fused.

    Attributes:
        chains: its lists of blocks, in order.
        unsuited: why a transformer of this class has no fused form after all, or None.
        always_masked: attention has a mask in each call, so that it is computed in bf16.
        exact: buffers that keep their dtype, while all else becomes bf16 but what diffusers keeps in fp32.
    """

    chains: tuple[str, ...]
    fuse: Fuse
    unsuited: Callable[[Any], str | None] = lambda _: None
    exact: tuple[str, ...] = ()
    always_masked: bool = False

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
    family = family_of(denoiser)
    if family is None or not family.fused or not family.is_transformer:
        return None
    form: FusedForm = importlib.import_module(f"vivace.machinery.fused.models.{family.fused}").FORM
    return form


def heads_of(transformer: Any) -> tuple[int, int]:
    config = transformer.config
    if "n_heads" in config:
        return config.n_heads, config.dim // config.n_heads
    num = config.num_attention_heads
    return num, config.attention_head_dim if "attention_head_dim" in config else config.hidden_size // num
