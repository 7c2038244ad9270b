"""Progressive resolution: noise levels and frequencies at the switch, sizes, seeds, what it goes with."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import flow_models
from tests.families import build, draw, drawn, session
from tests.unit.techniques.test_cuda_graph import apply as apply_cuda_graph
from vivace.errors import Unsupported, UsageError
from vivace.machinery.resolution.frequencies import cosines, resized, stretched
from vivace.measure.flops import count_flops
from vivace.models import find_model, load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless

HALF = "progressive_resolution(0.5, until=0.4)"
CALL = {"num_inference_steps": 10}
PROMPTS = ["a red circle", "a blue star"]


# The transform


def test_it_keeps_noise_white_and_images_as_they_are() -> None:
    noise = torch.randn(400, 16, 12, generator=torch.Generator().manual_seed(0))
    low = resized(noise, (8, 6))
    assert low.shape == (400, 8, 6)
    assert float(low.std()) == pytest.approx(1, abs=0.02)
    assert float((low[:, :-1] * low[:, 1:]).mean()) == pytest.approx(0, abs=0.02), "white"
    assert torch.allclose(resized(resized(low, (16, 12)), (8, 6)), low, atol=1e-5)
    flat = torch.full((1, 8, 8), 3.0)
    assert torch.allclose(2 * resized(flat, (16, 16)), torch.full((1, 16, 16), 3.0), atol=1e-5)
    assert torch.allclose(cosines(9) @ cosines(9).T, torch.eye(9, dtype=torch.float64))


def test_stretched_positions_are_those_of_the_tokens_centres() -> None:
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(3.0))
    positions = stretched(ids, (8, 12), (4, 6))
    assert positions[:, 1].unique().tolist() == [0.5, 2.5]
    assert positions[:, 2].unique().tolist() == [0.5, 2.5, 4.5]


# The switch


class Oracle:
    """In the place of tiny-sd's UNet: always predicts the same image, scaled to the size that is asked for.

    Attributes:
        noise: what the calls' latents consist of besides, by call.
    """

    def __init__(self, pipe: Any) -> None:
        coarse = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(3))
        self.image = resized(coarse, (16, 16))
        self.noise: list[torch.Tensor] = []
        self.timesteps: list[float] = []
        self._alphas = pipe.scheduler.alphas_cumprod
        pipe.unet.forward = self._forward

    def _forward(self, sample: torch.Tensor, timestep: Any, **_: Any) -> tuple[torch.Tensor]:
        size = sample.shape[-2:]
        image = resized(self.image, size) * (size[0] / 16)
        place = float(timestep)
        low, high = self._alphas[int(place)], self._alphas[min(int(place) + 1, 999)]
        power = torch.exp(torch.lerp(low.log(), high.log(), place % 1))
        scale, sigma = power.sqrt(), (1 - power).sqrt()
        noise = (sample - scale * image) / sigma
        self.noise.append(noise[:1])
        self.timesteps.append(place)
        return (scale * noise - sigma * image,)


@pytest.mark.parametrize("sampler", ["euler", "ddim", "dpmpp_2m", "unipc"])
def test_the_noise_fits_the_timestep_before_and_after_the_switch(sampler: str) -> None:
    pipe = build("sd")
    made = vivace.apply(pipe, f"{HALF}+scheduler({sampler})")
    oracle = Oracle(pipe)
    size = {"height": 128, "width": 128, "output_type": "latent", **CALL}
    latents = torch.as_tensor(draw(made, **size))
    assert torch.allclose(latents, oracle.image, atol=0.05), "what was predicted all along"
    assert [noise.shape[-1] for noise in oracle.noise] == [8] * 4 + [16] * 6
    for noise in oracle.noise[:-2]:  # the last ones divide by next to nothing
        assert float(noise.std()) == pytest.approx(1, abs=0.15)
    low, full = oracle.noise[3:5]
    assert torch.allclose(resized(full, (8, 8)), low, atol=0.1), "low frequencies go on with their noise"
    drawn_at_first = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    begun = resized(drawn_at_first, (8, 8))
    assert torch.allclose(oracle.noise[0], begun, atol=0.2), "the low frequencies of the usual noise"
    high = drawn_at_first - resized(begun, (16, 16))
    assert torch.allclose(full - resized(low, (16, 16)), high, atol=0.1), "the others are the usual noise's"


def test_noise_levels_are_lower_at_the_lower_resolution() -> None:
    made = session("sd", f"{HALF}+scheduler(euler)")
    draw(made, **CALL, height=128, width=128)
    plain = session("sd", "scheduler(euler)")
    draw(plain, **CALL)
    scheduler, usual = made.pipe.scheduler, plain.pipe.scheduler
    assert torch.allclose(scheduler.sigmas[:4], usual.sigmas[:4] / 2)
    assert torch.equal(scheduler.sigmas[4:], usual.sigmas[4:])
    assert (scheduler.timesteps[:4] < usual.timesteps[:4]).all()
    assert torch.equal(scheduler.timesteps[4:], usual.timesteps[4:])


def test_a_schedule_that_depends_on_the_size_is_that_of_each_size() -> None:
    schedules = []
    for recipe, side in ((HALF, 128), ("baseline", 64), ("baseline", 128)):
        pipe = build("flux")
        shifting = {"use_dynamic_shifting": True, "base_image_seq_len": 16, "max_image_seq_len": 64}
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **shifting)
        draw(vivace.apply(pipe, recipe), **CALL, height=side, width=side)
        schedules.append(pipe.scheduler.sigmas)
    both, low, full = schedules
    assert not torch.equal(low[1:4], full[1:4])
    assert torch.allclose(both[:4], low[:4])
    assert torch.allclose(both[4:], full[4:])


# Calls


def test_flux_s_tokens_and_positions_change_together() -> None:
    pipe = build("flux")
    made = vivace.apply(pipe, HALF)
    calls: list[tuple[int, tuple[int, ...], float]] = []

    def called(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["img_ids"]
        calls.append((kwargs["hidden_states"].shape[1], tuple(ids.shape), float(ids.max())))

    pipe.transformer.register_forward_pre_hook(called, with_kwargs=True)
    assert draw(made, **CALL).shape == (1, 128, 128, 3)
    assert calls == [(16, (16, 3), 3.0)] * 4 + [(64, (64, 3), 7.0)] * 6
    assert made.evidence() == {"low_resolution_steps": 4, "full_resolution_steps": 6}
    assert draw(made, **CALL, height=96, width=160).shape == (1, 96, 160, 3)
    assert calls[10][0] == 3 * 5
    assert calls[-1][0] == 6 * 10


@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.quick("flux")
def test_the_seed_decides(family: str) -> None:
    size = {"height": 128, "width": 128, "num_inference_steps": 5}
    made = session(family, "progressive_resolution")
    both = draw(made, PROMPTS, **size)
    for seed, prompt in enumerate(PROMPTS):
        alone = draw(made, prompt, seed=seed, **size)
        assert np.allclose(alone[0], both[seed], atol=2e-3), "of each image of a batch"
    assert np.array_equal(draw(made, PROMPTS, **size), both)
    assert not np.allclose(both, drawn(family, prompt=PROMPTS, **size), atol=0.1)

    def fail(*_: Any) -> Any:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        draw(made, PROMPTS, **size, callback_on_step_end=fail)
    assert np.array_equal(draw(made, PROMPTS, **size), both)


@pytest.mark.long
def test_given_latents_are_scaled_too() -> None:
    made = session("sd", "progressive_resolution")
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    size = {"height": 128, "width": 128, "num_inference_steps": 6}
    sampler = session("sd", "progressive_resolution+scheduler(ddim)")
    assert np.array_equal(draw(sampler, **size), draw(sampler, **size, latents=noise))
    assert draw(made, **size, latents=noise).shape == (1, 128, 128, 3)


def test_a_single_step_works() -> None:
    made = session("flux", "progressive_resolution")
    assert draw(made, num_inference_steps=1).shape == (1, 128, 128, 3)
    assert made.evidence() == {"low_resolution_steps": 1, "full_resolution_steps": 0}


def test_the_work_is_less() -> None:
    steps = {"num_inference_steps": 5}
    pipe = build("flux")
    plain = vivace.apply(pipe)
    whole = count_flops(lambda: draw(plain, **steps), of=pipe.transformer).total
    pipe = build("flux")
    made = vivace.apply(pipe, HALF)
    assert 0.6 < count_flops(lambda: draw(made, **steps), of=pipe.transformer).total / whole < 0.8


@pytest.mark.usefixtures("shallow")
def test_memory_is_predicted() -> None:
    weightless = find_weightless("synthetic:flux-dev")
    plain, made = (
        predict(weightless, resolve(recipe)).stages["denoiser"]
        for recipe in ("baseline", "progressive_resolution")
    )
    assert made == pytest.approx(plain, rel=0.01), "the largest step is as large"


# What it goes with


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("flux", "first_block_cache(0.3)"),
        ("flux", "first_block_cache(hits=0.5)"),
        ("flux", "dual_block_cache(0.3, last=1, order=1)"),
        ("flux", "seacache(0.5)"),
        ("flux", "teacache(hits=0.5)"),
        ("flux", "taylorseer(order=2)"),
        ("flux", "pyramid_attention(hits=0.5)"),
        ("flux", "bf16"),
        ("sd", "deepcache(2)"),
        ("sd", "faster_cache(2, start=1001)"),
        ("sd", "token_merging+cfg_cutoff(0.6)"),
    ],
)
@pytest.mark.quick("flux-seacache(0.5)")
def test_progressive_resolution_composes(family: str, recipe: str) -> None:
    made = session(family, f"{HALF}+{recipe}")
    size = {"height": 128, "width": 128, **CALL}
    first = draw(made, **size)
    assert first.shape == (1, 128, 128, 3)
    assert np.isfinite(first).all()
    assert np.array_equal(draw(made, **size), first)
    assert made.refuted(made.evidence()) is None
    if "cache" in recipe:
        assert made.evidence()["cache_hit_rate"] > 0


@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.long
@pytest.mark.exhaustive("sd")
def test_compiled_each_size_has_a_graph(family: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    size = {"height": 128, "width": 128, **CALL}
    made = session(family, f"{HALF}+compile(backend=eager)")
    alone = drawn(family, HALF, **size)
    for _ in range(2):
        assert np.allclose(draw(made, **size), alone, atol=1e-3)
        assert made.evidence()["compiled_graphs"] == 2
        assert made.evidence()["graph_breaks"] == 0


def test_recorded_each_size_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build("flux")
    made = vivace.apply(pipe, HALF)
    effect = apply_cuda_graph(pipe, monkeypatch)
    assert np.allclose(draw(made, **CALL), drawn("flux", HALF, **CALL), atol=1e-4)
    assert effect.evidence()["cuda_graphs_recorded"] == 2


@pytest.mark.parametrize("model", ["sd35-medium", "sana-1600m", "z-image-turbo"])
@pytest.mark.quick("sd35-medium")
def test_other_families(model: str) -> None:
    made = flow_models.session(model, HALF)
    rows: list[int] = []

    def called(_: Any, args: Any, kwargs: Any) -> None:
        latents = args[0] if args else kwargs["hidden_states"]
        rows.append(latents[0].shape[-1])

    made.pipe.transformer.register_forward_pre_hook(called, with_kwargs=True)
    assert np.isfinite(flow_models.draw(made)).all()
    assert rows[0] * 2 == rows[-1]
    assert rows == sorted(rows)
    assert made.refuted({}) is None


def test_progressive_resolution_refuses_with_a_reason() -> None:
    for sampler in ("pndm", "heun"):
        with pytest.raises(Unsupported, match=r"needs its earlier steps.*such as scheduler\(euler\)"):
            session("sd", f"progressive_resolution+scheduler({sampler})")
    with pytest.raises(Unsupported, match="no positions that could be stretched"):
        session("sd", "progressive_resolution(positions=stretched)")
    with pytest.raises(Unsupported, match="how Flux2KleinPipeline lays out its latents is not known here"):
        flow_models.session("flux2-klein-4b", "progressive_resolution")
    with pytest.raises(Unsupported, match="starts from an image"):
        vivace.apply(load_pipeline(find_model("tiny-sd"), "cpu", task="image"), "progressive_resolution")
    made = session("flux", "progressive_resolution(0.75)")
    with pytest.raises(UsageError, match="the image has 2x2 latent cells"):
        draw(made, height=16, width=16)
    assert draw(made, num_inference_steps=2).shape == (1, 128, 128, 3), "and the next call works"
