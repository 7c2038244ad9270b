"""Requests for several images, of which one fails: nothing is half answered, and what is left is freed."""

import json
import time

import openai
import pytest

from tests.served import PATH, Served
from vivace.serve.queue.jobs import State


@pytest.mark.quick("False-*breaks*", "True-*dies*", "False-slow*")
@pytest.mark.parametrize(
    ("prompt", "fields", "status", "message"),
    [
        ("seed 7 breaks", {}, 500, "drawing failed: RuntimeError: the model broke"),
        ("seed 7 dies", {}, 503, "the worker died twice while it drew this image"),
        ("slow 3", {"timeout": 2.0}, 504, "the time of the request ended"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_one_image_that_fails_ends_its_request_and_the_other_images(
    server: Served, prompt: str, fields: dict[str, object], status: int, message: str, stream: bool
) -> None:
    began = time.monotonic()
    answer = server.draw(f"{prompt} slow 1", seed=6, n=8, stream=stream, num_inference_steps=4, **fields)
    if stream:
        events = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
        *drawn, last = (json.loads(line.removeprefix("data: ")) for line in events)
        assert (answer.status, last["type"]) == (200, "error")
        assert (last["error"]["code"], message in last["error"]["message"]) == (str(status), True)
        assert {event["type"] for event in drawn} <= {"image_generation.completed"}
    else:
        assert answer.status == status
        assert message in answer.message, "and no image with it"
    server.wait_for("running", 0)
    states = server.states()
    assert states["waiting"] == 0
    assert states["failed"] >= 1
    assert states["done"] <= 4
    assert sum(states.values()) == 8
    assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert not list(server.pool._folder.path.iterdir())
    assert time.monotonic() - began < 20


def test_openais_client_raises_where_an_image_of_a_stream_fails(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.images.generate(
        model="fake", prompt="seed 7 breaks", n=3, stream=True, extra_body={"seed": 6}
    )
    events = []
    with pytest.raises(openai.APIError, match="the model broke"):
        events.extend(stream)
    assert server.states()["running"] == 0


def test_a_stream_that_is_left_before_it_begins_frees_its_images(server: Served) -> None:
    for _ in range(20):
        left = server.leave("slow 1", n=3, stream=True, num_inference_steps=20)
        left.close()
    for state in (State.WAITING, State.RUNNING):
        server.wait_for(state.value, 0, 15)
    assert server.send(PATH, {"prompt": "x"}).status == 200
    assert server.states()["done"] == 1, "twenty streams of sixty images would take two minutes"
