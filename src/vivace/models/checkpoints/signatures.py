"""Signatures of published files of weights, by tensors that they have: one table.

The first row whose tensors are all in a file identifies it. So kinds that contain another's tensors come first: Chroma
and FLUX.2 before FLUX.1, whole models before single components. A row matches only by tensors that the file has, never
by missing ones.

The names are those of the authors' own files, of ComfyUI's `model_detection.py` and of diffusers'
`single_file_utils.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "pipe.dit.", "")
"""Prefixes that tools write before the names of a denoiser's tensors; "net." is NVIDIA's, "pipe.dit." DiffSynth's."""
_MOST_PREFIXES = 4
"""Words of a name that are tried as a prefix that is not in the list."""
SD2 = "sd2"
"""Placeholder for a catalogue name in rows of SD 2, which the catalogue lacks."""
SUPPORTED = "supported are single files of SD 1.5, SDXL, SD 3.5, FLUX.1, FLUX.2, Qwen-Image and Z-Image"

_FOLDER = f"give it as a folder in diffusers' format, or as org/repo of the hub ({SUPPORTED})"
_REST = (
    f"give the file that holds the whole model, or a folder in diffusers' format with all parts ({SUPPORTED})"
)
_NO_IMAGES = f"vivace makes single images from text; {SUPPORTED}"
_QUANTISED = (
    "vivace reads no weights that another tool quantised, except fp8, ComfyUI's nvfp4 and mxfp8, and GGUF; give the "
    "model in 16 bits, and quantise it with a recipe: quantize(int8), quantize(fp8) or quantize(nf4)"
)
_WITH_MODEL = f"give the model that it belongs to ({SUPPORTED})"
_OTHER_SIZE = "of a size that vivace does not know, or written with other shapes"
_FIRST = "input_blocks.0.0.weight"
_FLUX = "double_blocks.0.img_attn.norm.key_norm.scale"


@dataclass(frozen=True)
class Signature:
    """A row of the table.

    Attributes:
        what: what such a file is; follows "FILE is ".
        has: names of tensors, without their denoiser's prefix. A `*` at either end stands for anything.
        advice: what to do with a file that is refused.
        sizes: lengths of dimensions: the tensor, the dimension, the length.
        entry: catalogue name of the model with the same configuration; None for a file that is refused.
        component: the only component that is read from the file; None for a whole pipeline.
        note: what was assumed.
    """

    what: str
    has: tuple[str, ...]
    advice: str = _FOLDER
    sizes: tuple[tuple[str, int, int], ...] = ()
    entry: str | None = None
    component: str | None = None
    note: str = ""


def _refused(advice: str, *rows: tuple[str, tuple[str, ...]]) -> tuple[Signature, ...]:
    return tuple(Signature(what, has, advice) for what, has in rows)


def _with_four_channels(advice: str, *rows: tuple[str, tuple[str, ...]]) -> tuple[Signature, ...]:
    return tuple(replace(row, sizes=_FOUR) for row in _refused(advice, *rows))


def _denoiser(
    what: str,
    entry: str,
    has: tuple[str, ...],
    sizes: tuple[tuple[str, int, int], ...],
    part: str = "transformer",
) -> Signature:
    """Return the row of a file from which the denoiser is read; all other parts come from the catalogue's model."""
    return Signature(what, has, sizes=sizes, entry=entry, component=part)


def _unet(what: str, num_channels: int, *has: str) -> Signature:
    return Signature(
        f"{what}, not a text-to-image model",
        (_FIRST, *has),
        sizes=((_FIRST, 1, num_channels),),
    )


_SDXL_TEXT = "conditioner.embedders.1.model.positional_embedding"
_SD1_TEXT = "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight"
_SD2_TEXT = "cond_stage_model.model.*"
_REFINER_TEXT = "conditioner.embedders.0.model.*"
_VAE = "first_stage_model.*"
_FOUR = ((_FIRST, 1, 4),)
_SIXTY_FOUR = (("img_in.weight", 1, 64),)
_BUNDLE = ("text_encoders.clip_l.*", "text_encoders.t5xxl.*", "vae.*")
_FLUX2 = ("single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight", "img_in.weight")
_SD35 = ("joint_blocks.0.x_block.attn.ln_q.weight", "x_embedder.proj.weight")
_QWEN = ("txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight", "img_in.weight")
_Z_IMAGE = ("cap_embedder.0.weight", "layers.0.adaLN_modulation.0.weight", "x_embedder.weight")
_TEXT_WIDTH = "{}.1.transformer_blocks.0.attn2.to_k.weight"

SIGNATURES: tuple[Signature, ...] = (
    # Weights that are codes. Nunchaku's files also have tensors that are called lora_down.
    *_refused(
        _QUANTISED,
        ("a model that was quantised with SVDQuant for Nunchaku", ("*.wscales",)),
        ("a model that was quantised with SVDQuant for Nunchaku", ("*.qweight", "*.proj_down")),
        ("a model that was quantised with SVDQuant for Nunchaku", ("*.qweight", "*.smooth_factor")),
        ("a model that was quantised with bitsandbytes (nf4 or fp4)", ("*.quant_state.bitsandbytes__*",)),
        ("a model that was quantised with bitsandbytes (nf4 or fp4)", ("*.absmax",)),
        ("a model that was quantised with bitsandbytes (int8)", ("*.SCB",)),
        ("a model that was quantised with AWQ or GPTQ", ("*.qweight",)),
        ("a model that was quantised with optimum-quanto", ("*.weight._data",)),
        ("a model that was quantised with torchao", ("*.weight.qdata",)),
        ("a model that was quantised with torchao", ("*._weight_qdata",)),
    ),
    # What goes beside a model; its names contain those of the model.
    *_refused(
        f"give the model and the LoRA as two files: --recipe 'lora(FILE)' ({SUPPORTED})",
        ("a model with a LoRA beside its weights, which is not merged into them", (_FIRST, "*lora_*")),
        ("a model with a LoRA beside its weights, which is not merged into them", (_FLUX, "*lora_*")),
    ),
    *_refused(
        f"give it as a recipe for its model: lora(FILE) ({SUPPORTED})",
        ("a LoRA, not a model", ("*lora_*",)),
        ("a LoRA, not a model", ("*.lora.*",)),
        ("a LoRA (LoKr), not a model", ("*lokr_*",)),
        ("a LoRA (LoHa), not a model", ("*hada_w*",)),
        ("a LoRA (OFT), not a model", ("*.oft_*",)),
        ("a LoRA (full differences), not a model", ("*.diff",)),
    ),
    *_refused(
        f"{_WITH_MODEL}; a ControlNet is an option beside it: --controlnet FOLDER",
        ("a ControlNet, not a model", ("control_model.*",)),
        ("a ControlNet, not a model", ("input_hint_block.*",)),
        ("a ControlNet, not a model", ("controlnet_cond_embedding.*",)),
        ("a ControlNet, not a model", ("controlnet_blocks.*",)),
        ("a ControlNet, not a model", ("controlnet_down_blocks.*",)),
        ("a ControlNet, not a model", ("control_layers.*",)),
        ("a ControlNet, not a model", ("control_all_x_embedder.*",)),
        ("a ControlNet (LLLite), not a model", ("lllite_*",)),
        ("a T2I-Adapter, not a model", ("adapter.body.*",)),
        ("a T2I-Adapter, not a model", ("body.0.block1.weight",)),
    ),
    # Families of denoisers with FLUX.1's blocks, or parts of them.
    *_refused(
        f"Chroma is another model than FLUX.1: {_FOLDER}",
        ("Chroma (Radiance)", ("distilled_guidance_layer.*", "nerf_*")),
        ("Chroma", ("distilled_guidance_layer.*",)),
    ),
    _denoiser(
        "FLUX.2 [dev]", "flux2-dev", (*_FLUX2, "guidance_in.in_layer.weight"), (("img_in.weight", 0, 6144),)
    ),
    _denoiser("FLUX.2 [klein] 4B", "flux2-klein-4b", _FLUX2, (("img_in.weight", 0, 3072),)),
    _denoiser("FLUX.2 [klein] 9B", "flux2-klein-9b", _FLUX2, (("img_in.weight", 0, 4096),)),
    _denoiser("SD 3.5 Large", "sd35-large", _SD35, (("x_embedder.proj.weight", 0, 2432),)),
    _denoiser(
        "SD 3.5 Medium",
        "sd35-medium",
        (*_SD35, "joint_blocks.0.x_block.attn2.qkv.weight"),
        (("x_embedder.proj.weight", 0, 1536),),
    ),
    *_refused(
        _FOLDER,
        ("Qwen-Image-Edit-2511, which edits images", (*_QWEN, "__index_timestep_zero__")),
        ("Qwen-Image-Layered", (*_QWEN, "time_text_embed.addition_t_embedding.weight")),
    ),
    _denoiser("Qwen-Image", "qwen-image", _QWEN, (("img_in.weight", 0, 3072),)),
    _denoiser("Z-Image", "z-image-turbo", _Z_IMAGE, (("x_embedder.weight", 0, 3840),)),
    *_refused(
        _FOLDER,
        (f"FLUX.2 {_OTHER_SIZE}", ("single_stream_modulation.lin.weight",)),
        (
            "FLUX.2 in diffusers' layout, without its VAE and text encoder",
            ("single_stream_modulation.linear.weight",),
        ),
        ("FLUX.3", ("early_stream_modulations.image.lin.weight",)),
        (f"SD 3, or SD 3.5 {_OTHER_SIZE}", ("joint_blocks.0.*",)),
        ("Qwen-Image 2.1", ("txt_in.text_norm.weight",)),
        (
            "Qwen-Image or Qwen-Image-Edit, without its VAE and text encoder",
            ("txt_norm.weight", "transformer_blocks.0.attn.add_q_proj.weight"),
        ),
        (
            f"Qwen-Image or Qwen-Image-Edit {_OTHER_SIZE}",
            ("txt_norm.weight", "transformer_blocks.0.*", "img_in.weight"),
        ),
        ("AuraFlow", ("double_layers.0.*", "cond_seq_linear.weight")),
        ("AuraFlow in diffusers' layout", ("joint_transformer_blocks.0.*", "register_tokens")),
        ("HiDream", ("double_stream_blocks.0.block.*",)),
        (f"Z-Image {_OTHER_SIZE}", ("cap_embedder.*", "noise_refiner.0.adaLN_modulation.0.weight")),
        (f"Z-Image {_OTHER_SIZE}", ("cap_embedder.*", "layers.0.adaLN_modulation.0.weight")),
        ("OmniGen2", ("time_caption_embed.*", "ref_image_refiner.*")),
        ("Lumina 2", ("cap_embedder.*", "noise_refiner.*")),
        ("Lumina 2", ("cap_embedder.0.weight",)),
        ("Lumina 2 in diffusers' layout", ("time_caption_embed.*", "noise_refiner.*")),
        ("Lumina", ("cap_embedder.1.weight", "layers.0.*")),
        ("Krea 2", ("txtfusion.projector.weight",)),
        ("HunyuanDiT", ("mlp_t5.0.weight",)),
        ("HunyuanImage, or HunyuanVideo 1.5", ("double_blocks.0.*", "byt5_in.*")),
        ("Sana", ("attention_y_norm.weight",)),
        (
            "Sana in diffusers' layout",
            ("caption_norm.weight", "transformer_blocks.0.ff.conv_inverted.weight"),
        ),
        ("PixArt", ("t_block.1.weight", "blocks.0.scale_shift_table")),
        (
            "PixArt in diffusers' layout",
            ("adaln_single.linear.weight", "caption_projection.linear_1.weight", "pos_embed.*"),
        ),
        ("Stable Cascade's stage C", ("clip_txt_mapper.weight",)),
        ("Stable Cascade's stage B", ("down_blocks.1.0.channelwise.0.weight",)),
        ("Kolors", ("encoder_hid_proj.weight", "add_embedding.linear_1.weight")),
        ("CogView", ("patch_embed.text_proj.weight", "time_condition_embed.*")),
        ("Kandinsky 5", ("visual_transformer_blocks.0.*",)),
        ("DeepFloyd IF", ("encoder_hid_proj.weight", "add_embedding.norm1.weight")),
    ),
    *_refused(
        _NO_IMAGES,
        ("HunyuanVideo, which makes videos", ("txt_in.individual_token_refiner.*",)),
        ("Wan, which makes videos", ("head.modulation", "blocks.0.*")),
        (
            "Wan in diffusers' layout, which makes videos",
            ("condition_embedder.*", "blocks.0.*", "scale_shift_table"),
        ),
        ("LTX-Video, which makes videos", ("patchify_proj.weight",)),
        (
            "LTX-Video in diffusers' layout, which makes videos",
            ("proj_in.weight", "scale_shift_table", "time_embed.*"),
        ),
        ("Mochi, which makes videos", ("blocks.0.attn.qkv_x.weight",)),
        ("CogVideoX, which makes videos", ("patch_embed.text_proj.weight",)),
        ("Cosmos, which makes videos", ("x_embedder.proj.1.weight",)),
        ("Stable Video Diffusion, which makes videos", ("input_blocks.1.0.time_stack.*",)),
        ("an AnimateDiff motion module", ("*.motion_modules.0.*",)),
        ("Stable Audio, which makes sound", ("pretransform.*",)),
    ),
    # FLUX.1, by one of its blocks and the width of its input.
    Signature(
        "FLUX.1 [dev]", (_FLUX, "guidance_in.in_layer.weight", *_BUNDLE), sizes=_SIXTY_FOUR, entry="flux-dev"
    ),
    Signature("FLUX.1 [schnell]", (_FLUX, *_BUNDLE), sizes=_SIXTY_FOUR, entry="flux-schnell"),
    Signature(
        "FLUX.1 [dev]",
        (_FLUX, "guidance_in.in_layer.weight"),
        sizes=_SIXTY_FOUR,
        entry="flux-dev",
        component="transformer",
    ),
    Signature("FLUX.1 [schnell]", (_FLUX,), sizes=_SIXTY_FOUR, entry="flux-schnell", component="transformer"),
    Signature(
        "a FLUX.1 variant with inputs other than text: FLUX.1 Fill, whose input has an image and a mask",
        (_FLUX,),
        sizes=(("img_in.weight", 1, 384),),
    ),
    Signature(
        "a FLUX.1 variant with inputs other than text: FLUX.1 Depth or Canny, whose input has a control image",
        (_FLUX,),
        sizes=(("img_in.weight", 1, 128),),
    ),
    *_refused(
        _FOLDER,
        (
            "a model with FLUX.1's blocks whose input (img_in.weight) is not FLUX.1's 64 channels, nor those of a "
            "variant that vivace knows: it is another model, or was written with other shapes",
            (_FLUX, "img_in.weight"),
        ),
        ("part of a FLUX.1 transformer with scaled fp8 weights, without its input", (_FLUX, "*scaled_fp8")),
        ("part of a FLUX.1 transformer, without its input", (_FLUX,)),
        ("a model with FLUX's blocks, but another one", ("double_blocks.0.*", "single_blocks.0.*")),
    ),
    # UNets in their authors' layout.
    _unet("an inpainting model of SDXL", 9, _SDXL_TEXT),
    _unet("an inpainting model", 9),
    _unet("an image editing model", 8),
    _unet("an upscaler", 7),
    _unet("a model that starts from a depth map", 5),
    Signature(
        "CosXL, which predicts v over EDM's noise levels",
        (_FIRST, "edm_vpred.sigma_max"),
        f"vivace has no sampler for it ({SUPPORTED})",
    ),
    Signature("Playground v2.5", (_FIRST, _VAE, _SDXL_TEXT, "edm_mean"), sizes=_FOUR, entry="playground"),
    Signature("SDXL", (_FIRST, _VAE, _SDXL_TEXT), sizes=_FOUR, entry="sdxl"),
    Signature("SD 1.5", (_FIRST, _VAE, _SD1_TEXT), sizes=_FOUR, entry="sd15"),
    *_refused(
        SUPPORTED,
        ("SDXL's refiner, which refines images of another model", (_FIRST, _REFINER_TEXT)),
    ),
    Signature("an SD 2 model", (_FIRST, _VAE, _SD2_TEXT), sizes=_FOUR, entry=SD2),
    # A UNet alone, by the width of the text that its attention takes.
    _denoiser(
        "SDXL's UNet",
        "sdxl",
        (_FIRST, "label_emb.0.0.weight"),
        (*_FOUR, (_TEXT_WIDTH.format("input_blocks.4"), 1, 2048)),
        "unet",
    ),
    _denoiser(
        "SD 1.5's UNet", "sd15", (_FIRST,), (*_FOUR, (_TEXT_WIDTH.format("input_blocks.1"), 1, 768)), "unet"
    ),
    *_refused(
        "vivace reads a UNet's own weights (model.diffusion_model.*); give the file that has them",
        ("a model with averaged weights (EMA) of its UNet alone", ("model_ema.diffusion_model*",)),
    ),
    *_with_four_channels(
        _REST,
        ("an SD 2 model without its VAE", (_FIRST, _SD2_TEXT)),
        ("SDXL without its VAE", (_FIRST, _SDXL_TEXT)),
        ("SD 1.5 without its VAE", (_FIRST, _SD1_TEXT)),
        ("a UNet and a VAE, and has no text encoder that vivace knows", (_FIRST, _VAE)),
        (
            "a UNet without its VAE and text encoders, of SDXL or one like it",
            (_FIRST, "label_emb.0.0.weight"),
        ),
        ("a UNet without its VAE and text encoders", (_FIRST,)),
    ),
    *_refused(
        _FOLDER,
        (f"a UNet whose input ({_FIRST}) has not 4 channels, or was written with another shape", (_FIRST,)),
    ),
    # One component in diffusers' layout.
    *_refused(
        "one component in diffusers' layout; give the folder of the whole pipeline",
        (
            "FLUX.1's transformer",
            ("single_transformer_blocks.0.*", "x_embedder.weight", "context_embedder.weight"),
        ),
        (
            "SD 3's transformer",
            ("transformer_blocks.0.attn.add_q_proj.*", "pos_embed.*", "context_embedder.weight"),
        ),
        ("SDXL's UNet", ("down_blocks.0.resnets.0.*", "add_embedding.linear_1.weight")),
        ("a VAE", ("decoder.up_blocks.0.*", "decoder.mid_block.*")),
        ("a UNet", ("down_blocks.0.*", "mid_block.*")),
        ("a part of a UNet", ("down_blocks.*",)),
        ("a transformer", ("transformer_blocks.0.*",)),
    ),
    # Other parts.
    *_refused(
        _WITH_MODEL,
        ("an IP-Adapter, not a model", ("ip_adapter.*",)),
        ("an IP-Adapter, not a model", ("image_proj.*",)),
        ("an embedding (textual inversion), not a model", ("emb_params",)),
        ("an embedding (textual inversion), not a model", ("string_to_param.*",)),
        ("an embedding (textual inversion), not a model", ("clip_g", "clip_l")),
        ("a safety checker, not a model", ("concept_embeds",)),
        ("an upscaler's network, not a model", ("body.0.rdb1.conv1.weight",)),
        ("an upscaler's network, not a model", ("model.1.sub.0.*",)),
    ),
    *_refused(
        _REST,
        ("a VAE alone (of Wan)", ("decoder.middle.0.residual.0.gamma",)),
        ("a VAE alone (a deep-compression autoencoder)", ("decoder.stages.*",)),
        ("a VAE alone", ("first_stage_model.*",)),
        ("a VAE alone", ("decoder.*",)),
        ("a VAE alone", ("vae.*",)),
        ("a text encoder alone (CLIP)", ("text_model.*",)),
        ("a text encoder alone (T5)", ("encoder.block.*",)),
        ("a text encoder alone (OpenCLIP)", ("transformer.resblocks.0.*",)),
        ("a text encoder alone", ("cond_stage_model.*",)),
        ("a text encoder alone", ("conditioner.*",)),
        ("a text encoder alone", ("text_encoders.*",)),
        ("an image encoder alone (CLIP)", ("vision_model.*",)),
        ("a language model, such as the text encoder of some model, alone", ("model.embed_tokens.weight",)),
        ("a language model, such as the text encoder of some model, alone", ("model.language_model.*",)),
        ("a language model in llama.cpp's layout alone", ("token_embd.weight",)),
    ),
)


class TensorNames:
    """The names of a file's tensors, without their denoiser's prefix."""

    def __init__(self, names: Iterable[str], prefix: str | None = None) -> None:
        """Strip the denoiser's prefix, or the one that is given, from the names in the file."""
        tensor_names = list(names)
        self.prefix = _prefix_of(tensor_names) if prefix is None else prefix
        self.own = {name.removeprefix(self.prefix): name for name in tensor_names}

    def has(self, pattern: str) -> bool:
        """Return whether a tensor has a name."""
        text = pattern.strip("*")
        if pattern.startswith("*") and pattern.endswith("*"):
            return any(text in name for name in self.own)
        if pattern.startswith("*"):
            return any(name.endswith(text) for name in self.own)
        if pattern.endswith("*"):
            return any(name.startswith(text) for name in self.own)
        return pattern in self.own


def _prefix_of(names: Iterable[str]) -> str:
    """Return the first of the denoiser's prefixes that any tensor has."""
    names = list(names)
    return next(prefix for prefix in DENOISER_PREFIXES if any(name.startswith(prefix) for name in names))


def signature_of(names: TensorNames, tensors: Mapping[str, Any]) -> Signature | None:
    """Return the row of the table that a file's tensors fit; None if they fit no row.

    Args:
        tensors: shape and dtype of each tensor by its name in the file, as `read_header` returns them.
    """

    def fits(row: Signature) -> bool:
        return all(names.has(pattern) for pattern in row.has) and all(
            names.own.get(name) is not None and tensors[names.own[name]]["shape"][axis : axis + 1] == [length]
            for name, axis, length in row.sizes
        )

    return next((row for row in SIGNATURES if fits(row)), None)


def behind_prefix(tensors: Mapping[str, Any]) -> tuple[str, Signature] | None:
    """Return a prefix that vivace does not know, and the row that a file's tensors fit without it; None without one."""
    words = [name.split(".")[:-1][:_MOST_PREFIXES] for name in tensors]
    shares = Counter(".".join(each[: k + 1]) + "." for each in words for k in range(len(each)))
    for prefix, number in shares.most_common(_MOST_PREFIXES):
        row = signature_of(TensorNames(tensors, prefix), tensors) if 2 * number >= len(tensors) else None
        if row is not None:
            return prefix, row
    return None
