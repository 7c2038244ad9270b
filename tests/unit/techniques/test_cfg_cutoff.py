"""Guidance that ends: one forward less a step where it takes two, half a batch where it takes one."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import build, draw, drawn, psnr, session
from tests.unit.techniques.test_cuda_graph import apply as apply_cuda_graph
from vivace.errors import RecipeError, Unsupported
from vivace.runtime.calls import encode

pytestmark = pytest.mark.usefixtures("small_images", "fresh_compiler")

TRUE_CFG = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0, "output_type": "latent"}
CALLS = {"cfg_cutoff(0.5)": 3 * 2 + 3, "cfg_cutoff(0.34)": 2 * 2 + 4, "cfg_cutoff(0.01)": 2 + 5}
"""Of the transformer, in six steps."""


def counted(made: Any) -> list[str]:
    """Grows by one at each call that the transformer really makes."""
    calls: list[str] = []
    made.pipe.transformer.register_forward_hook(lambda *_: calls.append("a call"))
    return calls


def by_hand(pipe: Any, guided: int, prompt: str, negative: str, scale: float, steps: int = 6) -> np.ndarray:
    """FLUX's loop, as plain as it gets, with true CFG in the first `guided` steps."""
    embeds, pooled, text_ids = pipe.encode_prompt(prompt, None, max_sequence_length=32)
    negatives, negative_pooled, _ = pipe.encode_prompt(negative, None, max_sequence_length=32)
    channels = pipe.transformer.config.in_channels // 4
    latents, image_ids = pipe.prepare_latents(
        1, channels, 96, 96, embeds.dtype, torch.device("cpu"), torch.Generator().manual_seed(0)
    )
    sigmas = np.linspace(1.0, 1 / steps, steps)
    pipe.scheduler.set_timesteps(sigmas=sigmas.tolist(), device="cpu", mu=0.5)
    pipe.scheduler.set_begin_index(0)

    def predict(t: torch.Tensor, words: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        guidance = torch.tensor([3.5]) if pipe.transformer.config.guidance_embeds else None
        return pipe.transformer(
            hidden_states=latents,
            timestep=t.expand(1) / 1000,
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=words,
            txt_ids=text_ids,
            img_ids=image_ids,
        ).sample

    with torch.no_grad():
        for step, t in enumerate(pipe.scheduler.timesteps):
            noise = predict(t, embeds, pooled)
            if step < guided:
                away = predict(t, negatives, negative_pooled)
                noise = away + scale * (noise - away)
            latents = pipe.scheduler.step(noise, t, latents).prev_sample
        latents = pipe._unpack_latents(latents, 96, 96, pipe.vae_scale_factor)
        latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        picture = pipe.vae.decode(latents).sample
    return np.asarray(pipe.image_processor.postprocess(picture, output_type="np"))


@pytest.mark.parametrize("recipe", CALLS)
@pytest.mark.quick("cfg_cutoff(0.34)")
def test_after_the_cutoff_flux_makes_one_call_a_step(recipe: str) -> None:
    made = session("flux", recipe)
    calls = counted(made)
    for k in range(2):
        draw(made, **TRUE_CFG)
        assert len(calls) == (k + 1) * CALLS[recipe], "and a second image is guided again"
    guided = CALLS[recipe] - 6
    assert made.evidence() == {"guided_steps": guided, "unguided_steps": 6 - guided}
    assert made.refuted({}) is None


@pytest.mark.parametrize("guided", [1, 3, 5])
@pytest.mark.quick("3")
def test_it_is_what_a_plain_loop_gives(guided: int) -> None:
    made = session("flux", f"cfg_cutoff({guided / 6:.3f})")
    call = TRUE_CFG | {"guidance_scale": 3.5, "output_type": "np"}
    picture = draw(made, "a red circle", **call)
    plain = by_hand(build("flux"), guided, "a red circle", TRUE_CFG["negative_prompt"], 3.0)
    assert psnr(picture, plain) > 90
    whole = draw(session("flux"), "a red circle", **call)
    assert psnr(picture, whole) < 40, "the cutoff shows"


@pytest.mark.parametrize(
    "call_arguments",
    [{}, {"true_cfg_scale": 3.0}, {"negative_prompt": "a blue square"}, TRUE_CFG | {"true_cfg_scale": 1.0}],
)
def test_without_true_cfg_it_is_refuted_in_words(call_arguments: dict[str, Any]) -> None:
    call_arguments = call_arguments | {"output_type": "latent"}
    made = session("flux", "cfg_cutoff(0.5)")
    picture = draw(made, **call_arguments)
    assert "guidance(3.5, true_cfg=4)" in (made.refuted({}) or "")
    assert np.array_equal(picture, drawn("flux", **call_arguments))


def test_a_cutoff_on_the_last_step_is_refuted() -> None:
    made = session("flux", "cfg_cutoff(0.99)")
    draw(made, **TRUE_CFG)
    assert "the cutoff is after the last step" in (made.refuted({}) or "")


def test_a_call_that_failed_leaves_the_next_one_guided() -> None:
    made = session("flux", "cfg_cutoff(0.5)")
    first = draw(made, **TRUE_CFG)

    def fail(_: Any, step: int, *__: Any) -> Any:
        if step == 4:
            raise RuntimeError("in the middle")
        return {}

    with pytest.raises(RuntimeError, match="in the middle"):
        draw(made, **TRUE_CFG, callback_on_step_end=fail)
    assert np.array_equal(draw(made, **TRUE_CFG), first)


@pytest.mark.parametrize("blocks", ["whole", "repeated"])
@pytest.mark.quick("repeated")
def test_compiled_there_is_nothing_new_to_compile(blocks: str) -> None:
    alone = drawn("flux", "cfg_cutoff(0.5)", **TRUE_CFG)
    made = session("flux", f"cfg_cutoff(0.5)+compile(backend=eager, blocks={blocks})")
    counts = []
    for _ in range(2):
        assert psnr(draw(made, **TRUE_CFG), alone) > 80
        counts.append((made.evidence()["compiled_graphs"], made.evidence()["graph_breaks"]))
    assert counts[0] == counts[1], "none in the second call"
    assert made.evidence()["unguided_steps"] == 3
    if blocks == "whole":
        assert counts[0] == (1, 0)


@pytest.mark.parametrize(("family", "graphs"), [("sd", 2), ("flux", 1)])
def test_recorded_there_is_nothing_new_to_record(
    family: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: dict[str, Any] = {"num_inference_steps": 6, "guidance_scale": 4.0}
    call |= TRUE_CFG if family == "flux" else {}
    alone = drawn(family, "cfg_cutoff(0.5)", **call)
    pipe = build(family)
    made = vivace.apply(pipe, "cfg_cutoff(0.5)")
    effect = apply_cuda_graph(pipe, monkeypatch)
    for _ in range(2):
        assert psnr(draw(made, **call), alone) > 80
        assert effect.evidence is not None
        assert effect.evidence()["cuda_graphs_recorded"] == graphs


# guidance(true_cfg=...)


def test_a_recipe_turns_true_cfg_on() -> None:
    made = session("flux", "guidance(3.5, true_cfg=3)")
    arguments = {"negative_prompt": "", "true_cfg_scale": 3.0, "guidance_scale": 3.5}
    assert np.array_equal(draw(made), drawn("flux", **arguments))
    own = draw(made, negative_prompt="a blue square")
    assert np.array_equal(own, drawn("flux", **arguments | {"negative_prompt": "a blue square"}))
    assert not np.array_equal(own, draw(made))
    off = draw(made, true_cfg_scale=1.0)
    assert np.array_equal(off, drawn("flux", guidance_scale=3.5)), "what is passed to the call wins"


@pytest.mark.parametrize("per_prompt", [1, 2])
@pytest.mark.quick("2")
def test_every_prompt_of_a_batch_has_its_own_row_of_the_empty_one(per_prompt: int) -> None:
    made = session("flux", "guidance(3.5, true_cfg=3)+cfg_cutoff(0.5)")
    prompts = ["a red circle", "a green triangle"]
    torch.set_num_threads(1)
    generators = [torch.Generator().manual_seed(k) for k in range(2 * per_prompt)]
    batch = made(
        prompts, generator=generators, num_images_per_prompt=per_prompt, height=96, width=96,
        num_inference_steps=6, max_sequence_length=32, output_type="np",
    ).images  # fmt: skip
    assert made.evidence() == {"guided_steps": 3, "unguided_steps": 3}
    for k in range(2 * per_prompt):
        assert psnr(batch[k], draw(made, prompts[k // per_prompt], seed=k)[0]) > 60


def test_embeddings_take_the_place_of_prompts() -> None:
    made = vivace.load("tiny-flux", "guidance(3.5, true_cfg=3)+cfg_cutoff(0.5)+steps(6)")
    embeddings = encode(made, ["a red circle"])
    assert {"negative_prompt_embeds", "negative_pooled_prompt_embeds"} <= set(embeddings)
    seeded = {"output_type": "np"}
    in_words = made("a red circle", generator=torch.Generator().manual_seed(0), **seeded).images
    encoded = made(**embeddings, generator=torch.Generator().manual_seed(0), **seeded).images
    assert np.array_equal(in_words, encoded)
    assert made.evidence() == {"guided_steps": 3, "unguided_steps": 3}
    plain = vivace.load("tiny-flux", "steps(6)")
    assert "negative_prompt_embeds" not in encode(plain, ["a red circle"])


def test_one_kind_of_guidance_says_that_there_is_no_other() -> None:
    with pytest.raises(
        Unsupported, match=r"StableDiffusionPipeline takes no true_cfg_scale.*need only guidance\(scale\)"
    ):
        session("sd", "guidance(4, true_cfg=3)")
    with pytest.raises(RecipeError, match="more than 1"):
        session("flux", "guidance(3.5, true_cfg=1)")
