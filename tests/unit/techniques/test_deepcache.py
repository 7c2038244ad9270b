"""A UNet's deep features, kept between steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import exported
from tests.families import build, draw, drawn, psnr, session
from tests.targets import target_of
from tests.unit.techniques import halved
from vivace.errors import RecipeError, Unsupported
from vivace.measure.flops import count_denoiser
from vivace.measure.timer import PipelineTimer
from vivace.memory.predict import predict
from vivace.memory.weightless import find_weightless
from vivace.recipes.resolve import resolve
from vivace.techniques.deepcache import Deepcache

UNETS = ("sd", "sdxl")
NUM_SKIPS = {"sd": 6, "sdxl": 6}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def inputs(unet: Any, side: int = 8, batch: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found: dict[str, Any] = {
        "sample": noise(batch, 4, side, side),
        "timestep": torch.tensor(500.0),
        "encoder_hidden_states": noise(batch, 7, unet.config.cross_attention_dim),
        "return_dict": False,
    }
    if unet.config.addition_embed_type == "text_time":
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        found["added_cond_kwargs"] = {"text_embeds": noise(batch, pooled), "time_ids": noise(batch, 6)}
    return found


@pytest.mark.parametrize("family", UNETS)
@pytest.mark.parametrize("branch", range(6))
@pytest.mark.parametrize("side", [8, 10])  # 10 cells cannot be halved as often as the UNet does
@pytest.mark.diagonal
def test_a_hit_on_what_was_computed_is_the_same(family: str, branch: int, side: int) -> None:
    pipe = build(family)
    given = inputs(pipe.unet, side)
    with torch.no_grad():
        (wanted,) = pipe.unet(**given)
        made = vivace.apply(pipe, f"deepcache(2, branch={branch})")
        (whole,) = pipe.unet(**given)
        (hit,) = pipe.unet(**given)
        other = pipe.unet(**given | {"return_dict": True}).sample
    assert made.evidence() == {"cache_hit_rate": pytest.approx(1 / 3), "cache_calls": 3}
    for result in (whole, hit, other):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("family", UNETS)
def test_a_hit_computes_the_outer_layers_alone(family: str) -> None:
    counted, size = [], {"height": 64, "width": 64, "text_length": 7}
    for branch in range(NUM_SKIPS[family]):
        pipe = build(family)
        alone = count_denoiser(pipe.unet, **size).total
        vivace.apply(pipe, f"deepcache(2, branch={branch})")
        whole, hit = (count_denoiser(pipe.unet, **size).total for _ in range(2))
        assert whole == alone, "nothing is computed for the cache's own sake"
        counted.append(hit / whole)
    assert counted[0] < 0.2
    assert counted == sorted(counted)
    assert counted[-1] < 1


@pytest.mark.parametrize("family", UNETS)
def test_every_call_starts_anew(family: str) -> None:
    made = session(family, "deepcache(3)")
    first = draw(made, num_inference_steps=7)
    assert made.evidence() == {"cache_hit_rate": pytest.approx(4 / 7), "cache_calls": 7}
    assert np.array_equal(draw(made, num_inference_steps=7), first)
    assert made.evidence() == {"cache_hit_rate": pytest.approx(4 / 7), "cache_calls": 14}

    def fail(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    # A pipeline that failed never reached its end, where it empties caches.
    with pytest.raises(RuntimeError, match="in the middle"):
        draw(made, num_inference_steps=7, callback_on_step_end=fail)
    assert np.array_equal(draw(made, num_inference_steps=7), first)
    generator = torch.Generator().manual_seed(0)
    told = {"height": 64, "width": 64, "num_inference_steps": 7, "output_type": "np"}
    for _ in range(2):  # the pipeline itself, without the session around it
        picture = made.pipe("a red circle", generator=generator.manual_seed(0), **told).images
        assert np.array_equal(picture, first)


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
def test_schedules(recipe: str, num_hits: int) -> None:
    made = session("sd", recipe)
    draw(made, num_inference_steps=8 if recipe != "deepcache" else 7)
    calls = made.evidence()["cache_calls"]
    assert round(float(made.evidence()["cache_hit_rate"]) * float(calls)) == num_hits
    assert made.refuted({}) is None


def test_batches_and_guidance_that_is_cut_off() -> None:
    made = session("sd", "deepcache(3)+cfg_cutoff(0.5)")
    pictures = draw(made, ["a red circle", "a blue square"], num_inference_steps=8)
    # Four steps of guidance (full at 0 and 3), then rows of another number: full at 4 and 7.
    assert made.evidence()["cache_hit_rate"] == pytest.approx(4 / 8)
    for k, prompt in enumerate(["a red circle", "a blue square"]):
        alone = draw(session("sd", "deepcache(3)+cfg_cutoff(0.5)"), prompt, seed=k, num_inference_steps=8)
        assert psnr(pictures[k : k + 1], alone) > 60, "neighbours do not change each other"
    without = session("sd", "deepcache(3)+guidance(1)")
    assert draw(without).shape == (1, 64, 64, 3)


@pytest.mark.parametrize(("extra", "graphs"), [("", 2), ("+cfg_cutoff(0.5)", 4), ("+bf16+channels_last", 2)])
@pytest.mark.parametrize("family", UNETS)
@pytest.mark.quick("sd--2")
@pytest.mark.long
@pytest.mark.exhaustive("sdxl*", "*bf16*", "*cutoff*")
def test_compiled_it_is_two_graphs_without_a_break(family: str, extra: str, graphs: int) -> None:
    alone = drawn(family, "deepcache(2)" + extra, num_inference_steps=8)
    made = session(family, "deepcache(2)+compile(backend=eager)" + extra)
    for _ in range(2):
        assert psnr(draw(made, num_inference_steps=8), alone) > (25 if "bf16" in extra else 80)
        found = made.evidence()
        assert (found["compiled_graphs"], found["graph_breaks"]) == (graphs, 0), "none in the second call"
    assert found["cache_hit_rate"] == 0.5


@pytest.mark.parametrize("family", UNETS)
def test_recorded_it_is_two_graphs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    halved.check_recorded(family, "deepcache(2)", monkeypatch)


@pytest.mark.parametrize("recipe", [*halved.COMPANY, "compile(backend=eager, blocks=repeated)"])
@pytest.mark.parametrize("family", UNETS)
@pytest.mark.diagonal
def test_it_composes(family: str, recipe: str) -> None:
    halved.check_it_composes(family, "deepcache(2)", recipe)


def test_a_batch_in_one_context_is_timed_once_a_step() -> None:
    made = session("sd", "deepcache(2)")
    _, sample = PipelineTimer(made.pipe, "cpu").time_call(lambda: draw(made, num_inference_steps=5), 0)
    assert sample.num_denoiser_calls == 5


def test_other_residuals() -> None:
    """What a control net adds at the outer skip connections is added in hits too; an adapter's forbids them."""
    pipe = build("sd")
    given = inputs(pipe.unet)
    skips: list[torch.Tensor] = []
    middle: list[torch.Tensor] = []
    hooks = [b.register_forward_hook(lambda _, __, o: skips.extend(o[1])) for b in pipe.unet.down_blocks]
    hooks.append(pipe.unet.conv_in.register_forward_hook(lambda _, __, o: skips.append(o)))
    hooks.append(pipe.unet.mid_block.register_forward_hook(lambda _, __, o: middle.append(o)))
    with torch.no_grad():
        pipe.unet(**given)
        for hook in hooks:
            hook.remove()
        added = {
            "down_block_additional_residuals": [0.1 * torch.ones_like(skip) for skip in skips],
            "mid_block_additional_residual": 0.1 * torch.ones_like(middle[0]),
        }
        (wanted,) = pipe.unet(**given, **added)
        made = vivace.apply(pipe, "deepcache(2, branch=1)")
        assert torch.equal(pipe.unet(**given, **added)[0], wanted)
        assert torch.equal(pipe.unet(**given, **added)[0], wanted)
        assert made.evidence()["cache_hit_rate"] == 0.5
        for _ in range(2):
            pipe.unet(**given, down_intrablock_additional_residuals=[])
        assert made.evidence()["cache_hit_rate"] == 0.25, "no further hit"


def test_what_cannot_be_is_said_in_words() -> None:
    with pytest.raises(Unsupported, match=r"FluxTransformer2DModel is no UNet: it has no skip connections"):
        session("flux", "deepcache")
    with pytest.raises(
        Unsupported, match=r"this UNet has 6 skip connections; give a branch from 0 to 5, got 6"
    ):
        session("sd", "deepcache(branch=6)")
    with pytest.raises(RecipeError, match="give an interval or hits, not both"):
        resolve("deepcache(2, hits=0.5)")
    pipe = build("sd")
    vivace.apply(pipe, "deepcache")
    with pytest.raises(Unsupported, match="only one step cache at a time can work"):
        vivace.apply(pipe, "deepcache")
    with pytest.raises(RecipeError, match="both set the step cache of denoiser"):
        resolve("deepcache+first_block_cache")
    made = session("sd", "deepcache")
    draw(made, num_inference_steps=1)
    assert str(made.refuted({})).startswith(
        "deepcache@denoiser: the cache never hit in 1 call of the denoiser: "
    )


def test_random_weights_take_its_schedule() -> None:
    pipe = build("sdxl")
    target = target_of(pipe=pipe, has_random_weights=True)
    assert Deepcache().unsupported(target) is None


@pytest.mark.usefixtures("shallow")
def test_memory_is_predicted_with_the_feature() -> None:
    # Guidance makes two rows of 320 channels of 128 x 128 cells in fp16.
    feature = 2 * 320 * 128 * 128 * 2
    found = find_weightless("synthetic:sdxl")
    plain, cached = (predict(found, resolve(recipe)) for recipe in ("baseline", "deepcache"))
    assert cached.model_bytes == plain.model_bytes, "its layers are the UNet's own"
    more = cached.stages["vae"] - plain.stages["vae"]
    assert more == pytest.approx(feature, rel=0.1), "while it is kept, which is until the call's end"


def test_a_script_draws_the_same(tmp_path: Path) -> None:
    recipe = "deepcache(2)+steps(4)"
    written = exported.write("tiny-sd", recipe)
    assert written.own == ["deepcache(2)"]
    assert np.array_equal(exported.run(written.text, tmp_path), exported.with_vivace("tiny-sd", recipe))
