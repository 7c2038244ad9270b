"""The fused forward against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from tests.fused_kernels import error
from tests.targets import target_of
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.technique import Machine, Target
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128


class Pipe:
    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.scheduler = None


def transformer(guidance: bool = True, singles: int = 2) -> Any:
    torch.manual_seed(0)
    made = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=singles,
        num_attention_heads=HEADS,
        attention_head_dim=CHANNELS,
        joint_attention_dim=48,
        pooled_projection_dim=32,
        guidance_embeds=guidance,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(batch: int, text: int, height: int, width: int, guidance: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden_states": random(batch, height * width, 16),
        "encoder_hidden_states": random(batch, text, 48),
        "pooled_projections": random(batch, 32),
        "timestep": torch.linspace(0.7, 0.3, batch),
        "guidance": torch.full([batch], 3.5) if guidance else None,
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


def target(made: Any) -> Target:
    return target_of(pipe=Pipe(made))


@torch.no_grad()
def test_each_row_of_a_batch_is_a_picture_of_its_own() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    given = inputs(3, 5, 4, 6)
    (together,) = made(**given)
    for row in range(3):
        alone = {
            name: value[row : row + 1]
            if isinstance(value, torch.Tensor) and not name.endswith("_ids")
            else value
            for name, value in given.items()
        }
        assert error(made(**alone)[0], together[row : row + 1]) < 0.01


@torch.no_grad()
def test_new_inputs_are_never_mixed_up_with_old_ones() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    plain = transformer()
    given = inputs(1, 5, 4, 6)
    made(**given)
    for name in ("pooled_projections", "timestep", "guidance", "encoder_hidden_states", "img_ids"):
        given[name] = given[name] * 0.5
        assert error(made(**given)[0], plain(**given)[0]) < 0.015, name


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    given = inputs(1, 5, 4, 6)
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(**given, controlnet_block_samples=[torch.zeros(1)])
    with pytest.raises(Unsupported, match="ip_adapter_image_embeds"):
        made(**given, joint_attention_kwargs={"ip_adapter_image_embeds": [torch.zeros(1)]})
    made(**given, joint_attention_kwargs={"scale": 1.0})
    made(**given, joint_attention_kwargs={})


def test_attention_in_fp8_is_for_hopper_and_fp8() -> None:
    technique = Fused(precision="fp8", attention="fp8")
    assert "runs on GPUs" in str(technique.unsupported(target(transformer())))
    with pytest.raises(RecipeError, match=r"write fused\(fp8, attention=fp8\)"):
        resolve("fused(attention=fp8)")


@pytest.mark.parametrize(
    ("precision", "capability", "needed"),
    [("bf16", (7, 5), "8.0"), ("fp8", (8, 0), "8.9"), ("fp8", (8, 9), "")],
)
def test_older_gpus_are_refused(precision: Any, capability: tuple[int, int], needed: str) -> None:
    machine = Machine("cuda", "a GPU", capability, None, has_all_packages=True)
    reason = Fused(precision=precision).unsupported(target_of(machine=machine))
    assert (reason is None) if not needed else f"compute capability {needed}" in str(reason)


def test_other_denoisers_have_no_fused_form() -> None:
    reason = str(Fused(precision="bf16").unsupported(target(torch.nn.Linear(2, 2))))
    assert "made for transformers of FLUX.1, " in reason


@pytest.mark.parametrize("other", ["first_block_cache(0.1)", "compile", "int8"])
def test_what_works_on_blocks_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match="does not go with"):
        resolve(f"fused(bf16)+{other}")
