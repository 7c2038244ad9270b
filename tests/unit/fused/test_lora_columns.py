"""LoRAs inside of fused products: y = [W B] [x; A x]."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from benchmarks.lora import write_random
from tests import flow_models
from tests.families import draw, psnr
from tests.fused_kernels import error
from vivace.errors import Unsupported
from vivace.machinery.fused.operations import Rows
from vivace.machinery.fused.products import Product, room_for
from vivace.machinery.kernels.reference import TokenLayout

MODELS = ("tiny-flux", "flux2-klein-4b", "z-image-turbo", "qwen-image", "qwen-image-2.1")
RANKS = (4, 8)
SCALE = 60
"""Random ones are weak."""


def session(model: str, recipe: str) -> Any:
    return (
        vivace.load(model, recipe, device="cpu")
        if model == "tiny-flux"
        else flow_models.session(model, recipe)
    )


def image(made: Any) -> np.ndarray:
    return draw(made) if type(made.pipe).__name__ == "FluxPipeline" else flow_models.draw(made)


def first_step(made: Any) -> torch.Tensor:
    """Return what the transformer makes of the first step: in few bits, steps after it go ways of their own."""
    outputs: list[torch.Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        sample = output[0] if isinstance(output, tuple) else output.sample
        outputs.append(sample[0] if isinstance(sample, list) else sample)

    handle = made.pipe.transformer.register_forward_hook(note)
    image(made)
    handle.remove()
    return outputs[0].float()


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """Two LoRAs of other ranks."""
    model = request.node.callspec.params["model"]
    pipe = session(model, "baseline").pipe
    paths = [tmp_path / f"{rank}.safetensors" for rank in RANKS]
    for rank, path in zip(RANKS, paths, strict=True):
        assert write_random(pipe, path, rank, rank) >= 8
    return [path.as_posix() for path in paths]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_it_draws_what_a_merged_one_draws_and_is_exchanged(
    model: str, precision: str, files: list[str]
) -> None:
    first, second = files
    fused = f"fused({precision})"
    merged, without = (
        first_step(session(model, text)) for text in (f"lora({first!r}, scale={SCALE})", "baseline")
    )
    hot = session(model, f"{fused}+lora({first!r}, hot=True, max_rank=8, scale={SCALE})")
    assert error(first_step(hot), merged) < 0.5 * error(without, merged)
    drawn = image(hot)
    assert hot.refuted({}) is None
    hot.set_lora(second)
    fresh = session(model, f"{fused}+lora({second!r}, hot=True, scale={SCALE})")
    assert np.array_equal(image(hot), image(fresh)), "nothing of the first is left"
    hot.set_lora(scale=0)
    nothing, plain = first_step(hot), first_step(session(model, fused))
    assert error(nothing, plain) < 0.02, "wider products are summed in another order"
    hot.set_lora(first)
    assert first_step(hot).equal(nothing), "the scale is kept"
    hot.set_lora(scale=SCALE)
    assert np.array_equal(image(hot), drawn)


@pytest.mark.parametrize("model", ["flux2-klein-4b"])
def test_two_are_beside_the_same_layers(model: str, files: list[str]) -> None:
    first, second = files
    both = session(model, f"fused(bf16)+lora({first!r}, hot=True)+lora({second!r}, hot=True, scale={SCALE})")
    merged = session(model, f"fused(bf16)+lora({first!r})+lora({second!r}, scale={SCALE})")
    alone = session(model, f"fused(bf16)+lora({first!r}, hot=True)")
    assert psnr(image(both), image(merged)) > psnr(image(both), image(alone)) + 10
    both.set_lora(scale=0, instead_of=second)
    assert psnr(image(both), image(alone)) > 40


@pytest.mark.parametrize("model", ["tiny-flux"])
def test_layers_without_a_slot_are_refused_by_name(model: str, files: list[str], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    pipe = session(model, "baseline").pipe
    layer = pipe.transformer.transformer_blocks[0].norm1.linear
    prefix = "transformer.transformer_blocks.0.norm1.linear"
    path = tmp_path / "modulation.safetensors"
    save_file(
        {
            f"{prefix}.lora_A.weight": torch.ones(4, layer.in_features),
            f"{prefix}.lora_B.weight": torch.ones(layer.out_features, 4),
        },
        path,
    )
    with pytest.raises(
        Unsupported, match=r"norm1\.linear, a FusedModulation, which can have no LoRA beside it"
    ):
        session(model, f"fused(bf16)+lora({path.as_posix()!r}, hot=True)")
    hot = session(model, f"fused(bf16)+lora({files[0]!r}, hot=True)")
    with pytest.raises(Unsupported, match="FusedModulation"):
        hot.set_lora(path.as_posix())
    session(model, f"fused(bf16)+lora({path.as_posix()!r})")


def test_a_fused_unet_has_no_slots(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    write_random(session_of_sd().pipe, path, 4, 0)
    with pytest.raises(Unsupported, match="fused UNets have no layers for a LoRA to be beside"):
        vivace.load("tiny-sd", f"fused(bf16)+lora({path.as_posix()!r}, hot=True)", device="cpu")


def session_of_sd() -> Any:
    return vivace.load("tiny-sd", "baseline", device="cpu")


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
@torch.no_grad()
def test_a_product_with_a_lora_of_any_strength(quantize: bool, strength: float) -> None:
    """The columns of B share the weight's scale, so neither a weak nor a strong LoRA may leave e4m3's range."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.nn.Linear(256, outputs, bias=False) for outputs in (64, 96)]
    product = Product([layers], quantize)
    deltas = []
    for slot in product.lora_slots:
        slot.reserve_rank(4, torch.device("cpu"))
        slot.down.copy_(torch.randn(slot.down.shape, generator=generator) / 16)
        slot.up.copy_(torch.randn(slot.up.shape, generator=generator) * strength)
        deltas.append(slot.up.float() @ slot.down.float())
    product.write_loras()
    x = torch.randn(10, 256, generator=generator)
    scale = x.abs().amax().reshape(1) * 50 / 448 if quantize else None
    rows = room_for(product)(x.shape, dtype=torch.float8_e4m3fn if quantize else torch.bfloat16)
    rows.copy_(x if scale is None else x / scale)
    exact = (rows.double() * (1 if scale is None else scale.double())) @ (
        torch.cat([layer.weight for layer in layers]) + torch.cat(deltas)
    ).double().t()
    made = product(Rows(rows, scale), TokenLayout(1, 0, 10))
    assert error(made, exact) < (0.05 if quantize else 0.01)
    lora = (
        exact
        - rows.double()
        * (1 if scale is None else scale.double())
        @ torch.cat([layer.weight for layer in layers]).double().t()
    )
    for slot in product.lora_slots:
        slot.up.zero_()
    product.write_loras()
    without = product(Rows(rows, scale), TokenLayout(1, 0, 10))
    assert error(made.double() - without.double(), lora) < max(0.1, 0.02 * float(exact.norm() / lora.norm()))
