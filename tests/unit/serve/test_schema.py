"""Requests made from /openapi.json, right and wrong: every answer is one that it describes, and no worker is lost."""

from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from tests.served import Served
from tests.unit.serve.test_edits import bomb, png
from vivace.serve.http.requests import EditRequest

OPERATIONS = {
    ("POST", "/v1/images/generations"): 0.5,
    ("POST", "/v1/images/edits"): 0.42,
    ("GET", "/v1/images/files/{name}"): 0.01,
    ("GET", "/v1/models"): 0.01,
    ("GET", "/v1/models/{name}"): 0.01,
    ("GET", "/readyz"): 0.01,
    ("GET", "/livez"): 0.01,
    ("GET", "/metrics"): 0.01,
    ("GET", "/dashboard.json"): 0.01,
    ("GET", "/"): 0.01,
}
"""Every operation, and its share of the cases."""
LATE = [schemathesis.checks.not_a_server_error]
"""A request that gives itself a few milliseconds is told that they have ended."""
QUICK, MANY = 60, 20_000
EXCLUDED = [schemathesis.checks.positive_data_acceptance]
"""A body that the schema allows may ask for a size or a number of steps that this server does not draw."""


def described(plain: Served, mode: GenerationMode) -> Any:
    """Return what /openapi.json says, with one file as image[], and without files for wrong requests, of which
    schemathesis can make none."""
    schema: dict[str, Any] = plain.send("/openapi.json").json
    form = schema["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"][
        "schema"
    ]
    form["properties"]["image[]"] = form["properties"]["image[]"]["items"]
    if mode is GenerationMode.NEGATIVE:
        for name in ("image", "image[]", "mask"):
            del form["properties"][name]
    return schemathesis.openapi.from_dict(schema)


def settings(number: int, examples: float) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=max(4, int(examples)),
        deadline=None,
        database=None,
        derandomize=number == QUICK,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@pytest.mark.parametrize(
    "number", [QUICK, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_every_answer_is_as_described(plain: Served, number: int) -> None:
    statuses: Counter[int] = Counter()
    for mode in GenerationMode:
        operations = [result.ok() for result in described(plain, mode).get_all_operations()]
        assert {(each.method.upper(), each.path) for each in operations} == OPERATIONS.keys()
        for operation in operations:
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue  # nothing of it can be wrong
            share = OPERATIONS[operation.method.upper(), operation.path]

            @settings(number, number * share / 2)
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def call(case: schemathesis.Case) -> None:
                answer = case.call(base_url=plain.url, timeout=30)
                statuses[answer.status_code] += 1
                is_late = answer.status_code == 504 and "timeout" in str(case.body)
                assert answer.status_code < 500 or is_late, answer.text
                case.validate_response(answer, excluded_checks=[*EXCLUDED, *LATE * is_late])

            call()
    print(dict(statuses))
    assert statuses[200] > number * 0.02, "some draw"
    check_it_draws(plain)


NAMES = st.sampled_from([*EditRequest.model_fields, "image", "mask", "quality"]) | st.text(max_size=20)
VALUES = st.sampled_from(["1", "0", "2", "64x64", "png", "webp", "true", "0.5", "x", "[]", "nan"]) | st.text(
    max_size=50
)
IMAGES = st.sampled_from(
    [png(), png((64, 64)), bomb(9_000), png()[:50], png((16, 16), (0, 0, 0, 0), "RGBA"), b""]
)


@pytest.mark.parametrize(
    "number", [100, pytest.param(MANY // 4, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_forms_of_any_fields_and_images_are_answered(plain: Served, number: int) -> None:
    statuses: Counter[int] = Counter()

    @settings(QUICK if number == 100 else MANY, number)
    @hypothesis.given(
        st.dictionaries(NAMES, VALUES, max_size=3),
        st.dictionaries(st.sampled_from(["image", "image[]", "mask"]), IMAGES, max_size=2),
    )
    def send(fields: dict[str, str], files: dict[str, bytes]) -> None:
        answer = plain.edit(**{"prompt": "x", **fields, "files": files})
        statuses[answer.status] += 1
        may_be = (
            {200, 400} | ({504} if "timeout" in fields else set()) | ({404} if "model" in fields else set())
        )
        assert answer.status in may_be, answer.body
        assert answer.status == 200 or answer.message

    send()
    print(dict(statuses))
    assert statuses[200]
    check_it_draws(plain)


def check_it_draws(plain: Served) -> None:
    assert plain.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert plain.pool.replicas[0].num_restarts == 0
