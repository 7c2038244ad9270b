"""What a training takes from one machine to the next: one archive, in parts small enough to travel.

    python -m tinyworld.carry build/flux        unpacks parts lying in a folder beside them

Taken along are finished models, the facts of every training, and the checkpoints of unfinished ones, made slim. A slim
checkpoint has the weights and their running mean rounded to fp16 (at most a fiftieth of what one optimiser step moves
them) and the second moment in bf16; Adam rebuilds the first moment in some twenty steps. So 6 bytes a parameter.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

PART_BYTES = 15 * 2**20
MANIFEST = "carry.json"


def is_finished(out: Path, name: str) -> bool:
    """Whether the training of that name has spent its budget."""
    facts = out / f"{name}.json"
    return facts.exists() and json.loads(facts.read_text()).get("finished", False)


def slim(checkpoint: Path) -> bytes:
    """The checkpoint in 6 bytes a parameter; `loop.Loop` resumes from it as from a whole one."""
    import torch  # seconds, which the driver's clock should not lose before it starts anything

    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    for part in ("weights", "ema"):
        state[part] = {key: value.half() for key, value in state[part].items()}
    state["first"] = {}
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _contents(out: Path, leave: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(out.iterdir()):
        if path.name in leave:
            continue
        if path.is_dir() and path.suffix not in (".part", ".so-far"):
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    yield str(file.relative_to(out)), file.read_bytes()
        elif path.suffix in (".json", ".log"):
            yield path.name, path.read_bytes()
        elif path.suffix == ".pt" and not is_finished(out, path.stem):
            yield path.name, slim(path)


def pack(out: Path, to: Path, leave: frozenset[str] = frozenset()) -> int:
    """Write `to`/carry.000, ... and their manifest; return bytes. `leave`: names in `out` that need not travel.

    The manifest goes first and last comes the old parts' removal, so a stop in between is seen by `unpack` as parts
    that do not fit the manifest, never as a model with torn weights.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in _contents(out, leave):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    whole = archive.getvalue()
    parts = [whole[start : start + PART_BYTES] for start in range(0, len(whole), PART_BYTES)]
    to.mkdir(parents=True, exist_ok=True)
    manifest = [hashlib.sha256(part).hexdigest() for part in parts]
    _write(to / MANIFEST, json.dumps(manifest).encode())
    for number, part in enumerate(parts):
        _write(to / f"carry.{number:03}", part)
    for old in sorted(to.glob("carry.[0-9][0-9][0-9]"))[len(parts) :]:
        old.unlink()
    return len(whole)


def _write(path: Path, content: bytes) -> None:
    unsaved = path.with_suffix(path.suffix + ".new")
    unsaved.write_bytes(content)
    os.replace(unsaved, path)


def unpack(source: Path, out: Path) -> None:
    """Put back what `pack` wrote; whatever of the same name lies in `out` is replaced."""
    manifest = json.loads((source / MANIFEST).read_text())
    parts = [(source / f"carry.{number:03}").read_bytes() for number in range(len(manifest))]
    for number, (part, digest) in enumerate(zip(parts, manifest, strict=True)):
        if hashlib.sha256(part).hexdigest() != digest:
            raise ValueError(f"{source}/carry.{number:03} is torn or from another set; bring the parts again")
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as tar:
        for folder in {Path(name).parts[0] for name in tar.getnames() if "/" in name}:
            shutil.rmtree(out / folder, ignore_errors=True)
        tar.extractall(out, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder with carry.json and the parts")
    parser.add_argument("--out", type=Path, help="where to unpack (the same folder)")
    args = parser.parse_args()
    unpack(args.source, args.out or args.source)


if __name__ == "__main__":
    main()
