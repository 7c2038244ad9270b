"""Every answer, whatever the model, the card's spelling and the file: possible, with commands that are accepted."""

import json
import shlex
import struct
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file

import vivace
from vivace.architectures import CATALOGUE
from vivace.cli import app
from vivace.cli.measuring.bench_endpoint import bench_endpoint
from vivace.evidence.recommendation import Recommendation
from vivace.evidence.recommendation.row_filter import refused
from vivace.foundation.hardware import counted, known_gpu
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import RESERVE_BYTES
from vivace.runtime.memory.footprints import footprints
from vivace.runtime.memory.weightless import find_weightless

ROOT = Path(__file__).parents[3]
CARDS = (
    "cpu", "H200", "H100", "NVIDIA H100 80GB HBM3", "H100 PCIe", "H20", "GH200", "B200", "A100", "A100-SXM4-80GB",
    "a100 40gb", "4x A100", "8xH100", "RTX 4090 x2", "A40", "A10G", "L40S", "L4", "T4", "V100", "V100 32GB", "P100",
    "RTX 5090", "5080", "RTX 5060 Ti 16GB", "RTX 4090", "4080 super", "rtx4070ti", "RTX 4060 Ti", "RTX 4060", "3090",
    "RTX 3080", "RTX 3060", "RTX 3060 12GB", "RTX 3060 Laptop", "RTX 3050", "2080Ti", "GTX 1660 Super", "GTX 1080",
    "RTX 6000 Ada",
)  # fmt: skip
MODELS = tuple(CATALOGUE)
EVERY = 8
"""A model answers for one card in eight beside the long tests."""


def assert_sound(answer: Recommendation, model: str, gpu: str) -> None:
    """Assert what holds of every answer: its own limit, memory as plan counts it, the device, its commands."""
    said = " ".join(str(answer).split())
    chosen, basis = answer.chosen, answer.basis
    for line in answer.next:
        assert_accepted(line)
        if " plan " in line and answer.criteria.max_bytes is None:
            assert shlex.split(line)[-1] == answer.gpu, "the card is the one that was asked about"
    if counted(gpu)[0] > 1:
        assert "parallel" in said
    if chosen is None or basis is None:
        assert answer.next
        return
    recipe = resolve(chosen.recipe)
    if answer.limit is not None and chosen.latency is not None:
        assert chosen.latency.point >= 0.999 * answer.limit.least_s(chosen.recipe)
    if chosen.predicted_from is not None and chosen.latency is not None:
        assert "predicted" in said.partition("stands on")[0]
    assert basis.kind != "committed" or (ROOT / basis.place).exists()
    if gpu == "cpu":
        assert basis.device == "cpu"
        return
    if chosen.measured_s is not None:
        assert chosen.predicted_from == basis.gpu or basis.kind == "predicted"
    named = known_gpu(answer.gpu or "")
    assert named is not None
    if basis.near != "same" or basis.kind == "predicted":
        assert refused(recipe, named.name, named.chip.capability) == ""
    published = footprints().get(basis.of or answer.model)
    if published is None or chosen.peak_bytes is None:
        return
    allowed = min(named.memory_bytes - RESERVE_BYTES, answer.criteria.max_bytes or named.memory_bytes)
    loading = 0 if recipe.loads_from_host else published.model_bytes
    assert max(chosen.peak_bytes, loading) <= allowed
    if chosen.num_techniques and published.needed_bytes <= allowed:
        assert chosen.gain is None or chosen.gain.point > 0.99, (
            "slower than the model as published, which fits"
        )


def assert_accepted(line: str) -> None:
    """Parse a command line, and plan a model that it plans."""
    name, *words = shlex.split(line)[1:]
    command = app.get_command(None, name)
    assert isinstance(command, click.Command)
    assert command is not bench_endpoint
    context = command.make_context(name, list(words), parent=click.Context(app, obj={}))
    for recipe in (
        value for value in (context.params.get("recipe"), *context.params.get("recipes", ())) if value
    ):
        resolve(recipe) if isinstance(recipe, str) else None


@pytest.mark.parametrize("model", MODELS)
def test_an_answer_is_sound(model: str) -> None:
    for gpu in CARDS[MODELS.index(model) % EVERY :: EVERY]:
        assert_sound(vivace.recommend(model, gpu=gpu, store=()), model, gpu)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_all_answers_are_sound(model: str) -> None:
    for gpu in CARDS:
        assert_sound(vivace.recommend(model, gpu=gpu, store=()), model, gpu)


@pytest.mark.parametrize(
    ("write", "of"),
    [(write_sdxl, "sdxl"), (write_fp8, "flux-dev"), (write_folder, "sdxl")],
    ids=["file", "fp8", "folder"],
)
def test_a_file_or_folder_has_the_answers_of_its_architecture(write, of: str, tmp_path: Path) -> None:
    path = str(write(tmp_path))
    for gpu in ("cpu", "H200", "RTX 3060", "2080Ti"):
        answer = vivace.recommend(path, gpu=gpu, store=())
        assert_sound(answer, path, gpu)
        assert answer.recipe == vivace.recommend(of, gpu=gpu, store=()).recipe
        if answer.basis is not None:
            assert answer.basis.of == of
            assert f"{of}, whose architecture it has" in " ".join(str(answer).split())


def test_a_gguf_file_is_planned_by_its_header(tmp_path: Path) -> None:
    from vivace.runtime.memory.predict import predict

    path = str(write_gguf(tmp_path))
    answer = vivace.recommend(path, gpu="RTX 3060 12GB", store=())
    assert answer.recipe is None
    assert_sound(answer, path, "RTX 3060 12GB")
    (plan, _) = answer.next
    assert plan.startswith("vivace plan")
    planned, plain = predict(find_weightless(path), resolve("baseline")), footprints()["flux-dev"]
    (denoiser,) = (part for part in planned.components if part.name == "transformer")
    assert denoiser.num_bytes == pytest.approx(11.9e9, rel=0.01)
    assert plain.model_bytes - planned.model_bytes == pytest.approx(23.8e9 - 11.9e9, rel=0.02)


def test_a_file_in_fp8_says_how_it_is_counted(tmp_path: Path) -> None:
    assert "loaded and computed with in bf16" in find_weightless(str(write_fp8(tmp_path))).note


@pytest.mark.parametrize(
    ("gpu", "max_memory", "is_taken_for"),
    [
        ("RTX 3060", None, "RTX 3060"),
        ("RTX 3060", "12GB", "RTX 3060 12GB"),
        ("RTX 3060", "8GB", "RTX 3060 8GB"),
        ("RTX 4060 Ti", "16GB", "RTX 4060 Ti 16GB"),
        ("RTX 4060 Ti", "16GiB", "RTX 4060 Ti 16GB"),
        ("RTX 4060 Ti", "13GB", "RTX 4060 Ti 16GB"),
        ("A100", "80GB", "A100 80GB"),
    ],
)
def test_a_limit_tells_which_of_a_cards_sizes_is_meant(
    gpu: str, max_memory: str | None, is_taken_for: str
) -> None:
    answer = vivace.recommend("sdxl", gpu=gpu, max_memory=max_memory, store=())
    assert answer.gpu == is_taken_for
    assert answer.card_bytes == known_gpu(is_taken_for).memory_bytes
    assert answer.card_bytes >= 12e9 or max_memory == "8GB"


def test_what_no_gpu_of_a_cpu_gains_is_no_answer() -> None:
    """--gpu cpu was answered with CUDA graphs at 2.46x."""
    answer = vivace.recommend("flux-dev", gpu="cpu", store=())
    assert answer.recipe is None
    assert "--device cpu" in answer.next[0]


def test_another_models_seconds_are_not_shown() -> None:
    """qwen-image-2512 on an H20: 1.84 s of 8 steps of qwen-image, below its own limit of 23 s."""
    answer = vivace.recommend("qwen-image-2512", gpu="H20", store=())
    assert answer.basis is not None
    assert answer.basis.model == "qwen-image-2512"
    assert answer.chosen is not None
    assert answer.chosen.latency is not None
    assert answer.limit is not None
    assert answer.chosen.latency.point > answer.limit.eight_s


def test_bf16_has_no_tensor_cores_before_ampere() -> None:
    t4, a10 = (vivace.recommend("flux-dev", gpu=gpu, store=()) for gpu in ("T4", "A10"))
    assert t4.chosen is not None
    assert a10.chosen is not None
    assert t4.chosen.latency.point > 2 * a10.chosen.latency.point
    assert "compile" not in t4.chosen.recipe
