"""Replacements for the places where pipelines read values of tensors, which tensors on the meta device lack.

Timesteps stay on the CPU. Where a pipeline reads masks or positions, the same is known from the prompts' tokens or the
image's size. All patches are on the instance.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vivace.machinery.technique import TEXT_ENCODERS, component_of

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def run_without_values(pipe: DiffusionPipeline, height: int, width: int) -> None:
    """Patch a pipeline on the meta device so that its call runs.

    Args:
        height, width: pixels of the image that the call will draw.
    """
    keep_timesteps_on_cpu(pipe)
    for encoder in (component_of(pipe, component) for component in TEXT_ENCODERS):
        if encoder is not None:
            encoder.register_forward_pre_hook(_without_mask, with_kwargs=True)
    name = type(pipe).__name__
    if name == "ZImagePipeline":
        pipe._encode_prompt = functools.partial(_z_image_embeddings, pipe)
    elif name == "QwenImagePipeline":
        pipe._get_qwen_prompt_embeds = functools.partial(_qwen_embeddings, pipe)
    elif name == "QwenImage21Pipeline":
        pipe._get_qwen_prompt_embeds = functools.partial(_qwen21_embeddings, pipe)
        pipe.transformer.register_forward_pre_hook(_with_image_last, with_kwargs=True)
    elif "QwenImageEdit" in name:
        pipe._get_qwen_prompt_embeds = functools.partial(_qwen_edit_embeddings, pipe)
    elif name == "Flux2Pipeline":
        # It reads the size of the latents from their positions.
        side = 2 * int(pipe.vae_scale_factor)

        def unpack(tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return tokens.transpose(1, 2).unflatten(2, (height // side, width // side)).contiguous()

        pipe._unpack_latents_with_ids = unpack


def keep_timesteps_on_cpu(pipe: DiffusionPipeline) -> None:
    """Patch a pipeline on the meta device so that it can read the values of the timesteps.

    Only the denoiser's arguments are moved to the meta device. The scheduler and the denoiser are patched as instances.
    """
    scheduler = pipe.scheduler
    if (
        type(scheduler).__name__ != "SCMScheduler"
    ):  # whose pipeline reads none, and computes with their tensors
        set_timesteps = scheduler.set_timesteps

        @functools.wraps(set_timesteps)
        def set_on_cpu(*args: Any, **kwargs: Any) -> Any:
            return set_timesteps(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))

        scheduler.set_timesteps = set_on_cpu
    denoiser = component_of(pipe, "denoiser")
    denoiser.register_forward_pre_hook(_move_to_meta, with_kwargs=True)
    if getattr(pipe, "controlnet", None) is not None:
        pipe.controlnet.register_forward_pre_hook(_move_to_meta, with_kwargs=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None  # it reads the image's values; its weights have been counted


def _move_to_meta(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from torch.utils._pytree import tree_map_only

    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return moved[0], moved[1]


def _without_mask(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Drop the mask: language models check whether it masks anything, or without a key cache whether there is one."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return args, kwargs
    if kwargs.get("use_cache", True):
        return args, kwargs | {"attention_mask": None}
    rows, length = mask.shape
    return args, kwargs | {"attention_mask": mask.new_ones(rows, 1, length, length, dtype=mask.dtype).bool()}


def _z_image_embeddings(
    pipe: Any,
    prompt: str | list[str],
    device: Any = None,
    prompt_embeds: Any = None,
    max_sequence_length: int = 512,
) -> Any:
    """ZImagePipeline._encode_prompt: a row per prompt of as many embeddings as the prompt has tokens."""
    if prompt_embeds is not None:
        return prompt_embeds
    prompts = [prompt] if isinstance(prompt, str) else prompt
    texts = [
        pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        for text in prompts
    ]
    tokens = pipe.tokenizer(
        texts, padding="max_length", max_length=max_sequence_length, truncation=True, return_tensors="pt"
    )
    ids = tokens.input_ids.to("meta")
    hidden = pipe.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-2]
    lengths = tokens.attention_mask.sum(dim=1).tolist()
    return [hidden[row][:length].clone() for row, length in enumerate(lengths)]


def _qwen_embeddings(pipe: Any, prompt: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """QwenImagePipeline._get_qwen_prompt_embeds, without a mask, as where prompts have one length."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    dropped = pipe.prompt_template_encode_start_idx
    tokens = pipe.tokenizer(
        [pipe.prompt_template_encode.format(text) for text in prompts],
        max_length=pipe.tokenizer_max_length + dropped,
        padding=True,
        truncation=True,
        return_tensors="pt",
    )
    ids = tokens.input_ids.to("meta")
    hidden = pipe.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    return hidden[:, dropped:].to(dtype or pipe.text_encoder.dtype, copy=True), None


def _qwen21_embeddings(pipe: Any, prompt: Any = None, image: Any = None, device: Any = None) -> Any:
    """QwenImage21Pipeline._get_qwen_prompt_embeds from text alone, without a mask, as where prompts have one length."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    tokens = pipe.processor(
        text=[pipe.prompt_template_t2i.format(text) for text in prompts], padding=True, return_tensors="pt"
    )
    ids = tokens["input_ids"].to("meta")
    hidden = pipe.text_encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    embeddings = hidden[:, pipe._drop_idx :].clone()
    return embeddings, None, embeddings.new_zeros(embeddings.shape[:2]).bool()


def _with_image_last(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Let QwenImage21Transformer2DModel read where the image's tokens are: behind the text's."""
    import torch

    mask = torch.zeros(kwargs["img_mask"].shape, dtype=torch.bool)
    mask[:, kwargs["encoder_hidden_states"].shape[1] :] = True
    return args, kwargs | {"img_mask": mask}


def _qwen_edit_embeddings(
    pipe: Any, prompt: Any = None, image: Any = None, device: Any = None, dtype: Any = None
) -> Any:
    """Replace the same in QwenImageEditPipeline and its Plus, whose text encoder sees the images too.

    The vision tower divides its attention by the size of the patches' grid, which therefore stays on the CPU. Which
    tokens are the images' is known from their place in the prompt's ids.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    encoder, template = pipe.text_encoder, pipe.prompt_template_encode
    if "<|image_pad|>" not in template:  # of the Plus, which numbers its images in front of the prompt
        places = "".join(
            f"Picture {index + 1}: <|vision_start|><|image_pad|><|vision_end|>" for index in range(len(image))
        )
        template = template.replace("{}", places + "{}")
    inputs = pipe.processor(
        text=[template.format(text) for text in prompts], images=image, padding=True, return_tensors="pt"
    )
    with _seeing(encoder):
        hidden = encoder(
            input_ids=inputs["input_ids"].to("meta"),
            pixel_values=inputs["pixel_values"].to("meta"),
            image_grid_thw=inputs["image_grid_thw"],
            output_hidden_states=True,
        ).hidden_states[-1]
    hidden = hidden[:, pipe.prompt_template_encode_start_idx :]
    return hidden.to(dtype or encoder.dtype, copy=True), None


@contextmanager
def _seeing(encoder: Any) -> Iterator[None]:
    """Let a language model put images in the place of their tokens without counting these."""

    def mask(ids: torch.Tensor, **_: Any) -> Any:
        is_image = (ids == encoder.config.image_token_id).unsqueeze(-1)
        return is_image, is_image

    model = encoder.model
    model.get_placeholder_mask = mask
    positions = model.visual.rotary_pos_emb.register_forward_pre_hook(_move_to_meta, with_kwargs=True)
    try:
        yield
    finally:
        positions.remove()
        del model.get_placeholder_mask
