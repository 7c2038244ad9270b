"""Attention kernels: what runs where, calls that are redirected to a kernel, and those that it does not take."""

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vivace
from tests.families import FAMILIES, build, draw, drawn, psnr, session
from tests.targets import target_of
from vivace.errors import NoEffect, Unsupported
from vivace.machinery.attention_backends import redirection
from vivace.machinery.attention_backends.kernels import KERNELS, selected
from vivace.machinery.attention_backends.redirection import RedirectedAttention
from vivace.machinery.technique import Machine
from vivace.measure.profiling.profiler import attention_kernels
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.attention import Attention

pytestmark = pytest.mark.usefixtures("short_calls")

CPU = Machine("cpu", "CPU", None, "c++")
PLAIN = F.scaled_dot_product_attention


def gpu(major: int, minor: int, packages: bool = True) -> Machine:
    return Machine("cuda", "a GPU", (major, minor), None, has_all_packages=packages)


def unsupported(backend: Any, machine: Machine, components: Any = ("denoiser",), **target: Any) -> str | None:
    technique = Attention(backend=backend, targets=components)
    return technique.unsupported(target_of(machine=machine, **target))


@pytest.mark.parametrize(
    ("machine", "runs"),
    [
        (CPU, "math flash flex"),
        (Machine("cpu", "CPU", None, None), "math flash"),
        (gpu(7, 0), "math efficient xformers"),
        (gpu(7, 5), "math efficient flex xformers"),
        (gpu(8, 6), "math efficient flash cudnn flex flash4 sage xformers"),
        (gpu(9, 0), "math efficient flash cudnn flex flash3 flash3_fp8 cudnn_fp8 flash4 sage xformers"),
        (gpu(12, 0), "math efficient flash cudnn flex flash4 sage xformers"),
        (gpu(9, 0, packages=False), "math efficient flash cudnn flex"),
    ],
)
def test_what_runs_where(machine: Machine, runs: str) -> None:
    reasons = {backend: unsupported(backend, machine) for backend in KERNELS}
    assert [backend for backend, reason in reasons.items() if reason is None] == runs.split()


def test_reasons_say_what_is_missing_and_what_to_do() -> None:
    assert "install g++" in (unsupported("flex", Machine("cpu", "CPU", None, None)) or "")
    assert "needs compute capability 8.0, a GPU has 7.5" in (unsupported("flash", gpu(7, 5)) or "")
    assert "only on compute capability 9.x, a GPU has 10.0" in (unsupported("flash3", gpu(10, 0)) or "")
    for backend, package in (
        ("flash3", "fa3_fwd_interface or flash_attn_interface (pip install fa3-fwd"),
        ("flash3_fp8", "fa3_fwd_interface or flash_attn_interface (pip install fa3-fwd"),
        ("cudnn_fp8", "pip install --no-deps nvidia-cudnn-frontend"),
        ("flash4", "pip install --pre flash-attn-4"),
        ("sage", "pip install sageattention"),
        ("xformers", "pip install xformers"),
    ):
        assert package in (unsupported(backend, gpu(9, 0, packages=False)) or "")
        assert unsupported(backend, gpu(9, 0, packages=False), has_weights=False) is None, (
            "of another machine"
        )


@pytest.mark.parametrize(
    ("model", "backend", "component", "expected"),
    [
        ("sd15", "flash", "vae", "supports up to 256 channels per head, the vae has 512"),
        ("sd15", "flex", "vae", "up to 256"),
        ("sd15", "sage", "denoiser", "supports 64 or 96 or 128 channels per head, the denoiser has 40"),
        ("sd15", "efficient", "vae", None),
        ("sd15", "flash4", "denoiser", None),  # 40 and 80 fit, 160 is left to PyTorch
        ("sdxl", "sage", "denoiser", None),
        ("flux-dev", "flash3", "denoiser", None),
        ("flux-dev", "cudnn_fp8", "denoiser", None),
        ("sdxl", "flash3_fp8", "denoiser", "supports 128 channels per head, the denoiser has 64"),
    ],
)  # fmt: skip
def test_heads_of_full_size_models(model: str, backend: str, component: Any, expected: str | None) -> None:
    pipe = find_weightless(model).build()
    reason = unsupported(backend, gpu(9, 0), pipe=pipe, components=(component,), has_weights=False)
    assert reason is None if expected is None else expected in (reason or "")


def test_fp32_is_refused_where_a_kernel_wants_half_of_it() -> None:
    pipe = build("sd")
    for backend in ("flash", "cudnn", "flash3", "cudnn_fp8", "flash4"):
        reason = unsupported(backend, gpu(9, 0), pipe=pipe, has_weights=False)
        assert "needs fp16 or bf16, the denoiser is float32" in (reason or "")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.long
def test_flex_draws_the_same_picture_and_is_named() -> None:
    made = session("flux", "attention(flex)@denoiser,vae")
    call = {"num_inference_steps": 1}
    assert psnr(draw(made, **call), drawn("flux", **call)) > 80
    evidence = made.evidence()
    assert evidence["denoiser.attention_calls_flex"] == 7
    assert evidence["vae.attention_calls_flex"] == 1
    assert evidence["compiled_graphs"] == 2
    assert made.refuted({}) is None
    parts = {"denoiser": made.pipe.transformer, "vae": made.pipe.vae.decoder}
    kernels = attention_kernels(parts, lambda: draw(made, **call))
    assert [name for name in kernels if not name.startswith("elsewhere")] == [
        "denoiser: flex_attention x7",
        "vae: flex_attention x1",
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("sd")
def test_another_kernel_for_the_vae(family: str) -> None:
    made = session(family, "attention(math)@vae")
    assert set(made.effects["attention@vae"].values()) == {"math", "flash"}
    assert psnr(draw(made), drawn(family)) > 80
    denoiser = getattr(made.pipe, "unet", None) or made.pipe.transformer
    kernels = attention_kernels({"denoiser": denoiser, "vae": made.pipe.vae.decoder}, lambda: draw(made))
    assert any(name.startswith("vae: ") and "math" in name for name in kernels)
    assert any(name.startswith("denoiser: ") and "flash" in name for name in kernels)
    assert made.refuted({"attention_kernels": kernels}) is None
    wrong = [name.replace("_math", "_flash") for name in kernels]
    assert "math attention was asked for" in (made.refuted({"attention_kernels": wrong}) or "")


def test_nothing_to_choose_is_said() -> None:
    with pytest.raises(NoEffect, match="already picks flash") as caught:
        session("sd", "attention(flash)@vae")
    assert caught.value.already_so
    with pytest.raises(NoEffect, match="no diffusers attention layer in vae"):
        vivace.load("tiny-sd", "tiny_vae+attention(math)@vae")
    with pytest.raises(Unsupported, match="no sage attention kernel for CPUs"):
        session("sd", "attention(sage)")


def test_a_kernel_that_no_call_reaches_refutes_the_technique() -> None:
    made = session("sd", "attention(flex)")
    made.pipe.unet.set_attn_processor(_Bypass())
    draw(made, num_inference_steps=1)
    assert made.refuted({}) == "attention@denoiser: no call of the denoiser reached flex attention"


class _Bypass:
    """A processor that computes attention in a way of its own, as adapters may."""

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


# redirected calls


@pytest.fixture(params=["flash3", "flash4", "sage", "xformers"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that stands in for the real one: same module, function, layout and results, computed by PyTorch."""

    def of_tokens_first(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return PLAIN(*(x.transpose(1, 2) for x in (query, key, value)), scale=scale).transpose(1, 2)

    def flash(query: Any, key: Any, value: Any, softmax_scale: float | None = None) -> Any:
        return of_tokens_first(query, key, value, softmax_scale), torch.zeros(1)

    def sageattn(q: Any, k: Any, v: Any, tensor_layout: str, sm_scale: Any, smooth_k: bool = True) -> Any:
        assert tensor_layout == "NHD"
        if smooth_k:
            k -= k.mean(dim=1, keepdim=True)  # as it does
        return of_tokens_first(q, k, v, sm_scale)

    def xformers(query: Any, key: Any, value: Any, scale: float | None = None) -> Any:
        return of_tokens_first(query, key, value, scale)

    for name, functions in {
        "flash_attn_interface": {"flash_attn_func": flash},
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_func": flash},
        "sageattention": {"sageattn": sageattn},
        "xformers": {},
        "xformers.ops": {"memory_efficient_attention": xformers},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    yield request.param
    redirection._OPERATORS.clear()


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 40, 64, generator=generator, dtype=torch.bfloat16)
    key, value = (torch.randn(2, 3, 24, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    return query, key, value


@pytest.mark.quick("flash3", "sage")
def test_packages_compute_eager_and_compiled_calls(package: str) -> None:
    redirected = RedirectedAttention(package)
    query, key, value = tensors()
    kept = key.clone()

    def outer(*inputs: Any) -> Any:
        return F.scaled_dot_product_attention(*inputs).flatten(1) + 1

    expected = outer(query, key, value)
    with torch.no_grad(), redirected.inside():
        torch.testing.assert_close(outer(query, key, value), expected, atol=0.03, rtol=0.03)
        assert (redirected.num_redirected, redirected.num_compiled) == (1, 0)
        compiled = torch.compile(outer, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(query, key, value), expected, atol=0.03, rtol=0.03)
    assert (redirected.num_redirected, redirected.num_compiled) == (1, 1)
    assert torch.equal(key, kept), "the caller's tensors stay as they are"


def test_calls_that_do_not_fit_stay_pytorchs_and_are_counted(package: str) -> None:
    redirected = RedirectedAttention(package)
    query, key, value = tensors()
    mask = torch.rand(2, 3, 40, 24) > 0.5
    with redirected.inside():
        masked = F.scaled_dot_product_attention(query, key, value, mask)
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
        F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert torch.equal(masked, PLAIN(query, key, value, mask))
    left = {"masked": 1, "causal, grouped or with dropout": 1}
    assert redirected.left == (left if package == "xformers" else left | {"fp32": 1})


def test_pytorchs_own_function_comes_back_after_an_error(package: str) -> None:
    with pytest.raises(ZeroDivisionError), RedirectedAttention(package).inside():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is PLAIN


# attention in fp8


def _in_fp8(q: Any, k: Any, v: Any, scales: list[torch.Tensor]) -> torch.Tensor:
    """What the kernels compute, tokens before heads: fp32 products of e4m3 values."""
    assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
    return PLAIN(
        *((x.float() * scale).transpose(1, 2) for x, scale in zip((q, k, v), scales, strict=True))
    ).transpose(1, 2)


@pytest.fixture(params=["flash3_fp8", "cudnn_fp8"])
def in_fp8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The packages' functions, computed by PyTorch."""

    def attend(q: Any, k: Any, v: Any, qk_scales: Any, v_scales: Any, out: torch.Tensor) -> None:
        assert all(x.is_contiguous() for x in (q, k, v))
        assert float(v_scales[0] * v_scales[1]) == pytest.approx(1.0), "and its inverse"
        output = _in_fp8(q, k, v, [*qk_scales, v_scales[0]])
        out.copy_((output * v_scales[1]).to(torch.float8_e4m3fn))

    def flash(
        q: Any, k: Any, v: Any, softmax_scale: Any, q_descale: Any, k_descale: Any, v_descale: Any
    ) -> Any:
        assert q_descale.shape == (q.shape[0], q.shape[2]), "a scale for each head"
        scales = [x[:, None, :, None] for x in (q_descale, k_descale, v_descale)]
        return _in_fp8(q, k, v, scales).bfloat16()

    monkeypatch.setattr("vivace.machinery.attention_backends.redirection.attend", attend)
    module = types.ModuleType("fa3_fwd_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("fa3_fwd_interface", None)
    vars(module)["flash_attn_func"] = flash
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    return str(request.param)


@pytest.mark.quick("flash3*")
def test_fp8_rounds_by_a_few_percent_eager_and_compiled(in_fp8: str) -> None:
    redirected = RedirectedAttention(in_fp8)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, 40, 64, generator=generator, dtype=torch.bfloat16) + 0.5 for _ in range(3)
    )
    expected = PLAIN(query, key, value)

    def error(attended: torch.Tensor) -> float:
        assert (attended.dtype, attended.shape) == (expected.dtype, expected.shape)
        return float((attended - expected).norm() / expected.norm())

    with torch.no_grad(), redirected.inside():
        assert 0.005 < error(F.scaled_dot_product_attention(query, key, value)) < 0.1
        compiled = torch.compile(
            lambda *inputs: F.scaled_dot_product_attention(*inputs), backend="aot_eager", fullgraph=True
        )
        assert 0.005 < error(compiled(query, key, value)) < 0.1
        nothing = torch.zeros_like(query)
        assert torch.equal(F.scaled_dot_product_attention(nothing, nothing, nothing), nothing)
    assert (redirected.num_redirected, redirected.num_compiled, redirected.left) == (2, 1, {})


def test_cudnn_in_fp8_leaves_what_it_does_not_know_to_pytorch(in_fp8: str) -> None:
    redirected = RedirectedAttention("cudnn_fp8")
    query, key, value = tensors()
    with redirected.inside():
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), PLAIN(query, key, value))
        F.scaled_dot_product_attention(query, query, query, scale=0.5)
    assert redirected.left == {
        "of other numbers of queries and keys": 1,
        "with a softmax scale of its own": 1,
    }


@pytest.mark.parametrize("compiled", ["", "+compile(backend=eager, blocks=repeated)"])
@pytest.mark.slow("*compile*")
@pytest.mark.exhaustive("flash3_fp8-*compile*")
@pytest.mark.quick("flash3*")
def test_the_first_and_last_blocks_stay_as_they_are(
    in_fp8: str, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "unsupported", lambda *_: None)  # it is a CPU's fp8 here
    call = {"num_inference_steps": 2}
    plain = session("flux", "bf16")
    psnr_by_blocks = {}
    for blocks in (0, 1):
        made = session("flux", f"bf16+attention({in_fp8}, bf16_blocks={blocks}){compiled}")
        psnr_by_blocks[blocks] = psnr(draw(made, **call), draw(plain, **call))
        calls_left = made.evidence().get("denoiser.attention_calls_left")
        if not compiled:
            assert calls_left == (None if blocks == 0 else "in blocks that were to be left x4")
            assert made.evidence()[f"denoiser.attention_calls_{in_fp8}"] == 2 * (7 - 2 * blocks)
        else:
            assert (calls_left is None) is (blocks == 0)
        assert made.refuted({}) is None
    assert all(15 < value < 60 for value in psnr_by_blocks.values())
    assert psnr_by_blocks[0] != psnr_by_blocks[1]
    with pytest.raises(NoEffect, match="bf16_blocks=4 leaves none of the 7 blocks"):
        session("flux", f"bf16+attention({in_fp8}, bf16_blocks=4)")


def test_blocks_in_bf16_need_fp8_and_a_chain() -> None:
    machine = gpu(9, 0)
    assert "goes with attention in fp8, flash3_fp8 or cudnn_fp8" in (
        Attention(backend="cudnn", bf16_blocks=1).unsupported(target_of(machine=machine)) or ""
    )
    pipe = build("sd").to(torch.bfloat16)
    assert "the denoiser has no chain of blocks" in (
        Attention(backend="cudnn_fp8", bf16_blocks=1).unsupported(target_of(machine=machine, pipe=pipe)) or ""
    )
    assert resolve("attention(cudnn)").spec.techniques[0].knobs == {"backend": "cudnn"}, "as stored before"


@pytest.mark.long
def test_the_compilers_cache_does_not_return_another_kernels_code() -> None:
    from torch._inductor.utils import fresh_cache

    query = torch.randn(1, 2, 64, 16)

    def kernel(backend: str) -> str:
        torch._dynamo.reset()  # what this process has compiled; the cache on the disk stays
        attend = torch.compile(F.scaled_dot_product_attention)
        with torch.no_grad(), selected(backend):
            attend(query, query, query)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
                attend(query, query, query)
        names = {event.name for event in trace.events()}
        if any("flash_attention" in name for name in names):
            return "flash"
        return "math" if "aten::bmm" in names else str(names)

    with fresh_cache():
        assert [kernel(backend) for backend in ("flash", "math")] == ["flash", "math"]
