"""The bookkeeping of captured steps, with a capture that runs on a CPU: it repeats the work into the same memory."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch.utils._pytree import tree_leaves

import vivace
from tests import flow_models
from tests.families import FAMILIES, STEPS, build, draw, latents, psnr
from tests.targets import target_of
from vivace.benchmark import Timing
from vivace.benchmark.rounds.round import measure_round
from vivace.errors import Unsupported
from vivace.foundation.spec.record import CAPTURED_WHILE_TIMED
from vivace.foundation.spec.trial import Trial
from vivace.machinery.compilation.captured import CapturedFunction, never_written_again
from vivace.machinery.technique import Machine
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.workloads import checked_request
from vivace.techniques import cuda_graph
from vivace.techniques.compile import Compile
from vivace.techniques.cuda_graph import CudaGraph

pytestmark = pytest.mark.usefixtures("short_calls")

GPU = Machine("cuda", "a GPU", (9, 0), None)


def capture(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Like a CUDA graph, it knows no arguments and writes its outputs where they were the first time."""
    outputs = work()
    kept = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    for leaf in kept:
        leaf.fill_(float("nan"))  # a capture computes nothing

    def replay() -> None:
        fresh = [leaf for leaf in tree_leaves(work()) if isinstance(leaf, torch.Tensor)]
        for old, new in zip(kept, fresh, strict=True):
            old.copy_(new)

    return replay, outputs


def captured(function: Callable[..., Any], max_graphs: int = 4) -> CapturedFunction:
    return CapturedFunction(function, torch.device("cpu"), capture, max_graphs)


def counts(made: CapturedFunction) -> tuple[int, int]:
    return made.num_captured, made.num_replays


@pytest.mark.parametrize("recipe", [CudaGraph(), Compile(mode="reduce-overhead")])
def test_a_forward_that_reads_values_is_not_captured(recipe: CudaGraph | Compile) -> None:
    pipe = flow_models.pipeline("qwen-image-2.1")
    reason = recipe.unsupported(target_of(GPU, pipe))
    assert reason is not None
    assert "reads back from the GPU where the image's tokens are" in reason
    assert CudaGraph(targets=("vae",)).unsupported(target_of(GPU, pipe)) is None


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("flux2-klein-4b", (1, 32, 8, 8)),
        ("krea-2-turbo", (1, 16, 1, 8, 8)),
        ("qwen-image-2.1", (1, 64, 1, 4, 4)),
    ],
)
def test_a_tiny_vae_of_vivace_is_captured(model: str, shape: tuple[int, ...]) -> None:
    vae = flow_models.session(model, "tiny_vae").pipe.vae
    inputs = [torch.randn(shape) for _ in range(2)]
    expected = [vae.decode(z).sample for z in inputs]
    vae.decoder.forward = made = captured(vae.decoder.forward)
    for z, image in zip(inputs, expected, strict=True):
        assert torch.allclose(vae.decode(z).sample, image, atol=1e-5)
    assert counts(made) == (1, 2)


def test_new_values_go_in_and_earlier_results_stay() -> None:
    made = captured(lambda x, *, extra: (x + extra["y"], {"z": x * 2}))
    results = [made(torch.full((2, 3), float(k)), extra={"y": torch.tensor(10.0)}) for k in range(3)]
    for k, (total, rest) in enumerate(results):
        assert (total == k + 10).all(), "not overwritten by later calls"
        assert (rest["z"] == 2 * k).all()
    assert counts(made) == (1, 3)


def test_announced_sizes_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six shapes in turn, with four graphs kept for each of two sizes: none is captured again."""
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    unet = torch.nn.Conv2d(4, 4, 3, padding=1)
    unet.device = torch.device("cpu")
    plain = target_of(GPU, SimpleNamespace(unet=unet))
    earlier = (Compile(backend="eager", sizes=("64x64", "96x64")),)
    effect = CudaGraph().apply(replace(plain, request=replace(plain.request, earlier=earlier)))
    assert effect.changed == {"denoiser.cuda_graphs": "up to 8"}
    for _ in range(2):
        for width in range(8, 14):
            unet.forward(torch.zeros(1, 4, 8, width))
    assert effect.evidence is not None
    assert effect.evidence() == {"cuda_graphs_recorded": 6, "cuda_graph_replays": 12}


def test_the_callers_tensors_are_neither_kept_nor_changed() -> None:
    made = captured(lambda x: x.add_(1))
    mine = torch.zeros(3)
    result = made(mine)
    assert (mine == 0).all()
    result.fill_(7)
    assert (made(mine) == 1).all()


def copies_of(made: CapturedFunction, *args: Any) -> tuple[Any, int]:
    """A call's result, and how many of its arguments were copied."""
    before = [buffer._version for graph in made.graphs.values() for buffer in graph.inputs]
    result = made(*args)
    after = [buffer._version for graph in made.graphs.values() for buffer in graph.inputs]
    return result, sum(new != old for new, old in zip(after, before, strict=True))


def test_what_is_not_written_again_is_copied_once() -> None:
    made = captured(lambda x, y: x + y)
    first, second = (never_written_again(torch.full((3,), value)) for value in (10.0, 20.0))
    made(torch.zeros(3), first)
    for x, constant, num in (
        (1.0, first, 1),
        (2.0, second, 2),  # another one
        (3.0, second, 1),
        (4.0, first, 2),  # the buffer has held the other one since
        (5.0, first.clone(), 2),  # nobody has said it of this one
        (6.0, first, 2),
        (7.0, first[:], 2),
        (8.0, first, 2),
    ):
        result, copied = copies_of(made, torch.full((3,), x), constant)
        assert (result == x + constant).all()
        assert copied == num, x
    first.add_(1)  # against the word
    assert (made(torch.zeros(3), first) == 11).all()
    unnamed = torch.ones(3)
    assert copies_of(made, torch.zeros(3), unnamed)[1] == copies_of(made, torch.zeros(3), unnamed)[1] == 2


def test_an_argument_that_took_the_place_of_one_that_is_gone_is_copied() -> None:
    made = captured(lambda x: x * 2)
    for value in range(50):
        constant = never_written_again(torch.full((3,), float(value)))
        assert (made(constant) == 2 * value).all()
        assert (made(constant) == 2 * value).all()
        del constant


def test_what_the_work_writes_is_copied_each_time() -> None:
    made = captured(lambda x, y: x[:1].add_(1) + y.add_(1))
    x, y = (never_written_again(torch.zeros(3)) for _ in range(2))
    for _ in range(3):
        assert (made(x, y) == 2).all()
    with torch.inference_mode():  # where nothing counts what is written
        x, y = (never_written_again(torch.zeros(3)) for _ in range(2))
        for _ in range(3):
            assert (made(x, y) == 2).all()


@pytest.mark.parametrize(
    "other",
    [
        ((torch.ones(3, 2),), {}),
        ((torch.ones(2, 3, dtype=torch.float64),), {}),
        ((torch.ones(3, 2).T,), {}),
        ((torch.ones(2, 3), torch.ones(1)), {}),
        ((), {"x": torch.ones(2, 3)}),
        ((torch.ones(2, 3),), {"flag": True}),
        ((torch.ones(2, 3),), {"flag": 1}),
        ((torch.ones(2, 3),), {"flag": 1.0}),
        ((torch.ones(2, 3),), {"flag": "text"}),
        ((torch.ones(2, 3),), {"flag": {"scale": 1.0}}),
        ((torch.ones(2, 3),), {"flag": {"scale": 0.5}}),
        ((torch.ones(2, 3),), {"flag": object()}),
    ],
)
def test_another_kind_of_arguments_is_captured_anew(other: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    made = captured(lambda x, y=None, flag=None: x * 2)
    for _ in range(2):
        made(torch.ones(2, 3))
        args, kwargs = other
        made(*args, **kwargs)
    assert counts(made) == (2, 4)


def test_inference_mode_has_separate_graphs() -> None:
    made = captured(lambda x: x + 1)
    with torch.inference_mode():
        made(torch.ones(2))
    assert (made(torch.ones(2)) == 2).all()
    with torch.inference_mode():
        assert (made(torch.zeros(2)) == 1).all()
    assert counts(made) == (2, 3)


def test_only_the_most_recently_used_are_kept() -> None:
    made = captured(lambda x: x + 1, max_graphs=2)
    for size in (1, 2, 1, 3, 1, 2):
        assert made(torch.zeros(size)).shape == (size,)
    assert counts(made) == (4, 6), "2 was forgotten for 3, 1 was not"


def apply(pipe: Any, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> Any:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    graphs, target = CudaGraph(**knobs), target_of(machine=GPU, pipe=pipe)
    assert graphs.unsupported(target) is None
    return graphs.apply(target)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("flux")
def test_images_of_captured_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build(family)
    reference = latents(vivace.apply(pipe)), latents(vivace.apply(pipe), height=128)
    effect = apply(pipe, monkeypatch)
    session = vivace.apply(pipe)
    for _ in range(2):
        assert psnr(latents(session), reference[0]) > 90
        assert psnr(latents(session, height=128), reference[1]) > 90
    assert effect.evidence() == {"cuda_graphs_recorded": 2, "cuda_graph_replays": 4 * STEPS[family]}
    assert effect.refuted({}) is None


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux"])
@pytest.mark.quick("sd")
def test_text_encoders_and_the_decoder_are_captured_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build(family)
    reference = draw(vivace.apply(pipe)), draw(vivace.apply(pipe), prompt="another")
    targets = ("denoiser", "text_encoder", "text_encoder_2", "vae")
    effect = apply(pipe, monkeypatch, targets=targets)
    session = vivace.apply(pipe)
    for _ in range(2):
        assert psnr(draw(session), reference[0]) > 90
        assert psnr(draw(session, prompt="another"), reference[1]) > 90
    encoders = 1 if family == "sd" else 2
    assert effect.evidence()["cuda_graphs_recorded"] == 1 + encoders + 1
    assert effect.evidence()["cuda_graph_replays"] >= 4 * (STEPS[family] + encoders + 1)
    assert effect.refuted({}) is None


def test_a_decoder_that_is_not_used_refutes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build("sd")
    effect = apply(pipe, monkeypatch, targets=("vae",))
    assert effect.refuted({}) == "the VAE decoded nothing"


def test_a_vae_that_the_pipeline_casts_is_refused() -> None:
    pipe = build("sdxl")
    pipe.vae.register_to_config(force_upcast=True)
    pipe.vae.to(torch.float16)
    target = target_of(machine=GPU, pipe=pipe)
    assert "no fixed address" in str(CudaGraph(targets=("denoiser", "vae")).unsupported(target))
    assert CudaGraph().unsupported(target) is None


@pytest.mark.parametrize("name", cuda_graph._LOOK_UP_TIMESTEPS + cuda_graph._SEARCH_FIRST_TIMESTEP)
def test_schedulers_do_not_read_timesteps_back_from_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's timesteps are on "meta" here, where nothing can be read."""

    def samples(scheduler: Any, device: str) -> list[torch.Tensor]:
        scheduler.set_timesteps(num_inference_steps=5, device=device)
        assert all(t.device.type == device for t in scheduler.timesteps)
        random = torch.Generator().manual_seed(0)
        latents = [torch.ones(1, 4, 2, 2)]
        for t in scheduler.timesteps:
            latents.append(scheduler.scale_model_input(latents[-1], t))
            noise = torch.randn(1, 4, 2, 2, generator=random)
            more = (
                {"generator": random} if "generator" in inspect.signature(scheduler.step).parameters else {}
            )
            latents.append(scheduler.step(noise, t, latents[-2], **more).prev_sample)
        assert all(t.device.type == device for t in scheduler.timesteps)
        return latents

    expected = samples(getattr(diffusers, name)(), "cpu")
    pipe = build("sd")
    pipe.scheduler = getattr(diffusers, name)()
    effect = apply(pipe, monkeypatch)
    effect.finish()
    for _ in range(2):
        for ours, plain in zip(samples(pipe.scheduler, "meta"), expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    num_steps = effect.evidence()["timesteps_from_host"]
    assert num_steps == 2 * len(pipe.scheduler.timesteps)
    pipe.scheduler.set_timesteps(num_inference_steps=5)
    later = pipe.scheduler.timesteps = pipe.scheduler.timesteps[2:]  # as another technique may set them
    pipe.scheduler.step(torch.zeros(1, 4, 2, 2), later[0], torch.ones(1, 4, 2, 2))
    assert pipe.scheduler.timesteps is later
    assert effect.evidence()["timesteps_from_host"] == num_steps


def test_a_scheduler_that_comes_later_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    monkeypatch.setattr(CudaGraph, "unsupported", lambda *_: None)
    reference = draw(vivace.apply(build("sd"), "scheduler(ddim)"), num_inference_steps=4)
    session = vivace.apply(build("sd"), "cuda_graph@denoiser,vae+scheduler(ddim)")
    assert psnr(draw(session, num_inference_steps=4), reference) > 90
    assert session.evidence()["timesteps_from_host"] == 4
    plain = vivace.apply(build("sd"), "cuda_graph+scheduler(unipc)")
    draw(plain, num_inference_steps=2)
    assert "timesteps_from_host" not in plain.evidence(), "UniPC computes on the GPU"


@pytest.mark.parametrize("scheduler", ["euler", "dpmpp_2m", "dpmpp_2m_sde"])
@pytest.mark.quick("euler")
def test_schedulers_that_search_for_the_first_timestep(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    monkeypatch.setattr(CudaGraph, "unsupported", lambda *_: None)
    reference = draw(vivace.apply(build("sd"), f"scheduler({scheduler})"), num_inference_steps=4)
    session = vivace.apply(build("sd"), f"cuda_graph+scheduler({scheduler})")
    for _ in range(2):
        assert psnr(draw(session, num_inference_steps=4), reference) > 90
    assert session.evidence()["timesteps_from_host"] == 8


@pytest.mark.parametrize("recipe", ["scheduler(pndm)", "scheduler(heun)", "cfg_cutoff(0.5)", "guidance(1)"])
@pytest.mark.quick("cfg*")
def test_schedulers_and_guidance(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = draw(vivace.apply(build("sd"), recipe), num_inference_steps=4)
    pipe = build("sd")
    session = vivace.apply(pipe, recipe)
    effect = apply(pipe, monkeypatch)
    for _ in range(2):
        assert psnr(draw(session, num_inference_steps=4), reference) > 90
    assert effect.evidence()["cuda_graphs_recorded"] == (2 if "cutoff" in recipe else 1)


@pytest.mark.long
def test_a_round_says_how_many_graphs_were_captured_in_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With guidance for half of the steps a call has two kinds of steps; where one graph is kept, both come anew."""
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    monkeypatch.setattr(CudaGraph, "unsupported", lambda *_: None)
    timing = Timing(rounds=1, repeats=2, max_warmup=1)

    def evidence(max_graphs: int) -> dict[str, Any]:
        recipe = f"cfg_cutoff(0.5)+cuda_graph(max_graphs={max_graphs})"
        request = checked_request("tiny-sd", recipe, num_inference_steps=4)
        trial = Trial(
            model=request.located.model, recipe=request.recipe.spec, workload=request.workload, device="cpu"
        )
        return measure_round(trial, 0, timing, None, lambda event: None).evidence

    assert evidence(1)[CAPTURED_WHILE_TIMED] == 4, "two in each of two calls"
    assert CAPTURED_WHILE_TIMED not in evidence(2), "all were captured in the warm-up"


def test_graphs_that_are_never_used_twice_refute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build("sd")
    effect = apply(pipe, monkeypatch, max_graphs=1)
    for size in (64, 72):
        draw(vivace.apply(pipe), height=size, num_inference_steps=1)
    assert effect.refuted({}) == (
        "none of 2 graphs of the denoiser was used twice: every call had other arguments"
    )


def test_what_cannot_be_captured_is_refused_before_the_call() -> None:
    with pytest.raises(Unsupported, match="there is none here"):
        vivace.load("tiny-sd", "cuda_graph")
    pipe = build("flux")
    vivace.apply(pipe, "fbcache(0.1)")
    with pytest.raises(Unsupported, match="reads a value back to the CPU"):
        vivace.apply(pipe, "cuda_graph")
    assert CudaGraph().unsupported(target_of(machine=GPU, pipe=build("sd"))) is None
    with pytest.raises(Unsupported, match=r"cuda_graph: .* memory pool cannot be predicted"):
        predict(find_weightless("tiny-sd"), resolve("cuda_graph"))
