"""Evaluate tiny-z-image on held-out captions.

    python -m tinyworld.evaluate_z_image --record results/tinyworld-z-image.json --workers 8

The shipped fp16 weights draw through ZImagePipeline; the verifier judges each image by its caption.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from diffusers import ZImagePipeline

from tinyworld import evaluate, z_image

STEPS = (z_image.STEPS, 1, 2, 4, 8, 14, 20)
SCALES = (0.0, 1.0, 2.0, 5.0)
"""Other guidance scales than the default."""


def settings(dtype: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the settings to draw with, the default first."""
    yield {"steps": z_image.STEPS, "guidance": z_image.GUIDANCE, "dtype": dtype}
    if quick:
        return
    for steps in STEPS[1:]:
        yield {"steps": steps, "guidance": z_image.GUIDANCE, "dtype": dtype}
    for guidance in SCALES:
        yield {"steps": z_image.STEPS, "guidance": guidance, "dtype": dtype}
    yield {"steps": z_image.STEPS, "guidance": z_image.GUIDANCE, "dtype": "bf16"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    evaluate.add_arguments(parser)
    args = parser.parse_args()
    scorer = evaluate.Scorer(args.workers)
    prompts = evaluate.held_out_captions(args.captions)
    rows = []
    for setting in settings("fp16" if args.device == "cuda" else "fp32", args.quick):
        dtype = evaluate.DTYPES[setting["dtype"]]
        pipe = ZImagePipeline.from_pretrained(args.weights / z_image.FOLDER, dtype=dtype).to(args.device)
        pipe.set_progress_bar_config(disable=True)
        call = {"num_inference_steps": setting["steps"], "guidance_scale": setting["guidance"]}
        pictures = evaluate.call(pipe, prompts, 125, **call, **z_image.CALL)
        rows.append({**setting, "accuracies": scorer(pictures, prompts)})
        print(*setting.values(), evaluate.summarise(rows[-1]["accuracies"]), sep="  ", flush=True)
        if args.pictures and len(rows) == 1:
            evaluate.show(pictures[:64], prompts[:64], args.pictures / z_image.FOLDER)
    result: dict[str, Any] = {
        "environment": evaluate.environment(args.device),
        "captions": args.captions,
        "default": rows[0],
        "variations": rows[1:],
    }
    result["gates"] = evaluate.judge({"z-image": evaluate.GATES["sd"]}, {"z-image": rows[0]})
    evaluate.write(result, args)


if __name__ == "__main__":
    main()
