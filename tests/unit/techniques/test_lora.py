"""Your own LoRA: merged or beside the weights, on compiled, captured and quantised layers, and in the record."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import vivace
from tests.families import build, draw, psnr
from tests.unit.techniques.test_cuda_graph import captured
from vivace.errors import NoEffect, Unsupported, UnusableModel, UsageError
from vivace.machinery.compilation.captured import replace_forward
from vivace.machinery.lora.hot import DOWN, UP, hot_loras
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.workloads import checked_request

pytestmark = pytest.mark.usefixtures("short_calls")

SOME = {"sd": (".attn1.", "conv1"), "flux": (".attn.", ".proj_mlp")}
FEWER = {"sd": (".attn1.",), "flux": (".attn.",)}


AMOUNT = {"sd": 0.03, "flux": 0.15}


def write(path: Path, family: str, rank: int, seed: int, parts: tuple[str, ...] | None = None) -> str:
    """Write a random LoRA for the layers whose names have one of the parts; return its path."""
    pipe = build(family)
    name = "unet" if family != "flux" else "transformer"
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, module in getattr(pipe, name).named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and any(
            p in layer for p in parts or SOME[family]
        ):
            shape = module.weight.shape
            state[f"{name}.{layer}.lora_A.weight"] = AMOUNT[family] * torch.randn(
                rank, *shape[1:], generator=generator
            )
            up = AMOUNT[family] * torch.randn(shape[0], rank, *[1] * (len(shape) - 2), generator=generator)
            state[f"{name}.{layer}.lora_B.weight"] = up
    save_file(state, path)
    return path.as_posix()


@pytest.fixture
def loras(tmp_path: Path) -> dict[str, str]:
    """Two LoRAs of tiny-sd: `a` of rank 4, `b` of rank 6, which changes fewer layers."""
    return {
        "a": write(tmp_path / "a.safetensors", "sd", 4, 0),
        "b": write(tmp_path / "b.safetensors", "sd", 6, 1, FEWER["sd"]),
    }


def session(family: str, recipe: str = "baseline") -> Any:
    return vivace.apply(build(family), recipe)


@pytest.mark.parametrize("family", ["sd", "flux"])
@pytest.mark.quick("flux*")
def test_hot_and_merged_are_one_sum(family: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", family, 4, 0)
    plain, merged = draw(session(family)), draw(session(family, f"lora('{path}', 0.5)"))
    hot = session(family, f"lora('{path}', 0.5, hot=True, max_rank=8)")
    assert psnr(draw(hot), merged) > 80
    assert psnr(plain, merged) < 45
    hot.set_lora(scale=0)
    assert np.array_equal(draw(hot), plain), "scale 0 gives the old image byte for byte"
    hot.set_lora(scale=0.5)
    assert psnr(draw(hot), merged) > 80


def test_an_exchange_replaces_all_of_the_old_one(loras: dict[str, str]) -> None:
    hot = session("sd", f"lora('{loras['a']}', hot=True, max_rank=6)")
    hot.set_lora(loras["b"], scale=0.7)
    assert psnr(draw(hot), draw(session("sd", f"lora('{loras['b']}', 0.7)"))) > 80
    evidence = hot.evidence()
    assert evidence["lora.b"].endswith("rank 6 of 6, scale 0.7")
    assert evidence["lora.b.exchanges"] == 1


def test_several_add_up_whatever_their_order(loras: dict[str, str]) -> None:
    a, b = f"lora('{loras['a']}', 0.5)", f"lora('{loras['b']}')"
    there, back = session("sd", f"{a}+{b}"), session("sd", f"{b}+{a}")
    assert there.recipe == back.recipe
    assert list(there.effects) == ["lora(a)", "lora(b)"]
    both = draw(there)
    assert np.array_equal(both, draw(back))
    hot = [text.replace(")", ", hot=True)") for text in (a, b)]
    beside = session("sd", "+".join(hot))
    assert psnr(draw(beside), both) > 80
    with pytest.raises(UsageError, match="there are several LoRAs; say which by instead_of="):
        beside.set_lora(scale=1)
    beside.set_lora(scale=0, instead_of="b")
    assert psnr(draw(beside), draw(session("sd", a))) > 80
    assert psnr(draw(session("sd", f"{a}+{hot[1]}")), both) > 80, "merged and hot together"


def test_the_sum_of_several_is_rounded_once(loras: dict[str, str]) -> None:
    name = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    pipe = build("sd")
    pipe.unet.to(torch.bfloat16)
    weight = pipe.unet.get_submodule(name).weight.float()
    for key, scale in (("a", 0.5), ("b", 1.0)):
        from safetensors.torch import load_file

        state = load_file(loras[key])
        weight = weight + scale * state[f"unet.{name}.lora_B.weight"] @ state[f"unet.{name}.lora_A.weight"]
    vivace.apply(pipe, f"lora('{loras['a']}', 0.5)+lora('{loras['b']}')")
    assert torch.equal(pipe.unet.get_submodule(name).weight, weight.bfloat16())


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("compile(backend=eager)", marks=pytest.mark.soak),
        pytest.param("int8+compile(backend=eager)", marks=pytest.mark.long),
        pytest.param("fp8_weight+compile(backend=eager)", marks=pytest.mark.soak),
    ],
)
def test_somebodys_file_rides_on_compiled_quantised_layers_without_a_recompile(
    recipe: str, loras: dict[str, str]
) -> None:
    draw(session("sd", recipe))  # leaves compiled code without a LoRA in this process, which must not be used
    hot = session("sd", f"lora('{loras['a']}', hot=True, max_rank=6)+{recipe}")
    first = draw(hot)
    before = hot.evidence()["compiled_graphs"]
    assert before
    addresses = _addresses(hot.pipe)
    hot.set_lora(scale=0.25)
    second = draw(hot)
    hot.set_lora(loras["b"], scale=3.0)
    third = draw(hot)
    assert hot.evidence()["compiled_graphs"] == before, "nothing was compiled again"
    assert _addresses(hot.pipe) == addresses, "and no weight has another address"
    assert psnr(first, second) < 45
    assert psnr(second, third) < 45
    uncompiled = "+".join((f"lora('{loras['b']}', 3.0, hot=True)", *recipe.split("+")[:-1]))
    assert psnr(third, draw(session("sd", uncompiled))) > 60


def test_a_captured_step_sees_the_exchange(loras: dict[str, str]) -> None:
    hot = session("sd", f"lora('{loras['a']}', hot=True, max_rank=6)")
    graph = captured(hot.pipe.unet.forward)
    replace_forward(hot.pipe.unet, graph)
    draw(hot)
    made = graph.num_captured
    hot.set_lora(loras["b"], scale=1.0)
    assert psnr(draw(hot), draw(session("sd", f"lora('{loras['b']}')"))) > 80
    assert graph.num_captured == made


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "fp8_weight", "nf4"])
@pytest.mark.quick("nf4")
def test_it_is_beside_what_a_scheme_stores(scheme: str, loras: dict[str, str]) -> None:
    """W is quantised without the LoRA, and B A is not quantised: at scale 0 the quantised model is as it was."""
    hot = session("sd", f"{scheme}+lora('{loras['a']}', 0, hot=True)")
    assert np.array_equal(draw(hot), draw(session("sd", scheme)))
    hot.set_lora(scale=1)
    assert psnr(draw(hot), draw(session("sd", f"lora('{loras['a']}')"))) > 15
    layer = next(layer for layer in hot.pipe.unet.modules() if hasattr(layer, UP))
    assert getattr(layer, UP).dtype == torch.float32


def test_what_was_not_announced_is_refused_and_changes_nothing(loras: dict[str, str], tmp_path: Path) -> None:
    hot = session("sd", f"lora('{loras['b']}', hot=True)")
    before = draw(hot)
    with pytest.raises(Unsupported, match=r"without a LoRA slot \(.*reserve them at load: .*layers=all"):
        hot.set_lora(loras["a"])
    large = write(tmp_path / "large.safetensors", "sd", 9, 2, FEWER["sd"])
    with pytest.raises(Unsupported, match=r"has rank 9, and slots were reserved for rank 6.*max_rank=9"):
        hot.set_lora(large)
    with pytest.raises(Unsupported, match="is not a LoRA for this unet"):
        hot.set_lora(write(tmp_path / "flux.safetensors", "flux", 2, 0))
    with pytest.raises(UsageError, match="another LoRA's path, a scale, or both"):
        hot.set_lora()
    with pytest.raises(UsageError, match="from -100 to 100"):
        hot.set_lora(scale=float("nan"))
    with pytest.raises(UsageError, match="no single LoRA is 'x'"):
        hot.set_lora(scale=1, instead_of="x")
    assert np.array_equal(draw(hot), before)
    with pytest.raises(UsageError, match=r"there is no LoRA to exchange; .*hot=True"):
        session("sd", "channels_last").set_lora(scale=1)
    everywhere = session("sd", f"lora('{loras['b']}', hot=True, layers=all, max_rank=9)")
    everywhere.set_lora(loras["a"])
    assert psnr(draw(everywhere), draw(session("sd", f"lora('{loras['a']}')"))) > 80


def test_a_text_encoders_part_is_merged_left_out_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "both.safetensors"
    torch.manual_seed(0)
    te, unet = (
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
        "unet.mid_block.attentions.0.proj_in",
    )
    pipe = build("sd")
    width, inner = (
        pipe.text_encoder.config.hidden_size,
        pipe.unet.mid_block.attentions[0].proj_in.weight.shape[0],
    )
    state = {f"{te}.lora_A.weight": torch.randn(2, width), f"{te}.lora_B.weight": torch.randn(width, 2)}
    conv = [1] * (pipe.unet.mid_block.attentions[0].proj_in.weight.dim() - 2)
    state |= {
        f"{unet}.lora_A.weight": torch.randn(2, inner, *conv),
        f"{unet}.lora_B.weight": torch.zeros(inner, 2, *conv),
    }
    save_file(state, path)
    text = f"lora('{path.as_posix()}')"
    merged = session("sd", text)
    assert merged.effects["lora(both)"]["text_encoder.merged_layers"] == 1
    plain = draw(session("sd"))
    assert psnr(draw(merged), plain) < 45
    assert np.array_equal(draw(session("sd", f"{text}@denoiser")), plain), "its B is zero there"
    hot = text.replace(")", ", hot=True)")
    with pytest.raises(
        Unsupported, match=r"also changes the text_encoder.*merge it.*or leave those parts out with @denoiser"
    ):
        session("sd", hot)
    assert hot_loras(session("sd", f"{hot}@denoiser").pipe)
    with pytest.raises(
        Unsupported, match="changes the text_encoder and the denoiser, not the text_encoder_2"
    ):
        session("sd", f"{text}@text_encoder_2")


def test_a_changed_file_is_another_recipe_and_is_not_taken_for_the_old_one(loras: dict[str, str]) -> None:
    text = f"lora('{loras['a']}')"
    before = checked_request("tiny-sd", text).recipe
    assert before.text.startswith(f"lora('{loras['a']}', sha256=")
    assert checked_request("tiny-sd", before.text).recipe == before, "a stored recipe stays as it is"
    write(Path(loras["a"]), "sd", 4, 5)
    after = checked_request("tiny-sd", text).recipe
    assert after.text != before.text
    with pytest.raises(UnusableModel, match="is not the file of this recipe: its sha256 begins with"):
        vivace.apply(build("sd"), before.text)


def test_what_cannot_be_merged(loras: dict[str, str], tmp_path: Path) -> None:
    quantised = build("sd")
    vivace.apply(quantised, "int8")
    with pytest.raises(Unsupported, match=r"are quantised already.*hot=True"):
        vivace.apply(quantised, f"lora('{loras['a']}')")
    with pytest.raises(NoEffect, match="scale=0 adds nothing"):
        session("sd", f"lora('{loras['a']}', 0)")
    with pytest.raises(Unsupported, match="there is no LoRA 'nowhere'"):
        session("sd", "lora(nowhere)")
    with pytest.raises(Unsupported, match="is not a LoRA for this unet"):
        session("sd", f"lora('{write(tmp_path / 'flux.safetensors', 'flux', 2, 0)}')")


@pytest.mark.long
def test_a_plan_has_the_padded_matrices_of_a_hot_one_and_nothing_of_a_merged_one(
    loras: dict[str, str],
) -> None:
    model = find_weightless("tiny-sd")
    plain, merged, hot = (
        predict(model, resolve(recipe)).model_bytes
        for recipe in ("baseline", f"lora('{loras['a']}')", f"lora('{loras['a']}', hot=True, max_rank=16)")
    )
    assert merged == plain
    pipe = session("sd", f"lora('{loras['a']}', hot=True, max_rank=16)").pipe
    numbers = [b.numel() for n, b in pipe.unet.named_buffers() if n.endswith((DOWN, UP))]
    # On a GPU tiny-sd is fp16. The allocator rounds every tensor up.
    assert 2 * sum(numbers) <= hot - plain < 2 * sum(numbers) + 512 * len(numbers)


def _addresses(pipe: Any) -> list[int]:
    return [b.data_ptr() for n, b in pipe.unet.named_buffers() if n.endswith((DOWN, UP))]
