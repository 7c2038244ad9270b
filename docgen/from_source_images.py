"""Draw the images of docs/source-images.md, with the command line that the page shows.

python -m docgen.from_source_images
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vivace.models.prompts import PROMPT_SETS
from vivace.models.sources import FOLDER

IMAGES = Path("docs/images/from-source-images")


@dataclass(frozen=True)
class Example:
    """One row of the page.

    Attributes:
        source: number of the source image that ships with vivace, and of the prompt that goes with it.
    """

    model: str
    task: str
    source: int

    @property
    def prompt(self) -> str:
        return PROMPT_SETS["tinyworld"][self.source]

    @property
    def files(self) -> list[str]:
        """The source, and for inpainting its mask, below IMAGES."""
        names = [f"{self.source:02}.png"]
        return [*names, f"{self.source:02}-mask.png"] if self.task == "inpaint" else names

    @property
    def command(self) -> list[str]:
        flags = ["--image", "--mask"]
        arguments = [
            part for flag, file in zip(flags, self.files, strict=False) for part in (flag, str(IMAGES / file))
        ]
        return ["generate", self.prompt, "--model", self.model, *arguments, "--out", str(IMAGES / self.model)]


EXAMPLES = (
    Example("tiny-sd", "image", 6),
    Example("tiny-flux", "image", 3),
    Example("tiny-sd", "inpaint", 4),
    Example("tiny-flux", "inpaint", 0),
)


def main() -> int:
    shutil.rmtree(IMAGES, ignore_errors=True)
    IMAGES.mkdir(parents=True)
    for example in EXAMPLES:
        for file in example.files:
            shutil.copy(FOLDER / file, IMAGES / file)
        start = [sys.executable, "-c", "from vivace.cli import main; main()"]
        subprocess.run([*start, *example.command], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
