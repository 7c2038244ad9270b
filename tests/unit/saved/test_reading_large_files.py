"""Large files of saved folders: read and hashed in pieces, by several threads."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vivace.models import saved_folder
from vivace.models.checkpoints.headers import read_header
from vivace.runtime import saved

DTYPES = {"F32": "float32", "F8_E4M3": "float8_e4m3fn", "I64": "int64", "BF16": "bfloat16"}


def test_tensors_read_in_pieces_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_PIECE", 1000)
    tensors = {
        "large": torch.randn(70, 33),
        "e4m3": torch.randn(1001).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, 5).bfloat16(),
    }
    path = tmp_path / "file.safetensors"
    save_file(tensors, path)
    places = {name: (path, entry) for name, entry in read_header(path).items()}
    read = saved.read_tensors(places, DTYPES, "cpu", 3)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].float(), tensor.float())


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"weight": torch.randn(100)}, path)
    places = {name: (path, entry) for name, entry in read_header(path).items()}
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match=r"file\.safetensors ends before"):
        saved.read_tensors(places, DTYPES, "cpu")


def test_a_digest_is_that_of_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_folder, "_PIECE", 1000)
    files = {}
    for length in (0, 999, 1000, 2500):
        files[str(length)] = tmp_path / str(length)
        files[str(length)].write_bytes(bytes(k % 251 for k in range(length)))
    digests = saved_folder.digests(files, in_pieces=True)
    content = files["2500"].read_bytes()
    pieces = b"".join(hashlib.sha256(content[k : k + 1000]).digest() for k in (0, 1000, 2000))
    assert digests["2500"] == hashlib.sha256(pieces).hexdigest()
    assert len(set(digests.values())) == 4
    files["2500"].write_bytes(content[:-1] + b"!")
    assert saved_folder.digests(files, in_pieces=True)["2500"] != digests["2500"]
