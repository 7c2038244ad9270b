"""The operations of any call, or of one step of a denoiser with inputs of zeros.

PyTorch's FlopCounterMode cannot tell attention from GEMMs: on meta tensors attention is decomposed into the same `bmm`
as `linear` on transposed inputs (three layers of every VAE), and the CPU's flash kernel is not counted at all. So
attention is counted at its call, from the shapes of its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["gemm", "conv", "attention"]


def kind_of(operator: object) -> Kind:
    """Return the kind of an operator that PyTorch counts; matmuls may still be those of attention."""
    name = str(operator)
    return "attention" if "fused_attention" in name else "conv" if "convolution" in name else "gemm"


@dataclass(frozen=True)
class Flops:
    """FLOP by kind: matmuls of linear layers, convolutions, and the two matmuls of attention."""

    gemm: int
    conv: int
    attention: int

    @property
    def total(self) -> int:
        return self.gemm + self.conv + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.gemm + other.gemm, self.conv + other.conv, self.attention + other.attention)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.gemm - other.gemm, self.conv - other.conv, self.attention - other.attention)


def count_flops(call: Callable[[], Any], of: Any = None) -> Flops:
    """Run `call` once without gradients, and count its FLOP.

    Args:
        of: count only calls of this module, including its forward hooks.
    """
    total = before = Flops(0, 0, 0)
    with counting() as so_far:
        if of is None:
            call()
            return so_far()

        def begin(*_: Any) -> None:
            nonlocal before
            before = so_far()

        def end(*_: Any) -> None:
            nonlocal total
            total += so_far() - before

        # Around all other hooks: techniques may compute in theirs.
        hooks = [of.register_forward_pre_hook(begin, prepend=True), of.register_forward_hook(end)]
        try:
            call()
        finally:
            for hook in hooks:
                hook.remove()
    return total


@contextmanager
def counting() -> Iterator[Callable[[], Flops]]:
    """Count operations inside the context, without gradients; yield a function that returns the FLOP so far."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    attention = _attention_mode(counter.get_total_flops)

    def so_far() -> Flops:
        by_kind: Counter[Kind] = Counter()
        for operator, flop in counter.get_flop_counts().get("Global", {}).items():
            by_kind[kind_of(operator)] += flop
        gemm = by_kind["gemm"] - attention.counted_below
        return Flops(gemm, by_kind["conv"], attention.flop + by_kind["attention"])

    with torch.no_grad(), counter, attention:
        yield so_far


def _attention_mode(total: Callable[[], int]) -> Any:
    """Return a mode that counts attention from its inputs, and the increase of `total` inside (`counted_below`)."""
    import torch
    from torch.overrides import TorchFunctionMode

    fused = {torch.nn.functional.scaled_dot_product_attention}
    # Unfused attention multiplies two tensors of (batch, heads, tokens, channels); linear layers never do.
    matmuls = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}

    class CountAttention(TorchFunctionMode):  # type: ignore[misc]
        flop = 0
        counted_below = 0

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in fused:
                query, key, value = (
                    args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value"))
                )
                flop = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            elif func in matmuls and args[0].dim() == 4 and args[1].dim() == 4:
                flop = 2 * args[0].numel() * args[1].shape[-1]
            else:
                return func(*args, **kwargs)
            before = total()
            result = func(*args, **kwargs)
            self.flop += flop
            self.counted_below += total() - before
            return result

    return CountAttention()


def count_denoiser(
    denoiser: Any, *, height: int, width: int, text_length: int, batch: int = 1, vae_factor: int = 8
) -> Flops:
    """Count one call (one step) of a UNet2DConditionModel or FluxTransformer2DModel.

    Args:
        denoiser: the module, on any device; on "meta" this takes seconds and no memory.
        height, width: size of the image in pixels.
        text_length: number of prompt tokens that the denoiser attends to.
        batch: rows of the call; one image with classifier-free guidance has 2.
        vae_factor: width of a latent cell in pixels.
    """
    inputs = denoiser_inputs(
        denoiser, height=height, width=width, text_length=text_length, batch=batch, vae_factor=vae_factor
    )
    return count_flops(lambda: denoiser(**inputs))


def denoiser_inputs(
    denoiser: Any, *, height: int, width: int, text_length: int, batch: int = 1, vae_factor: int = 8
) -> dict[str, Any]:
    """Return zeros as inputs for one call, with the arguments of `count_denoiser`, on the denoiser's device."""
    cells = (height // vae_factor, width // vae_factor)
    make = _flux_inputs if hasattr(denoiser.config, "joint_attention_dim") else _unet_inputs
    return make(denoiser, cells, text_length, batch)


def _unet_inputs(unet: Any, cells: tuple[int, int], text_length: int, batch: int) -> dict[str, Any]:
    config = unet.config
    zeros = next(unet.parameters()).new_zeros
    inputs: dict[str, Any] = {
        "sample": zeros(batch, config.in_channels, *cells),
        "timestep": zeros(batch),
        "encoder_hidden_states": zeros(batch, text_length, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        # SDXL's conditioning: the pooled text, and six numbers for sizes and crops.
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": zeros(batch, pooled), "time_ids": zeros(batch, 6)}
    if config.time_cond_proj_dim:
        inputs["timestep_cond"] = zeros(batch, config.time_cond_proj_dim)
    return inputs


def _flux_inputs(transformer: Any, cells: tuple[int, int], text_length: int, batch: int) -> dict[str, Any]:
    config = transformer.config
    zeros = next(transformer.parameters()).new_zeros
    tokens = (cells[0] // 2) * (cells[1] // 2)  # the pipeline packs 2x2 cells into one token
    return {
        "hidden_states": zeros(batch, tokens, config.in_channels),
        "encoder_hidden_states": zeros(batch, text_length, config.joint_attention_dim),
        "pooled_projections": zeros(batch, config.pooled_projection_dim),
        "timestep": zeros(batch),
        "img_ids": zeros(tokens, 3),
        "txt_ids": zeros(text_length, 3),
        "guidance": zeros(batch) if config.guidance_embeds else None,
    }
