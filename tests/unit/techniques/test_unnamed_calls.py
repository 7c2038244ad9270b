"""A pipeline of no known family that guides with a second call and does not say which call is which."""

import copy
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel

import vivace
from tests.families import build
from vivace.architectures import FAMILIES
from vivace.errors import Unsupported
from vivace.machinery.step_caching.step_cache import guides_in_unnamed_calls


class OtherPipeline(ChromaPipeline):
    pass


@pytest.fixture(scope="module")
def other() -> Any:
    """Random weights beside tiny-flux's text encoder and VAE."""
    flux = build("flux")
    config = flux.transformer.config
    torch.manual_seed(0)
    transformer = ChromaTransformer2DModel(
        in_channels=config.in_channels,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=2,
        joint_attention_dim=config.joint_attention_dim,
        axes_dims_rope=tuple(config.axes_dims_rope),
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    pipe = OtherPipeline(
        scheduler=flux.scheduler,
        vae=flux.vae,
        text_encoder=flux.text_encoder_2,
        tokenizer=flux.tokenizer_2,
        transformer=transformer.eval().requires_grad_(False),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(session: Any, prompt: str | list[str] = "a red circle") -> np.ndarray:
    return session(
        prompt,
        generator=torch.Generator().manual_seed(0),
        num_inference_steps=2,
        height=64,
        width=64,
        max_sequence_length=32,
        output_type="np",
    ).images


@pytest.mark.parametrize(
    "recipe", ["teacache(hits=0.5)", "cfg_cutoff(0.5)", "pyramid_attention", "taylorseer(hits=0.5)"]
)
def test_what_would_mix_or_halve_its_calls_is_refused(other: Any, recipe: str) -> None:
    with pytest.raises(Unsupported) as refused:
        vivace.apply(copy.deepcopy(other), recipe)
    assert "OtherPipeline" in str(refused.value)
    assert "call" in str(refused.value)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
def test_what_leaves_its_calls_alone_works(other: Any) -> None:
    expected = draw(other)
    picture = draw(vivace.apply(copy.deepcopy(other), "fuse_qkv+attention(math)+prompt_cache"))
    assert np.abs(picture - expected).max() < 1e-3


@pytest.mark.parametrize(
    "pipeline", [name for family in FAMILIES for name in (each.name for each in family.pipelines)]
)
def test_no_known_pipeline_is_taken_for_one(pipeline: str) -> None:
    """SD 3's has a second call too: of guidance by skipped layers."""
    is_one = guides_in_unnamed_calls(object.__new__(getattr(diffusers, pipeline)))
    assert is_one == (pipeline in ("ChromaPipeline", "Krea2Pipeline"))
