"""Models that vivace knows by name alone: what it says of their files, and that a text means one of them."""

from __future__ import annotations

from vivace.architectures.family import Signature, refuse

OTHER_NAMES = (
    r"\bsd(?![a-z])|xl\b|diffusion|qwen|pixart|hunyuan|lumina|kolors|klein|chroma|hidream|pony|playground|kandinsky"
    r"|\bwan\b"
)
"""Names in tables of others, besides those of the families: a regular expression."""
_FLUX_KEY_NORM = "double_blocks.0.img_attn.norm.key_norm.scale"
_NO_IMAGES = "vivace makes single images from text; {supported}"
CONFUSABLE: tuple[Signature, ...] = (
    *refuse(
        "diffusers 0.42.1 draws with it in modular blocks alone, and vivace with pipelines; {supported}",
        ("FLUX.3, which has no pipeline in diffusers", ("early_stream_modulations.image.lin.weight",)),
        (
            "FLUX.3 in diffusers' layout, which has no pipeline in diffusers",
            ("early_stream_modulations.image.linear.weight",),
        ),
    ),
    *refuse(_NO_IMAGES, ("an AnimateDiff motion module", ("*.motion_modules.0.*",))),
)
"""Those that have the tensors of a family, too."""
OTHERS: tuple[Signature, ...] = (
    *refuse(
        "",
        ("AuraFlow", ("double_layers.0.*", "cond_seq_linear.weight")),
        ("AuraFlow in diffusers' layout", ("joint_transformer_blocks.0.*", "register_tokens")),
        ("HiDream", ("double_stream_blocks.0.block.*",)),
        ("OmniGen2", ("time_caption_embed.*", "ref_image_refiner.*")),
        ("Lumina 2", ("cap_embedder.*", "noise_refiner.*")),
        ("Lumina 2", ("cap_embedder.0.weight",)),
        ("Lumina 2 in diffusers' layout", ("time_caption_embed.*", "noise_refiner.*")),
        ("Lumina", ("cap_embedder.1.weight", "layers.0.*")),
        ("HunyuanDiT", ("mlp_t5.0.weight",)),
        ("HunyuanImage, or HunyuanVideo 1.5", ("double_blocks.0.*", "byt5_in.*")),
        ("PixArt", ("t_block.1.weight", "blocks.0.scale_shift_table")),
        (
            "PixArt in diffusers' layout",
            ("adaln_single.linear.weight", "caption_projection.linear_1.weight", "pos_embed.*"),
        ),
        ("Stable Cascade's stage C", ("clip_txt_mapper.weight",)),
        ("Stable Cascade's stage B", ("down_blocks.1.0.channelwise.0.weight",)),
        ("Kolors", ("encoder_hid_proj.weight", "add_embedding.linear_1.weight")),
        ("Kandinsky 5", ("visual_transformer_blocks.0.*",)),
        ("DeepFloyd IF", ("encoder_hid_proj.weight", "add_embedding.norm1.weight")),
    ),
    *refuse(
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
        ("Stable Audio, which makes sound", ("pretransform.*",)),
    ),
    *refuse(
        "",
        (
            "part of a FLUX.1 transformer with scaled fp8 weights, without its input",
            (_FLUX_KEY_NORM, "*scaled_fp8"),
        ),
        ("part of a FLUX.1 transformer, without its input", (_FLUX_KEY_NORM,)),
        ("a model with FLUX's blocks, but another one", ("double_blocks.0.*", "single_blocks.0.*")),
    ),
    *refuse(
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
    ),
    *refuse(
        "give the file that holds the whole model, or a folder in diffusers' format with all parts ({supported})",
        ("a VAE alone (of Wan)", ("decoder.middle.0.residual.0.gamma",)),
    ),
)
"""Those that no family's signature fits."""
