"""compile(sizes=...): the notation, code of its own for each announced size, and what happens at the limit."""

import types
from typing import Any

import pytest
import torch

from tests import flow_models
from tests.families import session
from tests.targets import target_of
from vivace.errors import RecipeError, Unsupported
from vivace.foundation.spec.recipe_syntax import RecipeSpec
from vivace.machinery.compilation import compiled_code as limits
from vivace.machinery.technique import Effect
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.techniques.compile import Compile

pytestmark = pytest.mark.usefixtures("short_calls", "fresh_compiler")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("[768x512, 512x512]", "compile(sizes=[512x512, 768x512])"),
        ("[512x768, 768x512, 512x768]", "compile(sizes=[512x768, 768x512])"),
        ("512x512", "compile(sizes=[512x512])"),
        ("['512x512']", "compile(sizes=[512x512])"),
        ("any", "compile(dynamic=True)"),
        ("[]", "compile"),
    ],
)
def test_sizes_have_one_form_which_survives_text_and_json(written: str, text: str) -> None:
    recipe = resolve(f"compile(sizes={written})")
    assert recipe.text == text
    assert resolve(text) == recipe
    stored = RecipeSpec.model_validate_json(recipe.spec.model_dump_json())
    assert Recipe.from_spec(stored) == recipe


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("sizes=[512]", r"a size is WIDTHxHEIGHT.*|sizes is a list of WIDTHxHEIGHT"),
        ("sizes=[512x500]", "must be multiples of 8; got 512x500"),
        ("sizes=[x512]", "a size is WIDTHxHEIGHT in pixels"),
        ("sizes=[any, 512x512]", "sizes=any stands for every size"),
        ("sizes=512x512, dynamic=True", "dynamic=True compiles once for any size"),
        ("sizes=[512x512, ]", "a value is missing here"),
        (f"sizes=[{', '.join(f'{8 * k}x64' for k in range(1, 34))}]", "at most 32 sizes"),
    ],
)
def test_what_is_no_size_is_refused_in_words(written: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(f"compile({written})")


class _Unet(torch.nn.Conv2d):
    """Names its input as diffusers' UNets do."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return super().forward(sample)


def applied(technique: Compile, layer: type[torch.nn.Conv2d] = torch.nn.Conv2d) -> tuple[Any, Effect]:
    """Apply to a small network that takes latents of any size; return what runs it as a session does."""
    pipe = types.SimpleNamespace(unet=layer(4, 4, 3, padding=1))
    effect = technique.apply(target_of(pipe=pipe))

    def run(width: int, height: int, batch: int = 2) -> int:
        """Draw; return how many graphs that compiled."""
        before = int(counted()["compiled_graphs"])
        with torch.no_grad(), effect.contexts["denoiser"]():
            pipe.unet.forward(torch.ones(batch, 4, height // 8, width // 8))
        return int(counted()["compiled_graphs"]) - before

    assert effect.evidence is not None
    counted = effect.evidence
    return run, effect


def test_each_announced_size_is_compiled_once_and_for_itself() -> None:
    run, effect = applied(Compile(backend="eager", sizes=("64x64", "96x64", "128x64")))
    assert effect.changed["denoiser.sizes"] == "64x64, 96x64, 128x64"
    announced = [(64, 64), (96, 64), (128, 64)]
    assert [run(*size) for size in announced] == [1, 1, 1], "no code for any size"
    assert [run(*size) for size in reversed(announced)] == [0, 0, 0]
    assert run(160, 64) == 1, "another size is compiled when it comes"
    assert run(160, 64) == 0


def test_of_a_unet_only_height_and_width_are_dynamic() -> None:
    """Tracing with a dynamic batch takes more than twice as long; so a second batch size compiles once more."""
    run, _ = applied(Compile.model_validate({"backend": "eager", "sizes": "any"}), _Unet)
    assert [run(*size) for size in ((64, 64), (96, 64), (64, 128), (256, 256))] == [1, 0, 0, 0]
    assert [run(*size) for size in ((64, 64, 4), (64, 96, 4), (64, 96, 3))] == [1, 0, 0]


def test_the_limit_of_graphs_is_no_silent_one() -> None:
    """More than PyTorch's own limit of 8 graphs are compiled if they are announced; then comes an error."""
    run, _ = applied(Compile(backend="eager", sizes=("64x64", "96x64")))
    allowed = limits.graph_limit(2)
    assert allowed > torch._dynamo.config.recompile_limit
    widths = [64 + 8 * k for k in range(allowed)]
    assert [run(width, 64) for width in widths] == [1] * allowed
    with pytest.raises(Unsupported, match=rf"for {allowed} shapes already.*2 announced sizes.*sizes=any"):
        run(1024, 64)
    assert run(64, 64) == 0, "what is compiled goes on"
    assert not torch._dynamo.config.fail_on_recompile_limit_hit, "the setting does not outlive the forward"


def test_prompts_of_any_length_need_any_size() -> None:
    with pytest.raises(Unsupported, match=r"Qwen-Image takes prompts at their own lengths.*sizes=any"):
        flow_models.session("qwen-image", "compile(backend=eager, sizes=[64x64])")


def test_warming_up_draws_each_size() -> None:
    made = session("sd", "compile(backend=eager, sizes=[96x64, 64x64])@text_encoder")
    drawn: list[Any] = []
    made.pipe.unet.register_forward_pre_hook(lambda _, inputs: drawn.append(tuple(inputs[0].shape[-2:])))
    warmed = made.warm_up("a red circle", num_inference_steps=1)
    assert [(str(warmed_size.size), warmed_size.graphs, warmed_size.graphs_later) for warmed_size in warmed] == [
        ("64x64", 1, 0), ("96x64", 0, 0)
    ], "the text encoder does not see the size"  # fmt: skip
    assert drawn == [(8, 8), (8, 8), (8, 12), (8, 12)]
    (only,) = session("sd", "inference_mode").warm_up("a red circle", num_inference_steps=1)
    assert (only.size, only.graphs) == (None, 0)
