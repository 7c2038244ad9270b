"""A worker's session, in this process: LoRAs that do not fit, timed batches, one task alone, models that edit."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.flow_models import _small
from tests.narrow import SIDE
from vivace.errors import UnusableModel
from vivace.foundation.spec.sizes import Size
from vivace.machinery.lora import hot, read_lora
from vivace.models.sources import example_images
from vivace.serve.queue.messages import Draw, Load, SentPicture, parsed, written
from vivace.serve.settings import STATE
from vivace.serve.worker import speeds, warm_session
from vivace.serve.worker.warm_session import Drawing

OF_SD = Path("tinyworld/loras/tiny-sd-outlines.safetensors")
OF_FLUX = Path("tinyworld/loras/tiny-flux-outlines.safetensors")
CALL = {"height": 64, "width": 64, "num_inference_steps": 3}
SESSION: Any = SimpleNamespace(defaults={"num_inference_steps": 20})


def load(folder: Path, **fields: Any) -> Drawing:
    plain: dict[str, Any] = {
        "model": "tiny-sd",
        "recipe": "tiny_vae",
        "device": "cpu",
        "threads": 1,
        "sizes": ((64, 64),),
        "loras": (),
        "folder": str(folder),
    }
    return Drawing.load(Load(**plain | fields), lambda phase: None)


def draw(drawing: Drawing, *seeds: int, **fields: Any) -> list[np.ndarray]:
    ids = tuple(f"img-{seed}" for seed in seeds)
    request = Draw(ids, ("a red circle",) * len(ids), seeds, fields.pop("call", CALL), **fields)
    event = drawing.draw(request, lambda kind, fields: None)()
    images = [
        np.frombuffer(Path(image["file"]).read_bytes(), np.uint8).astype(int) for image in event["images"]
    ]
    assert event["steps"] > 0
    return images


def test_messages_are_what_they_were_after_the_pipe() -> None:
    picture = SentPicture("image", "RGB", 8, 8, "/dev/shm/x")
    message = Draw(("a", "b"), ("x", "y"), (1, 2), CALL, ("l", 0.5), (2,), "inpaint", (picture,))
    assert parsed(written(message).decode()) == message


def test_no_lora_that_fits_is_an_error_that_names_each(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"x" * 100)
    with pytest.raises(UnusableModel, match="--loras: no file fits the model") as raised:
        load(tmp_path, loras=(str(OF_FLUX), str(damaged)))
    assert "tiny-flux-outlines: lora: tiny-flux-outlines.safetensors is not a LoRA" in str(raised.value)
    assert "damaged: " in str(raised.value)


@pytest.mark.long
def test_loras_are_read_once_unless_their_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, factor: float) -> None:
        tensors = {
            name: factor * tensor if "up" in name or "lora_B" in name else tensor
            for name, tensor in own.items()
        }
        save_file(tensors, path)

    own = load_file(OF_SD)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, factor in zip(paths, (1.0, 2.0), strict=True):
        write(path, factor)
    drawing = load(tmp_path, loras=tuple(map(str, paths)))
    reads: list[str] = []
    read = read_lora.read_lora
    monkeypatch.setattr(hot, "read_lora", lambda *args: reads.append(args[2]) or read(*args))
    a, b = (draw(drawing, 1, lora=(str(path), 1.0))[0] for path in paths)
    assert not np.array_equal(a, b)
    assert np.array_equal(draw(drawing, 1, lora=(str(paths[0]), 1.0))[0], a)
    assert not reads, "each was read at start"
    write(paths[1], 4.0)
    assert not np.array_equal(draw(drawing, 1, lora=(str(paths[1]), 1.0))[0], b)
    assert reads == [str(paths[1])]
    (lora,) = hot.hot_loras(drawing.session.pipe)
    lora.keep_bytes = 0
    draw(drawing, 1, lora=(str(paths[0]), 1.0))
    draw(drawing, 1, lora=(str(paths[1]), 1.0))
    assert len(lora._kept) == 0
    assert len(reads) == 2


def test_a_batch_keeps_the_noise_of_each_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_LEAST_GAIN", 0.0)  # what a batch gains here is another process's affair
    drawing = load(tmp_path, batches=(2,))
    state = STATE.validate_python(drawing.state())
    (batching,) = state.batching.values()
    assert batching.gains[2] > 0
    together = draw(drawing, 5, 9)
    alone = [draw(drawing, seed)[0] for seed in (5, 9)]
    for image, other in zip(together, alone, strict=True):
        assert np.abs(image - other).max() <= max(2, batching.difference)
    assert np.abs(alone[0] - alone[1]).max() > 20
    assert np.array_equal(draw(drawing, 5)[0], alone[0]), "alone it is the same bit by bit"


@pytest.mark.parametrize(
    ("seconds", "allowed"), [((1.0, 1.9, 2.0), (4,)), ((1.0, 1.7, 3.5), (2,)), ((1.0, 1.9, 3.9), ())]
)
def test_batches_are_allowed_where_they_gain_a_tenth(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], allowed: tuple[int, ...]
) -> None:
    image = Image.new("RGB", (8, 8))
    by_number = dict(zip((1, 2, 4), seconds, strict=True))
    monkeypatch.setattr(speeds, "_draw", lambda *args: [image])
    monkeypatch.setattr(
        speeds, "_timed", lambda session, width, height, steps, number: (by_number[number], [image] * number)
    )
    assert tuple(speeds.time_batches(SESSION, 8, 8, (2, 4))["allowed"]) == allowed


@pytest.mark.parametrize(("gain", "timed"), [(1.02, [1, 2]), (1.06, [1, 2, 4])])
def test_four_at_once_are_not_timed_where_two_gain_nothing(
    monkeypatch: pytest.MonkeyPatch, gain: float, timed: list[int]
) -> None:
    numbers = []

    def time(session: object, width: int, height: int, steps: int, number: int) -> Any:
        numbers.append(number)
        return 1.0 if number == 1 else number / gain, [Image.new("RGB", (8, 8))] * number

    monkeypatch.setattr(speeds, "_timed", time)
    batching = speeds.time_batches(SESSION, 8, 8, (2, 4))
    assert numbers == timed
    assert batching["allowed"] == [], "and nothing is drawn to compare with"


def test_a_server_of_one_task_has_no_other(tmp_path: Path) -> None:
    drawing = load(tmp_path, task="inpaint", recipe="tiny_vae+cfg_cutoff(0.5)")
    state = STATE.validate_python(drawing.state())
    assert not state.draws_text
    assert state.edits.tasks == {"inpaint"}
    both = STATE.validate_python(load(tmp_path, recipe="tiny_vae+cfg_cutoff(0.5)").state())
    assert both.draws_text
    assert both.edits.tasks == set()
    assert "cfg_cutoff(0.5) belongs to the text-to-image pipeline" in both.edits.refused["image"]


@pytest.fixture
def kontext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drawing]:
    # Its memory is predicted as published.
    monkeypatch.setattr(warm_session, "machine_bytes", lambda: 10**12)
    with _small("flux-kontext"):
        yield load(tmp_path, model="synthetic:flux-kontext", recipe="baseline", sizes=((SIDE, SIDE),))


def test_a_model_that_edits_draws_from_the_image(kontext: Drawing, tmp_path: Path) -> None:
    state = STATE.validate_python(kontext.state())
    assert not state.draws_text
    assert (state.edits.tasks, state.edits.strength) == ({"edit"}, None)
    call = {"height": SIDE, "width": SIDE, "num_inference_steps": 2}
    source = example_images("FluxKontextPipeline", {"height": SIDE, "width": SIDE})["image"]
    drawn = []
    for number, image in enumerate((source, source.rotate(90))):
        file = tmp_path / f"source-{number}"
        file.write_bytes(image.tobytes())
        picture = SentPicture("image", "RGB", SIDE, SIDE, str(file))
        drawn += draw(kontext, 1, call=call, task="edit", pictures=(picture,))
    assert drawn[0].size == SIDE * SIDE * 3
    assert not np.array_equal(drawn[0], drawn[1])
    assert Size(SIDE, SIDE) in state.speeds
