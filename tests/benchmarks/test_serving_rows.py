"""The rows of `benchmarks.serving`."""

import pytest

from benchmarks.serving_process import phases_of
from benchmarks.serving_rows import Part, ServingRow, added_ms, share, span_rate
from tests.unit.load_testing.test_load_figures import row, samples
from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage
from vivace.foundation.spec.environment import Environment

HERE = Environment(
    vivace="0.1.0",
    platform="Linux",
    python="3.11",
    device="cpu",
    device_name="a CPU",
    cpu="a CPU",
    num_cores=2,
    num_threads=2,
    memory_bytes=1,
    libraries={},
    source_revision=None,
    device_capability=None,
    driver=None,
    variables={},
)


def served(clients: int, seconds: float, number: int = 8) -> LoadRow:
    """Images that a server draws one after the other for clients that came at once."""
    ended = [seconds * (k + 1) for k in range(number)]
    due = [max(0.0, seconds * (k + 1 - clients)) for k in range(number)]
    return row(samples(due, ended), LoadStage(kind="closed", clients=clients))


def serving_row(part: Part, **fields: object) -> ServingRow:
    return ServingRow(model="m", recipe="r", environment=HERE, part=part, **fields)


def test_what_http_adds_is_the_clients_time_less_the_workers() -> None:
    load = served(1, 0.5, 4)
    columns = {"queue": 1.0, "text": 20.0, "denoise": 400.0, "decode": 70.0, "encode": 3.0}
    phases = {name: (value,) * 4 for name, value in columns.items()}
    load = load.model_copy(update={"samples": load.samples.model_copy(update={"phases_ms": phases})})
    assert added_ms(load) == pytest.approx([10.0] * 4), "500 ms at the client, 490 ms in the worker"


def test_eight_clients_get_what_a_loop_gets_from_a_server_that_adds_nothing() -> None:
    load = served(8, 0.5, 16)
    assert span_rate(load) == pytest.approx(2.0)
    (line,) = serving_row("pairs", seconds=((0.5, 0.5),) * 3, loads=(load,) * 3).lines
    assert line.startswith("eight clients: 1 [0.9")
    assert "(0.500 s an image, 3 pairs), and the worker draws 0.000 of the time" in line


def test_each_part_says_its_line() -> None:
    assert serving_row("ready", seconds=((20.0, 7.5),)).lines == [
        "ready 20.0 s after the first start, 7.5 s after the second, with warm caches"
    ]
    (line,) = serving_row("killed", seconds=((5.25, 4.0), (0.5,))).lines
    assert line == "the image after its worker was killed: 5.2, 4.0 s; 0.500 s usually"
    phases = ({}, {"importing libraries": 3.0, "warming 1024x1024": 4.25})
    (_, line) = serving_row("ready", seconds=((20.0, 7.5),), phases=phases).lines
    assert line == "its worker: importing libraries 3.0, warming 1024x1024 4.2"
    assert share((0.5, 0.5), served(8, 0.5, 32)) == span_rate(served(8, 0.5, 32)) * 0.5
    (line,) = serving_row("replicas", loads=(served(8, 0.5, 32), served(16, 0.26, 32)), number=2).lines
    assert line == "2 replicas: 1.92 times the images a second of one, at 8 and 16 clients"
    load = served(2, 0.5, 8)
    load = load.model_copy(
        update={"samples": load.samples.model_copy(update={"phases_ms": {"lora": (12.0,) * 8}})}
    )
    (line,) = serving_row("loras", loads=(load,), number=20).lines
    assert line == "20 LoRAs at random: 0.500 s an image, of it 12.0 ms for the exchange (8 images)"


def test_phases_of_a_start_are_those_of_the_log() -> None:
    line = (
        "worker 1: ready after 7.7 s: starting a process 0.5, applying distilled(lcm, steps=4)+tiny_vae 0.1, "
    )
    assert phases_of(line + "warming 128x128 0.4\n") == {
        "starting a process": 0.5,
        "applying distilled(lcm, steps=4)+tiny_vae": 0.1,
        "warming 128x128": 0.4,
    }
    assert phases_of("worker 1: importing libraries (after 0.5 s)") == {}
