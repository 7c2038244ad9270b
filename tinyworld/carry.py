"""Move a training from one machine to another: one archive, split into small parts.

    python -m tinyworld.carry build/flux        unpacks the parts in a folder

The archive has finished models, the facts of every training, and compact checkpoints of unfinished ones. A compact
checkpoint has the weights and their running mean in fp16 (the rounding is at most a fiftieth of an optimiser step) and
the second moment in bf16; Adam rebuilds the first moment in about twenty steps. This takes 6 bytes per parameter.
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
    """Whether the training of that name has used its budget."""
    facts = out / f"{name}.json"
    return facts.exists() and json.loads(facts.read_text(encoding="utf-8")).get("finished", False)


def slim(checkpoint: Path) -> bytes:
    """Return the checkpoint in 6 bytes per parameter; `loop.Loop` resumes from it as from a full one."""
    import torch  # imported late: it takes seconds, which would delay the start of the first training

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
    """Write `to`/carry.000, ... and their manifest; return the bytes. `leave`: names in `out` to leave out.

    The manifest is written first and old parts are removed last, so that after an interruption `unpack` finds parts
    that do not match the manifest, never a model with damaged weights.
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
    """Unpack what `pack` wrote, replacing anything of the same name in `out`."""
    manifest = json.loads((source / MANIFEST).read_text(encoding="utf-8"))
    parts = [(source / f"carry.{number:03}").read_bytes() for number in range(len(manifest))]
    for number, (part, digest) in enumerate(zip(parts, manifest, strict=True)):
        if hashlib.sha256(part).hexdigest() != digest:
            raise ValueError(
                f"{source}/carry.{number:03} is damaged or from another set; copy the parts again"
            )
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
