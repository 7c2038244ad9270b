"""The fused forms of Chroma, ERNIE-Image, Ideogram 4 and LongCat-Image against diffusers', on a CPU."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from tests.unit.fused.test_flux import target
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve

HEADS, CHANNELS = 2, 128
DOUBLE: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "num_attention_heads": HEADS,
    "attention_head_dim": CHANNELS,
    "joint_attention_dim": 48,
}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def _ids(first: int, height: int, width: int, start: int = 0) -> torch.Tensor:
    cells = torch.cartesian_prod(torch.arange(height), torch.arange(width)) + start
    return torch.nn.functional.pad(cells, (1, 0), value=first).float()


def _double(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    """Images and texts of so many words, padded to the longest."""
    return {
        "hidden_states": _random(len(words), height * width, 16),
        "encoder_hidden_states": _random(len(words), max(words), 48),
        "timestep": torch.linspace(0.7, 0.3, len(words)),
        "return_dict": False,
    }


def chroma(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    mask = torch.arange(max(words))[None] < torch.tensor(words)[:, None]
    of_image = torch.ones(len(words), height * width, dtype=torch.bool)
    return _double(words, height, width) | {
        "img_ids": _ids(0, height, width),
        "txt_ids": torch.zeros(max(words), 3),
        # As the pipeline makes it: the text's part are numbers, so that all is added to the logits.
        "attention_mask": torch.cat([mask.float(), of_image], dim=1),
    }


def longcat_image(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    places = torch.arange(max(words)).float()[:, None]
    return _double(words, height, width) | {
        "img_ids": _ids(1, height, width, max(words)),
        "txt_ids": torch.cat([torch.zeros(max(words), 1), places, places], dim=1),
    }


def ernie_image(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": _random(len(words), 16, height, width),
        "timestep": torch.linspace(700, 300, len(words)),
        "text_bth": _random(len(words), max(words), 48),
        "text_lens": torch.tensor(words),
        "return_dict": False,
    }


def ideogram4(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    """Texts are padded in front, to more than the longest."""
    places, count = max(words) + 3, height * width
    own = torch.arange(places)[None] >= places - torch.tensor(words)[:, None]
    whole = torch.cat([own, torch.ones(len(words), count, dtype=torch.bool)], dim=1)
    kinds = torch.where(torch.arange(places + count) < places, 3, 2)
    positions = (torch.cumsum(own, dim=1) - 1).clamp(min=0)[..., None].expand(-1, -1, 3)
    cells = _ids(0, height, width).long() + 65536
    return {
        "hidden_states": torch.cat(
            [torch.zeros(len(words), places, 16), _random(len(words), count, 16)], dim=1
        ),
        "timestep": torch.linspace(0.3, 0.7, len(words)),
        "encoder_hidden_states": _random(len(words), places + count, 48),
        "position_ids": torch.cat([positions, cells.expand(len(words), -1, -1)], dim=1),
        "segment_ids": torch.where(whole, 1, -1),
        "indicator": torch.where(whole, kinds, 0),
        "return_dict": False,
    }


FORMS: dict[str, tuple[str, dict[str, Any], Callable[..., dict[str, Any]]]] = {
    "chroma": ("ChromaTransformer2DModel", DOUBLE | {"approximator_hidden_dim": 64}, chroma),
    "longcat_image": (
        "LongCatImageTransformer2DModel",
        DOUBLE | {"pooled_projection_dim": 32},
        longcat_image,
    ),
    "ernie_image": (
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": HEADS * CHANNELS,
            "num_attention_heads": HEADS,
            "num_layers": 3,
            "ffn_hidden_size": 384,
            "in_channels": 16,
            "out_channels": 16,
            "text_in_dim": 48,
            "rope_axes_dim": (32, 48, 48),
        },
        ernie_image,
    ),
    "ideogram4": (
        "Ideogram4Transformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 3,
            "attention_head_dim": CHANNELS,
            "num_attention_heads": HEADS,
            "intermediate_size": 384,
            "adaln_dim": 32,
            "llm_features_dim": 48,
            "mrope_section": (24, 20, 20),
        },
        ideogram4,
    ),
}

CASES = [((40,), 8, 8), ((9, 9), 5, 9), ((3, 16, 7), 4, 2)]
"""One text; two of one length; three padded to the longest."""


def transformer(form: str) -> Any:
    name, config, _ = FORMS[form]
    torch.manual_seed(0)
    made = getattr(diffusers, name)(**config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        fill(made, generator)
        for parameter_name, parameter in made.named_parameters():
            if "norm" in parameter_name and parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made.eval().requires_grad_(False)


def test_chroma_s_masked_attention_is_not_said_to_be_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_fp8, "unsupported_on", lambda *_: None)
    made = transformer("chroma")
    technique = resolve("fused(fp8, attention=fp8)").techniques[0]
    assert "mask" in str(technique.unsupported(target(made)))
