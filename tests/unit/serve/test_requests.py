"""What clients may send, and what becomes of it, with a worker that draws one colour."""

import base64
import contextlib
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.served import EDITS, PATH, Served, fake, image_of
from vivace.serve.http.access import Keys
from vivace.serve.http.request_checks import LARGEST_BODY, LARGEST_UPLOAD


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": 1}, "seeds is not a parameter here; there are: prompt, model, n, size"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 11}, "n: Input should be less than or equal to 10"),
        ({"prompt": ""}, "prompt: String should have at least 1 character"),
        ({"size": "17x17"}, "this server draws 16x16, 64x64; got 17x17"),
        ({"size": "big"}, "a size is WIDTHxHEIGHT in pixels, e.g. 16x16; got 'big'"),
        ({"quality": "high"}, "quality: Input should be 'auto' or 'standard'"),
        ({"response_format": "file"}, "response_format: Input should be 'b64_json' or 'url'"),
        ({"output_compression": 50}, "png is not compressed with loss"),
        ({"partial_images": 1}, "partial images come in a stream only; add stream=true"),
        ({"num_inference_steps": 51}, "at most 50 steps are drawn here; got 51"),
        ({"negative_prompt": "x", "guidance_scale": 1}, "it has no effect at guidance_scale 1"),
        ({"loras": [{"name": "../../etc/passwd"}]}, "no LoRA '../../etc/passwd'; there are: none"),
        ({"seed": True}, "seed: Input should be a valid integer"),
        ({"n": "2"}, "n: Input should be a valid integer"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale: Input should be a finite number"),
        ({"prompt": "refuse"}, "the model refuses"),
    ],
)
def test_what_is_not_served_is_refused_in_words(plain: Served, fields: dict[str, Any], message: str) -> None:
    answer = plain.draw(**fields) if "prompt" not in fields else plain.send(PATH, fields)
    assert answer.status == 400
    assert message in answer.message
    assert plain.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0), "the next request is right"


def test_a_body_that_does_not_go_on_is_given_up(plain: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.serve.http.request_checks._LONGEST_PAUSE_S", 0.2)
    client = socket.create_connection(("127.0.0.1", plain.port), timeout=10)
    kind = "content-type: application/json"
    client.sendall(
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: 99\r\n\r\n{{".encode()
    )
    assert b" 408 " in client.recv(1000).splitlines()[0]
    client.close()
    assert plain.draw().status == 200


@pytest.mark.parametrize(
    ("path", "largest"), [(PATH, LARGEST_BODY), pytest.param(EDITS, LARGEST_UPLOAD, marks=pytest.mark.long)]
)
def test_a_body_of_unknown_length_is_bounded(plain: Served, path: str, largest: int) -> None:
    kind = "application/json" if path == PATH else "multipart/form-data; boundary=limit"
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b'--limit\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n\r\n'
    client = socket.create_connection(("127.0.0.1", plain.port), timeout=10)
    sent = 0
    with contextlib.suppress(OSError):  # it answers, and listens no more
        client.sendall(head.encode() + f"{len(part):x}\r\n".encode() + part + b"\r\n")
        while sent < 2 * largest:
            client.sendall(b"80000\r\n" + b"x" * 0x80000 + b"\r\n")
            sent += 0x80000
    with contextlib.suppress(OSError):
        assert client.recv(1000).splitlines()[0].split()[1] == b"413"
    client.close()
    assert plain.draw().status == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' is given twice; give it once"),
        (b'{"prompt": "a", "loras": [{"name": "a", "name": "b"}]}', "'name' is given twice"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a number of 5000 digits is too long"),
        (b'{"prompt": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"prompt": "\xff"}', "its text is not UTF-8"),
        (b"", "the body is not JSON: Expecting value"),
        (b"[]", "the body is not a JSON object"),
        (b'{"prompt": "a", "loras": [{"name": "a", "' + b"k" * 9000 + b'": 1}]}', "loras.0.kkk"),
    ],
)
def test_json_that_says_nothing_clear_is_refused(plain: Served, body: bytes, message: str) -> None:
    answer = plain.send(PATH, body)
    assert answer.status == 400
    assert message in answer.message
    assert len(answer.body) < 1000, "nothing long is sent back"


def test_null_is_as_if_left_out(plain: Served) -> None:
    """OpenAI's API says so, and clients send it for what they do not set."""
    names = ("n", "size", "response_format", "output_format", "output_compression", "stream", "user", "loras")
    answer = plain.draw(seed=3, **dict.fromkeys(names))
    assert answer.images[0].getpixel((0, 0)) == (3, 0, 0)
    assert plain.send(PATH, {"prompt": None}).message == "prompt: Field required"
    assert plain.send(PATH, {"prompt": "x", "style": None}).status == 400


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("image/webp;q=0", "application/json"),
        ("image/png;q=0.1, image/webp", "image/webp"),
        ("image/avif, image/webp, */*", "image/webp"),
        ("application/json, image/webp", "application/json"),
        ("image/*", "image/png"),
        ("text/html", "application/json"),
    ],
)
def test_the_type_that_a_client_prefers_is_sent(plain: Served, accept: str, kind: str) -> None:
    assert plain.send(PATH, {"prompt": "x"}, {"accept": accept}).headers["content-type"] == kind
    refused = plain.send(PATH, {"prompt": "x"}, {"accept": "image/gif"})
    assert refused.status == 406
    assert "image/png, image/jpeg, image/webp" in refused.message


def test_probes_may_ask_by_head(plain: Served) -> None:
    client = socket.create_connection(("127.0.0.1", plain.port), timeout=10)
    client.sendall(b"HEAD /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    head, _, body = b"".join(iter(lambda: client.recv(1000), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""
    client.close()


def test_pages_of_other_sites_draw_nothing(plain: Served) -> None:
    """A browser lets any page send a form or plain text to this machine."""
    foreign = plain.send(PATH, {"prompt": "x"}, {"sec-fetch-site": "cross-site"})
    assert (foreign.status, foreign.message) == (
        403,
        "a page of another site may not draw here; allow it with --allowed-origins",
    )
    assert plain.send(PATH, {"prompt": "x"}, {"sec-fetch-site": "same-origin"}).status == 200
    assert plain.send(PATH, {"prompt": "x"}, {"content-type": "text/plain"}).status == 400


def test_the_address_of_a_request_has_no_parameters(plain: Served) -> None:
    answer = plain.send(f"{PATH}?seed=3", {"prompt": "x"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "seed")
    assert "whose parameters are not read; send it in the body" in answer.message


def test_bytes_of_an_image_are_of_one_image(plain: Served) -> None:
    for fields in ({"n": 2}, {"stream": True}, {"response_format": "url"}):
        answer = plain.send(PATH, {"prompt": "x", **fields}, {"accept": "image/webp"})
        assert answer.status == 400
        assert "asks for the bytes of one image" in answer.message
    fields = {"output_format": "webp", "output_compression": 5}
    assert plain.send(PATH, {"prompt": "x", **fields}, {"accept": "image/png"}).status == 400
    assert plain.send(PATH, {"prompt": "x", **fields}, {"accept": "image/jpeg"}).body[:2] == b"\xff\xd8"


def test_a_request_gets_the_images_that_it_asks_for(plain: Served) -> None:
    answer = plain.draw(n=3, seed=7, size="64x64")
    assert [image.getpixel((0, 0)) for image in answer.images] == [(7, 0, 0), (8, 0, 0), (9, 0, 0)]
    assert {image.size for image in answer.images} == {(64, 64)}
    assert [entry["seed"] for entry in answer.json["data"]] == [7, 8, 9]
    assert "denoise;dur=" in answer.headers["server-timing"]
    assert plain.draw().json["data"][0]["seed"] != plain.draw().json["data"][0]["seed"], "seeds are random"


@pytest.mark.parametrize(
    ("format_", "start"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8"), ("webp", b"RIFF")]
)
def test_images_come_in_each_format(plain: Served, format_: str, start: bytes) -> None:
    answer = plain.draw(output_format=format_, response_format="url")
    path = answer.json["data"][0]["url"].removeprefix(plain.url)
    fetched = plain.send(path)
    assert (fetched.headers["content-type"], fetched.body[: len(start)]) == (f"image/{format_}", start)
    in_bytes = plain.send(PATH, {"prompt": "x"}, {"accept": f"image/{format_}"})
    assert in_bytes.body[: len(start)] == start
    assert plain.send(f"{path}x").status == 404


def test_openais_client_generates_and_streams(plain: Served) -> None:
    client = openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)
    made = client.images.generate(model="fake", prompt="x", n=2, extra_body={"seed": 5})
    assert made.data is not None
    assert [image_of(entry.b64_json or "").getpixel((0, 0)) for entry in made.data] == [(5, 0, 0), (6, 0, 0)]
    stream = client.images.generate(
        model="fake", prompt="x", stream=True, partial_images=2, extra_body={"seed": 9}
    )
    events = list(stream)
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert image_of(events[-1].b64_json).getpixel((0, 0)) == (9, 0, 0)
    assert [model.id for model in client.models.list()] == ["fake"]
    with pytest.raises(openai.BadRequestError, match="n: Input should be"):
        client.images.generate(prompt="x", n=99)


def test_a_client_that_goes_away_ends_its_image_within_a_step(server: Served) -> None:
    waits = server.leave("slow 5", num_inference_steps=40)
    server.wait_for("running", 1)
    queued = server.leave("slow 5", num_inference_steps=40)
    server.wait_for("waiting", 1)
    queued.close()
    server.wait_for("cancelled", 1)
    began = time.monotonic()
    waits.close()
    server.wait_for("cancelled", 2)
    assert server.draw(seed=4).images[0].getpixel((0, 0)) == (4, 0, 0)
    assert time.monotonic() - began < 10, "forty steps take 20 s"


def test_a_request_ends_at_its_own_time(server: Served) -> None:
    began = time.monotonic()
    answer = server.draw("slow 5", num_inference_steps=40, timeout=0.7)
    assert (answer.status, answer.message) == (504, "the time of the request ended while it was drawn")
    assert time.monotonic() - began < 5
    assert server.draw().status == 200
    assert server.states() == {"waiting": 0, "running": 0, "done": 1, "failed": 1, "cancelled": 0}


def test_more_than_may_wait_is_refused_with_the_time_to_come_back(tmp_path: Path) -> None:
    with fake(tmp_path, max_queue=3) as server, ThreadPoolExecutor(8) as clients:
        slow = clients.submit(server.draw, "slow 4", num_inference_steps=5)
        server.wait_for("running", 1)
        later = [clients.submit(server.draw, "x") for _ in range(3)]
        server.wait_for("waiting", 3)
        refused = server.draw("x")
        assert refused.status == 429
        assert "3 images wait, and no more than 3 may" in refused.message
        assert int(refused.headers["retry-after"]) >= 1
        assert [slow.result().status, *(each.result().status for each in later)] == [200] * 4


def test_a_worker_that_dies_is_started_again_and_its_image_drawn_once_more(server: Served) -> None:
    with ThreadPoolExecutor(2) as clients:
        dying = clients.submit(server.draw, "die once", seed=6)
        answer = dying.result()
    assert answer.images[0].getpixel((0, 0)) == (6, 0, 0)
    assert server.pool.replicas[0].num_restarts == 1
    assert server.states()["done"] == 1


def test_a_key_opens_every_route_but_livez(tmp_path: Path) -> None:
    with fake(tmp_path, api_keys=Keys({"secret": "key 1"})) as locked:
        assert locked.send("/livez").status == 200
        for path in ("/", "/readyz", "/metrics", "/v1/models", "/openapi.json", "/nothing"):
            assert locked.send(path).status == 401, path
            assert locked.send(path, headers={"authorization": "Bearer wrong"}).status == 401
        assert locked.send("/v1/models", headers={"authorization": "Bearer secret"}).status == 200
        assert locked.send(PATH, {"prompt": "x"}).status == 401
        asked = locked.send("/").headers["www-authenticate"]
        assert "Basic realm=" in asked, "a browser asks for the password of the page"
        for user, status in (("anyone:secret", 200), ("secret:wrong", 401), ("secret", 401)):
            password = {"authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}
            assert locked.send("/", headers=password).status == status, user
            assert locked.send("/v1/models", headers=password).status == status
        assert locked.send("/", headers={"authorization": "Basic ?"}).status == 401


def test_an_idle_worker_ends_and_comes_back(tmp_path: Path) -> None:
    with fake(tmp_path, idle_unload_s=0.3) as idle:
        until = time.monotonic() + 10
        while idle.pool.replicas[0].phase.value != "unloaded":
            assert time.monotonic() < until
            time.sleep(0.05)
        assert idle.send("/readyz").status == 200
        assert idle.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)


def test_this_process_imports_no_torch() -> None:
    code = "import sys, vivace.cli.serve, vivace.serve.http.app; print({'torch', 'diffusers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
