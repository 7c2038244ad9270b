"""Every answer, whatever the model, the card's spelling and the file: possible in time and memory, allowed by the gate,
and with commands that are accepted; and `vivace plan` says the same."""

import shlex
from pathlib import Path

import click
import pytest

import vivace
from tests.typed import typed
from tests.unit.recommendation.files import write_folder, write_gguf, write_sdxl, write_unet
from vivace.architectures import CATALOGUE
from vivace.cli import app
from vivace.cli.measuring.bench_endpoint import bench_endpoint
from vivace.evidence.recommendation import Recommendation
from vivace.evidence.recommendation.advise import recommend_for
from vivace.evidence.recommendation.predicted import Card, typical_gpu
from vivace.evidence.recommendation.row_filter import refused
from vivace.foundation.hardware import CHIPS, Near, counted, known_gpu, near
from vivace.foundation.stats import Gate
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import RESERVE_BYTES, Saving, largest_encoder, need_of
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.remembered import footprints
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
CHIP_NAMES = tuple(chip.name for chip in CHIPS)
EVERY = 8
"""A model answers for one card in eight beside the long tests."""


def assert_sound(answer: Recommendation, model: str, gpu: str) -> None:
    """Assert what holds of every answer: possible times and memory, proven images, the device, its commands."""
    said = " ".join(answer.explain().split())
    chosen, basis = answer.chosen, answer.basis
    assert (chosen is None) == (answer.recipe is None)
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
    assert basis.kind != "committed" or (ROOT / basis.place).exists()
    if gpu == "cpu":
        assert basis.device == "cpu"
        return
    if chosen.measured_s is not None:
        assert chosen.predicted_from == basis.gpu or basis.kind == "predicted"
    if not chosen.same_picture:
        assert chosen.judged is not None
        assert chosen.judged.gate is Gate.PASSED
    named = known_gpu(answer.gpu or "")
    assert named is not None
    assert answer.card_bytes == named.memory_bytes
    if near(basis.gpu, named.name) is not Near.SAME or basis.kind == "predicted":
        assert refused(recipe, named.name, named.chip.capability) == ""
        assert chosen.latency is None or chosen.predicted_from, "another GPU's time is no time of this one"
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


def test_an_answer_is_sound_on_every_generation() -> None:
    for gpu in {chip.capability: chip.name for chip in CHIPS}.values():
        assert_sound(vivace.recommend("flux-dev", gpu=gpu, store=()), "flux-dev", gpu)


@pytest.mark.soak
@pytest.mark.parametrize("gpu", dict.fromkeys((*CARDS, *CHIP_NAMES)))
def test_all_answers_are_sound(gpu: str) -> None:
    for model in MODELS:
        assert_sound(vivace.recommend(model, gpu=gpu, store=()), model, gpu)


@pytest.mark.parametrize(
    ("write", "of"),
    [(write_sdxl, "sdxl"), (write_unet, "sdxl"), (write_folder, "sdxl")],
    ids=["file", "unet", "folder"],
)
def test_a_file_or_folder_has_the_answers_of_its_architecture(write, of: str, tmp_path: Path) -> None:
    path = str(write(tmp_path))
    for gpu in ("cpu", "H200", "RTX 3060", "2080Ti"):
        answer = vivace.recommend(path, gpu=gpu, store=())
        assert_sound(answer, path, gpu)
        assert answer.recipe == vivace.recommend(of, gpu=gpu, store=()).recipe
        if answer.basis is not None:
            assert answer.basis.of == of
            assert f"{of}, whose architecture it has" in " ".join(answer.explain().split())


def test_a_gguf_file_is_planned_by_its_header(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path))
    planned, plain = predict(find_weightless(path), resolve("baseline")), footprints()["flux-dev"]
    (denoiser,) = (part for part in planned.components if part.name == "transformer")
    assert denoiser.num_bytes == pytest.approx(11.9e9, rel=0.01)
    assert plain.model_bytes - planned.model_bytes == pytest.approx(23.8e9 - 11.9e9, rel=0.02)
    assert vivace.recommend(path, gpu="H200", store=()).published_bytes == planned.needed_bytes


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


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24])
def test_a_size_alone_means_a_usual_gpu_of_that_size(gigabytes: int) -> None:
    gpu = typical_gpu(gigabytes * 1e9)
    assert gpu.memory_bytes == gigabytes * 1e9
    plan = recommend_for("flux-dev", footprints()["flux-dev"], Card(gpu, gigabytes * 1e9, is_typical=True))
    assert plan.basis is not None
    assert plan.chosen is not None
    assert plan.chosen.peak_bytes is not None
    assert plan.chosen.peak_bytes + RESERVE_BYTES <= gigabytes * 1e9
    answer = vivace.recommend("flux-dev", gpu=gpu.name, max_memory=gigabytes - RESERVE_BYTES / 1e9, store=())
    assert answer.recipe == plan.recipe


def test_a_record_of_few_steps_is_taken_at_the_models_own_number() -> None:
    """1.84 s an image of Qwen-Image on an H100 was 8 of 50 steps on an H200."""
    answer = vivace.recommend("qwen-image", gpu="H200", store=())
    assert answer.basis is not None
    assert answer.chosen is not None
    assert answer.chosen.latency is not None
    assert (answer.basis.steps, answer.chosen.timed_steps) == (50, 8)
    assert answer.chosen.latency.point == pytest.approx(10.6, rel=0.05)
    assert "timed over 8 steps, and scaled to 50" in answer.doubts


def test_published_caches_need_proof() -> None:
    """An A100 was advised first_block_cache(0.4), from a published table."""
    answer = vivace.recommend("flux-dev", gpu="A100", store=())
    assert answer.recipe is not None
    assert "cache" not in answer.recipe
    h100 = vivace.recommend("flux-dev", gpu="H100", store=())
    assert not any(row.recipe.startswith("dtype(fp16)+first_block_cache(0.") for row in h100.ranking)


def test_a_faster_record_of_the_same_generation_is_followed() -> None:
    """An H200 was advised compile, where an H100 was faster with another recipe."""
    answer = vivace.recommend("flux2-klein-9b", gpu="H100", store=())
    assert answer.basis is not None
    assert answer.chosen is not None
    assert answer.chosen.latency is not None
    assert answer.recipe is not None
    assert "fused(fp8" in answer.recipe
    assert (answer.basis.near, answer.chosen.predicted_from) == ("generation", answer.basis.gpu)
    assert answer.chosen.measured_s is not None
    assert answer.chosen.measured_s <= answer.chosen.latency.point < 0.4
    assert "another GPU of the same generation" in " ".join(answer.doubts)
    assert "measured on NVIDIA H200" in " ".join(answer.explain().split())
    blackwell = vivace.recommend("sdxl", gpu="RTX 5090", store=())
    assert blackwell.basis is not None
    assert blackwell.basis.near != "same"


def test_the_memory_of_the_card_is_the_limit() -> None:
    """A 4070 was advised a recipe of 17.4 GB."""
    answer = vivace.recommend("flux-dev", gpu="4070", store=())
    assert str(answer).startswith("flux-dev on RTX 4070 (12 GB): fits with this recipe")
    assert any(row.kind == "memory" and "RTX 4070 of 12.0 GB" in row.why for row in answer.left_out)
    small, large = (
        vivace.recommend("flux-dev", gpu=f"RTX 4060 Ti{size}", store=()) for size in ("", " 16GB")
    )
    assert small.chosen is not None
    assert large.chosen is not None
    assert "RTX 4060 Ti is sold with 8 or 16 GB: 8 are assumed, say which" in small.doubts
    assert not any("is sold with" in doubt for doubt in large.doubts)


@pytest.mark.parametrize(("gpu", "says"), [("banana", "such as H100"), ("4071", "did you mean 'RTX 4070'")])
def test_an_unknown_gpu_is_refused(
    gpu: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (("recommend", "flux-dev"), ("plan", "tiny-sd"), ("lint", __file__)):
        assert typed(monkeypatch, *command, "--gpu", gpu) == 2
        assert says in capsys.readouterr().err


SAVINGS = [
    Saving("offload(group)", offloading="group"),
    Saving("compile+offload(model)", offloading="model"),
    Saving("quantize(int8)@denoiser,{}+offload(model)", "int8", "int8", "model"),
    Saving("quantize(nf4)@denoiser,{}", "nf4", "nf4"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "model", ["sd15", "sdxl", "sana-1600m", "flux-dev", "z-image-turbo", "flux2-klein-9b"]
)
def test_estimates_are_what_plan_predicts(model: str) -> None:
    weightless, shipped = find_weightless(model), footprints()[model]
    assert predict(weightless, resolve("baseline")) == shipped, (
        "python -m benchmarks.footprints writes them anew"
    )
    for saving in SAVINGS:
        exact = predict(weightless, resolve(saving.recipe.format(largest_encoder(shipped))))
        estimate = need_of(saving, shipped)
        assert exact.needed_bytes <= estimate.needed_bytes <= 1.12 * exact.needed_bytes + 3e8, saving.recipe


def test_a_shipped_prediction_is_still_right() -> None:
    """The smallest stands for all; `make test` of everything predicts more."""
    assert predict(find_weightless("sd15"), resolve("baseline")) == footprints()["sd15"]
