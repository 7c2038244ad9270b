"""What docs/hardware.md says of NVFP4 and MXFP8, as a CPU rounds them."""

from __future__ import annotations

import json
from pathlib import Path

from vivace.answers.markdown import markdown_lines

_NUMBERS = ("steps", "images", "SSIM", "PSNR dB, worst")


def section(record: Path) -> list[str]:
    """Return the page's section.

    Args:
        record: of `python -m benchmarks.block_formats`.
    """
    content = json.loads(record.read_text(encoding="utf-8"))
    smoothing = "; ".join(
        f"{row['model']} {row['errors']['nvfp4']:.1%}, {row['errors']['rank']:.1%}, "
        f"{min(error for kind, error in row['errors'].items() if kind.startswith('smoothed')):.1%}"
        for row in content["smoothing"]
    )
    return [
        "## NVFP4 and MXFP8, rounded on a CPU",
        "",
        "The embedded models with the numbers that Blackwell's tensor cores multiply, judged by the gate "
        f"([record](../results/{record.name})). Their times on a GPU are not measured, and what 4 bits do to models of "
        "full size these small ones do not say.",
        "",
        *markdown_lines(
            ("model", "recipe", *_NUMBERS[:2], "quality", *_NUMBERS[2:]),
            [
                (
                    row["model"],
                    f"`{row['recipe']}`",
                    str(row["steps"]),
                    str(row["images"]),
                    row["verdict"],
                    f"{row['ssim']:.3f}",
                    f"{row['psnr_db']:.1f}, {row['worst_psnr_db']:.1f}",
                )
                for row in content["quality"]
            ],
            dict.fromkeys(_NUMBERS, "right"),
        ),
        "",
        "SVDQuant's smoothing, which moves outliers of inputs into weights, is left out. The mean error of linear "
        "layers, relative to their outputs, in NVFP4, with `rank=32`, and with the best strength of smoothing too: "
        f"{smoothing}. The branch gives most of it, and smoothing would need calibration and one more pass over the "
        "inputs of each layer.",
    ]
