"""Count what the models of the catalogue compute for one image, without weights and without a GPU.

    python -m benchmarks.model_flops            write results/model-flops.json
    python -m benchmarks.model_flops --check    exit 1 if it is not current

Each model runs its pipeline once on tensors without values, at its own size, steps and guidance. One multiply-add is 2
FLOP; matmuls, convolutions and attention are counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vivace.architectures import ARCHITECTURES
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless

RECORD = Path(__file__).parents[1] / "results" / "model-flops.json"


def counted(name: str) -> dict[str, Any]:
    """Return the components of one image: calls and FLOP of all of them, and of a step."""
    prediction = predict(find_weightless(name), resolve(BASELINE))
    return {
        "height": prediction.height,
        "width": prediction.width,
        "task": prediction.task,
        "num_inference_steps": prediction.num_inference_steps,
        "components": {
            part.component: {
                "calls": part.calls,
                "gemm": part.gemm_flop,
                "conv": part.conv_flop,
                "attention": part.attention_flop,
            }
            for part in prediction.work.components
        },
    }


def content() -> str:
    return json.dumps({name: counted(name) for name in ARCHITECTURES}, indent=1) + "\n"


def main() -> int:
    text = content()
    if "--check" in sys.argv[1:]:
        return int(text != RECORD.read_text(encoding="utf-8"))
    RECORD.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
