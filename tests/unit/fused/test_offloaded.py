"""Fused components that are offloaded, with the CPU as the device: onloading copies there as well."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import families
from tests.families import STEPS, draw
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.fused import modulations
from vivace.machinery.offloading.components import ComponentOffloader
from vivace.machinery.technique import Machine
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless

GPU = Machine("cuda", "a GPU", (9, 0), None, has_all_packages=True)
HOISTED, COMPUTED = "denoiser.modulations_hoisted", "denoiser.modulations_computed_in_the_loop"
PROMPTS = ("a red circle", "a blue square", "a blue square")


@pytest.fixture
def _with_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; on a CPU there is no table."""
    monkeypatch.setattr(modulations, "capacity_on", lambda device: modulations.CAPACITY)


def offloaded(model: str, recipe: str) -> tuple[Any, ComponentOffloader]:
    session = families.session(model.removeprefix("tiny-"), recipe)
    return session, ComponentOffloader(session.pipe, "cpu", pin=False)


@pytest.mark.usefixtures("_with_table")
@pytest.mark.parametrize(
    "recipe", ["fused(bf16)", "fused(fp8)@denoiser,vae", "fused(bf16)+teacache(hits=0.5)"]
)
@pytest.mark.quick("fused(fp8)@*")
def test_flux_draws_the_same_and_hoists_in_every_call(recipe: str) -> None:
    plain, (made, offloader) = families.session("flux", recipe), offloaded("tiny-flux", recipe)
    table = made.pipe.transformer.vivace_fused.modulations
    for calls, prompt in enumerate(PROMPTS, 1):
        assert np.array_equal(draw(made, prompt), draw(plain, prompt))
        assert made.evidence() == plain.evidence()
        assert (made.evidence()[HOISTED], made.evidence()[COMPUTED]) == (calls * STEPS["flux"], 0)
        assert not offloader.is_in_call
        assert table.keys.isnan().all(), "the table was offloaded with what was written into it"
    assert made.refuted({}) is None


@pytest.mark.usefixtures("_with_table")
def test_the_table_is_filled_again_after_an_offload_within_a_call() -> None:
    plain, (made, offloader) = (
        families.session("flux", "fused(bf16)"),
        offloaded("tiny-flux", "fused(bf16)"),
    )

    def decode(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:  # as a preview does it: the VAE comes later, so the transformer makes room
            pipe.vae.decode(torch.zeros(1, pipe.vae.config.latent_channels, 4, 4))
            assert offloader.is_in_call
        return tensors

    assert np.array_equal(draw(made, callback_on_step_end=decode), draw(plain))
    assert (made.evidence()[HOISTED], made.evidence()[COMPUTED]) == (2 * STEPS["flux"], 0)


@pytest.mark.parametrize("recipe", ["fused(bf16)@denoiser,vae", "fused(fp8)"])
@pytest.mark.quick("fused(bf16)@*")
def test_a_unet_and_its_vae_draw_the_same(recipe: str) -> None:
    plain, (made, offloader) = families.session("sd", recipe), offloaded("tiny-sd", recipe)
    for prompt in PROMPTS[:2]:
        assert np.array_equal(draw(made, prompt), draw(plain, prompt))
        assert not offloader.is_in_call


@pytest.mark.parametrize("mode", ["group", "group, stream=True", "group, keep=2", "sequential"])
def test_offloading_by_layer_is_refused(mode: str) -> None:
    assert resolve("fused+offload(model)").loads_from_host
    with pytest.raises(RecipeError, match=r"fused blocks read .* take offload\(model\)"):
        resolve(f"fused(fp8)@denoiser,vae+offload({mode})")
    session = families.session("sd", "fused(bf16)")
    with pytest.raises(Unsupported, match=r"run by fused kernels: .* take offload\(model\)"):
        vivace.apply(session.pipe, f"offload({mode})")


def test_what_is_offloaded_already_is_not_fused() -> None:
    with pytest.raises(Unsupported, match="offloaded: apply both by the same recipe"):
        vivace.apply(offloaded("tiny-sd", "baseline")[0].pipe, "fused(bf16)")


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8)@denoiser,vae"])
@pytest.mark.long
def test_its_memory_is_predicted(recipe: str) -> None:
    model = find_weightless("synthetic:flux-dev")
    kept, moved = (
        predict(model, resolve(text), text="prompts") for text in (recipe, f"{recipe}+offload(model)")
    )
    denoiser = next(component.num_bytes for component in kept.components if component.name == "transformer")
    others = kept.model_bytes - denoiser
    assert moved.model_bytes < 1000, "a counter"
    assert moved.peak_stage == "denoiser"
    assert kept.stages["denoiser"] - moved.stages["denoiser"] == pytest.approx(others, rel=0.02)
