"""Qwen-Image: blocks of text and image apart. Guidance is a second call, with a negative prompt.

Pipelines that edit take the image's latents as further tokens, and show it to the text encoder.
Source: diffusers, QwenImageTransformer2DModel, QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vivace.architectures import components, family
from vivace.architectures.entry import TAEW21_FILES, Entry, FewSteps, Hub, SamplerEntry, StoredPart
from vivace.architectures.gains import GELU, MODULATED, MODULATION, SILU, embedders

if TYPE_CHECKING:
    import torch


def _modulated(block: Any, image: Any, call: family.Arguments) -> Any:
    kwargs = call[1]
    first, _ = block.img_mod(kwargs["temb"]).chunk(2, dim=-1)
    return block._modulate(block.img_norm1(image), first, kwargs.get("modulate_index"))[0]


def _grid(_: Any, call: family.Arguments) -> tuple[int, int]:
    """Return the grid; images to be edited come after the generated one."""
    _, rows, columns = call[1]["img_shapes"][0][0]
    return rows, columns


def _not_captured(transformer: Any) -> str:
    """Return why no graph is captured: Qwen-Image-Edit-2511 modulates its sources' tokens by a timestep of 0, for which
    diffusers writes an index of tokens on the host. Fused blocks count them instead."""
    has_own_blocks = any(hasattr(block, "attn") for block in transformer.transformer_blocks)
    copies = transformer.config.get("zero_cond_t", False) and has_own_blocks
    return "its transformer copies from the host which tokens are the sources'" if copies else ""


def _gains(transformer: Any) -> family.Rules:
    last = 1 / (MODULATION * math.sqrt(2 * transformer.config.num_layers))
    return [
        *embedders(1),
        (r"(img|txt)_mod\.1|norm_out\.linear", MODULATION * SILU),
        (r"(img|txt)_mlp\.net\.2", GELU * last),
        (r"to_out\.0|to_add_out", last),
        (r"to_[qkv]\.|add_[qkv]_proj|(img|txt)_mlp\.net\.0|^proj_out", MODULATED**-0.5),
    ]


# Qwen/Qwen2.5-VL-7B-Instruct, as text_encoder of Qwen-Image, which loads its vision tower and does not call it, and of
# Qwen-Image-Edit, which does. The rest of the tower's configuration is the class's default.
QWEN25_VL_7B = components.of_transformers(
    "Qwen2_5_VLForConditionalGeneration",
    text_config={
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "max_window_layers": 28,
        "rope_parameters": components.rope(1_000_000.0) | {"mrope_section": [16, 24, 24]},
    },
    vision_config={"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584},
)
# Qwen/Qwen-Image: the class's default.
_QWEN_IMAGE = components.of_diffusers("QwenImageTransformer2DModel", num_layers=60, out_channels=16)
# Qwen/Qwen-Image-Edit-2511: the tokens of its sources are modulated by a timestep of 0.
_EDIT_2511 = components.reconfigure(_QWEN_IMAGE, zero_cond_t=True)
QWEN_FLOW = components.of_diffusers(
    components.FLOW, use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
)


def _publish(
    name: str,
    repo: str,
    title: str,
    labels: str,
    step_flop: int,
    transformer: components.ComponentConfig = _QWEN_IMAGE,
    *,
    pipeline: str = "QwenImagePipeline",
    steps: int = 50,
    **own: Any,
) -> family.PublishedModel:
    entry = Entry(
        name=name,
        licence="Apache-2.0",
        origin=Hub(repo=f"Qwen/{repo}", tiny_vae=TAEW21_FILES, download_bytes=57_700_000_000),
        pipeline=pipeline,
        num_inference_steps=steps,
        # Guidance is a second call with a negative prompt: true_cfg_scale. The pipeline ignores a guidance scale.
        guidance_scale=1.0,
        ignores_guidance=True,
        arguments={"true_cfg_scale": 4.0, "negative_prompt": " "},
        **own,
    )
    parts = {"transformer": transformer, "vae": components.QWEN_IMAGE_VAE, "text_encoder": QWEN25_VL_7B}
    architecture = components.Architecture.of(entry, parts, QWEN_FLOW, {"text_encoder": 1024})
    return family.PublishedModel(entry, architecture, title, labels, step_flop)


def _lightning(repo: str, files: dict[int, str]) -> tuple[FewSteps, ...]:
    """LoRAs of ModelTC's Qwen-Image-Lightning, with the sampler of its generate_with_diffusers.py: a shift of 3."""
    shift = math.log(3)
    sampler = {
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "base_shift": shift,
        "max_shift": shift,
        "shift": 1.0,
        "shift_terminal": None,
        "use_dynamic_shifting": True,
        "time_shift_type": "exponential",
    }
    return tuple(
        FewSteps(
            kind="lightning",
            lora=StoredPart(repo=f"lightx2v/{repo}", revision="main", files=(file,)),
            steps=(steps,),
            guidance_scale=1.0,
            scheduler=SamplerEntry(class_name=components.FLOW, overrides=sampler),
            call={"true_cfg_scale": 1.0},
        )
        for steps, file in files.items()
    )


# All have the same components; the text encoder of those that edit sees the image.
_MODELS = (
    _publish(
        "qwen-image",
        "Qwen-Image",
        "Qwen-Image",
        r"qwen[ _-]?image(?!.*(?:edit|layered|25\d\d|2\.1))",
        136_353_835_204_608,
        summary="Qwen-Image, 20 B parameters, true classifier-free guidance in two calls a step",
        few_steps=_lightning(
            "Qwen-Image-Lightning",
            {n: f"Qwen-Image-Lightning-{n}steps-V2.0-bf16.safetensors" for n in (4, 8)},
        ),
    ),
    # As Qwen-Image, of which its publishers call it the update; its card was not checked.
    _publish(
        "qwen-image-2512",
        "Qwen-Image-2512",
        "Qwen-Image-2512",
        r"qwen[ _-]?image[ _-]?2512",
        136_353_835_204_608,
        summary="Qwen-Image of December 2025, 20 B parameters",
        few_steps=_lightning(
            "Qwen-Image-2512-Lightning",
            {n: f"Qwen-Image-2512-Lightning-{n}steps-V1.0-bf16.safetensors" for n in (4, 8)},
        ),
    ),
    # Steps of the first from diffusers' example; 40 steps and the guidance of both from memory of the cards, which were
    # not checked.
    _publish(
        "qwen-image-edit",
        "Qwen-Image-Edit",
        "Qwen-Image-Edit",
        r"qwen[ _-]?image[ _-]?edit(?!.*25\d\d)",
        395_390_816_501_760,
        pipeline="QwenImageEditPipeline",
        summary="Qwen-Image-Edit, 20 B parameters: edits an image, which its text encoder sees too",
        prompt_set="edit",
    ),
    _publish(
        "qwen-image-edit-2509",
        "Qwen-Image-Edit-2509",
        "Qwen-Image-Edit-2509",
        r"qwen[ _-]?image[ _-]?edit.*2509",
        332_528_651_550_720,
        pipeline="QwenImageEditPlusPipeline",
        steps=40,
        summary="Qwen-Image-Edit of September 2025, whose text encoder sees a smaller copy",
        prompt_set="edit",
    ),
    # As 2509; its card was not checked.
    _publish(
        "qwen-image-edit-2511",
        "Qwen-Image-Edit-2511",
        "Qwen-Image-Edit-2511",
        r"qwen[ _-]?image[ _-]?edit.*2511",
        332_542_281_990_144,
        _EDIT_2511,
        pipeline="QwenImageEditPlusPipeline",
        steps=40,
        summary="Qwen-Image-Edit of November 2025, which modulates the tokens of its sources apart",
        prompt_set="edit",
        few_steps=_lightning(
            "Qwen-Image-Edit-2511-Lightning",
            {4: "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors"},
        ),
    ),
)


def _embeddings(pipe: Any, prompt: Any = None, device: Any = None, dtype: Any = None) -> Any:
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


def _edit_embeddings(
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
    positions = model.visual.rotary_pos_emb.register_forward_pre_hook(family.move_to_meta, with_kwargs=True)
    try:
        yield
    finally:
        positions.remove()
        del model.get_placeholder_mask


def _run_without_values(pipe: Any, height: int, width: int) -> None:
    pipe._get_qwen_prompt_embeds = functools.partial(_embeddings, pipe)


def _edit_without_values(pipe: Any, height: int, width: int) -> None:
    pipe._get_qwen_prompt_embeds = functools.partial(_edit_embeddings, pipe)


def _without_sources(call: dict[str, Any], number: int) -> dict[str, Any]:
    """Leave out the tokens of source images. Their sizes stay, since the largest is where the text's positions begin;
    with no frames they have no tokens."""
    shapes = [[own, *((0, *size) for _, *size in sources)] for own, *sources in call["img_shapes"]]
    left = {"hidden_states": call["hidden_states"][:, :-number], "img_shapes": shapes}
    if "num_keys" in call:  # a fused forward's, in front of its text's padding
        left["num_keys"] = call["num_keys"] - number
    return call | left


def _take_images_without_tokens(transformer: Any) -> None:
    positions = transformer.pos_embed
    of_image = positions._compute_video_freqs

    def compute(frames: int, height: int, width: int, index: int = 0, device: Any = None) -> Any:
        some = of_image(max(frames, 1), height, width, index, device)
        return some if frames else some[:0]

    positions._compute_video_freqs = compute


_HAS = ("txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight")
_FILES = family.SingleFiles(
    (
        family.Signature(
            "Qwen-Image-Edit-2511, which edits images", (*_HAS, "img_in.weight", "__index_timestep_zero__")
        ),
        family.Signature(
            "Qwen-Image-Layered", (*_HAS, "img_in.weight", "time_text_embed.addition_t_embedding.weight")
        ),
        family.Signature(
            "Qwen-Image",
            (*_HAS, "img_in.weight"),
            (("img_in.weight", 0, 3072),),
            "qwen-image",
            "transformer",
            notes_by_name={
                "edit": "its name tells of Qwen-Image-Edit, whose tensors are those of Qwen-Image: read as that, "
                "without a source image; to edit images give it as a folder in diffusers' format"
            },
        ),
        family.Signature("Qwen-Image or Qwen-Image-Edit, without its VAE and text encoder", _HAS),
        family.Signature(
            "Qwen-Image or Qwen-Image-Edit of a size that vivace does not know, or written with other shapes",
            ("txt_norm.weight", "transformer_blocks.0.*", "img_in.weight"),
        ),
    ),
    supported=("Qwen-Image",),
)


QWEN_IMAGE = family.Family(
    name="Qwen-Image",
    denoiser="QwenImageTransformer2DModel",
    pipelines=(
        family.Pipeline(
            "QwenImagePipeline",
            tasks={"image": "QwenImageImg2ImgPipeline", "inpaint": "QwenImageInpaintPipeline"},
            last_text_state=-1,
            run_without_values=_run_without_values,
        ),
        family.Pipeline(
            "QwenImageEditPipeline",
            tasks={"edit": "QwenImageEditPipeline"},
            last_text_state=-1,
            run_without_values=_edit_without_values,
            packages=("torchvision",),
            appends_sources=True,
        ),
        family.Pipeline(
            "QwenImageEditPlusPipeline",
            tasks={"edit": "QwenImageEditPlusPipeline"},
            last_text_state=-1,
            run_without_values=_edit_without_values,
            packages=("torchvision",),
            appends_sources=True,
            one_a_call=True,
            most_images=3,
        ),
    ),
    files=_FILES,
    original=family.OriginalNames(keeps_others=True),
    lora_layers=("img_mod_1",),
    models=_MODELS,
    random_weights={
        "QwenImageTransformer2DModel": family.RandomWeights(_gains),
    },
    blocks=family.Blocks(
        chains=("transformer_blocks",),
        entering=family.output_of("img_in"),
        leaving=family.input_of("norm_out"),
        modulated=_modulated,
        grid=_grid,
        added_between=("controlnet_block_samples",),
    ),
    sources=family.SourceTokens(_without_sources, _take_images_without_tokens),
    text_of_any_length=True,
    not_captured=_not_captured,
    fused="qwen_image",
)
