"""Generate the images of tiny-sd that the README shows, with the command line.

python -m docgen.example_images
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROMPTS = (
    "a red circle above a blue square",
    "a small yellow star left of a large purple diamond",
    "a large green triangle on a white background",
    "an orange cross in the top left on a checkered black background",
    "a pink disc below a cyan box on a gray background",
    "a big blue diamond right of a small red triangle on a striped white background",
    "a tiny violet star in the bottom right on a gradient black background",
    "a large yellow circle in the center on a checkered gray background",
)


def main() -> int:
    for old in IMAGES.glob("*-0.png"):  # seed 0; other pages have images here too
        old.unlink()
    for prompt in PROMPTS:
        command = [
            sys.executable,
            "-c",
            "from vivace.cli import main; main()",
            "generate",
            prompt,
            "--out",
            str(IMAGES),
        ]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
