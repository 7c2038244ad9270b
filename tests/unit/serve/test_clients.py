"""What clients of the OpenAI images API send and expect, and what stands between them and the server."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from PIL import Image

from tests.served import EDITS, PATH, Answer, Served, fake, form_of, image_of
from tests.unit.serve.test_edits import encoded, png
from vivace.errors import UsageError
from vivace.serve.http import image_routes, request_checks
from vivace.serve.http.access import Keys


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fake(
        tmp_path_factory.mktemp("clients"),
        served_name="shapes",
        public_url="https://images.example/draw",
        origins=("https://app.example",),
    ) as running:
        yield running


def test_values_that_leave_it_to_the_server_are_accepted(server: Served) -> None:
    neutral = {
        "quality": "auto",
        "background": "auto",
        "moderation": "auto",
        "size": "auto",
        "output_compression": 100,
    }
    assert server.draw(seed=3, **neutral).images[0].getpixel((0, 0)) == (3, 0, 0)
    assert server.edit(files={"image": png()}, **neutral).status == 200
    for name, value in (("quality", "hd"), ("background", "transparent"), ("output_compression", 99)):
        refused = server.draw(**{name: value})
        assert (refused.status, refused.json["error"]["param"]) == (400, name)


def test_pixels_outside_of_a_mask_are_those_that_were_sent(server: Served) -> None:
    mask = Image.new("L", (16, 16), 0)
    mask.paste(255, (0, 0, 8, 16))
    files = {"image": png(colour=(100, 110, 120)), "mask": encoded(mask)}
    answer = server.edit(seed=5, files=files)
    (image,) = answer.images
    assert image.getpixel((7, 7)) == (5, 0, 100), "drawn, from the image"
    assert image.getpixel((8, 7)) == (100, 110, 120)
    assert any("outside of the mask" in note for note in answer.json["notes"])
    (completed,) = events_of(server.edit(seed=5, files=files, stream="true").body)
    assert image_of(str(completed["b64_json"])).getpixel((8, 7)) == (100, 110, 120)
    (plain,) = server.edit(seed=5, files=files, keep_unmasked="false").images
    assert plain.getpixel((8, 7)) == (5, 0, 100)


def test_errors_have_the_codes_of_openai(server: Served) -> None:
    def code(answer: Answer) -> tuple[int, str]:
        return answer.status, answer.json["error"]["code"]

    assert code(server.draw(style="vivid")) == (400, "unknown_parameter")
    assert code(server.send(PATH, {})) == (400, "missing_required_parameter")
    assert code(server.draw(model="dall-e-3")) == (404, "model_not_found")
    assert code(server.send("/v1/models/dall-e-3")) == (404, "model_not_found")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="this server has 'shapes', not 'dall-e-3'"):
        client.images.generate(prompt="x", model="dall-e-3")


def test_the_model_has_the_name_that_it_is_served_by(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["shapes"]
    assert client.models.retrieve("shapes").id == "shapes"
    for name in ("shapes", "fake"):
        assert server.draw(model=name).status == 200


LIBRECHAT = {"background": "auto", "quality": "auto", "size": "auto"}
RECORDED: dict[str, dict[str, object]] = {
    "LibreChat": {"model": "shapes", "prompt": "x", "n": 1, "output_format": "png", **LIBRECHAT},
    "LibreChat, webp": {
        "model": "shapes",
        "prompt": "x",
        "n": 1,
        "output_format": "webp",
        "output_compression": 100,
    }
    | LIBRECHAT,
    "Open WebUI": {"model": "shapes", "prompt": "x", "n": 1, "size": "16x16", "response_format": "b64_json"},
    "Open WebUI, size by the server": {"model": "shapes", "prompt": "x", "n": 2, "size": "auto"},
    "AI SDK": {"model": "shapes", "prompt": "x", "n": 2, "size": "16x16", "response_format": "b64_json"},
    "LangChain": {"model": "shapes", "prompt": "x", "n": 1, "size": "auto", "quality": "standard"},
}
"""Bodies that these clients send, with the name of their model."""


@pytest.mark.parametrize("client", RECORDED)
def test_what_clients_send_is_drawn(server: Served, client: str) -> None:
    answer = server.send(PATH, RECORDED[client])
    assert answer.status == 200, answer.body
    assert len(answer.images) == RECORDED[client]["n"]
    assert {image.size for image in answer.images} == {(16, 16)}


@pytest.mark.parametrize(
    ("fields", "file"),
    [
        (
            {"model": "shapes", "n": "1", "size": "16x16", "response_format": "b64_json"},
            "image",
        ),  # Open WebUI
        (
            {"model": "shapes", "background": "auto", "response_format": "b64_json"},
            "image[]",
        ),  # Open WebUI, a list
        ({"model": "shapes", "quality": "auto", "size": "auto"}, "image[]"),  # LibreChat
    ],
)
def test_forms_that_clients_send_are_drawn(server: Served, fields: dict[str, str], file: str) -> None:
    answer = server.edit(files={file: png()}, **fields)
    assert answer.status == 200, answer.body
    assert [image.size for image in answer.images] == [(16, 16)]


def test_litellm_draws(server: Served) -> None:
    litellm = pytest.importorskip("litellm")
    place = {"api_base": f"{server.url}/v1", "api_key": "none"}
    drawn = litellm.image_generation(model="openai/shapes", prompt="x", n=2, size="16x16", **place)
    assert [image_of(each.b64_json).size for each in drawn.data] == 2 * [(16, 16)]
    with pytest.raises(litellm.exceptions.NotFoundError, match="this server has 'shapes'"):
        litellm.image_generation(model="openai/dall-e-3", prompt="x", **place)


def test_langchain_draws(server: Served) -> None:
    tools = pytest.importorskip("langchain_community.utilities.dalle_image_generator")
    wrapper = tools.DallEAPIWrapper(
        model_name="shapes", size="auto", openai_api_key="none", openai_api_base=f"{server.url}/v1"
    )
    assert "https://images.example/draw/v1/images/files/" in wrapper.run("x")


JAVASCRIPT = """
const OpenAI = require("openai"), { generateImage } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const baseURL = process.argv[2] + "/v1", apiKey = "none";
(async () => {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const { data } = await client.images.generate({ model: "shapes", prompt: "x", seed: 7 });
  const events = [];
  const parts = { stream: true, partial_images: 2, num_inference_steps: 6 };
  for await (const event of await client.images.generate({ model: "shapes", prompt: "x", ...parts }))
    events.push(event.type.split(".")[1]);
  const code = await client.images.generate({ model: "none", prompt: "x" }).catch((error) => error.code);
  const model = createOpenAICompatible({ name: "vivace", baseURL, apiKey }).imageModel("shapes");
  const { images } = await generateImage({ model, prompt: "x", n: 2, size: "16x16" });
  const prompt = { text: "x", images: [images[0].uint8Array] };
  const edited = await generateImage({ model, prompt });
  const kinds = [images.length, images[0].mediaType, edited.images.length];
  console.log(JSON.stringify([data[0].seed, events, code, kinds]));
})();
"""


def test_javascript_clients_draw(server: Served, tmp_path: Path) -> None:
    """`npm install openai ai @ai-sdk/openai-compatible` somewhere, with NODE_PATH=THERE/node_modules."""
    node = shutil.which("node")
    names = "['openai', 'ai', '@ai-sdk/openai-compatible'].forEach(require.resolve)"
    if node is None or subprocess.run([node, "-e", names], capture_output=True).returncode:
        pytest.skip("node, openai, ai or @ai-sdk/openai-compatible is not installed")
    (tmp_path / "clients.cjs").write_text(JAVASCRIPT)
    command = [node, str(tmp_path / "clients.cjs"), server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    events = ["partial_image", "partial_image", "completed"]
    assert json.loads(done.stdout) == [7, events, "model_not_found", [2, "image/png", 1]]


def test_an_image_is_there_as_base64_and_by_url_where_nothing_is_asked(server: Served) -> None:
    (entry,) = server.draw(seed=5).json["data"]
    assert image_of(entry["b64_json"]).getpixel((0, 0)) == (5, 0, 0)
    place, _, name = entry["url"].rpartition("/")
    assert place == "https://images.example/draw/v1/images/files"
    assert server.send(f"/v1/images/files/{name}").body == base64.b64decode(entry["b64_json"])
    assert "url" not in server.draw(response_format="b64_json").json["data"][0]
    assert "b64_json" not in server.draw(response_format="url").json["data"][0]


def events_of(body: bytes) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]


def test_partial_images_are_counted_by_image_and_streams_stay_alive(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_routes, "_KEEP_ALIVE_S", 0.05)
    body = server.draw("slow 2", n=2, stream=True, partial_images=2).body
    events = events_of(body)
    for seed in {event["seed"] for event in events}:
        own = [event for event in events if event["seed"] == seed and "partial_image_index" in event]
        assert [event["partial_image_index"] for event in own] == [0, 1]
    completed = [event for event in events if event["type"] == "image_generation.completed"]
    assert all(event["usage"]["total_tokens"] == 0 for event in completed)
    assert b"\n\n: keep-alive\n\n" in body or body.startswith(b": keep-alive\n\n")


def test_pages_of_allowed_origins_draw(server: Served) -> None:
    origin = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    answer = server.send(PATH, {"prompt": "x"}, origin)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    other = server.send(PATH, {"prompt": "x"}, {"origin": "https://other.example"})
    assert other.status == 403
    assert "access-control-allow-origin" not in other.headers


def access_lines(caplog: pytest.LogCaptureFixture, *ids: str) -> list[str]:
    """Wait for the line of each request, which is written after its answer was sent; return them without the times."""
    until = time.monotonic() + 10
    while True:
        lines = [record.getMessage() for record in caplog.records if record.name == "vivace.serve.access"]
        own = [line for name in ids for line in lines if line.startswith(f"{name} ")]
        if len(own) == len(ids):
            return [re.sub(r" [\d.]+ s\b", "", line) for line in own]
        assert time.monotonic() < until, lines
        time.sleep(0.01)


def test_each_request_has_an_id_a_line_in_the_log_and_a_count(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vivace.serve.access"):
        given = server.send(PATH, {"prompt": "x"}, {"x-request-id": "order-7"})
        made = server.send("/nothing", headers={"x-request-id": "two words"})
        server.send("/livez")
        lines = access_lines(caplog, "order-7", made.headers["x-request-id"])
    assert given.headers["x-request-id"] == "order-7"
    assert re.fullmatch("[0-9a-f]{16}", made.headers["x-request-id"])
    assert lines == [
        f"order-7 POST {PATH} 200",
        f"{made.headers['x-request-id']} GET /nothing 404",
    ]
    metrics = server.send("/metrics").body.decode()
    assert 'vivace_http_answers_total{path="other",status="404"} 1.0' in metrics


def raw(server: Served, *head: str, body: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall("\r\n".join([*head, "", ""]).encode() + body)
        answer = b""
        while part := client.recv(65_536):
            answer += part
    return answer


def test_a_request_of_two_lengths_is_the_last_of_its_connection(server: Served) -> None:
    """A proxy may have read the other length, and takes the rest for a request of somebody else."""
    smuggled = b"0\r\n\r\nGET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = [f"POST {PATH} HTTP/1.1", "host: localhost", "content-length: 5", "transfer-encoding: chunked"]
    answer = raw(server, *head, body=smuggled)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_large_body_that_finds_no_room_sees_why(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_checks, "_MOST_BYTES", 1_000_000)
    answer = server.edit(files={"image": b"x" * 31_000_000})
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert "send it again later" in answer.message


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "keys").write_text("# those who draw\nanna anna-key-1\nbert-key-1\n")
    with fake(tmp_path, api_keys=Keys.read(tmp_path / "keys"), max_queue=4) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_are_read_again_and_named_in_the_log(
    locked: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="vivace.serve.access"):
        for key, status in (("anna-key-1", 200), ("bert-key-1", 200), ("carl-key-1", 401), ("anna", 401)):
            named = bearer(key) | {"x-request-id": key}
            assert locked.send(PATH, {"prompt": "x"}, named).status == status
        lines = access_lines(caplog, "anna-key-1", "bert-key-1", "carl-key-1")
    assert [line.partition("generations ")[2] for line in lines] == ["200 of anna", "200 of key 2", "401"]
    replaced = tmp_path / "new"
    replaced.write_text("carl-key-1")
    os.replace(replaced, tmp_path / "keys")
    for key, status in (("anna-key-1", 401), ("carl-key-1", 200)):
        assert locked.send("/v1/models", headers=bearer(key)).status == status
    (tmp_path / "keys").write_text("")
    assert locked.send("/v1/models", headers=bearer("carl-key-1")).status == 200, "the last good file counts"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no key in it"),
        ("k", "the key on line 1 has 1 characters; give 8 or more"),
        ("eight-or-more\neight-or-more", "the key on line 2 is there twice"),
        ("a b c", "line 1 has 3 words"),
        ("schlüssel-wort", "is not plain ASCII"),
    ],
)
def test_a_file_of_keys_that_is_wrong_says_how(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text, "utf-8")
    with pytest.raises(UsageError, match=message):
        Keys.read(tmp_path / "keys")


def test_images_by_url_need_no_key(locked: Served) -> None:
    answer = locked.send(PATH, {"prompt": "x", "response_format": "url"}, bearer("anna-key-1"))
    path = answer.json["data"][0]["url"].removeprefix(locked.url)
    assert locked.send(path).status == 200
    assert locked.send("/v1/images/files/guess").status == 404


def test_a_foreign_page_does_not_draw_with_the_password_of_this_one(locked: Served) -> None:
    """Browsers without Sec-Fetch-Site send it with forms of other pages, too."""
    password = {"authorization": f"Basic {base64.b64encode(b'me:anna-key-1').decode()}"}
    body, kind = form_of({"prompt": "x"}, {"image": png()})
    own = f"127.0.0.1:{locked.port}"
    for page, status in (
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"referer": "https://evil.example/page"}, 403),
        ({"origin": f"http://{own}"}, 200),
        ({"referer": f"http://{own}/"}, 200),
        ({}, 200),
    ):
        answer = locked.send(EDITS, body, {"content-type": kind, **password, **page})
        assert answer.status == status, page
