"""What every step cache does: start anew in each call, go with other techniques, be compiled and recorded.

What is one cache's own (its schedule, its criterion, its refusals) is in the file of its name.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

import vivace
from benchmarks.flops import count_denoiser
from tests import exported
from tests.families import build, draw, drawn, psnr
from tests.unit.techniques.test_cuda_graph import apply as apply_cuda_graph
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.step_caching import model_fits
from vivace.measure.accelerator import PipelineTimer
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import Prediction, predict
from vivace.runtime.memory.weightless import find_weightless

pytestmark = pytest.mark.usefixtures("small_images")

LINE = model_fits.Fit((1.0, 0.0), model="a line", high=10.0)
RATIOS = model_fits.Ratios(tuple(float(ratio) for ratio in FLUX_MAG_RATIOS), model="FLUX's")


@dataclass(frozen=True)
class Cache:
    """A cache on a small model.

    Attributes:
        steps: of a call.
    """

    family: str
    recipe: str
    steps: int = 12

    def pipe(self) -> Any:
        """Return a pipeline that holds what the cache was calibrated with."""
        pipe = build(self.family)
        if self.recipe.startswith("teacache"):
            model_fits.keep(LINE, pipe.transformer)
        if self.recipe.startswith("magcache"):
            model_fits.keep(RATIOS, pipe.transformer)
        return pipe

    def session(self, extra: str = "") -> Any:
        return vivace.apply(self.pipe(), self.recipe + extra)

    def draw(self, session: Any, prompt: Any = "a red circle", **call: Any) -> np.ndarray:
        return draw(session, prompt, **{"num_inference_steps": self.steps} | call)

    def latents(self, session: Any, prompt: Any = "a red circle", **call: Any) -> np.ndarray:
        """Return what `draw` decodes: enough where the decoder plays no part, in two thirds of the time."""
        return self.draw(session, prompt, output_type="latent", **call)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is compiled and calibrated to one test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))


def _id(value: Any) -> str | None:
    return f"{value.family}-{value.recipe}" if isinstance(value, Cache) else None


# A call

ANEW = [
    Cache("sd", "deepcache(3)", 7),
    Cache("sd", "faster_cache(hits=0.65)", 8),
    Cache("flux", "dual_block_cache(0.2, last=1, order=1)"),
    Cache("flux", "dual_block_cache(mask=2c2h1c)"),
    Cache("flux", "magcache(0.3)", 14),
    Cache("sd", "pyramid_attention(hits=0.65)"),
    Cache("flux", "pyramid_attention(hits=0.65)"),
    Cache("flux", "seacache(hits=0.5, order=1)"),
    Cache("flux", "seacache(0.5, order=1)"),
    Cache("sd", "taylorseer(2, order=2)"),
    Cache("flux", "taylorseer(2, order=2)"),
    Cache("flux", "teacache(hits=0.5)"),
    Cache("flux", "teacache(0.3)"),
]


@pytest.mark.parametrize("cache", ANEW, ids=_id)
@pytest.mark.quick("sd-faster*", "flux-dual*order=1*", "flux-mag*", "sd-taylor*", "flux-teacache(0.3)")
def test_every_call_starts_anew(cache: Cache) -> None:
    made = cache.session()
    first = cache.latents(made)
    evidence = made.evidence()
    assert np.array_equal(cache.latents(made), first)
    assert made.evidence()["cache_hit_rate"] == evidence["cache_hit_rate"]
    if "cache_calls" in evidence:
        assert made.evidence()["cache_calls"] == 2 * evidence["cache_calls"]

    def fail(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    # A pipeline that failed never reached its end, where it empties caches.
    with pytest.raises(RuntimeError, match="in the middle"):
        cache.draw(made, callback_on_step_end=fail)
    assert np.array_equal(cache.latents(made), first)


@pytest.mark.parametrize(
    ("cache", "hits"),
    [
        # Four steps of guidance (full at 0 and 3), then rows of another number: full at 4 and 7.
        (Cache("sd", "deepcache(3)"), 4),
        # When the batch has shrunk already nothing is split.
        (Cache("sd", "faster_cache(2, start=1001)"), 2),
        # Hits at 2, 4, 6, but for 4, where the rows are others.
        (Cache("sd", "pyramid_attention(hits=0.5)"), 2),
        (Cache("sd", "taylorseer(hits=0.5)"), 2),
    ],
    ids=_id,
)
@pytest.mark.quick("sd-faster*")
def test_batches_and_guidance_that_is_cut_off(cache: Cache, hits: int) -> None:
    cache = replace(cache, steps=8)
    made = cache.session("+cfg_cutoff(0.5)")
    prompts = ["a red circle", "a blue square"]
    images = cache.draw(made, prompts)
    evidence = made.evidence()
    if cache.recipe.startswith("faster_cache"):
        counts = [evidence[name] for name in ("half_batch_calls", "whole_batch_calls", "unguided_calls")]
        assert counts == [hits, 2, 4]
    else:
        assert evidence["cache_hit_rate"] == pytest.approx(hits / 8)
    for k, prompt in enumerate(prompts):
        alone = cache.draw(made, prompt, seed=k)
        assert psnr(images[k : k + 1], alone) > 60, "neighbours do not change each other"


@pytest.mark.parametrize(
    "cache",
    [
        Cache("sd", "deepcache(2)", 5),
        Cache("sd", "faster_cache(2, start=1001)", 5),
        Cache("flux", "dual_block_cache(0.2)", 6),
        Cache("flux", "seacache(0.5)", 6),
        Cache("flux", "teacache(0.3)", 6),
    ],
    ids=_id,
)
@pytest.mark.quick("sd-faster*", "flux-dual*", "flux-seacache*")
def test_a_look_is_no_step_of_its_own(cache: Cache) -> None:
    """Batches in one context, and looks at the first blocks alone, are timed once a step."""
    made = cache.session()
    _, sample = PipelineTimer(made.pipe, "cpu").time_call(lambda: cache.draw(made), 0)
    assert sample.num_denoiser_calls == cache.steps


@pytest.mark.parametrize(
    ("name", "thresholds", "rates"),
    [
        # Where the table says that nothing changes; all but the first fifth.
        ("magcache({}, max_skip=100)", (0.0, 0.1, 10.0), (1 / 14, 11 / 14)),
        # All but the first and the last step.
        ("seacache({}, max_skip=100)", (0.0, 0.5, 10.0), (0.0, 10 / 12)),
        ("teacache({})", (0.0, 0.3, 10.0), (0.0, 10 / 12)),
    ],
    ids=["magcache", "seacache", "teacache"],
)
@pytest.mark.quick("teacache")
def test_a_higher_threshold_hits_more(
    name: str, thresholds: tuple[float, ...], rates: tuple[float, float]
) -> None:
    measured = []
    for threshold in thresholds:
        cache = Cache("flux", name.format(threshold), 14 if name.startswith("magcache") else 12)
        made = cache.session()
        cache.latents(made)
        measured.append(float(made.evidence()["cache_hit_rate"]))
        assert (made.refuted({}) is None) == (measured[-1] > 0)
    assert (measured[0], measured[-1]) == pytest.approx(rates)
    assert measured == sorted(set(measured))


@pytest.mark.parametrize(
    ("cache", "near_db"),
    [
        (Cache("flux", "dual_block_cache(0.3, first=2, last=1)"), 25),
        (Cache("flux", "seacache(0.5)"), 18),
        (Cache("flux", "teacache(hits=0.5)"), 18),
    ],
    ids=_id,
)
@pytest.mark.quick("flux-dual*", "flux-teacache*")
def test_guidance_in_two_calls_has_a_cache_for_each(cache: Cache, near_db: float) -> None:
    guided: dict[str, Any] = {"true_cfg_scale": 2.0, "negative_prompt": "a blue square"}
    made = cache.session()
    image = cache.draw(made, **guided)
    evidence = made.evidence()
    assert evidence["cache_calls"] == 24
    assert 0.2 < evidence["cache_hit_rate"] < 0.8
    whole = drawn("flux", num_inference_steps=12, **guided)
    assert psnr(image, whole) > near_db
    assert psnr(image, drawn("flux", num_inference_steps=12)) < psnr(image, whole)


# Graphs

RECORDED = [
    (Cache("sd", "deepcache(2)", 4), 2),
    (Cache("sd", "faster_cache(2, start=1001)", 4), 2),
    (Cache("flux", "dual_block_cache(0.2, last=1)"), 3),
    (Cache("flux", "dual_block_cache(mask=2c1h1c, last=1, order=1)"), 2),
    (Cache("sd", "pyramid_attention(hits=0.5)", 8), 2),
    (Cache("flux", "pyramid_attention(hits=0.5)", 8), 2),
    (Cache("flux", "seacache(hits=0.5, order=1)"), 2),
    (Cache("flux", "seacache(0.5)"), 3),
    (Cache("sd", "taylorseer", 8), 2),
    (Cache("flux", "taylorseer", 8), 2),
    (Cache("flux", "teacache(hits=0.5)", 6), 2),
    (Cache("flux", "teacache(0.3)", 6), 3),
]


@pytest.mark.parametrize(("cache", "graphs"), RECORDED, ids=_id)
@pytest.mark.quick("sd-deepcache*", "flux-dual*order=1*", "flux-tea*0.3*")
def test_recorded(cache: Cache, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = cache.latents(cache.session())
    pipe = cache.pipe()
    made = vivace.apply(pipe, cache.recipe)
    effect = apply_cuda_graph(pipe, monkeypatch)
    for _ in range(2):
        assert psnr(cache.latents(made), alone) > 60
    assert effect.evidence()["cuda_graphs_recorded"] == graphs


COMPILED_WHOLE = [
    (Cache("sd", "deepcache(2)", 8), "", 2),
    (Cache("sd", "deepcache(2)", 8), "+cfg_cutoff(0.5)", 4),
    (Cache("sdxl", "deepcache(2)", 8), "+bf16+channels_last", 2),
    (Cache("sd", "faster_cache(2, start=1001)", 8), "", 2),
    (Cache("sdxl", "faster_cache(2, start=1001)", 8), "+cfg_cutoff(0.5)", 3),
    (Cache("flux", "dual_block_cache(0.2, last=1)"), "", 3),
    (Cache("flux", "dual_block_cache(mask=2c1h1c, last=1, order=1)"), "", 2),
    (Cache("flux", "pyramid_attention(hits=0.5)"), "", 2),
    (Cache("sd", "pyramid_attention(hits=0.5)"), "", 2),
    (Cache("flux", "seacache(0.5)"), "", 3),
    (Cache("flux", "taylorseer"), "+bf16", 2),
    (Cache("sd", "taylorseer"), "", 2),
    (Cache("flux", "teacache(hits=0.5)"), "", 2),
    (Cache("flux", "teacache(0.3)"), "", 3),
]


@pytest.mark.parametrize(("cache", "extra", "graphs"), COMPILED_WHOLE, ids=_id)
@pytest.mark.long
@pytest.mark.exhaustive(
    "sdxl-*",
    "sd-faster*",
    "sd-taylor*",
    "sd-pyramid*",
    "*bf16*",
    "*cutoff*",
    "*mask*",
    "flux-sea*",
    "flux-dual*",
)
def test_compiled_it_has_no_break(cache: Cache, extra: str, graphs: int) -> None:
    alone = cache.latents(cache.session(extra))
    made = cache.session(f"{extra}+compile(backend=eager)")
    for _ in range(2):
        assert psnr(cache.latents(made), alone) > (20 if "bf16" in extra else 60)
        evidence = made.evidence()
        assert (evidence["compiled_graphs"], evidence["graph_breaks"]) == (graphs, 0), (
            "none in the second call"
        )


# Scripts


@pytest.mark.parametrize(
    ("model", "recipe", "own"),
    [
        ("tiny-sd", "deepcache(2)+steps(4)", ["deepcache(2)"]),
        ("tiny-sd", "faster_cache(3)+steps(6)", ["faster_cache(3)"]),
        ("tiny-flux", "pyramid_attention(3)+steps(8)", []),
        ("tiny-flux", "pyramid_attention(hits=0.5)+steps(8)", ["pyramid_attention(hits=0.5)"]),
        ("tiny-flux", "taylorseer(2)+steps(8)", []),
        ("tiny-flux", "bf16+taylorseer(2)+steps(8)", ["taylorseer(2)"]),
    ],
)
@pytest.mark.quick("tiny-sd-deepcache*", "tiny-flux-pyramid_attention(3)*")
def test_a_script_with_a_step_cache_draws_the_same(
    model: str, recipe: str, own: list[str], tmp_path: Path
) -> None:
    exported.check_it_draws_the_same(model, recipe, own, tmp_path)


# What a cache costs

RESIDUAL = 4096 * 3072 * 2  # of FLUX at 1024 px in bf16


@functools.cache
def plain_memory(model: str) -> Prediction:
    return predict(find_weightless(model), resolve("baseline"))


@pytest.mark.parametrize("recipe", ["teacache(hits=0.99)", "seacache(hits=0.99)", "magcache(hits=0.99)"])
def test_a_hit_computes_no_block(recipe: str) -> None:
    pipe = build("flux")
    size = {"height": 128, "width": 128, "text_length": 32}
    alone = count_denoiser(pipe.transformer, **size).total
    vivace.apply(pipe, recipe)
    whole, again, hit = (count_denoiser(pipe.transformer, **size).total for _ in range(3))
    assert whole == again == alone, "with a fixed schedule nothing is computed for the cache's own sake"
    assert hit < 0.05 * alone


@pytest.mark.parametrize(
    ("model", "recipe", "kept"),
    [
        ("synthetic:flux-dev", "teacache", RESIDUAL),
        ("synthetic:flux-dev", "seacache(hits=0.5)", RESIDUAL),
        ("synthetic:flux-dev", "seacache(hits=0.5, order=1)", 2 * RESIDUAL),
        # Guidance makes two rows of 320 channels of 128 x 128 cells in fp16.
        ("synthetic:sdxl", "deepcache", 2 * 320 * 128 * 128 * 2),
        ("synthetic:sdxl", "faster_cache", 2 * 4 * 128 * 128 * 4),
    ],
)
@pytest.mark.slow("synthetic:flux-dev-seacache(hits=0.5)-*", "synthetic:sdxl-deepcache*")
@pytest.mark.usefixtures("shallow")
def test_memory_is_predicted_with_what_is_kept(model: str, recipe: str, kept: int) -> None:
    plain, cached = plain_memory(model), predict(find_weightless(model), resolve(recipe))
    assert cached.model_bytes == plain.model_bytes
    more = cached.stages["vae"] - plain.stages["vae"]
    assert more == pytest.approx(kept, rel=0.1), "kept until the call's end"


# Refusals


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("deepcache(2, hits=0.5)", "give an interval or hits, not both"),
        ("deepcache+faster_cache", "both set the step cache of denoiser"),
        ("dual_block_cache(hits=0.5)+fused", "works within diffusers' blocks"),
        ("dual_block_cache(hits=0.5)+parallel(ulysses)", "each GPU has only its own tokens"),
        ("faster_cache(3, hits=0.5)", r"give an interval .* or hits, not both"),
        ("pyramid_attention(3, hits=0.5)", r"give an interval .* or hits, not both"),
        ("pyramid_attention(start=100, until=800)", r"start \(100\) must be above until \(800\)"),
        *[
            (f"seacache({knobs})", r"give a threshold \(with max_skip and power\) or hits, not both")
            for knobs in ("0.1, hits=0.5", "max_skip=2, hits=0.5", "power=3, hits=0.5")
        ],
        ("taylorseer(2, hits=0.5)", "give an interval and warmup or hits, not both"),
        ("teacache(0.1, hits=0.5)", "give a threshold or hits, not both"),
    ],
)
def test_what_no_recipe_can_say(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        resolve(recipe)


@pytest.mark.parametrize(
    ("family", "recipe", "why"),
    [
        ("flux", "deepcache", r"FluxTransformer2DModel is no UNet: it has no skip connections"),
        ("sd", "deepcache(branch=6)", "has 6 skip connections; give a branch from 0 to 5, got 6"),
        ("sd", "dual_block_cache(hits=0.5)", "UNet2DConditionModel has no chain of blocks"),
        (
            "flux",
            "dual_block_cache(first=5, last=2)",
            "has 7 blocks, and 5 first and 2 last ones leave none to",
        ),
        ("flux", "faster_cache", "does not run guidance as a doubled batch, so there is no unconditional"),
        ("a linear layer", "pyramid_attention", "Linear has no attention of diffusers'"),
        ("sd", "seacache(hits=0.5)", "UNet2DConditionModel has no chain of blocks"),
        ("a linear layer", "taylorseer", "what Linear returns is not known"),
        ("sd", "teacache(hits=0.5)", "UNet2DConditionModel has no chain of blocks"),
        ("flux", "teacache", "calibrate teacache --model M;"),
    ],
)
def test_what_no_model_can_have(family: str, recipe: str, why: str) -> None:
    pipe = build("sd" if family == "a linear layer" else family)
    if family == "a linear layer":
        pipe.unet = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match=why):
        vivace.apply(pipe, recipe)


@pytest.mark.parametrize(
    ("family", "recipe", "other"),
    [
        ("sd", "deepcache", "deepcache"),
        ("flux", "dbcache(hits=0.5)", "first_block_cache"),
        ("sd", "faster_cache", "deepcache"),
        ("flux", "pyramid_attention", "taylorseer"),
        ("flux", "seacache(hits=0.5)", "first_block_cache"),
        ("sd", "taylorseer", "deepcache"),
        ("flux", "teacache(hits=0.5)", "teacache(hits=0.5)"),
    ],
)
def test_one_at_a_time(family: str, recipe: str, other: str) -> None:
    pipe = build(family)
    vivace.apply(pipe, recipe)
    with pytest.raises(Unsupported, match="only one step cache at a time can work"):
        vivace.apply(pipe, other)


@pytest.mark.parametrize(
    "cache",
    [
        Cache("sd", "deepcache", 1),
        Cache("sd", "faster_cache", 1),
        Cache("flux", "pyramid_attention(start=10, until=5)"),
        Cache("flux", "taylorseer(warmup=12)"),
    ],
    ids=_id,
)
def test_a_cache_that_never_hit_is_refuted(cache: Cache) -> None:
    made = cache.session()
    cache.latents(made)
    calls = "1 call" if cache.steps == 1 else f"{cache.steps} calls"
    name = cache.recipe.partition("(")[0]
    assert str(made.refuted({})).startswith(
        f"{name}@denoiser: the cache never hit in {calls} of the denoiser: "
    )
