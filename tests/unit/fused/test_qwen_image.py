"""Qwen-Image's fused forward against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from tests.fused_kernels import error
from tests.unit.fused.rounded import attend_in_e4m3
from tests.unit.fused.test_flux import target
from tests.unit.techniques.test_cuda_graph import capture
from vivace.architectures import family_of
from vivace.errors import Unsupported
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.compilation.prompt_lengths import PaddedTexts
from vivace.machinery.fused import modulations
from vivace.models.synthetic import fill
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128


def transformer(num_layers: int = 3, **config: Any) -> Any:
    torch.manual_seed(0)
    made = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=num_layers,
        num_attention_heads=HEADS,
        attention_head_dim=CHANNELS,
        joint_attention_dim=48,
        **config,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(words: tuple[int, ...], *shapes: tuple[int, int]) -> dict[str, Any]:
    """Of images with texts of so many words; shapes of the image, and of those to be edited, in tokens."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, longest = len(words), max(words)
    mask = torch.arange(longest)[None] < torch.tensor(words)[:, None]
    return {
        "hidden_states": random(batch, sum(height * width for height, width in shapes), 16),
        "encoder_hidden_states": random(batch, longest, 48),
        "encoder_hidden_states_mask": None if mask.all() else mask,
        "timestep": torch.linspace(0.7, 0.3, batch),
        "img_shapes": [[(1, *shape) for shape in shapes]] * batch,
        "return_dict": False,
    }


CASES = [
    inputs((128,), (8, 8)),
    inputs((9, 9), (5, 9)),
    inputs((3, 16, 7), (4, 2)),
    inputs((7,), (5, 9), (4, 6), (3, 3)),
]
"""One text; two of one length; three padded to the longest; an image with two to be edited."""


@pytest.mark.parametrize("shapes", [((5, 9), (4, 6), (3, 3)), ((4, 6),)])
@torch.no_grad()
def test_images_to_be_edited_are_modulated_by_a_time_of_zero(shapes: Any) -> None:
    """As in Qwen-Image-Edit-2511."""
    arguments = inputs((7,), *shapes)
    expected = transformer(zero_cond_t=True)(**arguments)[0]
    if len(shapes) > 1:
        assert error(transformer()(**arguments)[0], expected) > 0.1, "they would be otherwise"
    for precision, allowed in (("bf16", 0.015), ("fp8", 0.07)):
        made = transformer(zero_cond_t=True)
        Fused(precision=precision).apply(target(made))
        assert error(made(**arguments)[0], expected) < allowed


@torch.no_grad()
def test_a_padded_text_is_an_image_of_its_own() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs((3, 9), (4, 6))
    together = made(**arguments)[0]
    arguments["encoder_hidden_states"][0, 3:] = 1e3
    assert torch.equal(made(**arguments)[0], together), "what is padded is not read"
    alone = {name: each[:1] if torch.is_tensor(each) else each for name, each in arguments.items()}
    alone["encoder_hidden_states"] = alone["encoder_hidden_states"][:, :3]
    alone["encoder_hidden_states_mask"] = None
    assert error(made(**alone)[0], together[:1]) < 0.01


@pytest.mark.parametrize("zero", [False, True])
@torch.no_grad()
def test_texts_of_new_lengths_share_a_graph(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are padded to 64 tokens, and what is padded is not attended to, by either kind of attention."""
    monkeypatch.setattr(cudnn_fp8, "attend", attend_in_e4m3)
    made, exact, plain = (transformer(zero_cond_t=zero) for _ in range(3))
    Fused(precision="fp8", attention="fp8").apply(target(made))
    Fused(precision="bf16").apply(target(exact))
    graphs = PaddedTexts(made.forward, torch.device("cpu"), capture, 1)
    for words in (3, 40, 64, 65):
        arguments = inputs((words,), (5, 9), (4, 6))
        assert error(graphs(**arguments)[0], plain(**arguments)[0]) < 0.08
        unpadded = exact(**arguments)[0]
        exact.forward.pads = True
        assert error(exact(**arguments)[0], unpadded) < 0.01
        exact.forward.pads = False
    assert graphs.num_captured == 2


@pytest.mark.parametrize("zero", [False, True])
@torch.no_grad()
def test_modulations_of_all_steps_are_computed_before_the_first(
    zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row for each timestep, whatever the batch, and for both calls of guidance."""
    monkeypatch.setattr(modulations, "capacity_on", lambda device: 8)
    made, plain = transformer(zero_cond_t=zero), transformer(zero_cond_t=zero)
    shapes = ((4, 6), (2, 3)) if zero else ((4, 6),)
    batch = 1 if zero else 2
    its = target(made)
    its.pipe.scheduler = type("Scheduler", (), {"timesteps": torch.tensor([700.0, 300.0])})()
    effect = Fused(precision="bf16").apply(its)
    for words in (5, 3):
        for time in its.pipe.scheduler.timesteps:
            arguments = inputs((words,) * batch, *shapes) | {"timestep": time.expand(batch) / 1000}
            assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015
    assert effect.evidence() == {
        "denoiser.modulations_hoisted": 2 + zero,
        "denoiser.modulations_computed_in_the_loop": 0,
    }
    arguments["timestep"] = arguments["timestep"] * 0.9
    assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015, "another time is computed"
    assert effect.evidence()["denoiser.modulations_computed_in_the_loop"] == 1


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = CASES[0]
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(**arguments, controlnet_block_samples=[torch.zeros(1)])
    with pytest.raises(Unsupported, match="takes no guidance"):
        made(**arguments, guidance=torch.ones(1))
    with pytest.raises(Unsupported, match="ip_adapter"):
        made(**arguments, attention_kwargs={"ip_adapter": torch.zeros(1)})
    made(**arguments, attention_kwargs={"scale": 1.0})
    layered = transformer(use_additional_t_cond=True)
    assert "use_additional_t_cond" in str(Fused(precision="bf16").unsupported(target(layered)))
    made = transformer(zero_cond_t=True)
    assert "copies from the host" in family_of(made).not_captured(made)
    Fused(precision="bf16").apply(target(made))
    assert not family_of(made).not_captured(made)
    with pytest.raises(Unsupported, match="one image at a time"):
        made(**inputs((5, 5), (4, 6), (2, 2)))
