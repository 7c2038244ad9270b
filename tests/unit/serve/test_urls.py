"""Images that are fetched by URL: how long, how many, and what is said once they are gone."""

import time

import pytest

from tests.served import PATH, Served
from vivace.serve.http import responses
from vivace.serve.http.responses import KeptImages


def urls(server: Served, **fields: object) -> list[str]:
    answer = server.draw(response_format="url", **fields)
    assert answer.status == 200, answer.body
    return [entry["url"].removeprefix(server.url) for entry in answer.json["data"]]


def kept(server: Served) -> KeptImages:
    images = server.app.state.kept
    assert isinstance(images, KeptImages)
    return images


def test_a_url_is_answered_until_its_time_and_then_in_words(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEPT_S", 0.1)
    (path,) = urls(server)
    until = time.monotonic() + 5
    while kept(server).num_bytes:
        assert time.monotonic() < until, "it is removed though nobody asks for it"
        time.sleep(0.05)
    gone = server.send(path)
    assert gone.status == 404
    assert gone.message.startswith("no such image: each is kept for an hour")
    monkeypatch.undo()
    before = time.time()
    (entry,) = server.draw(response_format="url").json["data"]
    assert before + 3599 <= entry["expires_at"] <= time.time() + 3601
    assert server.send(entry["url"].removeprefix(server.url)).status == 200


def test_newer_images_take_the_room_of_older_ones(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = urls(server, seed=3)
    size = kept(server).num_bytes
    monkeypatch.setattr(responses, "KEPT_BYTES", int(2.5 * size))
    later = [path for _ in range(3) for path in urls(server, seed=3)]
    assert kept(server).num_bytes <= 2.5 * size
    assert [server.send(path).status for path in (first, *later)] == [404, 404, 200, 200]


def test_a_url_is_of_the_name_that_the_client_used(server: Served) -> None:
    answer = server.send(
        PATH, {"prompt": "x", "response_format": "url"}, {"host": f"localhost:{server.port}"}
    )
    assert answer.json["data"][0]["url"].startswith(f"http://localhost:{server.port}/v1/images/files/")


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_that_is_set_changes_nothing_but_dates(
    server: Served, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = urls(server)
    before = server.draw().json["created"]
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    assert server.send(path).status == 200, "an hour is an hour"
    answer = server.draw("slow 1", num_inference_steps=4, timeout=10, seed=3)
    assert answer.images[0].getpixel((0, 0)) == (3, 0, 0)
    assert answer.json["created"] - before == pytest.approx(jump_s, abs=60)
    assert float(answer.headers["server-timing"].split("queue;dur=")[1].split(",")[0]) < 5_000
