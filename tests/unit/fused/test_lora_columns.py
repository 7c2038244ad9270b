"""LoRAs inside of fused products: y = [W B] [x; A x]."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lora import write_random
from tests import families, flow_models
from tests.families import latents, psnr
from tests.fused_kernels import error
from tests.lora_files import write_lora
from tests.narrow import SIDE
from vivace.machinery.fused import modulations
from vivace.machinery.fused.operations import Rows
from vivace.machinery.fused.products import Product, room_for
from vivace.machinery.kernels.reference import TokenLayout

MODELS = (
    "tiny-flux",
    "flux2-klein-4b",
    "z-image-turbo",
    "qwen-image",
    "qwen-image-2.1",
    "sd35-medium",
    "krea-2-turbo",
    "chroma1-hd",
    "ernie-image",
    "ideogram-4",
    "longcat-image",
)
RANKS = (4, 8)
SCALE = 60
"""Random ones are weak."""


def session(model: str, recipe: str) -> Any:
    return families.session("flux", recipe) if model == "tiny-flux" else flow_models.session(model, recipe)


def drawn_latents(made: Any, **call: Any) -> np.ndarray:
    draws = latents if type(made.pipe).__name__ == "FluxPipeline" else flow_models.latents
    return draws(made, **call)


def first_step(made: Any) -> torch.Tensor:
    """Return what the transformer makes of the first step: in few bits, steps after it go ways of their own."""
    outputs: list[torch.Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        sample = output[0] if isinstance(output, tuple) else output.sample
        if type(made.pipe).__name__ == "Ideogram4Pipeline":  # what a text becomes is nobody's
            sample = sample[:, -((SIDE // 16) ** 2) :]
        outputs.append(sample[0] if isinstance(sample, list) else sample)

    handle = made.pipe.transformer.register_forward_hook(note)
    drawn_latents(made, num_inference_steps=2)
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
@pytest.mark.diagonal
@pytest.mark.exhaustive("bf16-flux2*", "bf16-qwen-image", "fp8-tiny*", "fp8-z*", "fp8-qwen-image-2.1")
@pytest.mark.quick("bf16-tiny-flux")
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
    drawn = drawn_latents(hot)
    assert hot.refuted({}) is None
    hot.set_lora(second)
    fresh = session(model, f"{fused}+lora({second!r}, hot=True, scale={SCALE})")
    assert np.array_equal(drawn_latents(hot), drawn_latents(fresh)), "nothing of the first is left"
    hot.set_lora(scale=0)
    nothing = first_step(hot)
    assert nothing.equal(first_step(session(model, fused))), "bit for bit"
    hot.set_lora(first)
    assert first_step(hot).equal(nothing), "the scale is kept"
    hot.set_lora(scale=SCALE)
    assert np.array_equal(drawn_latents(hot), drawn)


@pytest.mark.parametrize("model", ["flux2-klein-4b"])
def test_two_are_beside_the_same_layers(model: str, files: list[str]) -> None:
    first, second = files
    both = session(model, f"fused(bf16)+lora({first!r}, hot=True)+lora({second!r}, hot=True, scale={SCALE})")
    merged = session(model, f"fused(bf16)+lora({first!r})+lora({second!r}, scale={SCALE})")
    alone = session(model, f"fused(bf16)+lora({first!r}, hot=True)")
    assert (
        psnr(drawn_latents(both), drawn_latents(merged))
        > psnr(drawn_latents(both), drawn_latents(alone)) + 10
    )
    both.set_lora(scale=0, instead_of=second)
    assert psnr(drawn_latents(both), drawn_latents(alone)) > 40


def is_modulation(layer: str) -> bool:
    """Of FLUX.1, Qwen-Image and Z-Image."""
    return layer.endswith(
        ("norm1.linear", "norm1_context.linear", "norm.linear", "_mod.1", "adaLN_modulation.0")
    )


@pytest.mark.parametrize("model", ["tiny-flux", "z-image-turbo", "qwen-image"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.quick("bf16-tiny-flux")
def test_modulations_too(model: str, precision: str, tmp_path: Path) -> None:
    pipe = session(model, "baseline").pipe
    first, second = (
        write_lora(pipe, tmp_path / f"{rank}.safetensors", rank, rank, strength=0.1, takes=is_modulation)
        for rank in RANKS
    )
    without, merged = (first_step(session(model, text)) for text in ("baseline", f"lora({first!r})"))
    plain = session(model, f"fused({precision})")
    hot = session(model, f"fused({precision})+lora({first!r}, hot=True, max_rank=8)")
    drawn = first_step(hot)
    assert error(drawn, merged) < max(0.5 * error(without, merged), 1.5 * error(first_step(plain), without))
    assert not drawn.equal(first_step(plain))
    hot.set_lora(second)
    assert not first_step(hot).equal(drawn)
    hot.set_lora(scale=0)
    assert np.array_equal(drawn_latents(hot), drawn_latents(plain))
    hot.set_lora(first, scale=1)
    assert first_step(hot).equal(drawn)


def test_the_table_of_modulations_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where modulations of all steps are computed before the first one."""
    monkeypatch.setattr(modulations, "capacity_on", lambda device: modulations.CAPACITY)
    pipe = session_of_flux("baseline").pipe
    path = write_lora(pipe, tmp_path / "lora.safetensors", 4, strength=0.1, takes=is_modulation)
    hot, plain = session_of_flux(f"fused(bf16)+lora({path!r}, hot=True)"), session_of_flux("fused(bf16)")
    first = latents(hot)
    table = hot.pipe.transformer.vivace_fused.modulations
    address = table.table.data_ptr()
    hot.set_lora(scale=0)
    assert table.keys.isnan().all(), "nothing of before is found"
    assert np.array_equal(latents(hot), latents(plain))
    hot.set_lora(scale=1)
    assert np.array_equal(latents(hot), first)
    assert table.table.data_ptr() == address, "captured graphs read it"
    assert hot.evidence()["denoiser.modulations_computed_in_the_loop"] == 0


def session_of_flux(recipe: str) -> Any:
    return session("tiny-flux", recipe)


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
