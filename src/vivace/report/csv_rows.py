"""Rows of a comparison as flat data, one dictionary a row: what `vivace bench --format csv` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.report.rows import Row

Of = Callable[[Row], Any]


def _at(path: str) -> Of:
    def of(row: Row) -> Any:
        value: Any = row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        return value

    return of


def _verdict(row: Row) -> str | None:
    if row.speedup is None:
        return None
    return row.outcome.value if row.failed_quality else row.verdict and row.verdict.value


def _listed(path: str) -> Of:
    return lambda row: None if (names := _at(path)(row)) is None else ", ".join(names)


def _place(name: str) -> Of:
    """The GPU of a row: the place's, or the one that its rounds reported."""

    def of(row: Row) -> Any:
        place = row.record.environment.place
        if place is not None:
            return getattr(place, name.removeprefix("gpu_"))
        return row.record.rounds[0].conditions.get(name)

    return of


_WORKLOAD = {
    "batch": "images per call",
    "height": "of the images, pixels",
    "width": "of the images, pixels",
    "num_inference_steps": "denoising steps that were asked for; the recipe may change them",
    "guidance_scale": "that was asked for; the recipe may change it",
    "text": "whether prompts are encoded in the call: prompts, repeated or embeddings",
    "task": "what images are made from: text, image, inpaint, control or edit",
    "strength": "how much of a source image may change, 0 to 1",
}
_STAGES = {
    "text": "the text encoders",
    "encode": "encoding source images",
    "steps": "all denoising steps",
}
COLUMNS: dict[str, tuple[str, Of]] = {
    "model": ("name of the model", _at("model")),
    "source": ("where it comes from: embedded, hub, folder, file or synthetic", _at("record.trial.model.source")),
    "recipe": ("in canonical form", _at("recipe")),
    **{name: (about, _at(f"record.trial.workload.{name}")) for name, about in _WORKLOAD.items()},
    "outcome": ("how the row ended: measured, failed_quality, unsupported, ...", _at("outcome.value")),
    "reason": ("why it was not measured, or failed", _at("reason")),
    "median_s": ("seconds per image: the geometric mean of the rounds' medians", _at("latency.median.point")),
    "ci95_low_s": ("its 95 % interval, lower end", _at("latency.median.low")),
    "ci95_high_s": ("upper end", _at("latency.median.high")),
    "mean_s": ("mean over all timed calls", _at("latency.mean_s")),
    "min_s": ("least", _at("latency.min_s")),
    "max_s": ("most", _at("latency.max_s")),
    "p90_s": ("90th percentile; empty with fewer than 10 calls", _at("latency.p90_s")),
    "p99_s": ("99th percentile; empty with fewer than 100 calls", _at("latency.p99_s")),
    "n": ("number of timed calls", _at("latency.n")),
    "rounds": ("number of rounds", lambda row: None if row.latency is None else len(row.latency.samples_s)),
    "speedup": ("the baseline's time over the row's, round by round", _at("speedup.point")),
    "speedup_low": ("its 95 % interval, lower end", _at("speedup.low")),
    "speedup_high": ("upper end", _at("speedup.high")),
    "verdict": ("faster, same, unclear, slower, or failed_quality", _verdict),
    "quality": ("the quality gate's verdict: passed, unclear or failed", _at("judgement.gate.value")),
    "quality_reason": ("the figures that decide it", _at("judgement.reason")),
    "num_pictures": ("number of images that were compared", _at("fidelity.num_pictures")),
    "num_identical": ("of them identical to the baseline's", _at("fidelity.num_identical")),
    "psnr_db": ("mean PSNR of the images that differ, dB", _at("fidelity.psnr_db.point")),
    "worst_psnr_db": ("the least of them", _at("fidelity.worst_psnr_db")),
    "ssim": ("mean structural similarity to the baseline's images", _at("fidelity.ssim.point")),
    "match": ("share of the contrast of the baseline's images", _at("fidelity.match.mean.point")),
    "clip_score": ("mean CLIP score with the own prompt", _at("fidelity.clip_score.point")),
    "clip_kept": ("share of the baseline's CLIP margin", _at("fidelity.clip_kept.point")),
    "clip_kept_low": ("its 95 % interval, lower end", _at("fidelity.clip_kept.low")),
    "clip_kept_high": ("upper end", _at("fidelity.clip_kept.high")),
    "witness_kept": ("the same by a second model", _at("fidelity.witness.mean.point")),
    "clip_similarity": ("of CLIP's embeddings to the baseline's images", _at("fidelity.clip_similarity.point")),
    "outside_psnr_db": ("PSNR to the source outside of the mask, dB", _at("fidelity.outside_psnr_db.point")),
    "outside_match": ("share of the source's contrast outside of the mask", _at("fidelity.outside.mean.point")),
    "source_similarity": ("of CLIP's embeddings to the sources", _at("fidelity.source_similarity.point")),
    "lpips": ("mean LPIPS to the baseline's images", _at("fidelity.lpips.point")),
    "sharpness": ("mean sharpness", _at("fidelity.alone.sharpness.mean")),
    "colourfulness": ("mean colourfulness", _at("fidelity.alone.colourfulness.mean")),
    "entropy_bits": ("mean entropy, bits", _at("fidelity.alone.entropy_bits.mean")),
    **{f"{name}_s": (f"seconds per image: {about}", _at(f"stages_s.{name}")) for name, about in _STAGES.items()},
    "step_s": ("one call of the denoiser", _at("step_s")),
    "vae_s": ("decoding by the VAE", _at("stages_s.vae")),
    "other_s": ("everything else", _at("stages_s.other")),
    "first_call_s": ("seconds of the first call after loading, with compiling", _at("first_call_s")),
    "compile_fresh_s": ("of it compiling with an empty cache", _at("compilation.fresh_s")),
    "compile_cached_s": ("of it loading compiled code from the cache", _at("compilation.cached_s")),
    "break_even_images": ("images from which compiling has paid", _at("compilation.break_even_images")),
    "load_s": ("seconds to load the model", _at("load_s")),
    "model_bytes": ("memory after the recipe was applied", _at("memory.model_bytes")),
    "peak_bytes": ("most memory during the timed calls", _at("memory.peak_bytes")),
    "weights_bytes": ("size of the weights", _at("memory.weights_bytes")),
    "gpu_busy_s": ("seconds per image in which the GPU computes", _at("gpu_busy_s")),
    "limit_s": ("seconds per image at the device's measured ceilings", _at("limit.limit_s")),
    "limit_share": ("that over the median", _at("limit.share")),
    "lost_to_kernels_s": ("time beyond the limit in which the GPU is busy", _at("limit.kernels_s")),
    "launch_gaps_s": ("time in which it waits between kernels", _at("limit.gaps_s")),
    "outside_components_s": ("time outside of the components", _at("limit.outside_s")),
    "energy_j": ("joules per image, of the whole card", _at("gpu.energy_j")),
    "energy_from": ("counter, or sampled power", _at("gpu.energy_from")),
    "power_w": ("mean power, W", _at("gpu.power_w")),
    "sm_clock_mhz": ("median clock, MHz", _at("gpu.sm_clock_mhz")),
    "gpu_temperature_c": ("highest temperature, °C", _at("gpu.max_temperature_c")),
    "throttled": ("why clocks were held down", _listed("gpu.throttled")),
    "cost_per_1000": ("cost of 1,000 images, in the currency of the price", _at("cost_per_1000")),
    "cpu_share": ("least share of its threads' time that the process got, on a CPU", _at("cpu_share")),
    "device": ("cpu, cuda, ...", _at("record.environment.device")),
    "device_name": ("of the GPU, or the CPU", _at("record.environment.device_name")),
    "gpu_index": ("number of the GPU on its host", _place("gpu_index")),
    "gpu_uuid": ("the GPU's own name", _place("gpu_uuid")),
    "host": ("name of the host, where there were several", _at("record.environment.place.host")),
    "warnings": ("what to read before trusting the row", lambda row: "; ".join(row.warnings)),
}  # fmt: skip
"""The columns, each with what it means and how it is made of a row."""


def csv_row(row: Row) -> dict[str, object]:
    return {name: of(row) for name, (_, of) in COLUMNS.items()}
