"""A denoiser sharded between processes generates what one generates; what cannot work is refused with a reason."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import vivace
from tests import families
from tests.families import psnr
from tests.forked_peers import forked_peers, lives, pids
from tests.targets import target_of
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.multi_gpu.split_tokens import needs_diffusers
from vivace.machinery.technique import Machine
from vivace.models import find_model
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script
from vivace.techniques.parallel import Parallel

pytestmark = pytest.mark.usefixtures("small_images")

SAME_DB = 40.0
VERY_SAME_DB = 100.0
RECIPES = {"sd": "parallel(cfg)", "flux": "parallel(ulysses)"}


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with forked_peers():
        yield


@pytest.fixture(scope="class", params=list(RECIPES))
def both(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, Any]]:
    """A family, its pipeline sharded between two processes, and the same in one."""
    family = request.param
    with families.session(family, RECIPES[family]) as sharded:
        started = pids(sharded)
        yield family, sharded, families.session(family)
    assert all(not lives(pid) for pid in started), "closing ends them"


class TestBoth:
    @pytest.mark.parametrize(
        "call",
        [
            {},
            {"prompt": ["a red circle", "a blue square above a green star"]},
            {"prompt": ["a red circle", "a blue star", "a green square"]},
            {"height": 160, "width": 96},
            {"prompt": "a big blue diamond right of a small red triangle on a striped white background"},
            {"prompt": "a red circle", "num_images_per_prompt": 2, "guidance_scale": 2.0},
        ],
        ids=["plain", "batch", "odd batch", "size", "prompt", "guidance"],
    )
    @pytest.mark.quick("sd-plain", "sd-guidance", "flux-batch", "flux-size")
    @pytest.mark.slow("sd-plain", "flux-batch")
    def test_it_draws_the_same_picture(self, both: tuple[str, Any, Any], call: dict[str, Any]) -> None:
        _, sharded, alone = both
        before = sharded.evidence()["forwards_shared"]
        assert psnr(families.draw(sharded, **call), families.draw(alone, **call)) > SAME_DB
        evidence = sharded.evidence()
        assert evidence["forwards_shared"] > before
        assert evidence["processes"] == 2
        assert evidence["bytes_exchanged_a_forward"] > 0
        assert evidence["peer_1.peak_bytes"] > 1e6
        assert sharded.refuted(evidence) is None

    def test_without_guidance_tokens_are_sharded_and_rows_are_not(self, both: tuple[str, Any, Any]) -> None:
        family, sharded, alone = both
        before = sharded.evidence()
        call = {"guidance_scale": 1.0}
        assert psnr(families.draw(sharded, **call), families.draw(alone, **call)) > SAME_DB
        after = sharded.evidence()
        assert (after["forwards_shared"] == before["forwards_shared"]) is (family == "sd")
        assert (after["forwards_alone"] > before["forwards_alone"]) is (family == "sd")

    @pytest.mark.quick("sd")
    def test_one_session_at_a_time(self, both: tuple[str, Any, Any]) -> None:
        family, sharded, alone = both
        with pytest.raises(Unsupported, match="close the session"):
            families.session(family, RECIPES[family])
        assert psnr(families.draw(sharded), families.draw(alone)) > SAME_DB, "the first goes on"


@pytest.mark.parametrize(
    ("family", "recipe", "least_db"),
    [
        ("sdxl", "parallel(cfg)", SAME_DB),  # conditions in nested dictionaries
        (
            "sd",
            "parallel(cfg)+fuse_qkv+quantize(int8)+deepcache+compile(blocks=repeated, backend=eager)+inference_mode",
            35,
        ),
        ("sd", "parallel(cfg)+taylorseer(hits=0.5)+attention(math)", 35),
        ("flux", "bf16+parallel(cfg)+teacache(hits=0.3)", 35),
        ("flux", "quantize(nf4)+parallel(ulysses)+attention(math)", 35),
        ("flux", "parallel(all_gather)+attention(math)+steps(4)", SAME_DB),
        ("flux", "parallel(all_gather)+teacache(hits=0.5)", SAME_DB),
        ("flux", "parallel(all_gather)+magcache(hits=0.5)+compile(blocks=repeated, backend=eager)", SAME_DB),
        ("flux", "parallel(all_gather)+seacache(1)", SAME_DB),
        ("flux", "parallel(all_gather)+taylorseer(hits=0.3)", SAME_DB),
        # A last bit of the inputs turns over whole steps of int8: 34.2 dB apart, and each is 37 from full precision.
        ("sd", "int8_dynamic+parallel(cfg)", 33),
    ],
)
@pytest.mark.exhaustive("sdxl*", "flux-bf16*", "flux-parallel(all_gather)+att*", "flux-quantize*")
@pytest.mark.quick("sd-int8_dynamic*", "*teacache(hits=0.5)*")
def test_the_rest_of_a_recipe_holds_in_each_process(family: str, recipe: str, least_db: float) -> None:
    """Precision and structure travel with the weights; later techniques are applied in each process."""
    left_out = ("parallel", "compile")  # eager code computes the same
    alone = "+".join(part for part in recipe.split("+") if not part.startswith(left_out)) or "baseline"
    call: dict[str, Any] = {} if family != "flux" else {"prompt": ["a red circle", "a blue star"]}
    expected = families.draw(families.session(family, alone), **call)
    with families.session(family, recipe) as sharded:
        assert psnr(families.draw(sharded, **call), expected) > least_db
        evidence = sharded.evidence()
        assert evidence["forwards_shared"] > 0
        assert sharded.refuted(evidence) is None


def even_flux() -> Any:
    """tiny-flux's pipeline with a random transformer of four heads, which two processes split evenly."""
    return families.random_flux(num_attention_heads=4, num_single_layers=1, num_layers=1)


def of_even_flux(recipe: str = "baseline", **call: Any) -> np.ndarray:
    """What one process generates with it, once for all tests."""
    key = f"{recipe} {call}"
    if key not in _EXPECTED:
        _EXPECTED[key] = families.draw(vivace.apply(even_flux(), recipe), **call)
    return _EXPECTED[key]


_EXPECTED: dict[str, np.ndarray] = {}


@pytest.mark.long
def test_even_heads_compile_and_uneven_tokens_are_refused() -> None:
    expected = of_even_flux()
    with vivace.apply(even_flux(), "parallel(ulysses)+compile(backend=eager)") as sharded:
        assert psnr(families.draw(sharded), expected) > SAME_DB
        assert sharded.evidence()["graph_breaks"] == 0
        with pytest.raises(Unsupported, match="31 tokens, which cannot be split evenly among 2 GPUs"):
            families.draw(sharded, max_sequence_length=31)
        assert psnr(families.draw(sharded), expected) > SAME_DB, "nothing was sent, so it goes on"


@pytest.mark.parametrize(
    ("recipe", "call"),
    [
        ("parallel(ulysses)", {}),
        ("parallel(ulysses, gpus=4)", {"height": 128, "width": 64}),
        ("parallel(ulysses)+attention(math)", {"prompt": ["a red circle", "a blue star", "a green square"]}),
        ("fuse_qkv+parallel(ulysses)", {"num_images_per_prompt": 2}),
        ("quantize(int8)+parallel(ulysses)", {}),
        ("quantize(fp8_weight)+parallel(ulysses)+compile(blocks=repeated, backend=aot_eager)", {}),
        ("parallel(all_gather)", {}),
        ("parallel(all_gather, gpus=3)", {"height": 96, "width": 96, "max_sequence_length": 24}),
        ("fuse_qkv+parallel(all_gather)", {"prompt": ["a red circle", "a blue star", "a green square"]}),
        ("quantize(int8)+parallel(all_gather)+compile(backend=aot_eager)", {}),
    ],
)
@pytest.mark.exhaustive("quantize(fp8_weight)*", "quantize(int8)*compile*")
@pytest.mark.quick("parallel(ulysses)-call0", "*gpus=3*")
def test_flux_draws_the_very_same_picture(recipe: str, call: dict[str, Any]) -> None:
    alone = "+".join(part for part in recipe.split("+") if part.startswith(("quantize", "fuse")))
    expected = of_even_flux(alone or "baseline", **call)
    with vivace.apply(even_flux(), recipe) as sharded:
        assert psnr(families.draw(sharded, **call), expected) > VERY_SAME_DB
        evidence = sharded.evidence()
        assert evidence["messages_an_attention"] == (1 if "all_gather" in recipe else 2)
        assert evidence.get("graph_breaks", 0) == 0


def test_a_hit_of_a_step_cache_is_computed_alone_and_of_all_tokens() -> None:
    recipe = "teacache(hits=0.5)"
    expected = of_even_flux(recipe, num_inference_steps=8)
    with vivace.apply(even_flux(), f"parallel(ulysses)+{recipe}") as sharded:
        for _ in range(2):
            assert psnr(families.draw(sharded, num_inference_steps=8), expected) > VERY_SAME_DB
        evidence = sharded.evidence()
    hits = round(16 * evidence["cache_hit_rate"])
    assert hits >= 6
    assert evidence["forwards_alone"] == hits
    assert evidence["forwards_shared"] == evidence["peer_1.forwards"] == 16 - hits


@pytest.mark.parametrize(
    ("cache", "calls", "shared"),
    [
        ("", ({"height": 160, "width": 96}, {"prompt": ["a red circle", "a blue square"]}), 12),
        ("+teacache(hits=0.5)", ({},), 4),
    ],
)
@pytest.mark.quick("+teacache*")
def test_fused_blocks_gather_keys_and_values(
    cache: str, calls: tuple[dict[str, Any], ...], shared: int
) -> None:
    alone = families.session("flux", f"fused(bf16){cache}")
    with families.session("flux", f"fused(bf16)+parallel(all_gather){cache}") as sharded:
        for call in calls:
            assert psnr(families.draw(sharded, **call), families.draw(alone, **call)) > SAME_DB
        evidence = sharded.evidence()
        assert evidence["messages_an_attention"] == 1
        assert evidence["forwards_shared"] == shared
        assert sharded.refuted(evidence) is None


@pytest.mark.parametrize("by_one_recipe", [True, False])
@pytest.mark.quick("True")
def test_a_fused_unets_rows_are_shared_out(by_one_recipe: bool) -> None:
    """Its text is sent, and where it was fused before, the keys and values of it, which are eight times as large."""
    alone = families.session("sd", "fused(bf16)")
    expected = [families.draw(alone, prompt) for prompt in ("a red circle", "a blue square")]
    with (
        families.session("sd", "fused(bf16)+parallel(cfg)")
        if by_one_recipe
        else vivace.apply(alone.pipe, "parallel(cfg)")
    ) as sharded:
        for prompt, picture in zip(("a red circle", "a blue square"), expected, strict=True):
            # A row alone and two at once are rounded to bf16 differently.
            assert psnr(families.draw(sharded, prompt), picture) > 34
        evidence = sharded.evidence()
        assert (evidence["bytes_exchanged_a_forward"] < 20_000) is by_one_recipe
        assert sharded.refuted(evidence) is None


def test_layers_that_are_more_than_a_matmul_are_called() -> None:
    """A hook, as an adapter or a probe registers it, runs, though nothing overlaps with the collective then."""
    pipe = even_flux()
    expected = of_even_flux()
    with vivace.apply(pipe, "parallel(ulysses)") as sharded:
        calls: list[Any] = []
        sharded.pipe.transformer.single_transformer_blocks[0].proj_out.register_forward_hook(
            lambda *_: calls.append(_)
        )
        assert psnr(families.draw(sharded), expected) > VERY_SAME_DB
        assert len(calls) == sharded.evidence()["forwards_shared"]


def test_who_shards_the_tokens() -> None:
    """A backend that was chosen in diffusers' own way stays chosen."""
    transformer = even_flux().transformer
    assert not needs_diffusers(transformer, "ulysses", 2)
    assert needs_diffusers(transformer, "ulysses", 3), "four heads"
    assert not needs_diffusers(transformer, "all_gather", 3)
    assert needs_diffusers(transformer, "ring", 2), "which is theirs alone"
    try:
        transformer.set_attention_backend("_native_math")  # for all models of this process, and of no other
        assert needs_diffusers(transformer, "ulysses", 2)
        assert needs_diffusers(even_flux().transformer, "ulysses", 2)
        with pytest.raises(
            Unsupported, match=r"default attention backend.*parallel\(ring\) or parallel\(ulysses\)"
        ):
            vivace.apply(even_flux(), "parallel(all_gather)")
    finally:
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


@pytest.mark.parametrize(
    ("family", "recipe", "why"),
    [
        ("sd", "parallel(ulysses)", "no context-parallel plan .* for UNet2DConditionModel"),
        ("sd", "parallel(all_gather)", r"take parallel\(cfg\)"),
        ("flux", "parallel(ring)", "only CUDA kernels"),
        ("flux", "parallel(ulysses)+teacache(hits=0.5)", r"cannot be gathered.*parallel\(all_gather\)"),
        ("flux", "parallel(ulysses, gpus=4)", r"5 attention heads.*parallel\(all_gather\)"),
        ("flux", "parallel(ulysses)+compile(backend=eager)", "torch.compile does not support"),
        ("flux", "fused(bf16)+parallel(ulysses)", r"take parallel\(all_gather, gpus=2\)"),
    ],
)
def test_what_cannot_work_says_why(family: str, recipe: str, why: str) -> None:
    with pytest.raises(Unsupported, match=f"parallel: .*{why}"):
        families.session(family, recipe)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("parallel(all_gather)+first_block_cache(0.2)", "each GPU has only its own tokens"),
        ("parallel(cfg)+faster_cache", "both branches"),
        ("parallel(cfg)+layerwise_casting", "hooks in layers"),
    ],
)
def test_what_conflicts_is_refused_when_the_recipe_is_resolved(recipe: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        resolve(recipe)


def test_the_old_name_of_cfg_is_accepted() -> None:
    recipe = resolve("parallel(guidance, gpus=3)+steps(4)")
    assert recipe.text == "parallel(cfg, gpus=3)+steps(4)"
    (stored,) = (call for call in recipe.spec.techniques if call.name == "parallel")
    old = recipe.spec.model_copy(
        update={"techniques": (stored.model_copy(update={"knobs": {**stored.knobs, "mode": "guidance"}}),)}
    )
    assert Recipe.from_spec(old).techniques == (Parallel(mode="cfg", gpus=3),)
    with pytest.raises(RecipeError, match="mode must be one of cfg, ulysses, all_gather, ring; got 'rows'"):
        resolve("parallel(rows)")


def test_a_script_of_it_says_that_it_needs_vivace() -> None:
    written = write_script(
        find_model("tiny-sd"), resolve("parallel(cfg)+steps(8)"), "cpu", prompt="a red circle"
    )
    assert written.own == ["parallel(cfg)"]
    assert 'vivace.apply(pipe, "parallel(cfg)")' in written.text
    assert not torch.distributed.is_initialized(), "it was applied to be written, and is over"


def test_what_cannot_be_pickled_is_told_before_anything_starts() -> None:
    pipe = families.build("sd")
    pipe.unet.conv_in.forward = lambda sample: sample
    with pytest.raises(Unsupported, match=r"parallel: the denoiser cannot be copied .*lambda"):
        vivace.apply(pipe, "parallel(cfg)")


def test_too_few_gpus_are_counted() -> None:
    def reason(num: int | None) -> str | None:
        target = target_of(Machine("cuda", "H200", (9, 0), None, num_gpus=num))
        return Parallel(mode="ring", gpus=4).unsupported(target)

    assert reason(4) is None
    assert reason(None) is None, "the hardware alone"
    assert "asked for 4 GPUs, and this process sees 2 GPUs" in str(reason(2))
    assert "sees 1 GPU " in str(reason(1))


def test_flux_has_no_second_row() -> None:
    with families.session("flux", "parallel(cfg)") as sharded:
        assert np.isfinite(families.draw(sharded)).all()
        assert "no forward had two rows" in str(sharded.refuted(sharded.evidence()))
