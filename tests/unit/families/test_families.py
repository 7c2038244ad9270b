"""What is said of each family is so: where its blocks are, what enters them, how its tokens lie, how it is guided."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.flow_models import MODELS, STEPS, WORDS, draw, session
from tests.narrow import SIDE
from vivace.architectures import CATALOGUE, FAMILIES, family_of, family_of_pipeline
from vivace.machinery.step_caching.block_residual import (
    blocks_of,
    residual_forwards,
    watching_modulated,
    watching_residuals,
)

TOKENS = {"sana-1600m": 4 * 4, "sana-sprint-1600m": 4 * 4}
"""Of an image of SIDE pixels; the others have one for 16 pixels."""


class _Enough(Exception):
    pass


def one_call(model: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a transformer, and the arguments of the first call that its pipeline makes."""
    opened = session(model)
    transformer = opened.pipe.transformer
    call: list[Any] = []

    def keep(_: Any, args: Any, kwargs: Any) -> None:
        call.extend((args, kwargs))
        raise _Enough

    hook = transformer.register_forward_pre_hook(keep, with_kwargs=True)
    with pytest.raises(_Enough):
        draw(opened, num_inference_steps=2)
    hook.remove()
    return transformer, call[0], call[1]


TEXT_FIRST = ("qwen-image-2.1", "krea-2-turbo", "krea-2-raw", "ideogram-4")
"""Their blocks get text and image as one tensor; what is reused is of the image alone."""


def of_the_image(model: str, output: torch.Tensor) -> torch.Tensor:
    """Some calls return what becomes of the text too, which their pipelines leave out."""
    return output[:, -((SIDE // 16) ** 2) :] if model in ("qwen-image-2.1", "ideogram-4") else output


def tensor(output: Any) -> torch.Tensor:
    return torch.stack(output) if isinstance(output, list) else output


@pytest.mark.parametrize("model", MODELS)
def test_its_blocks_are_one_residual(model: str) -> None:
    transformer, args, kwargs = one_call(model)
    kwargs["return_dict"] = False
    blocks = blocks_of(transformer)
    first = getattr(transformer, blocks.chains[0])[0]
    attended: list[torch.Tensor] = []
    attention = next(part for part in first.children() if "Attention" in type(part).__name__)

    def attends(_: Any, args: Any, kwargs: Any) -> None:
        attended.append(args[0] if args else kwargs["hidden_states"])

    hook = attention.register_forward_pre_hook(attends, with_kwargs=True)
    forwards = residual_forwards(transformer)
    with torch.no_grad(), watching_residuals(transformer) as watched:
        output, (residual,) = forwards.compute(*args, **kwargs)
        (theirs,) = watched
    with torch.no_grad():
        plain = of_the_image(model, tensor(output))
        reused = of_the_image(model, tensor(forwards.reuse((residual,), *args, **kwargs)))
        without = of_the_image(model, tensor(forwards.reuse((torch.zeros_like(residual),), *args, **kwargs)))
        assert forwards.look is not None
        looked = forwards.look(*args, **kwargs)
    hook.remove()
    assert torch.equal(theirs, residual)
    assert torch.allclose(reused, plain, atol=1e-5), "with what the blocks added, they need not be computed"
    assert not torch.allclose(without, plain, atol=1e-2), "and they add something"
    first_gets = attended[0][:, -looked.shape[1] :] if model in TEXT_FIRST else attended[0]
    assert torch.equal(looked, first_gets), "what the first attention gets"
    rows, columns = blocks.grid(transformer, (args, kwargs))
    assert rows * columns == TOKENS.get(model, (SIDE // 16) ** 2)
    assert residual.shape[1] >= rows * columns
    family = family_of(transformer)
    assert family is not None
    assert rows * family.cells(transformer) * vae_cell(model) == SIDE


def vae_cell(model: str) -> int:
    return 32 if model.startswith("sana") else 16 if model == "qwen-image-2.1" else 8


@pytest.mark.parametrize("model", ["z-image-turbo", "sana-1600m"])
def test_a_calibration_sees_what_a_cache_looks_at(model: str) -> None:
    transformer, args, kwargs = one_call(model)
    with torch.no_grad(), watching_modulated(transformer) as modulated:
        transformer(*args, **kwargs)
    assert not transformer.training
    look = residual_forwards(transformer).look
    assert look is not None
    with torch.no_grad():
        assert torch.equal(modulated[0], look(*args, **kwargs | {"return_dict": False}))


@pytest.mark.parametrize("scale", [0.0, 4.5])
@pytest.mark.quick("4.5")
def test_a_cache_tells_krea_2_s_calls_apart_although_they_have_no_names(scale: float) -> None:
    """The second call of a step gets the same latents. Mixed up, they would be one call, and guidance nothing."""
    opened = session("krea-2-turbo", "seacache(hits=0.5)", guidance_scale=scale)
    picture = draw(opened)
    assert opened.evidence()["cache_hit_rate"] == 0.25
    assert opened.evidence()["cache_calls"] == STEPS * (2 if scale else 1)
    plain = draw(session("krea-2-turbo", guidance_scale=scale))
    assert 0 < np.abs(picture - plain).mean() < 0.1


def test_qwen_image_21_s_second_calls_are_cached_apart_and_cut() -> None:
    guided = {"true_cfg_scale": 4.0, "negative_prompt": "blue"}
    plain = draw(session("qwen-image-2.1"), **guided)
    cached = session("qwen-image-2.1", "seacache(hits=0.5)")
    picture = draw(cached, **guided)
    assert cached.evidence()["cache_hit_rate"] == 0.25
    assert 0 < np.abs(picture - plain).mean() < 0.1
    cut = session("qwen-image-2.1", "cfg_cutoff(0.5)")
    calls: list[int] = []
    cut.pipe.transformer.img_in.register_forward_pre_hook(lambda _, __: calls.append(1))
    draw(cut, **guided)
    assert len(calls) == 2 + 2 + 1 + 1


@pytest.mark.parametrize(
    "recipe", ["seacache(hits=0.5)", "dual_block_cache(mask=2c1h1c)", "taylorseer(hits=0.5)"]
)
def test_qwen_image_21_s_text_may_be_padded_or_computed_in_each_step(recipe: str) -> None:
    """The image's positions come after the padding, so the image differs a little."""
    pair = draw(session("qwen-image-2.1", recipe), ["a star", "a red circle above a blue square"])
    alone = draw(session("qwen-image-2.1", recipe), "a star")
    assert np.abs(pair[:1] - alone).max() < 0.05
    whole = draw(session("qwen-image-2.1", recipe), "a star", use_kv_cache=False)
    assert np.abs(whole - alone).max() < 1e-3


@pytest.mark.parametrize(
    ("model", "off"), [("sd35-medium", 1.0), ("sana-1600m", 1.0), ("z-image-turbo", 0.0)]
)
def test_guidance_is_cut(model: str, off: float) -> None:
    cut = session(model, "cfg_cutoff(0.5)", guidance_scale=4.0)
    rows: list[int] = []
    cut.pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    picture = draw(cut)
    assert rows == [2, 2, 1, 1]
    assert cut.refuted(cut.evidence()) is None
    assert not np.array_equal(picture, draw(session(model, guidance_scale=4.0)))
    unguided = session(model, "cfg_cutoff(0.5)", guidance_scale=off)
    draw(unguided)
    assert f"guidance was off (scale {off:g} or less)" in str(unguided.refuted(unguided.evidence()))


def test_qwen_image_s_second_calls_are_cut() -> None:
    cut = session("qwen-image", "cfg_cutoff(0.5)")
    calls: list[int] = []
    cut.pipe.transformer.img_in.register_forward_pre_hook(lambda _, __: calls.append(1))
    draw(cut)
    assert len(calls) == 2 + 2 + 1 + 1
    assert cut.refuted(cut.evidence()) is None


def test_every_catalogue_model_is_of_a_family() -> None:
    for entry in CATALOGUE.values():
        family = family_of_pipeline(entry.pipeline)
        assert family is not None, entry.name
    assert len({family.denoiser for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("krea*")
def test_its_prompts_are_encoded_ahead(model: str) -> None:
    from vivace.runtime.calls import encode

    opened = session(model)
    prompts = ["a red circle", "a blue square"]
    embeddings = encode(opened, prompts)
    torch.set_num_threads(1)
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    ahead = opened(**embeddings, generator=generators, output_type="np", num_inference_steps=2).images
    pads = type(opened.pipe).__name__ in WORDS
    padded = {"max_sequence_length": 512} if pads else {}
    plain = draw(session(model), prompts, num_inference_steps=2, **padded)
    assert np.allclose(ahead, plain, atol=1e-5)
