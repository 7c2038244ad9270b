"""The `python` and `sh` blocks of README and docs run, with embedded models in the place of large ones.

`<!-- not run: REASON -->` before a block leaves the block out, ``<!-- not run (`WORDS`): REASON -->`` its lines with
these words: what needs a GPU, a download, a server or a clone. Signatures and parts of files are `py` blocks.
"""

import ast
import builtins
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(
    r"((?:^ *<!-- not run.*?-->\n+)*)^( *)```(python|sh|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL
)
LEFT_OUT = re.compile(r"<!-- not run(?: \(`([^`]+)`\))?: (.*?) -->", re.DOTALL)
EMBEDDED = {
    "synthetic:sdxl": "tiny-sd", "sdxl": "tiny-sd", "flux-dev": "tiny-flux", "1024x1024": "128x128",
    "1344x768": "192x128", "width=1344, height=768": "width=192, height=128",
}  # fmt: skip
"""What is run in the place of a page's words."""
SHORTER = {
    "bench": "--steps 2 --rounds 1 --repeats 1 --warmup 1 --no-quality",
    "calibrate": "--runs 1 --seeds 1 --cache first_block_cache",
    "compare": "--steps 2 --max-pairs 1 --repeats 1 --warmup 1",
    "profile": "--steps 2 --calls 1 --warmup 1",
    "prove": "--steps 2 --num-prompts 2 --seeds 1",
    "tune": "--steps 2 --trials 1",
}
"""Added to commands, which measure for minutes otherwise."""
SHORTER_IN_PYTHON = """
import functools
import vivace
from vivace.foundation.spec.timing import Timing

few = {"num_inference_steps": 2, "timing": Timing(rounds=1, repeats=1, max_warmup=1)}
vivace.bench = functools.partial(vivace.bench, prompts=["a red circle"], quality=False, **few)
vivace.compare = functools.partial(vivace.compare, max_pairs=1, **few)
vivace.profile = functools.partial(vivace.profile, calls=1, **few)
"""
ANSWERS = {"compare": (0, 1, 5), "prove": (0, 1), "lint": (0, 1), "tune": (0, 1, 4), "bench": (0, 4)}
"""Exit codes that are answers, not errors."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    left_out: tuple[tuple[str, str], ...]
    """Words ("" for the whole block), and the reason."""

    @property
    def is_run(self) -> bool:
        return all(words for words, _ in self.left_out)

    @property
    def lines(self) -> list[str]:
        """Its lines that are run, of a block of commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            line for line in lines if line.strip() and not any(words in line for words, _ in self.left_out)
        ]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for match in BLOCK.finditer(text):
        code = re.sub(f"^{match[2]}", "", match[4], flags=re.MULTILINE)
        left_out = tuple(
            (found[1] or "", " ".join(found[2].split())) for found in LEFT_OUT.finditer(match[1])
        )
        yield Block(page, text[: match.start(4)].count("\n"), match[3], code, left_out)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_what_is_not_run_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [
        f"{name_of(block.page)}:{block.line}: {words or 'the whole block'}: {reason}"
        for block in BLOCKS
        for words, reason in block.left_out
    ]
    for block in BLOCKS:
        for words, reason in block.left_out:
            assert len(reason.split()) > 1, block
            assert not words or words in block.text, f"{name_of(block.page)} has no line with {words}"
    run = [block for block in BLOCKS if block.is_run]
    print(f"{len(run)} of {len(BLOCKS)} blocks are run; not run are", *listed, sep="\n")
    assert len(run) > len(BLOCKS) / 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_python_block_needs_a_name_that_its_page_does_not_define(page: Path) -> None:
    known = set(dir(builtins)) | {"__file__"}
    for block in blocks_of(page):
        if block.language == "python" and block.is_run:
            tree = ast.parse(block.text)
            names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
            known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
            known |= {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
            known |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
            assert [node.id for node in names if node.id not in known] == [], f"line {block.line}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that pages name as a reader's own."""
    images = ROOT / "docs" / "images" / "from-source-images"
    for name in ("old", "photo"):
        shutil.copy(images / "00.png", tmp_path / f"{name}.png")
    for name in ("hole", "mask"):
        shutil.copy(images / "00-mask.png", tmp_path / f"{name}.png")
    for name in ("folder_a", "folder_b"):
        (tmp_path / name).mkdir()
        shutil.copy(images / "00.png", tmp_path / name)
    lora = ROOT / "tinyworld" / "loras" / "tiny-sd-outlines.safetensors"
    (tmp_path / "styles").mkdir()
    for name in ("ink.safetensors", "styles/ink.safetensors"):
        shutil.copy(lora, tmp_path / name)
    for name in ("results.csv", "timings.csv"):
        (tmp_path / name).write_text("model,steps,seconds\nflux-dev,28,3.1\n")
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(images, tmp_path / "docs" / "images" / "from-source-images")
    (tmp_path / "src").symlink_to(ROOT / "src")
    return tmp_path


def with_embedded(text: str) -> str:
    for words, instead in EMBEDDED.items():
        text = re.sub(rf"(?<![\w:.-]){re.escape(words)}(?![\w.-])", instead, text)
    return text


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.is_run and b.language == "python" for b in blocks_of(page))],
    ids=name_of,
)
def test_the_python_blocks_of_a_page_run_in_their_order(page: Path, folder: Path) -> None:
    code = [block.text for block in blocks_of(page) if block.language == "python" and block.is_run]
    # A measurement imports the main module again where a process cannot be forked.
    (folder / "page.py").write_text(SHORTER_IN_PYTHON + with_embedded("\n\n".join(code)))
    _run([sys.executable, "page.py"], folder, (0,))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.is_run and b.language != "python" for b in blocks_of(page))],
    ids=name_of,
)
def test_the_commands_of_a_page_run_in_their_order(page: Path, folder: Path) -> None:
    for block in blocks_of(page):
        place = folder
        for line in block.lines if block.is_run and block.language != "python" else ():
            words = shlex.split(with_embedded(line), comments=True)
            if words[0] == "cd":
                place = folder / words[1]
                continue
            if words[0].endswith("vivace"):
                allowed = ANSWERS.get(words[1], (0,)) if len(words) > 1 else (0,)
                shorter = SHORTER.get(words[1], "").split() if "--help" not in words else []
                _run([sys.executable, "-m", "vivace", *words[1:], *shorter], place, allowed)
            else:
                assert words[0] == "python", f"{line}: only vivace and python are run here"
                _run([sys.executable, *words[1:]], place, (0,))


def _run(command: list[str], folder: Path, allowed: tuple[int, ...]) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode in allowed, f"{shlex.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
