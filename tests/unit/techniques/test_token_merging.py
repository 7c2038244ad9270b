"""Self-attention over fewer tokens."""

import numpy as np
import pytest
import torch

from tests.families import draw, drawn, psnr, session
from vivace.errors import Unsupported
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.token_merging import match

pytestmark = pytest.mark.usefixtures("small_images")


@pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 3), (1, 6), (8, 2)])
@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.5, 0.75])
def test_every_token_gets_what_it_was_merged_into(height: int, width: int, ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, height * width, 8, generator=generator)
    merge, unmerge, kept = match(tokens, height, width, ratio)
    merged = merge(tokens)
    num_destinations = -(-height // 2) * -(-width // 2)
    assert kept == max(num_destinations, height * width - int(ratio * height * width))
    assert merged.shape == (2, kept, 8)
    back = unmerge(merged)
    same = (back == tokens).all(-1)
    if kept == height * width:
        assert same.all(), "nothing was merged"
    for sample in range(2):
        # Whoever shares a value has had its own averaged into it, and nobody is lost.
        values, group = torch.unique(back[sample], dim=0, return_inverse=True)
        assert len(values) == kept
        for number in range(kept):
            members = tokens[sample][group == number]
            assert torch.allclose(members.mean(0), values[number], atol=1e-6)


def test_the_most_alike_are_merged() -> None:
    tokens = torch.eye(16)[None].clone()
    tokens[0, 1] = tokens[0, 0] * 3  # beside a destination, of the same direction
    tokens[0, 15] = tokens[0, 10] + 0.1 * tokens[0, 3]
    _, unmerge, kept = match(tokens, 4, 4, 2 / 16)
    assert kept == 14
    merged = unmerge(torch.arange(kept).float().view(1, kept, 1)).flatten()
    assert merged[1] == merged[0]
    assert merged[15] == merged[10]
    assert len(merged.unique()) == 14


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_attention_sees_fewer_tokens_and_the_picture_is_much_the_same(family: str) -> None:
    reference = drawn(family, height=128, width=96)
    made = session(family, "token_merging(0.5)")
    picture = draw(made, height=128, width=96)
    assert not np.array_equal(picture, reference)
    assert psnr(picture, reference) > 12
    (kept,) = made.evidence().items()
    name, number = kept
    tokens = int(name.removeprefix("denoiser.tokens_of_"))
    assert number == tokens // 2
    assert made.refuted({}) is None
    assert np.array_equal(draw(made, height=128, width=96), picture), "no lots are drawn"


def test_more_levels_thin_more_blocks() -> None:
    one_level, two = session("sd", "token_merging"), session("sd", "token_merging(levels=2)")
    num = [
        int(made.effects["token_merging@denoiser"]["denoiser.thinned_attentions"])
        for made in (one_level, two)
    ]
    assert num[0] < num[1]
    draw(two)
    assert len(two.evidence()) == 2


def test_each_picture_of_a_batch_has_pairs_of_its_own() -> None:
    made = session("sd", "token_merging(0.5)")
    prompts = ["a red circle", "a large green triangle"]
    both = draw(made, prompts)
    for number, prompt in enumerate(prompts):
        assert psnr(draw(made, prompt, seed=number), both[number : number + 1]) > 40


@pytest.mark.soak
def test_it_is_traced_into_one_graph() -> None:
    # Counts are of the whole process, and what other tests compiled counts for the limit of recompiling.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    alone = session("sd", "token_merging(0.5)")
    picture = draw(alone)
    compiled = session("sd", "token_merging(0.5)+compile(backend=eager)")
    for _ in range(2):
        assert psnr(draw(compiled), picture) > 40
    evidence = compiled.evidence()
    assert (evidence["compiled_graphs"], evidence["graph_breaks"]) == (1, 0)
    assert evidence | alone.evidence() == evidence, "the tokens are counted all the same"


def test_a_transformer_is_refused_in_words() -> None:
    with pytest.raises(Unsupported, match="only in UNets, and FluxTransformer2DModel is not one"):
        session("flux", "token_merging")


def test_memory_of_merged_tokens_is_predicted() -> None:
    base, thinned = (
        predict(find_weightless("tiny-sd"), resolve(text), height=512, width=512)
        for text in ("attention(math)", "attention(math)+token_merging(0.5)")
    )
    assert thinned.stages["denoiser"] < base.stages["denoiser"], "score matrices of a quarter"
