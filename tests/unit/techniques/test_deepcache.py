"""A UNet's deep features, kept between steps."""

from typing import Any

import pytest
import torch

import vivace
from benchmarks.flops import count_denoiser
from tests.families import build, draw, session

pytestmark = pytest.mark.usefixtures("short_calls", "fresh_compiler")

UNETS = ("sd", "sdxl")
NUM_SKIPS = {"sd": 6, "sdxl": 6}


def inputs(unet: Any, side: int = 8, batch: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    arguments: dict[str, Any] = {
        "sample": noise(batch, 4, side, side),
        "timestep": torch.tensor(500.0),
        "encoder_hidden_states": noise(batch, 7, unet.config.cross_attention_dim),
        "return_dict": False,
    }
    if unet.config.addition_embed_type == "text_time":
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {"text_embeds": noise(batch, pooled), "time_ids": noise(batch, 6)}
    return arguments


@pytest.mark.parametrize("family", UNETS)
@pytest.mark.parametrize("branch", range(6))
@pytest.mark.parametrize("side", [8, 10])  # 10 cells cannot be halved as often as the UNet does
@pytest.mark.diagonal
def test_a_hit_on_the_same_input_is_the_same_unet_output(family: str, branch: int, side: int) -> None:
    pipe = build(family)
    arguments = inputs(pipe.unet, side)
    with torch.no_grad():
        (expected,) = pipe.unet(**arguments)
        made = vivace.apply(pipe, f"deepcache(2, branch={branch})")
        (whole,) = pipe.unet(**arguments)
        (hit,) = pipe.unet(**arguments)
        other = pipe.unet(**arguments | {"return_dict": True}).sample
    assert made.evidence() == {"cache_hit_rate": pytest.approx(1 / 3), "cache_calls": 3}
    for result in (whole, hit, other):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("family", UNETS)
@pytest.mark.quick("sd")
def test_a_hit_computes_the_outer_layers_alone(family: str) -> None:
    counted, size = [], {"height": 64, "width": 64, "text_length": 7}
    alone = count_denoiser(build(family).unet, **size).total
    for branch in range(NUM_SKIPS[family]):
        pipe = build(family)
        vivace.apply(pipe, f"deepcache(2, branch={branch})")
        whole, hit = (count_denoiser(pipe.unet, **size).total for _ in range(2))
        assert whole == alone, "nothing is computed for the cache's own sake"
        counted.append(hit / whole)
    assert counted[0] < 0.2
    assert counted == sorted(counted)
    assert counted[-1] < 1


@pytest.mark.parametrize(
    ("recipe", "num_hits"),
    [
        ("deepcache", 4),
        ("deepcache(2)", 4),
        ("deepcache(5)", 6),
        ("deepcache(hits=0.3)", 2),
        ("deepcache(hits=0.65)", 4),
    ],
)
def test_which_steps_deepcache_skips(recipe: str, num_hits: int) -> None:
    made = session("sd", recipe)
    draw(made, num_inference_steps=8 if recipe != "deepcache" else 7)
    calls = made.evidence()["cache_calls"]
    assert round(float(made.evidence()["cache_hit_rate"]) * float(calls)) == num_hits
    assert made.refuted({}) is None


def test_other_residuals() -> None:
    """What a control net adds at the outer skip connections is added in hits too; an adapter's forbids them."""
    pipe = build("sd")
    arguments = inputs(pipe.unet)
    skips: list[torch.Tensor] = []
    middle: list[torch.Tensor] = []
    hooks = [b.register_forward_hook(lambda _, __, o: skips.extend(o[1])) for b in pipe.unet.down_blocks]
    hooks.append(pipe.unet.conv_in.register_forward_hook(lambda _, __, o: skips.append(o)))
    hooks.append(pipe.unet.mid_block.register_forward_hook(lambda _, __, o: middle.append(o)))
    with torch.no_grad():
        pipe.unet(**arguments)
        for hook in hooks:
            hook.remove()
        added = {
            "down_block_additional_residuals": [0.1 * torch.ones_like(skip) for skip in skips],
            "mid_block_additional_residual": 0.1 * torch.ones_like(middle[0]),
        }
        (expected,) = pipe.unet(**arguments, **added)
        made = vivace.apply(pipe, "deepcache(2, branch=1)")
        assert torch.equal(pipe.unet(**arguments, **added)[0], expected)
        assert torch.equal(pipe.unet(**arguments, **added)[0], expected)
        assert made.evidence()["cache_hit_rate"] == 0.5
        for _ in range(2):
            pipe.unet(**arguments, down_intrablock_additional_residuals=[])
        assert made.evidence()["cache_hit_rate"] == 0.25, "no further hit"
