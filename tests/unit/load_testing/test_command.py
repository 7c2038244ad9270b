"""`vivace bench --endpoint` on a server that draws one image at a time."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.loaded_server import loaded_server
from vivace.benchmark.load_testing.load_rows import read_rows
from vivace.cli import app
from vivace.errors import StoreError, Unsupported, VivaceError

FEW = ("--num-requests", "10", "--clients", "4", "--fractions", "0.8")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], standalone_mode=False)


def test_a_server_is_measured_alone_in_a_loop_and_with_users() -> None:
    with loaded_server(0.02) as server:
        result = run("--endpoint", server.url, *FEW, "--size", "64x64", "--steps", "3", "--field", "a=[1]")
        bodies = server.bodies
    assert result.return_value == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{server.url}, shapes, 64x64, fast, a=[1], num_inference_steps=3; in")
    loads = {line.split("  ")[0].split(" (")[0] for line in lines}
    assert loads >= {"load", "1 client", "4 clients", "0.8 of capacity"}
    assert "denoise 20.0, queue 0.0" in " ".join(result.stdout.split())
    assert len(bodies) == 2 + 3 * 10
    assert {(body["size"], body["num_inference_steps"], body["n"], body["model"]) for body in bodies} == {
        ("64x64", 3, 1, "shapes")
    }
    assert len({body["seed"] for body in bodies}) == len(bodies), "no image comes from a cache"


def test_rows_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    with loaded_server(0.005) as server:
        command = ("--endpoint", server.url, *FEW, "-o", str(rows), "--format", "json", "--label", "mine")
        first = run(*command)
        number = len(server.bodies)
        again = run(*command, "--against", str(rows))
        assert len(server.bodies) == number
        assert json.loads(again.stdout) == json.loads(first.stdout)
        rows.write_text("[\n" + rows.read_text().splitlines()[1].rstrip(",") + "\n]\n")
        run(*command)
        assert len(server.bodies) == number + 2 + 20, "what is missing, and a warm-up"
        run(*command, "--rerun")
        assert len(server.bodies) == number + 2 * 22 + 10
    assert [row.stage.name for row in read_rows(rows)] == ["1 client", "4 clients", "0.8 of capacity"]


def test_sizes_and_loras_are_taken_at_random_and_unknown_fields_left_out() -> None:
    with loaded_server(0.002) as server:
        options = ("--size", "64x64", "--size", "96x96", "--lora", "a", "--lora", "b", "--format", "json")
        few = ("--num-requests", "40", "--fractions", "none", "--without", "response_format")
        result = run("--endpoint", server.url, *few, *options)
        requested = {(body["size"], body["loras"][0]["name"]) for body in server.bodies}
    assert requested == {(size, lora) for size in ("64x64", "96x96") for lora in "ab"}
    assert set(server.bodies[0]) == {"prompt", "n", "model", "seed", "size", "loras"}
    assert len(json.loads(result.stdout)[0]["slo_s"]) == 4


def test_requests_without_an_image_are_counted_and_change_the_exit_code() -> None:
    with loaded_server(0.001, "busy") as server:
        result = run("--endpoint", server.url, *FEW[:-1], "none")
    assert result.return_value == 4
    assert "3 HTTP 429" in result.stdout or "4 HTTP 429" in result.stdout
    assert "no capacity" in " ".join(result.stdout.split())


def test_the_key_is_sent_and_kept_nowhere(tmp_path: Path) -> None:
    key, rows = tmp_path / "key", tmp_path / "rows.json"
    key.write_text("secret-word\n")
    with loaded_server(0.001, "key") as server:
        without = run("--endpoint", server.url, *FEW)
        assert isinstance(without.exception, Unsupported)
        assert "draws no image (HTTP 401: no key); give --api-key-file FILE" in str(without.exception)
        result = run("--endpoint", server.url, *FEW, "--api-key-file", str(key), "-o", str(rows))
    assert result.return_value == 0
    assert "secret-word" not in rows.read_text() + result.output


@pytest.mark.parametrize(
    ("fault", "arguments", "message"),
    [
        ("empty", (), "draws no image (no image)"),
        ("cut", (), "draws no image (broken image)"),
        ("one image", ("--size", "2048x2048"), "draws no image (64x64 instead of 2048x2048)"),
        ("one image", (), "draws no image (same image for another seed or prompt)"),
        ("blind", ("--size", "64x64"), "draws no image (same image for another seed or prompt)"),
        ("", ("--field", "output_format=webp"), "draws no image (png instead of webp)"),
        ("busy", (), "requests failed in every closed loop, so the capacity is not known"),
        ("several models", (), "has 2 models; give --model, one of one, two"),
        ("", ("--field", "seed=1"), "--field seed=1: seed is set for each request; leave it out"),
        ("", ("--field", "seed"), "--field seed: give NAME=VALUE"),
        ("", ("--prompt", "x", "--prompt-set", "real"), "give prompts or --prompt-set, not both"),
        ("", ("-o", "-"), "-o - would mix with the results"),
    ],
)
def test_what_cannot_be_measured_is_said_before(fault: str, arguments: tuple[str, ...], message: str) -> None:
    with loaded_server(0.001, fault) as server:
        result = run("--endpoint", server.url, *FEW, *arguments)
    assert isinstance(result.exception, VivaceError)
    assert message in str(result.exception)


def test_a_server_that_is_not_there_and_a_file_of_something_else(tmp_path: Path) -> None:
    result = run("--endpoint", "http://127.0.0.1:9/v1")
    assert "no connection" in str(result.exception)
    assert "is the server running?" in str(result.exception)
    (tmp_path / "other.json").write_text('{"a": 1}')
    result = run("--endpoint", "http://127.0.0.1:9/v1", "--against", str(tmp_path / "other.json"))
    assert isinstance(result.exception, StoreError)
    assert "holds no rows of `vivace bench --endpoint`" in str(result.exception)


def test_a_page_shows_each_request_and_runs_nothing_foreign(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with loaded_server(0.01, "busy") as server:
        result = run(
            *("--endpoint", server.url, *FEW[:-1], "none", "--label", "<script>alert(1)</script>"),
            *("--page", str(page)),
        )
    assert f"page: {page}" in result.stderr
    text = page.read_text()
    dots = re.findall(r'<path class="mark mark-(good|late|failed)"', text)
    assert len(dots) == 2 * 10
    assert dots.count("failed") == text.count("<title>HTTP 429</title>") > 0
    assert "<script>alert" not in text
    assert "default-src 'none'" in text
    assert all(name in text for name in ("1 client", "4 clients", "goodput/s"))
