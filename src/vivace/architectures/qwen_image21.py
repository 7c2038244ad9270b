"""Qwen-Image 2.1: one stream of text and image, the image last, in blocks that share one modulation.

Attention is causal over the text and whole over the image, and the text is modulated by a timestep of 0. So the text's
keys and values are the same in each step: the pipeline keeps those of the first one, whose blocks get text and image,
and gives later ones the image alone. The tokens of this family are therefore the image's, and a step cache leaves the
text's to the first step. Guidance, if any, is a second call with a negative prompt.
Source: diffusers, QwenImage21Transformer2DModel, QwenImage21Pipeline.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import Entry, FewSteps, Hub, SamplerEntry, StoredPart
from vivace.architectures.gains import (
    GELU,
    MODULATION,
    SCALED,
    SILU,
    THROUGH_TANH,
    count,
    embedders,
    root_of_moment,
)
from vivace.architectures.qwen_image import QWEN_FLOW


def _modulated(block: Any, tokens: Any, call: family.Arguments) -> Any:
    kwargs = call[1]
    first, _ = kwargs["modulation"].chunk(2, dim=-1)
    return block._modulate(block.img_norm1(tokens), first, kwargs["target_token_mask"])[0]


def _image_starts_at(call: family.Arguments) -> int:
    """Return where the image starts: behind the tokens whose keys and values the first step keeps."""
    kept = call[1]["cache_write_slice"]
    return 0 if kept is None else int(kept.stop)


def _grid(_: Any, call: family.Arguments) -> tuple[int, int]:
    """Return the grid; images to be edited come before the generated one."""
    _, rows, columns = call[1]["img_shapes"][0][-1]
    return rows, columns


class _Image:
    """Counts the image's tokens, which come last."""

    def __init__(self, transformer: Any) -> None:
        self.count = 0
        self.hook = transformer.pos_embed.register_forward_pre_hook(self._note)

    def _note(self, _: Any, args: tuple[Any, ...]) -> None:
        self.count = math.prod(args[0][-1])


def _entering(transformer: Any, note: family.Note) -> family.Handle:
    embedded: list[Any] = []
    hook = transformer.img_in.register_forward_hook(lambda _, __, output: embedded.append(output))

    def enters(_: Any, args: tuple[Any, ...]) -> None:
        note(embedded.pop()[:, -math.prod(args[0][-1]) :])

    return family.Handles((hook, transformer.pos_embed.register_forward_pre_hook(enters)))


def _leaving(transformer: Any, note: family.Note) -> family.Handle:
    image = _Image(transformer)
    hook = transformer.norm_out.register_forward_pre_hook(lambda _, args: note(args[0][:, -image.count :]))
    return family.Handles((image.hook, hook))


def _not_captured(transformer: Any) -> str:
    """Return why no graph is captured: only a fused forward computes later steps apart, which read nothing back."""
    if hasattr(transformer.forward, "later_step"):
        return ""
    return "its transformer reads back from the GPU where the image's tokens are"


def _gains(transformer: Any) -> family.Rules:
    last = 1 / (THROUGH_TANH * math.sqrt(2 * transformer.config.num_layers))
    return [
        *embedders(1),
        (r"txt_in\.out_layer", GELU),
        (r"^modulation\.1|norm_out\.linear", MODULATION * SILU),
        (r"img_mlp\.out", SILU * last),
        (r"to_out\.0", last),
        (r"to_[qkv]\.|img_mlp\.|^proj_out", SCALED**-0.5),
    ]


def _norms(_: Any) -> family.Rules:
    """The norm of its text adds 1 to its weight."""
    return [(r"text_norm", 0.0)]


def _vae_gains(vae: Any) -> family.Rules:
    """Qwen-Image's with convolutions of one frame. Each stage adds its input to its output, which ends in a norm."""
    branches = count(vae.decoder, "QwenImage21ResidualBlock") + 1
    return [
        (r"^post_quant_conv", 1 / root_of_moment(vae.config)),
        (r"conv1\.", SILU),
        (r"conv2\.", SILU / math.sqrt(branches)),
        (r"attentions.*proj", 1 / math.sqrt(branches)),
        (r"decoder\.conv_out", 0.5 * SILU),  # images are in -1 .. 1
    ]


# Qwen/Qwen3-VL-8B-Instruct, as text_encoder of Qwen-Image-2.1, which draws from text without its vision tower. The rest
# of the tower's configuration is the class's default.
QWEN3_VL_8B = components.of_transformers(
    "Qwen3VLForConditionalGeneration",
    text_config={
        "model_type": "qwen3_vl_text",
        **components.QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "rope_parameters": components.rope(5_000_000.0) | {"mrope_section": [24, 20, 20]},
    },
    vision_config={"model_type": "qwen3_vl_vision", "hidden_size": 1152, "out_hidden_size": 4096},
)
# Qwen/Qwen-Image-2.1: one latent cell for 16 x 16 pixels, and images with an alpha channel. The class's default.
_VAE = components.of_diffusers("AutoencoderKLQwenImage21", base_dim=96, decoder_base_dim=144, z_dim=64)
# Its commit is not known.
_TAEQI21_FILES = StoredPart(
    repo="madebyollin/taeqi2_1",
    revision="main",
    files=("taeqi2_1.safetensors",),
    class_name="AutoencoderTinyQwenImage21",
)
# Qwen/Qwen-Image-2.1: the class's default.
_QWEN_IMAGE21 = components.of_diffusers("QwenImage21Transformer2DModel", num_layers=32)

# Steps, and no guidance, are the defaults of its pipeline, which diffusers' documentation calls Qwen's values. The
# licence is that of the model's page; the download is counted from the parameters, the VAE's in fp32.
_ENTRY = Entry(
    name="qwen-image-2.1",
    summary="Qwen-Image 2.1, 7 B parameters, one stream of text and image; drawn without guidance",
    licence="Qwen Research",
    origin=Hub(repo="Qwen/Qwen-Image-2.1", tiny_vae=_TAEQI21_FILES, download_bytes=33_120_000_000),
    pipeline="QwenImage21Pipeline",
    size_multiple=32,
    num_inference_steps=40,
    guidance_scale=1.0,
    ignores_guidance=True,
    # By its card: dynamic exponential shifting as the model's own sampler, and no stretching to a last sigma.
    few_steps=(
        FewSteps(
            kind="lightning",
            lora=StoredPart(
                repo="lightx2v/Qwen-Image-2.1-Lightning",
                revision="main",
                files=("pytorch_lora_weights.safetensors",),
            ),
            steps=(4,),
            guidance_scale=1.0,
            scheduler=SamplerEntry(class_name=components.FLOW, overrides={"shift_terminal": None}),
        ),
    ),
)
_PARTS = {"transformer": _QWEN_IMAGE21, "vae": _VAE, "text_encoder": QWEN3_VL_8B}
_MODELS = (
    family.PublishedModel(
        _ENTRY,
        components.Architecture.of(_ENTRY, _PARTS, QWEN_FLOW, {"text_encoder": 1024}),
        title="Qwen-Image 2.1",
        labels=r"qwen[ _-]?image[ _-]?2\.1(?!.*turbo)",
        step_flop=66_003_600_356_147,
    ),
)


def _embeddings(pipe: Any, prompt: Any = None, image: Any = None, device: Any = None) -> Any:
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


def _run_without_values(pipe: Any, height: int, width: int) -> None:
    pipe._get_qwen_prompt_embeds = functools.partial(_embeddings, pipe)
    pipe.transformer.register_forward_pre_hook(_with_image_last, with_kwargs=True)


QWEN_IMAGE21 = family.Family(
    name="Qwen-Image 2.1",
    denoiser="QwenImage21Transformer2DModel",
    pipelines=(
        # How many source images it was trained for is not known.
        family.Pipeline(
            "QwenImage21Pipeline",
            {"edit": "QwenImage21Pipeline"},
            images_are_optional=True,
            last_text_state=-1,
            packages=("torchvision",),
            run_without_values=_run_without_values,
        ),
    ),
    files=family.SingleFiles((family.Signature("Qwen-Image 2.1", ("txt_in.text_norm.weight",)),)),
    models=_MODELS,
    random_weights={
        "QwenImage21Transformer2DModel": family.RandomWeights(_gains, _norms),
        "AutoencoderKLQwenImage21": family.RandomWeights(_vae_gains),
    },
    not_by_diffusers="it does not know what they return",
    blocks=family.Blocks(
        chains=("transformer_blocks",),
        entering=_entering,
        leaving=_leaving,
        modulated=_modulated,
        grid=_grid,
        text=None,
        image_starts_at=_image_starts_at,
    ),
    text_in_first_step_alone=True,
    text_of_any_length=True,
    not_captured=_not_captured,
    cells=lambda _: 1,
    side_in_tokens=2,
    fused="qwen_image21",
    projects_apart=True,
)
