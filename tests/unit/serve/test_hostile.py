"""Clients that mean harm, or are broken: each gets an error in words, and harms nobody else."""

import contextlib
import json
import logging
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.served import EDITS, PATH, Answer, Served, form_of
from tests.unit.serve.test_edits import png


def soak(seconds: float) -> object:
    return pytest.param(seconds, marks=[pytest.mark.soak, pytest.mark.timeout(3 * seconds + 600)])


@pytest.fixture(autouse=True)
def harmless(plain: Served) -> Iterator[None]:
    """After each: the server draws, no worker was lost, and no image is left in memory."""
    yield
    assert plain.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert plain.pool.replicas[0].num_restarts == 0
    assert not list(plain.pool._folder.path.iterdir())


def send_form(plain: Served, kind: str = "", cut: int = 0, **fields: Any) -> Answer:
    body, usual = form_of({"prompt": "x", **fields}, {"image": png()})
    return plain.send(EDITS, body[: len(body) - cut], {"content-type": usual + kind})


def test_the_charset_of_a_form_costs_no_time(plain: Served) -> None:
    """Python's punycode takes two seconds for 100 KB, in which nobody else would be answered."""
    began = time.monotonic()
    answer = send_form(plain, "; charset=punycode", negative_prompt="a-" + 90_000 * "9", user=90_000 * "a")
    assert time.monotonic() - began < 1
    assert (answer.status, "is UTF-8 here; its header says 'punycode'" in answer.message) == (400, True)
    assert send_form(plain, '; charset="UTF-8"').status == 200


def test_a_form_whose_text_is_not_utf_8_is_refused(plain: Served) -> None:
    """It would be read as Latin-1, and another image drawn."""
    body, kind = form_of({"prompt": "sch\u00f6n"}, {"image": png()})
    answer = plain.send(EDITS, body.replace("\u00f6".encode(), b"\xf6"), {"content-type": kind})
    assert (answer.status, answer.message) == (
        400,
        "the form cannot be read: the text of prompt is not UTF-8",
    )
    assert plain.send(EDITS, body, {"content-type": kind}).status == 200


def test_a_form_that_is_cut_off_is_refused(plain: Served) -> None:
    """Its last field would be missing, and the image be drawn without it."""
    body, kind = form_of({"prompt": "x"}, {"image": png()})
    end = b"--limit--\r\n"
    last = b'--limit\r\ncontent-disposition: form-data; name="seed"\r\n\r\n123'
    answer = plain.send(EDITS, body.removesuffix(end) + last, {"content-type": kind})
    assert (answer.status, "its last boundary is missing" in answer.message) == (400, True)
    assert send_form(plain, cut=4).status == 400
    assert send_form(plain, cut=2).status == 200, "the line's end is not needed"


@pytest.mark.parametrize("path", [PATH, EDITS])
def test_compressed_bodies_are_refused(plain: Served, path: str) -> None:
    body, kind = form_of({"prompt": "x"}, {"image": png()})
    kind = kind if path == EDITS else "application/json"
    answer = plain.send(
        path,
        body if path == EDITS else {"prompt": "x"},
        {"content-type": kind, "content-encoding": "gzip"},
    )
    assert (answer.status, answer.message) == (
        400,
        "send the body as it is, without Content-Encoding: gzip",
    )


def test_every_image_of_a_request_can_be_asked_for_alone(plain: Served) -> None:
    most = 2**32 - 1
    assert plain.draw(seed=most).json["data"][0]["seed"] == most
    answer = plain.draw(seed=most, n=3)
    assert (answer.status, answer.json["error"]["param"]) == (400, "seed")
    assert "at most 4294967295; give 4294967293 or less" in answer.message
    assert [entry["seed"] for entry in plain.draw(seed=most - 2, n=3).json["data"]][-1] == most


def test_paths_and_methods_that_there_are_not_are_said(plain: Served) -> None:
    for path in ("/v1/images", PATH + "/", "/v1/images/files/%00%2e%2e%2f", "/%zz%ff"):
        answer = plain.send(path, {"prompt": "x"})
        assert answer.status == 404
        assert "here; /openapi.json says what there is" in answer.message
    answer = plain.send(PATH)
    assert (answer.status, answer.message) == (405, f"{PATH} is for POST, not for GET")


def test_what_nobody_foresaw_is_an_error_like_others(plain: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("vivace.serve.http.image_routes.jobs_of", fail)
    answer = plain.draw()
    monkeypatch.undo()
    assert (answer.status, answer.message) == (
        500,
        "the server failed: ZeroDivisionError; its log says where",
    )


def test_a_full_disk_fails_the_upload_alone(plain: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("starlette.formparsers.SpooledTemporaryFile", full)
    answer = send_form(plain)
    monkeypatch.undo()
    assert (answer.status, answer.message) == (
        500,
        "the images that are sent cannot be stored: No space left on device",
    )
    assert send_form(plain).status == 200


REQUESTS = [
    b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/images/files/abc HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    'content-length: 30\r\n\r\n{"prompt": "x", "n": 1, "a":1}'.encode(),
    f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    'transfer-encoding: chunked\r\n\r\nf\r\n{"prompt": "x"}\r\n0\r\n\r\n'.encode(),
    f"POST {EDITS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=limit\r\n".encode()
    + b"content-length: %d\r\n\r\n" % len(form_of({"prompt": "x"}, {"image": png()})[0])
    + form_of({"prompt": "x"}, {"image": png()})[0],
]


def mutated(chance: random.Random) -> bytes:
    """Return one or more requests with bytes changed, left out, repeated, or cut off."""
    data = bytearray(b"".join(chance.choice(REQUESTS) for _ in range(chance.choice([1, 1, 1, 3, 20]))))
    for _ in range(chance.choice([0, 1, 1, 2, 10])):
        at, length = chance.randrange(len(data) + 1), chance.choice([1, 1, 4, 40])
        match chance.randrange(4):
            case 0:
                data[at : at + length] = chance.randbytes(length)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length] * chance.choice([2, 2, 500])
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("seconds", [1.5, soak(300.0)])
def test_bytes_of_any_kind_harm_nobody(
    plain: Served, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    chance, until, number = random.Random(7), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        number += 1
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", plain.port), 5) as client:
            client.settimeout(chance.choice([0.001, 0.02, 0.2]))
            client.sendall(mutated(chance))
            answer = client.recv(65536)
            assert not answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 502")), answer
        if number % 50 == 0:
            assert plain.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
    plain.wait_for("running", 0)
    plain.wait_for("waiting", 0)
    print(f"{number} connections, {json.dumps(plain.states())}")
    assert number > 20
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
