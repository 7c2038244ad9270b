"""Keys and values of the text: computed once for each text by a fused UNet, and the same as diffusers'."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests import families
from tests.families import draw, psnr
from tests.fused_kernels import error
from tests.fused_unets import TEXT, inputs, target, unet
from vivace.machinery.offloading.components import ComponentOffloader
from vivace.machinery.technique import Effect
from vivace.techniques.fused import Fused

PROJECTED = "denoiser.texts_projected"
"""Keys and values of two blocks, in three transformers of 32 channels and four of 64."""


def fused(precision: Any = "bf16", **changed: Any) -> tuple[Any, Callable[[], int]]:
    """A fused UNet, and how many texts it has projected."""
    made = unet(**changed)
    effect: Effect = Fused(precision=precision).apply(target(unet=made))
    assert effect.evidence is not None
    evidence = effect.evidence
    return made, lambda: int(evidence()[PROJECTED])


def text(seed: int, batch: int = 2, words: int = 7) -> torch.Tensor:
    return torch.randn(batch, words, TEXT, generator=torch.Generator().manual_seed(seed))


def step(model: Any, words: torch.Tensor, at: int = 0) -> Any:
    given = inputs(len(words), 1, 8, 12)
    given["timestep"] = given["timestep"] - 100 * at
    return model(**given | {"encoder_hidden_states": words})[0]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@torch.no_grad()
@pytest.mark.quick("bf16")
def test_a_text_is_projected_once_and_a_changed_one_again(precision: Any) -> None:
    plain, (made, num) = unet(), fused(precision)
    allowed = {"bf16": 0.015, "fp8": 0.06}[precision]

    def same(words: torch.Tensor, at: int) -> bool:
        return error(step(made, words, at), step(plain, words, at)) < allowed

    first, second = text(1), text(2)
    assert error(step(plain, first), step(plain, second)) > 2 * allowed, "the text matters here"
    assert all(same(first, at) for at in range(3))
    assert num() == 1
    assert all(same(second, at) for at in range(3)), "another text"
    assert num() == 2
    assert all(same(words, at) for at in range(3) for words in (first, second)), "two in turn, as guidance"
    assert num() == 2
    second.copy_(text(3))
    assert all(same(second, at) for at in range(3)), "the same tensor, written anew"
    assert num() == 3
    first[:, :3] = 0
    assert all(same(first, at) for at in range(2)), "written through a view"
    assert num() == 4
    assert same(first.clone(), 0), "another tensor of the same values"
    assert num() == 5


@torch.inference_mode()
def test_a_text_that_may_be_written_unseen_is_not_remembered() -> None:
    made, num = fused()
    words = text(1)
    before = step(made, words)
    words.copy_(text(2))
    assert torch.equal(step(made, words), step(made, text(2)))
    assert error(step(made, words), before) > 0.03
    assert num() == 0


@torch.no_grad()
def test_changed_weights_are_used() -> None:
    made, num = fused()
    words = text(1)
    before = step(made, words)
    projections = made.vivace_text_projections
    projections.weight.mul_(2)
    changed = step(made, words)
    assert error(changed, before) > 0.03
    projections.weight.data = projections.weight.data / 2
    assert torch.equal(step(made, words), before)
    assert num() == 3


def test_unets_that_read_the_text_elsewhere_are_refused() -> None:
    for kind in ("text", "text_image"):
        strange = unet()
        strange.register_to_config(addition_embed_type=kind)
        reason = str(Fused(precision="bf16").unsupported(target(unet=strange)))
        assert reason.startswith(f"this UNet adds the text to its time embedding ({kind})")
    timed = unet()
    timed.register_to_config(addition_embed_type="text_time")
    assert Fused(precision="bf16").unsupported(target(unet=timed)) is None
    strange = unet()
    strange.mid_block.resnets.append(
        copy.deepcopy(strange.mid_block.attentions[0].transformer_blocks[0].attn2)
    )
    reason = str(Fused(precision="bf16").unsupported(target(unet=strange)))
    assert reason.startswith("mid_block.resnets.2: attention to the text outside of a transformer block")
    strange = unet()
    layer = torch.nn.Linear(TEXT + 1, 64, bias=False)
    strange.mid_block.attentions[0].transformer_blocks[0].attn2.to_k = layer
    assert (
        Fused(precision="bf16").unsupported(target(unet=strange)) == "its blocks read texts of several widths"
    )


@pytest.mark.parametrize("rest", ["", "+cfg_cutoff(0.5)", "+deepcache"])
@pytest.mark.slow("+deepcache")
def test_a_call_projects_its_text_once(rest: str) -> None:
    made = families.session("sd", f"fused(bf16){rest}")
    plain = families.session("sd", rest.removeprefix("+") or "baseline")
    a_call = 2 if "cutoff" in rest else 1  # the conditional half is another text
    for calls, prompt in enumerate(("a red circle", "a blue square", "a blue square"), 1):
        assert psnr(draw(made, prompt), draw(plain, prompt)) > 33
        assert made.evidence()[PROJECTED] == a_call * calls
    assert made.refuted({}) is None


def test_an_offloaded_unet_projects_a_text_where_it_works() -> None:
    made = families.session("sd", "fused(bf16)")
    expected = draw(made)
    ComponentOffloader(made.pipe, "cpu", pin=False)

    def decode(pipe: Any, at: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if at == 0:  # as a preview does it: the VAE comes later, so the UNet makes room
            pipe.vae.decode(torch.zeros(1, pipe.vae.config.latent_channels, 4, 4))
        return tensors

    assert np.array_equal(draw(made), expected)
    assert made.evidence()[PROJECTED] == 2
    assert np.array_equal(draw(made, callback_on_step_end=decode), expected)
    assert made.evidence()[PROJECTED] == 4, "once more after it came back"
