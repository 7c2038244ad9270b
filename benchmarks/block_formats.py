"""Make the record of NVFP4 and MXFP8 as a CPU rounds them: the gate's verdicts, and what smoothing would add.

    vivace bench --model tiny-sd --rounds 1 --repeats 1 --store S --recipe baseline --recipe "quantize(nvfp4)" ...
    vivace report --store S --format json > rows.json
    python -m benchmarks.block_formats rows.json ...

SVDQuant divides each input channel by a number and multiplies the weight's column by it, so that outliers of inputs
move into weights, before the low-rank branch (arXiv 2411.05007). Here that is computed for each layer alone, with
numbers from calibration prompts, and its error is measured on other prompts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.foundation.untrusted.destinations import replace

if TYPE_CHECKING:
    import torch

RECORD = Path(__file__).parents[1] / "results" / "block-formats-cpu.json"
MODELS = ("tiny-sd", "tiny-flux")
RANK = 32
STRENGTHS = (0.3, 0.5, 0.7)
_STEPS = 6
_ROWS = 64
"""Of inputs kept from each call of a layer."""
_CALIBRATION = (("a red circle", 0), ("a blue square above a green circle", 1))
_JUDGED = (("two yellow triangles", 7), ("a white star left of a red square", 8))
Inputs = dict[str, "torch.Tensor"]


def verdicts(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what the gate says of each recipe of a report's rows."""
    for row in rows:
        if row["is_baseline"]:
            continue
        fidelity = row["fidelity"]
        yield {
            "model": row["model"],
            "recipe": row["recipe"],
            "steps": row["workload"]["num_inference_steps"],
            "images": fidelity["num_pictures"],
            "verdict": row["quality"]["verdict"],
            "reason": row["quality"]["reason"],
            "ssim": round(fidelity["ssim"]["mean"], 4),
            "psnr_db": round(fidelity["psnr_db"]["mean"], 2),
            "worst_psnr_db": round(fidelity["worst_psnr_db"], 2),
            "vivace": row["environment"]["vivace"],
            "cpu": row["environment"]["cpu"],
        }


def layer_errors(model: str) -> dict[str, Any]:
    """Return the mean error of a model's linear layers, relative to their outputs, for each way of rounding them."""
    import torch

    from vivace.machinery.technique import component_of
    from vivace.models import find_model, load_pipeline

    pipe = load_pipeline(find_model(model), "cpu")
    denoiser = component_of(pipe, "denoiser")
    layers = {
        name: layer
        for name, layer in denoiser.named_modules()
        if isinstance(layer, torch.nn.Linear) and not any(length % 16 for length in layer.weight.shape)
    }
    calibrated, judged = (_inputs(pipe, layers, prompts) for prompts in (_CALIBRATION, _JUDGED))
    errors: dict[str, list[float]] = {}
    for name, inputs in judged.items():
        weight = layers[name].weight.detach()
        rank = min(RANK, min(weight.shape) // 2)
        kinds = {"nvfp4": (0, None), "rank": (rank, None)} | {f"smoothed {s}": (rank, s) for s in STRENGTHS}
        for kind, (own_rank, strength) in kinds.items():
            columns = torch.ones(weight.shape[1])
            if strength is not None:
                columns = _smoothing(calibrated[name], weight, strength)
            error = _error(weight * columns, inputs / columns, inputs @ weight.T, own_rank)
            errors.setdefault(kind, []).append(error)
    return {
        "model": model,
        "layers": len(judged),
        "errors": {kind: round(statistics.mean(values), 4) for kind, values in errors.items()},
    }


def _inputs(pipe: Any, layers: dict[str, Any], prompts: tuple[tuple[str, int], ...]) -> Inputs:
    """Return inputs of layers, of those that see more than a few different ones."""
    import torch

    caught: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def keep(name: str) -> Any:
        def hook(layer: Any, arguments: Any) -> None:
            rows = arguments[0].detach().flatten(0, -2)
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
            caught[name].append(rows[order[:_ROWS]])

        return hook

    hooks = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    for prompt, seed in prompts:
        noise = torch.Generator().manual_seed(seed)
        pipe(prompt, num_inference_steps=_STEPS, generator=noise, output_type="latent")
    for hook in hooks:
        hook.remove()
    return {
        name: torch.cat(kept)
        for name, kept in caught.items()
        if kept and len(torch.cat(kept).unique(dim=0)) >= 8
    }


def _smoothing(inputs: torch.Tensor, weight: torch.Tensor, strength: float) -> torch.Tensor:
    largest = inputs.abs().amax(0).clamp(min=1e-5) ** strength
    return (largest / weight.abs().amax(0).clamp(min=1e-5) ** (1 - strength)).clamp(1e-3, 1e3)


def _error(weight: torch.Tensor, inputs: torch.Tensor, expected: torch.Tensor, rank: int) -> float:
    import torch

    from vivace.machinery.quantization.block_tensors import branch, rest_of

    product = torch.zeros_like(expected)
    if rank:
        up, down = branch(weight, rank)
        product, weight = inputs @ down.T @ up.T, rest_of(weight, up, down)
    product = product + _rounded(inputs) @ _rounded(weight).T
    return float((product - expected).norm() / expected.norm().clamp(min=1e-12))


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    from vivace.machinery.quantization.block_tensors import from_nvfp4, to_nvfp4

    packed, scales, scale = to_nvfp4(rows)
    return from_nvfp4(packed, scales) * scale


def main() -> None:
    """Write the record."""
    import torch

    torch.set_num_threads(1)
    files = [Path(name) for name in sys.argv[1:]]
    rows = [row for file in files for row in verdicts(json.loads(file.read_text(encoding="utf-8")))]
    record = {"quality": rows, "smoothing": [layer_errors(model) for model in MODELS]}
    parts = [
        f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in part) + "\n]" for key, part in record.items()
    ]
    replace(RECORD, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


if __name__ == "__main__":
    main()
