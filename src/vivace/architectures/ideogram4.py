"""Ideogram 4: one stream of text and image, the text first and padded on its left, in Z-Image's blocks.

Guidance is another transformer with weights of its own, of the image alone; techniques are applied to the first one,
which reads the text. Source: diffusers, Ideogram4Transformer2DModel, Ideogram4Pipeline.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from vivace.architectures import family
from vivace.architectures.components import FLOW, Architecture, of_diffusers, of_transformers
from vivace.architectures.entry import Entry, Hub
from vivace.architectures.flux2 import FLUX2_VAE
from vivace.architectures.gains import MODULATION, SCALED, SILU, SINUSOID
from vivace.architectures.qwen_image21 import QWEN3_VL_8B

_IMAGE = 2
"""What `indicator` says of the image's tokens."""


def _modulated(block: Any, tokens: Any, call: family.Arguments) -> Any:
    scale = block.adaln_modulation(call[0][3]).chunk(4, dim=-1)[0]
    return block.attention_norm1(tokens) * (1.0 + scale)


class _ImageTokens:
    """How many tokens are the image's, the last ones: read once for each tensor that says what each token is."""

    def __init__(self) -> None:
        self.number = 0
        self._seen: Any = None

    def __call__(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        indicator = kwargs["indicator"]
        if indicator is not self._seen:
            self._seen = indicator
            whole = indicator.shape[1]
            self.number = whole if indicator.is_meta else int((indicator[0] == _IMAGE).sum())


def _entering(transformer: Any, note: family.Note) -> family.Handle:
    """Watch the image's tokens, to which an embedding of what they are is added last."""
    count, latents = _ImageTokens(), list[Any]()

    def embedded(kinds: Any) -> None:
        note((latents.pop() + kinds)[:, -count.number :])

    return family.Handles(
        (
            transformer.register_forward_pre_hook(count, with_kwargs=True),
            family.output_of("input_proj")(transformer, latents.append),
            family.output_of("embed_image_indicator")(transformer, embedded),
        )
    )


def _leaving(transformer: Any, note: family.Note) -> family.Handle:
    count = _ImageTokens()
    last = family.input_of("final_layer")(transformer, lambda tokens: note(tokens[:, -count.number :]))
    return family.Handles((transformer.register_forward_pre_hook(count, with_kwargs=True), last))


def _grid(_: Any, call: family.Arguments) -> tuple[int, int]:
    positions = call[1]["position_ids"][0][call[1]["indicator"][0] == _IMAGE]
    rows, columns = (int(positions[:, axis].max() - positions[:, axis].min()) + 1 for axis in (1, 2))
    return rows, columns


def _sigmas(function: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    is_meta = device is not None and str(device) == "meta"
    return function(*args, device="cpu" if is_meta else device, **kwargs)


def _angles(channels: int, ids: Any) -> tuple[Any, Any]:
    made = ids.new_empty((*ids.shape[:2], channels)).float()
    return made, made


def _run_without_values(pipe: Any, _: int, __: int) -> None:
    """Read the language model's states by its own call, and make the sigmas on the CPU: no values are read then."""
    from diffusers.pipelines.ideogram4 import pipeline_ideogram4 as pipeline

    def states(encoder: Any, ids: Any, *_: Any) -> list[Any]:
        behind = encoder(input_ids=ids.to("meta"), output_hidden_states=True).hidden_states
        return [behind[1 + layer] for layer in pipeline.QWEN3_VL_ACTIVATION_LAYERS]

    # A function of the pipeline's module, which no instance has; on the CPU the numbers are the same.
    if not hasattr(pipeline._logit_normal_sigmas, "func"):
        pipeline._logit_normal_sigmas = functools.partial(_sigmas, pipeline._logit_normal_sigmas)
    pipe._get_text_encoder_hidden_states = states
    pipe.unconditional_transformer.register_forward_pre_hook(family.move_to_meta, with_kwargs=True)
    for transformer in (pipe.transformer, pipe.unconditional_transformer):
        # Within autocast, which takes no meta device.
        positions = transformer.rotary_emb
        positions.forward = functools.partial(_angles, positions.head_dim)


def _gains(transformer: Any) -> family.Rules:
    scaled = SCALED**-0.5
    return [
        (r"input_proj|llm_cond_proj|embed_image_indicator", 1.0),
        (r"t_embedding\.mlp_in", SINUSOID),
        (r"t_embedding\.mlp_out", SILU),
        (r"final_layer\.adaln_modulation", MODULATION),
        (r"adaln_modulation", MODULATION * SILU),
        (r"feed_forward\.w2", SILU),
        (r"to_[qkv]\.|feed_forward\.w[13]", scaled),
        # Two models that are not trained to agree are blended 7 to -6.
        (r"final_layer\.linear", scaled / math.hypot(7, 6)),
    ]


def _norms(transformer: Any) -> family.Rules:
    """Its branches end with a norm."""
    return [(r"(attention|ffn)_norm2", 1 / (MODULATION * math.sqrt(2 * transformer.config.num_layers)))]


# The class's defaults, which are the published models': two transformers of 9.3 B parameters.
_TRANSFORMER = of_diffusers("Ideogram4Transformer2DModel", num_layers=34)
_PARTS = {
    "transformer": _TRANSFORMER,
    "unconditional_transformer": _TRANSFORMER,
    "vae": FLUX2_VAE,
    # Qwen/Qwen3-VL-8B-Instruct without its head.
    "text_encoder": of_transformers("Qwen3VLModel", **QWEN3_VL_8B.config),
}
# The id of diffusers' documentation; the weights of ideogram-ai/ideogram-4-nf4-diffusers are quantised, and those of
# ideogram-4-fp8 in another layout. Size and steps are the pipeline's defaults. It guides at 7, and the last three of 48
# steps at 3; a constant scale is given here, since a schedule is of one number of steps.
_ENTRY = Entry(
    name="ideogram-4",
    summary="Ideogram 4, 9.3 B parameters and as many for guidance, images of four megapixels",
    licence="Ideogram Non-Commercial",
    gated=True,
    origin=Hub(repo="ideogram-ai/ideogram-v4", download_bytes=54_000_000_000),
    pipeline="Ideogram4Pipeline",
    height=2048,
    width=2048,
    num_inference_steps=48,
    guidance_scale=7.0,
    max_sequence_length=2048,
)

IDEOGRAM4 = family.Family(
    name="Ideogram 4",
    denoiser="Ideogram4Transformer2DModel",
    pipelines=(
        family.Pipeline(
            "Ideogram4Pipeline",
            last_text_state=36,
            max_text_length=2048,
            run_without_values=_run_without_values,
        ),
    ),
    models=(
        family.PublishedModel(
            _ENTRY,
            Architecture.of(_ENTRY, _PARTS, of_diffusers(FLOW), {"text_encoder": 2048}),
            title="Ideogram 4",
            labels=r"ideogram[ _-]?(?:v[ _-]?)?4(?!.*instant)",
            # Of the transformer that reads the text; the other computes as much of the image alone, and is not counted.
            step_flop=541_364_720_762_880,
        ),
    ),
    random_weights={"Ideogram4Transformer2DModel": family.RandomWeights(_gains, _norms)},
    not_by_diffusers="it has no enable_cache",
    blocks=family.Blocks(
        chains=("layers",),
        entering=_entering,
        leaving=_leaving,
        modulated=_modulated,
        grid=_grid,
        text=None,
    ),
    fused="ideogram4",
)
