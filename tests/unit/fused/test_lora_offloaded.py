"""LoRAs that change in components that are offloaded, with the CPU as the device: onloading copies there as well."""

from pathlib import Path

import numpy as np
import pytest

import vivace
from tests.families import build, latents, session
from tests.lora_files import write_lora
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.offloading.components import ComponentOffloader
from vivace.recipes.resolve import resolve


@pytest.mark.parametrize("recipe", ["inference_mode", "fused(fp8)", "quantize(int8)"])
@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.diagonal
@pytest.mark.quick("flux-fused*")
def test_an_exchange_between_calls_is_kept(family: str, recipe: str, tmp_path: Path) -> None:
    pipe = build(family)
    first, second = (
        write_lora(
            pipe, tmp_path / f"{rank}.safetensors", rank, rank, 0.1, takes=lambda name: "blocks" in name
        )
        for rank in (4, 8)
    )
    text = f"{recipe}+lora({first!r}, hot=True, max_rank=8)"
    plain, moved = session(family, text), session(family, text)
    offloader = ComponentOffloader(moved.pipe, "cpu", pin=False)

    def drawn_alike() -> np.ndarray:
        """Return what both draw, having seen that it is the same: the VAE has no LoRA."""
        expected = latents(plain, num_inference_steps=2)
        for _ in range(2):
            assert np.array_equal(latents(moved, num_inference_steps=2), expected)
            assert not offloader.is_in_call
        return expected

    before = drawn_alike()
    for file, scale in ((second, 1.0), (None, 0.0), (first, 1.0)):
        moved.set_lora(file, scale=scale)
        plain.set_lora(file, scale=scale)
        after = drawn_alike()
        assert np.array_equal(after, before) is (file == first)


def test_layers_that_are_offloaded_one_by_one_have_none(tmp_path: Path) -> None:
    path = write_lora(build("sd"), tmp_path / "lora.safetensors", 4)
    hot = f"lora({path!r}, hot=True)"
    assert resolve(f"{hot}+fused(fp8)+offload(model)").loads_from_host
    for mode in ("group", "sequential"):
        with pytest.raises(RecipeError, match=r"in each step; take offload\(model\)"):
            resolve(f"{hot}+offload({mode})")
    moved = session("sd", "baseline")
    ComponentOffloader(moved.pipe, "cpu", pin=False)
    with pytest.raises(Unsupported, match="apply both by the same recipe, to a fresh pipeline"):
        vivace.apply(moved.pipe, hot)
