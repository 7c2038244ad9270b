"""Krea 2: one stream of text and image, the text first and padded, in blocks that share one modulation.

The states of twelve layers of a language model are fused inside the transformer, in each step. Guidance is a second
call with a negative prompt, at any scale above 0. Source: diffusers, Krea2Transformer2DModel, Krea2Pipeline.
"""

from __future__ import annotations

import math
from typing import Any

from vivace.architectures import components, family
from vivace.architectures.entry import TAEW21_FILES, Entry, Hub
from vivace.architectures.gains import GELU, MODULATED, MODULATION, SIGMOID, SILU, SINUSOID


def _modulated(block: Any, tokens: Any, call: family.Arguments) -> Any:
    shared = call[0][1]
    modulation = shared.unflatten(-1, (6, -1)) + block.scale_shift_table
    scale, shift = modulation.unbind(-2)[:2]
    return (1.0 + scale) * block.norm1(tokens) + shift


def _grid(_: Any, call: family.Arguments) -> tuple[int, int]:
    """Return the grid; its last token is that of the last row and column. ValueError where they are no image's."""
    kwargs = call[1]
    rows, columns = (int(place) + 1 for place in kwargs["position_ids"][-1, 1:])
    count = kwargs["hidden_states"].shape[1]
    if rows * columns != count:
        raise ValueError(f"the positions of the {count} image tokens are not those of an image, row by row")
    return rows, columns


def _gains(transformer: Any) -> family.Rules:
    config = transformer.config
    fusing = 1 / math.sqrt(2 * (config.num_layerwise_text_blocks + config.num_refiner_text_blocks))
    last = 1 / (MODULATION * math.sqrt(2 * config.num_layers))
    return [
        (r"time_embed\.linear_1", SINUSOID),
        (r"time_embed\.linear_2|txt_in\.linear_2", GELU),
        (r"time_mod_proj", MODULATION * GELU),
        (r"text_fusion.*to_out\.0", fusing / SIGMOID),
        (r"text_fusion.*down", SILU * fusing),
        (r"text_fusion", 1.0),
        (r"to_out\.0", last / SIGMOID),
        (r"ff\.down", SILU * last),
        (r"to_([qkv]|gate)\.|ff\.(gate|up)", MODULATED**-0.5),
        (r"final_layer\.linear", 3**-0.5),  # modulated by an embedding of unit variance
    ]


def _norms(_: Any) -> family.Rules:
    """All of its norms add 1 to their weight."""
    return [(r"norm", 0.0)]


# Qwen/Qwen3-VL-4B-Instruct without its head, as text_encoder of Krea 2, which does not call its vision tower.
QWEN3_VL_4B_BODY = components.of_transformers(
    "Qwen3VLModel",
    text_config={
        "model_type": "qwen3_vl_text",
        **components.QWEN3_4B,
        "max_position_embeddings": 262144,
        "rope_parameters": components.rope(5_000_000.0) | {"mrope_section": [24, 20, 20]},
    },
    vision_config={
        "model_type": "qwen3_vl_vision",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    tie_word_embeddings=True,
)
# krea/Krea-2-Raw and Krea-2-Turbo: the class's default.
_KREA2 = components.of_diffusers("Krea2Transformer2DModel", num_layers=28)
# Its pipeline computes the shift from the number of tokens; of Krea 2 Turbo it is 1.15.
_KREA2_FLOW = components.of_diffusers(components.FLOW, use_dynamic_shifting=True, max_image_seq_len=6400)


def _publish(
    kind: str, labels: str, step_flop: int, *, is_distilled: bool, **own: Any
) -> family.PublishedModel:
    entry = Entry(
        name=f"krea-2-{kind.lower()}",
        licence="Krea 2 Community",
        gated=True,
        origin=Hub(repo=f"krea/Krea-2-{kind}", tiny_vae=TAEW21_FILES, download_bytes=34_770_000_000),
        pipeline="Krea2Pipeline",
        max_sequence_length=512,
        **own,
    )
    parts = {"transformer": _KREA2, "vae": components.QWEN_IMAGE_VAE, "text_encoder": QWEN3_VL_4B_BODY}
    architecture = components.Architecture.of(
        entry, parts, _KREA2_FLOW, {"text_encoder": 512}, is_distilled=is_distilled
    )
    return family.PublishedModel(entry, architecture, f"Krea 2 {kind}", labels, step_flop)


# Steps and guidance of both from diffusers' documentation; the card of the second is quoted with 52 steps and guidance
# 3.5. The licence is that of their pages, access as others report it; the download is counted from the parameters in
# bf16.
_MODELS = (
    _publish(
        "Turbo",
        r"krea[ _-]?2.*turbo",
        128_987_188_690_944,
        is_distilled=True,
        summary="Krea 2 Turbo, 12.8 B parameters, one stream of text and image, distilled to 8 steps",
        num_inference_steps=8,
        guidance_scale=0.0,
    ),
    # Its velocity is that with the prompt, and the scale times what it differs from that without: 4.5 is 5.5 elsewhere.
    _publish(
        "Raw",
        r"krea[ _-]?2.*raw",
        257_974_377_381_888,
        is_distilled=False,
        summary="Krea 2 Raw, 12.8 B parameters, guidance in a second call",
        num_inference_steps=28,
        guidance_scale=4.5,
        arguments={"negative_prompt": ""},
    ),
)

KREA2 = family.Family(
    name="Krea 2",
    denoiser="Krea2Transformer2DModel",
    pipelines=(family.Pipeline("Krea2Pipeline"),),
    files=family.SingleFiles((family.Signature("Krea 2", ("txtfusion.projector.weight",)),)),
    models=_MODELS,
    random_weights={
        "Krea2Transformer2DModel": family.RandomWeights(_gains, _norms),
    },
    not_by_diffusers="it has no enable_cache",
    blocks=family.Blocks(
        chains=("transformer_blocks",),
        entering=family.output_of("img_in"),
        leaving=family.input_of("final_layer"),
        modulated=_modulated,
        grid=_grid,
        text=None,
        outside="the fusion of the text's states",
    ),
    fused="krea2",
    projects_apart=True,
)
