"""Requests made from /openapi.json, right and wrong: every answer is one that it describes, and no worker is lost."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from tests.serve_worker import COMMAND
from tests.served import Served, served
from vivace.serve.settings import ServeSettings

OPERATIONS = {
    ("POST", "/v1/images/generations"): 0.5,
    ("POST", "/v1/images/edits"): 0.44,
    ("GET", "/v1/images/files/{name}"): 0.01,
    ("GET", "/v1/models"): 0.01,
    ("GET", "/readyz"): 0.01,
    ("GET", "/livez"): 0.01,
    ("GET", "/metrics"): 0.01,
    ("GET", "/"): 0.01,
}
"""Every operation, and its share of the cases."""
LATE = [schemathesis.checks.not_a_server_error]
"""A request that gives itself a few milliseconds is told that they have ended."""
QUICK, MANY = 400, 20_000
EXCLUDED = [schemathesis.checks.positive_data_acceptance]
"""A body that the schema allows may ask for a size or a number of steps that this server does not draw."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ServeSettings("fake", "baseline", max_queue=64, timeout_s=20.0)
    with served(settings, COMMAND, VIVACE_TEST_DIED=str(tmp_path_factory.mktemp("x") / "died")) as running:
        yield running


def described(server: Served) -> dict[str, Any]:
    """Return /openapi.json with one file as image[]: schemathesis cannot make wrong lists of files."""
    schema: dict[str, Any] = server.send("/openapi.json").json
    form = schema["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"][
        "schema"
    ]
    form["properties"]["image[]"] = form["properties"]["image[]"]["items"]
    return schema


@pytest.mark.parametrize("number", [QUICK, pytest.param(MANY, marks=pytest.mark.soak)])
def test_every_answer_is_as_described(server: Served, number: int) -> None:
    schema = schemathesis.openapi.from_dict(described(server))
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {(each.method.upper(), each.path) for each in operations} == OPERATIONS.keys()
    statuses: Counter[int] = Counter()
    for operation in operations:
        share = OPERATIONS[operation.method.upper(), operation.path]
        modes = list(GenerationMode) if operation.method == "post" else [GenerationMode.POSITIVE]
        for mode in modes:

            @hypothesis.settings(
                max_examples=max(4, int(number * share / 2)),
                deadline=None,
                database=None,
                derandomize=number == QUICK,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def call(case: schemathesis.Case) -> None:
                answer = case.call(base_url=server.url, timeout=30)
                statuses[answer.status_code] += 1
                is_late = answer.status_code == 504 and "timeout" in str(case.body)
                assert answer.status_code < 500 or is_late, answer.text
                case.validate_response(answer, excluded_checks=[*EXCLUDED, *LATE * is_late])

            call()
    print(dict(statuses))
    assert statuses[200] > number * 0.02, "some draw"
    assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert server.pool.replicas[0].num_restarts == 0
