"""The rows of `benchmarks.serving`."""

import pytest

from benchmarks.serving_rows import Part, ServingRow, added_ms, span_rate
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
