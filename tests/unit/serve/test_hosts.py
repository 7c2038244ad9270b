"""A server without a key answers requests that name this machine, and no others: DNS rebinding."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import PATH, Served, fake
from tests.typed import run_vivace
from vivace.serve.http.access import Keys

OWN = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "images.lan:80"]
FOREIGN = [
    "evil.example",
    "localhost.evil.example:8000",
    "evil.example:8000",
    "10.0.0.1",
    "[fe80::1]",
    "127.0.0.1@evil.example",
    "evil.example:127.0.0.1",
    "",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fake(tmp_path_factory.mktemp("x"), hosts=("images.lan",)) as running:
        yield running


@pytest.mark.parametrize("host", OWN)
def test_the_names_of_this_machine_are_answered(server: Served, host: str) -> None:
    assert server.send("/v1/models", headers={"host": host}).status == 200
    drawn = server.send(PATH, {"prompt": "x"}, {"host": host, "origin": f"http://{host}"})
    assert drawn.status == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_request_to_another_name_is_refused_in_words(server: Served, host: str) -> None:
    for path in ("/", "/v1/models", "/livez", "/metrics", "/v1/images/files/x"):
        answer = server.send(path, headers={"host": host})
        assert answer.status == 403, path
    assert answer.message.startswith(f"Host: {host} is not this machine")
    assert "--allow-host NAME" in answer.message


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://localhost.evil.example", "null", "file://x"]
)
def test_a_page_of_another_origin_draws_nothing(server: Served, origin: str) -> None:
    before = server.states()
    answer = server.send(PATH, {"prompt": "x"}, {"origin": origin})
    assert answer.status == 403
    assert answer.message.startswith(f"Origin: {origin} is not this machine")
    assert server.states() == before


def test_with_a_key_any_name_is_answered(tmp_path: Path) -> None:
    headers = {"authorization": "Bearer secret", "host": "images.example"}
    with fake(tmp_path, api_keys=Keys({"secret": "key 1"})) as locked:
        assert locked.send(PATH, {"prompt": "x"}, headers).status == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--allow-host", "http://x"), "give a name as in a URL, without port and scheme"),
        (("--allow-host", "x:80"), "give a name as in a URL, without port and scheme"),
        (("--allow-host", "x", "--api-key-file", __file__), "--allow-host is for a server without a key"),
        (("--api-key-file", os.devnull), f"{os.devnull} cannot be read: it is a device"),
        (("--host", "0.0.0.0"), "lets other machines in; give --api-key-file FILE, too"),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_start(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("secret-key")
    options = [str(key) if each == __file__ else each for each in arguments]
    assert (
        message in run_vivace(tmp_path, "serve", "tiny-sd", "--recipe", "baseline", *options, code=2).stderr
    )
