"""Compiled code as a file: what is packed, for which machine, and what is refused."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from vivace.cli import app
from vivace.errors import Unsupported, UnusableModel
from vivace.runtime.warming import MANIFEST, CompiledFor, Manifest, pack, unpack

HERE = CompiledFor(platform="Linux x86_64, Python 3.12", device="NVIDIA H200", libraries={"torch": "2.11.0"})


def manifest(**changed: object) -> Manifest:
    plain = {
        "format": 1, "vivace": "0.1.0", "model": "tiny-sd", "recipe": "compile", "workload": "64x64",
        "compiled_for": HERE, "first_call_s": 31.0, "files": {},
    }  # fmt: skip
    return Manifest.model_validate(plain | changed)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "compiled"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "code.so").write_bytes(b"\x7fELF")
    (folder / "ab" / "code.py").write_text("pass")
    (folder / "ab" / "code.lock").touch()
    path = tmp_path / "x.code"
    path.write_bytes(pack(folder, manifest()))
    return path


def rewritten(path: Path, changes: dict[str, bytes | None]) -> None:
    """Replace entries of a zip; None removes one."""
    with zipfile.ZipFile(path) as file:
        entries: dict[str, bytes | None] = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (entries | changes).items():
            if content is not None:
                file.writestr(name, content)


def test_it_comes_out_as_it_went_in_and_once(packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert unpack(packed, cache, HERE) == 2, "locks stay behind"
    assert (cache / "ab" / "code.so").read_bytes() == b"\x7fELF"
    (cache / "ab" / "code.py").write_text("newer")
    assert unpack(packed, cache, HERE) == 0
    assert (cache / "ab" / "code.py").read_text() == "newer", "what is there stays"


def test_the_same_code_is_the_same_file(packed: Path, tmp_path: Path) -> None:
    assert pack(tmp_path / "compiled", manifest()) == packed.read_bytes()


def test_another_environment_is_refused_in_words(packed: Path, tmp_path: Path) -> None:
    other = HERE.model_copy(update={"device": "NVIDIA A100", "libraries": {"torch": "2.13.0"}})
    with pytest.raises(Unsupported) as refused:
        unpack(packed, tmp_path / "cache", other)
    assert "device: compiled for NVIDIA H200, here is NVIDIA A100" in str(refused.value)
    assert "torch: compiled with 2.11.0, here is 2.13.0" in str(refused.value)
    assert "vivace warm tiny-sd --recipe 'compile' -o x.code" in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_nothing_compiled_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="nothing was compiled"):
        pack(tmp_path, manifest())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({MANIFEST: None}, "vivace.json"),
        ({MANIFEST: b"[]"}, "damaged"),
        ({MANIFEST: b"{" * 100_000}, "damaged"),
        ({MANIFEST: b'{"format": 2}'}, "another version of vivace"),
        ({"ab/code.so": None}, "ab/code.so"),
        ({"ab/code.so": b"other"}, "is not what the manifest says"),
    ],
)
def test_damaged_files(packed: Path, tmp_path: Path, changes: dict[str, bytes | None], message: str) -> None:
    rewritten(packed, changes)
    with pytest.raises(UnusableModel, match=message):
        unpack(packed, tmp_path / "cache", HERE)
    assert not (tmp_path / "cache").exists(), "nothing is copied of a damaged file"


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "a/../../evil", "C:evil", "a\\b", ""])
def test_no_path_leads_out_of_the_cache(packed: Path, tmp_path: Path, name: str) -> None:
    listed = json.loads(manifest().model_dump_json()) | {"files": {name: "0" * 64}}
    rewritten(packed, {MANIFEST: json.dumps(listed).encode()})
    with pytest.raises(UnusableModel, match="outside of the cache folder"):
        unpack(packed, tmp_path / "cache" / "deep", HERE)


@pytest.mark.parametrize("content", [b"", b"PK", b"not a zip"])
def test_no_zip(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UnusableModel, match="is not compiled code that vivace packed"):
        unpack(path, tmp_path / "cache", HERE)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path, buffer = tmp_path / "x", io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(MANIFEST, b" " * 20_000_000)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(UnusableModel, match="its manifest is too large"):
        unpack(path, tmp_path / "cache", HERE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-sd", "--from", "x"], "leave out MODEL"),
        (["--from", "x", "--recipe", "compile"], "leave out MODEL"),
        (["tiny-sd", "--recipe", "compile(sizes=64x64)", "--width", "64"], "leave out --height and --width"),
    ],
)
def test_bad_usage(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["warm", *arguments])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.long
def test_a_second_cache_finds_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine of the same kind: another cache folder."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "one"))
    recipe = "compile(sizes=[64x64, 96x64])@text_encoder"
    command = ["warm", "tiny-sd", "--recipe", recipe, "--num-inference-steps", "1", "--threads", "1"]
    file = tmp_path / "x.code"
    done = CliRunner().invoke(app, [*command, "-o", str(file)])
    assert done.exit_code == 0, done.output
    small, large = done.stdout.splitlines()[:2]
    assert small.startswith("64x64: first call")
    assert small.endswith("1 graph, 0 from the cache")
    assert large.startswith("96x64: first call")
    assert large.endswith("0 graphs, 0 from the cache")
    with zipfile.ZipFile(file) as zipped:
        packed_manifest = Manifest.model_validate_json(zipped.read(MANIFEST))
    assert packed_manifest.recipe == recipe
    assert packed_manifest.workload.startswith("64x64, 96x64, batch 1")

    import torch

    torch.compiler.reset()
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "two"))
    done = CliRunner().invoke(app, ["warm", "--from", str(file)])
    assert "new files in the cache" in done.output
    done = CliRunner().invoke(app, command)
    assert "1 graph, 1 from the cache" in done.output
