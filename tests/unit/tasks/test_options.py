"""Every command that measures takes a task and its images, from one group of options, and measures that."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageEnhance

import vivace
from tests.typed import run_vivace, typed
from tests.unit.tasks.test_tasks import IMAGE, MASK
from vivace.benchmark.rounds.support import support_of
from vivace.errors import Unsupported, WorkloadError
from vivace.models.sources import FOLDER
from vivace.tuning.answer import Tuned
from vivace.tuning.search.objective import Objective
from vivace.tuning.settings import ImageRequest


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("bench --recipe baseline", "vivace.benchmark.run_study"),
        ("profile --model tiny-sd", "vivace.benchmark.profiles.profile"),
        ("compare baseline tiny_vae", "vivace.benchmark.pairs.compare"),
        ("tune tiny-sd", "vivace.tuning.tuner.search_recipe"),
    ],
    ids=lambda value: value.split()[0],
)
def test_each_command_hands_on_what_it_was_given(
    command: str, function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []

    def ask(*args: Any, **fields: Any) -> None:
        holder = next((arg for arg in args if hasattr(arg, "workload") or hasattr(arg, "request")), None)
        request = getattr(holder, "workload", None) or getattr(holder, "request", None) or fields["workload"]
        calls.append({name: getattr(request, name) for name in REQUESTED})
        raise WorkloadError("enough")

    monkeypatch.setattr(function, ask)
    flags = ["--task", "inpaint", "--image", "a.png", "--mask", "b.png", "--strength", "0.5"]
    assert typed(monkeypatch, *command.split(), *flags) == 2
    assert {name: calls[0][name] for name in REQUESTED} == REQUESTED


REQUESTED: dict[str, Any] = {
    "task": "inpaint",
    "images": ("a.png",),
    "masks": ("b.png",),
    "controls": (),
    "strength": 0.5,
    "controlnet": None,
}


def test_a_search_draws_from_as_many_pictures_as_prompts() -> None:
    prompts = ("a", "b", "c")
    request = ImageRequest(images=("1.png", "2.png", "3.png"), masks=("m.png",), task="inpaint", strength=0.5)
    workload = request.of(prompts[:2])
    assert (workload.images, workload.masks, workload.strength) == (("1.png", "2.png"), ("m.png",), 0.5)
    assert request.options == (("strength", 0.5), ("image", "1.png"), ("mask", "m.png"))


@pytest.mark.parametrize(
    ("image_request", "files"),
    [
        (ImageRequest(task="inpaint"), " --image FILE --mask FILE"),
        (
            ImageRequest(task="inpaint", images=("my picture.png",), masks=("m.png",)),
            " --image 'my picture.png' --mask m.png",
        ),
        (ImageRequest(task="control"), " --control FILE"),
    ],
)
def test_the_answer_of_a_search_can_be_run(image_request: ImageRequest, files: str) -> None:
    assert image_request.task is not None
    tuned = Tuned(
        model="tiny-sd",
        device_name="a CPU",
        objective=Objective(),
        pick=None,
        rows=(),
        history=(),
        cut={},
        notes=(),
        store=Path(),
        judges=True,
        num_trials=0,
        seconds=0.0,
        options=image_request.options,
        task=image_request.task,
    )
    generate, export, load = tuned.commands
    assert generate.endswith(f"--recipe baseline{files}")
    assert export.endswith(f"{files} -o draw.py")
    assert load == f"vivace.load('tiny-sd', 'baseline', task='{image_request.task}')"


def test_techniques_judge_the_pipeline_of_the_task() -> None:
    recipes = ["scheduler(unipc)"]
    assert support_of("tiny-flux", recipes, "cpu").reasons == {}
    assert list(support_of("tiny-flux", recipes, "cpu", "image").reasons) == recipes
    with pytest.raises(Unsupported, match="not trained to edit"):
        vivace.profile("tiny-sd", task="edit")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Images made from six sources: `a` changed inside of the masks, `b` a little outside too, `c` all over."""
    for index in range(6):
        source = Image.open(FOLDER / f"{index:02}.png").convert("RGB")
        mask = Image.open(FOLDER / f"{index:02}-mask.png").convert("L")
        inside = Image.composite(Image.new("RGB", source.size, "orange"), source, mask)
        other = Image.open(FOLDER / f"{index + 6:02}.png").convert("RGB")
        for name, image in (
            ("a", inside),
            ("b", ImageEnhance.Brightness(inside).enhance(0.97)),
            ("c", other),
        ):
            (tmp_path / name).mkdir(exist_ok=True)
            image.save(tmp_path / name / f"{index}.png")
    return tmp_path


def quality(folder: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run_vivace(folder, "quality", *flags, "--json", code=code).stdout)
    return answer


@pytest.mark.long
def test_folders_are_held_to_what_their_images_were_made_from(folders: Path) -> None:
    files = [part for k in range(6) for part in ("--image", str(FOLDER / f"{k:02}.png"))]
    files += [part for k in range(6) for part in ("--mask", str(FOLDER / f"{k:02}-mask.png"))]
    kept = quality(folders, "a", "b", *files)
    assert kept["summary"]["outside_psnr_db"]["a"] > 60, "the sources' own pixels"
    assert 25 < kept["summary"]["outside_psnr_db"]["b"] < 45
    assert "match outside the mask" in kept["quality"]["reason"]
    assert kept["quality"]["verdict"] in ("passed", "unclear")
    lost = quality(folders, "a", "c", *files, code=1)
    assert "outside the mask" in lost["quality"]["reason"]
    assert quality(folders, "a", "c")["quality"]["verdict"] == "unclear", "nothing to hold them to"
    sources = files[:12]
    alike = ("--min-quality", "variety=off")  # the images of c differ less from each other than a's
    edited = quality(folders, "a", "c", "--task", "edit", "--scorer", "tiny-clip", *alike, *sources)
    assert "likeness to the source kept" in edited["quality"]["reason"]
    figures = edited["summary"]["source_similarity"]
    assert figures["a"] > figures["b"] + 5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--mask", MASK), "a mask needs the image that it belongs to"),
        (
            ("--image", IMAGE, "--image", IMAGE),
            "--image: 2 files for 6 pairs of images; give one, or one for each",
        ),
        (("--task", "edit"), "--task edit: give what the images were made from, --image FILE"),
        (("--task", "inpaint"), "--image FILE and --mask FILE"),
        (("--task", "control"), "images are not compared with a control; leave it out"),
        (("--task", "edit", "--image", IMAGE), "needs a CLIP model; add --scorer NAME"),
    ],
)
def test_what_folders_lack_is_said(flags: tuple[str, ...], says: str, folders: Path) -> None:
    assert says in run_vivace(folders, "quality", "a", "b", *flags, code=2).stderr
