"""Pipelines with random weights: narrow versions of the published architectures, at their full depth."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.narrow import SIDE, narrow, network
from vivace.errors import UnknownModel
from vivace.models.synthetic import build, build_component, on_meta, tokenizer_for

PROMPT = "a red circle above a blue square"


@pytest.fixture(scope="module", params=["sd15", "sdxl", "flux-dev"])
def drawn(request: pytest.FixtureRequest) -> tuple[Any, dict[str, list[float]], torch.Tensor, torch.Tensor]:
    """A pipeline of each class; the variance of every norm's input while it drew; its latents and its image."""
    pipe = build(narrow(request.param), "cpu", torch.float32)
    variances: dict[str, list[float]] = {}
    latents: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"])
        return {}

    steps = 2 if request.param == "flux-dev" else 4
    with watched(pipe, variances):
        picture = draw(pipe, num_inference_steps=steps, callback_on_step_end=keep, output_type="pt")
    return pipe, variances, latents[-1], picture


@contextlib.contextmanager
def watched(pipe: Any, variances: dict[str, list[float]]) -> Iterator[None]:
    """Note the variance of each norm's input, over the whole tensor."""

    def note(into: list[float]) -> Any:
        return lambda _, args: into.append(float(args[0].var()))

    handles = [
        module.register_forward_pre_hook(note(variances.setdefault(f"{part}.{name}", [])))
        for part, component in pipe.components.items()
        if isinstance(component, torch.nn.Module)
        for name, module in component.named_modules()
        if type(module).__name__ in ("LayerNorm", "GroupNorm", "RMSNorm", "T5LayerNorm")
    ]
    yield
    for handle in handles:
        handle.remove()


def draw(pipe: Any, prompt: str = PROMPT, **call: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    images: torch.Tensor = pipe(prompt, height=SIDE, width=SIDE, generator=generator, **call).images
    return images


def test_each_pipeline_draws_something(drawn: Any) -> None:
    _, _, latents, picture = drawn
    assert torch.isfinite(latents).all()
    assert 0.3 < latents.std() < 3, "what the VAE was made to decode"
    assert picture.shape == (1, 3, SIDE, SIDE)
    assert torch.isfinite(picture).all()
    assert picture.std() > 0.05
    assert ((picture == 0) | (picture == 1)).float().mean() < 0.2, "hardly any pixel is clipped"


def test_every_norm_sees_an_input_of_unit_order_however_deep(drawn: Any) -> None:
    pipe, variances, _, _ = drawn
    part, at_least = {
        "StableDiffusionPipeline": ("unet", 100),
        "StableDiffusionXLPipeline": ("unet", 250),
        "FluxPipeline": ("transformer", 200),
    }[type(pipe).__name__]
    assert sum(name.startswith(part) for name in variances) > at_least
    for name, values in variances.items():
        if name.startswith("vae.encoder"):
            continue
        assert values, f"{name} never ran"
        assert min(values) > 0.05, name
        assert max(values) < 20, name


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sdxl-turbo", {"num_inference_steps": 1, "guidance_scale": 0.0}),
        ("sdxl-lightning-2step", {"num_inference_steps": 2, "guidance_scale": 0.0}),
        ("hyper-sdxl-4step", {"num_inference_steps": 4, "guidance_scale": 0.0}),
        ("lcm-sdxl", {"num_inference_steps": 4, "guidance_scale": 8.0}),
        ("pony", {"num_inference_steps": 6}),
        ("playground", {"num_inference_steps": 6}),
    ],
)
@pytest.mark.slow("pony*", "playground*", "lcm*")
def test_latents_end_in_range_under_every_scheduler(name: str, call: dict[str, Any]) -> None:
    # Shallow: what is tried here is the scheduler.
    few = {"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 2]}
    pipe = build(narrow(name).changed(unet=few), "cpu", torch.float32)
    latents = draw(pipe, output_type="latent", **call)
    assert torch.isfinite(latents).all()
    assert 0.15 < latents.std() < 3


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux-dev"])
@pytest.mark.quick("sd15")
def test_a_seed_gives_the_same_weights_whatever_else_ran(name: str) -> None:
    architecture = narrow(name)
    first = build(architecture, "cpu", torch.float32, seed=3)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again = build(architecture, "cpu", torch.float32, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before), "nobody else's random numbers are used up"
    for part in architecture.components:
        theirs = getattr(again, part).state_dict()
        for key, value in getattr(first, part).state_dict().items():
            assert torch.equal(value, theirs[key]), f"{part}.{key}"
    alone = build_component(
        architecture.components["text_encoder"], "cpu", torch.float32, seed=3, name="text_encoder"
    )
    for key, value in first.text_encoder.state_dict().items():
        assert torch.equal(value, alone.state_dict()[key]), "a component does not depend on the others"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_kept_and_nothing_overflows(dtype: torch.dtype) -> None:
    pipe = build(narrow("flux-dev").changed(vae={"layers_per_block": 1}), "cpu", dtype)
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        module = getattr(pipe, part)
        assert {p.dtype for p in module.parameters()} == {dtype}
        assert not any(p.requires_grad for p in module.parameters())
        assert not any(m.training for m in module.modules()), "T5's dropout would change every image"
    ids = pipe.tokenizer(PROMPT, padding="max_length", return_tensors="pt").input_ids
    assert torch.isfinite(pipe.text_encoder(ids).pooler_output).all()


def test_what_modules_compute_themselves_is_right() -> None:
    architecture = narrow("flux-dev")
    clip = build_component(architecture.components["text_encoder"], "cpu", torch.bfloat16)
    assert torch.equal(clip.embeddings.position_ids, torch.arange(77)[None])
    t5 = build_component(architecture.components["text_encoder_2"], "cpu", torch.bfloat16)
    assert t5.shared.weight is t5.encoder.embed_tokens.weight
    assert float(t5.shared.weight.float().std()) == pytest.approx(1, rel=0.01), (
        "an embedding, not a layer of 1000 inputs"
    )
    for module in (clip, t5):
        assert all(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers()))


def test_biases_and_norms_are_neither_zero_nor_one() -> None:
    """A kernel that forgets one of them must not give the same image."""
    unet = build_component(narrow("sd15").components["unet"], "cpu", torch.float32)
    for name, parameter in unet.named_parameters():
        if parameter.dim() == 1:
            assert parameter.std() > 0, name
            assert abs(float(parameter.mean()) - (0 if name.endswith("bias") else 1)) < 0.1, name


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownModel, match="did you mean 'flux-dev'"):
        build("flux-def", "cpu", torch.float32)


class TestTokenizers:
    """They stand in for CLIP's and T5's."""

    @pytest.fixture
    def clip(self) -> Any:
        return tokenizer_for(on_meta(network("sdxl", "text_encoder_2")).config, 77)

    @pytest.fixture
    def t5(self) -> Any:
        return tokenizer_for(on_meta(network("flux-dev", "text_encoder_2")).config, 512)

    def test_clip_s_ids_stand_where_they_should(self, clip: Any) -> None:
        out = clip([PROMPT, ""], padding="max_length", max_length=77, truncation=True, return_tensors="pt")
        assert out.input_ids.shape == out.attention_mask.shape == (2, 77)
        assert out.input_ids[0, 0] == 49406
        # Encoders read the pooled vector at the first place of the highest id.
        assert out.input_ids.argmax(-1).tolist() == [int(n) - 1 for n in out.attention_mask.sum(-1)]
        assert out.input_ids[1].tolist() == [49406] + [49407] * 76
        assert out.input_ids.max() == 49407

    def test_t5_s_ids_stand_where_they_should(self, t5: Any) -> None:
        out = t5(PROMPT, padding="max_length", max_length=256, truncation=True, return_tensors="pt")
        words = int(out.attention_mask.sum()) - 1
        assert out.input_ids.shape == (1, 256)
        assert out.input_ids[0, words] == 1
        assert out.input_ids[0, words + 1 :].eq(0).all()
        assert out.input_ids[0, :words].min() > 2

    def test_ids_are_spread_over_the_vocabulary_and_never_outside(self, clip: Any, t5: Any) -> None:
        text = " ".join(f"{a}{b}{c}" for a in "bcdfgh" for b in "aeiou" for c in "klmnprst")
        for tokenizer, size in ((clip, 49408), (t5, 32128)):
            ids = tokenizer(text).input_ids[1:-1]
            assert len(set(ids)) > 0.98 * len(ids)
            assert 0 <= min(ids) < 0.05 * size
            assert 0.9 * size < max(ids) < size

    def test_long_prompts_are_cut_and_end_all_the_same(self, clip: Any) -> None:
        text = "word " * 500
        assert len(clip(text, padding="longest").input_ids) == 502
        cut = clip(text, padding="max_length", truncation=True).input_ids
        assert len(cut) == 77
        assert cut[-1] == 49407


def test_pipelines_take_long_prompts_and_batches() -> None:
    shallow = {"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 1]}
    pipe = build(narrow("sdxl").changed(unet=shallow), "cpu", torch.float32)
    latents = draw(pipe, [PROMPT, "many words " * 100], num_inference_steps=1, output_type="latent")
    assert latents.shape == (2, 4, 16, 16)
    assert math.isfinite(float(latents.sum()))
