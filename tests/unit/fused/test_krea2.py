"""Krea 2's fused blocks against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import pytest
import torch
from diffusers import Krea2Transformer2DModel

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.unit.fused.rounded import attend_in_e4m3
from tests.unit.fused.test_flux import target
from vivace.errors import Unsupported
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.models.synthetic import fill
from vivace.techniques.fused import Fused

HEADS, KEY_HEADS, CHANNELS = 4, 2, 128
MODEL = "krea-2-turbo"


def transformer(num_layers: int = 3, channels: int = CHANNELS) -> Any:
    torch.manual_seed(0)
    made = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=num_layers,
        attention_head_dim=channels,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=384,
        timestep_embed_dim=32,
        text_hidden_dim=48,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=4,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(channels // 4, channels * 3 // 8, channels * 3 // 8),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        fill(made, generator)
        for name, parameter in made.named_parameters():
            if "norm" in name or "table" in name:  # zeros in a model with random weights
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made.eval().requires_grad_(False)


def inputs(words: tuple[int, ...], padded_to: int, height: int, width: int) -> dict[str, Any]:
    """Of images with texts of so many words, whose padding is in front of the last word."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, places = len(words), torch.arange(padded_to)
    mask = torch.stack([(places < number - 1) | (places == padded_to - 1) for number in words])
    positions = torch.zeros(padded_to + height * width, 3)
    positions[padded_to:, 1] = torch.arange(height).repeat_interleave(width)
    positions[padded_to:, 2] = torch.arange(width).repeat(height)
    return {
        "hidden_states": random(batch, height * width, 16),
        "encoder_hidden_states": random(batch, padded_to, 3, 48),
        "timestep": torch.linspace(0.7, 0.3, batch),
        "position_ids": positions,
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


CASES = [
    inputs((16,), 16, 8, 8),
    inputs((7,), 16, 5, 9),
    inputs((9, 9), 12, 4, 2),
    inputs((3, 16, 7), 16, 4, 2),
]
"""A text without padding; one with it; two of one length; three of others, which keep a mask."""


@torch.no_grad()
def test_padding_is_left_out_and_looked_for_once_for_each_text() -> None:
    made = transformer()
    effect = Fused(precision="bf16").apply(target(made))
    first, second = inputs((7,), 16, 5, 9), inputs((9,), 16, 5, 9)
    lengths: list[int] = []
    made.text_fusion.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    outputs = [made(**arguments)[0] for arguments in (first, second, first)]
    assert lengths == [7, 9, 7]
    assert torch.equal(outputs[0], outputs[2])
    assert effect.evidence()["denoiser.padding_left_out"] == 9
    first["encoder_hidden_states"][:, 6:15] = 1e3
    assert torch.equal(made(**first)[0], outputs[0]), "what is padded is not read"
    first["encoder_attention_mask"][:, 6] = True
    assert not torch.equal(made(**first)[0], outputs[0])
    assert lengths[-1] == 8, "a mask that is written to is looked at again"


@torch.no_grad()
def test_texts_of_new_lengths_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention in fp8 they keep padding up to 64 tokens, so that plans and graphs are shared."""
    shapes = []

    def of_groups(q: Any, k: Any, v: Any, *more: Any) -> None:
        shapes.append(q.shape)
        k, v = (each.view(torch.uint8).repeat_interleave(2, dim=2).view(q.dtype) for each in (k, v))
        attend_in_e4m3(q, k, v, *more)

    monkeypatch.setattr(cudnn_fp8, "attend", of_groups)
    plain, made = transformer(), transformer()
    Fused(precision="fp8", attention="fp8").apply(target(made))
    for number in (3, 64):
        arguments = inputs((number,), 160, 5, 9)
        assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.09
    assert len(shapes) == 6
    assert len(set(shapes)) == 1


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    with pytest.raises(Unsupported, match="ip_adapter"):
        made(**CASES[0], attention_kwargs={"ip_adapter": torch.zeros(1)})
    made(**CASES[0], attention_kwargs={"scale": 1.0})


def test_two_prompts_of_other_lengths_are_drawn_as_each_alone() -> None:
    session = flow_models.session(MODEL, "fused(bf16)")
    prompts = ["a red circle", flow_models.PROMPT + " and a green square on a grey table"]
    together = flow_models.draw(session, prompts)
    assert psnr(flow_models.draw(session, prompts[0])[0], together[0]) > 35
