"""LoRAs inside of fused UNets: in products, beside the text's keys and values, times and convolutions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.families import build, latents, session
from tests.fused_kernels import error
from tests.lora_files import write_lora
from vivace.errors import Unsupported
from vivace.machinery.lora.hot import hot_loras

OF_ATTENTION = (".attn1.", ".attn2.", ".ff.", "proj_in", "proj_out")
RECIPES = ["fused(bf16)", "fused(fp8)", "fused(fp8, convolutions=fp8)"]


def in_transformers(layer: str) -> bool:
    """What kohya's scripts and PEFT's train by default."""
    return any(part in layer for part in OF_ATTENTION)


def first_step(made: Any) -> torch.Tensor:
    """Return what the UNet makes of the first step."""
    outputs: list[torch.Tensor] = []
    handle = made.pipe.unet.register_forward_hook(
        lambda _, __, output: outputs.append(output[0] if isinstance(output, tuple) else output.sample)
    )
    latents(made, num_inference_steps=2)
    handle.remove()
    return outputs[0].float()


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Two LoRAs, of rank 4 for all layers, and of rank 8 for those of transformers."""
    pipe = build(request.node.callspec.params["family"])
    return (
        write_lora(pipe, tmp_path / "all.safetensors", 4),
        write_lora(pipe, tmp_path / "some.safetensors", 8, 1, takes=in_transformers),
    )


@pytest.mark.parametrize("family", ["sd", "sdxl"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.diagonal
@pytest.mark.quick("fused(fp8*-sd")
def test_it_draws_what_a_merged_one_draws_and_is_exchanged(
    family: str, recipe: str, files: tuple[str, str]
) -> None:
    of_all, of_some = files
    without, merged = (first_step(session(family, text)) for text in ("baseline", f"lora({of_all!r})"))
    plain = session(family, recipe)
    rounding = error(first_step(plain), without)
    hot = session(family, f"{recipe}+lora({of_all!r}, hot=True, max_rank=8)")
    (lora,) = hot_loras(hot.pipe)
    layers = [m for m in build(family).unet.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(lora.rows) == len(layers), "every layer has a slot"
    first = first_step(hot)
    assert error(without, merged) > 0.1
    assert error(first, merged) < 1.5 * rounding
    hot.set_lora(of_some)
    fresh = session(family, f"{recipe}+lora({of_some!r}, hot=True)")
    assert np.array_equal(latents(hot), latents(fresh)), "nothing of the first is left"
    hot.set_lora(scale=0)
    assert np.array_equal(latents(hot), latents(plain)), "nothing at all is left"
    hot.set_lora(of_all, scale=1)
    assert first_step(hot).equal(first)
    assert hot.refuted({}) is None


@pytest.mark.parametrize("family", ["sdxl"])
def test_kohyas_names_and_several_at_once(family: str, tmp_path: Path) -> None:
    pipe = build(family)
    own = write_lora(pipe, tmp_path / "own.safetensors", 4, takes=in_transformers)
    kohyas = write_lora(
        pipe,
        tmp_path / "kohya.safetensors",
        6,
        seed=1,
        strength=0.3,
        takes=lambda layer: "mid_block.attentions.0" in layer and in_transformers(layer),
        named=lambda layer: layer.replace("mid_block.attentions.0", "middle_block.1"),
    )
    pair = session(family, f"fused(bf16)+lora({own!r}, hot=True)+lora({kohyas!r}, hot=True, scale=3)")
    merged = first_step(session(family, f"lora({own!r})+lora({kohyas!r}, scale=3)"))
    alone = session(family, f"fused(bf16)+lora({own!r}, hot=True)")
    assert error(first_step(pair), merged) < 0.3 * error(first_step(alone), merged)
    first, second = sorted([own, kohyas])
    assert (first, second) == (kohyas, own), "the one with fewer layers has its columns moved by the other"
    pair.set_lora(scale=0, instead_of=kohyas)
    assert np.array_equal(latents(pair), latents(alone))


@pytest.mark.parametrize("family", ["sd"])
@pytest.mark.long
def test_layers_that_were_not_reserved_are_refused_by_name(family: str, files: tuple[str, str]) -> None:
    of_all, of_some = files
    hot = session(family, f"fused(fp8)+lora({of_some!r}, hot=True)")
    before = latents(hot)
    with pytest.raises(Unsupported, match=r"targets \d+ layers without a LoRA slot .*layers=all"):
        hot.set_lora(of_all)
    assert np.array_equal(latents(hot), before)
    hot = session(family, f"fused(fp8)+lora({of_some!r}, hot=True, layers=all)")
    hot.set_lora(of_all)
    assert not np.array_equal(latents(hot), before)
