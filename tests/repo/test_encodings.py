"""Text files and pipes have one encoding on every system: under Windows Python's default is another than UTF-8."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READING = ("read_text", "write_text", "fdopen", "open", "run", "Popen", "check_output")
BINARY = ("'rb'", "'wb'", "'ab'", "'xb'", "'r+b'", "'rb+'")


def without_encoding(source: str) -> Iterator[str]:
    """Yield the calls that read or write text without naming its encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(keyword.arg == "encoding" for keyword in call.keywords):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in READING:
            continue
        text = ast.unparse(call)
        is_binary = any(mode in text for mode in BINARY)
        is_text = any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)
        is_method = isinstance(call.func, ast.Attribute)
        if (
            (name == "read_text" and is_method and not call.args)
            or (name == "write_text" and is_method and len(call.args) == 1)
            or (name == "fdopen" and not is_binary)
            or (name == "open" and not is_method and not is_binary)
            or (name in ("run", "Popen", "check_output") and is_text and text.startswith("subprocess."))
        ):
            yield f"{call.lineno}: {text[:100]}"


@pytest.mark.parametrize("folder", ["src", "docgen", "benchmarks", "tinyworld"])
def test_every_text_file_is_utf8(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    missing = [
        f"{file}:{call}" for file in files for call in without_encoding(file.read_text(encoding="utf-8"))
    ]
    assert files
    assert not missing


def test_a_call_without_an_encoding_is_noticed() -> None:
    source = "path.read_text()\nopen(p)\nopen(p, 'rb')\npath.write_text(x, encoding='utf-8')\npath.read_text('utf-8')"
    assert [line.partition(":")[0] for line in without_encoding(source)] == ["1", "2"]
