"""The operations of any call, or of one step of a denoiser with inputs of zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.measure.flops import Flops, count_calls, counting


def count_flops(call: Callable[[], Any], of: Any = None) -> Flops:
    """Run `call` once without gradients, and count its FLOP.

    Args:
        of: count only calls of this module, including its forward hooks.
    """
    if of is not None:
        return count_calls(call, {"": of})[""].flops
    with counting() as so_far:
        call()
        return so_far()


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
