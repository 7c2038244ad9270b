"""Rows of a comparison as flat data, one dictionary a row: what `vivace bench --format csv` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.report.rows import Row

Of = Callable[[Row], Any]


def at(path: str) -> Of:
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
    return lambda row: None if (names := at(path)(row)) is None else ", ".join(names)


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
    "model": ("name of the model", at("model")),
    "source": ("where it comes from: embedded, hub, folder, file or synthetic", at("record.trial.model.source")),
    "recipe": ("in canonical form", at("recipe")),
    **{name: (about, at(f"record.trial.workload.{name}")) for name, about in _WORKLOAD.items()},
    "outcome": ("how the row ended: measured, failed_quality, unsupported, ...", at("outcome.value")),
    "reason": ("why it was not measured, or failed", at("reason")),
    "median_s": ("seconds per image: the geometric mean of the rounds' medians", at("latency.median.point")),
    "ci95_low_s": ("its 95 % interval, lower end", at("latency.median.low")),
    "ci95_high_s": ("upper end", at("latency.median.high")),
    "mean_s": ("mean over all timed calls", at("latency.mean_s")),
    "min_s": ("least", at("latency.min_s")),
    "max_s": ("most", at("latency.max_s")),
    "p90_s": ("90th percentile; empty with fewer than 10 calls", at("latency.p90_s")),
    "p99_s": ("99th percentile; empty with fewer than 100 calls", at("latency.p99_s")),
    "n": ("number of timed calls", at("latency.n")),
    "rounds": ("number of rounds", lambda row: None if row.latency is None else len(row.latency.samples_s)),
    "speedup": ("the baseline's time over the row's, round by round", at("speedup.point")),
    "speedup_low": ("its 95 % interval, lower end", at("speedup.low")),
    "speedup_high": ("upper end", at("speedup.high")),
    "verdict": ("faster, same, unclear, slower, or failed_quality", _verdict),
    "quality": ("the quality gate's verdict: passed, unclear or failed", at("judgement.gate.value")),
    "quality_reason": ("the figures that decide it", at("judgement.reason")),
    "num_pictures": ("number of images that were compared", at("fidelity.num_pictures")),
    "num_identical": ("of them identical to the baseline's", at("fidelity.num_identical")),
    "psnr_db": ("mean PSNR of the images that differ, dB", at("fidelity.psnr_db.point")),
    "worst_psnr_db": ("the least of them", at("fidelity.worst_psnr_db")),
    "ssim": ("mean structural similarity to the baseline's images", at("fidelity.ssim.point")),
    "match": ("share of the contrast of the baseline's images", at("fidelity.match.mean.point")),
    "clip_score": ("mean CLIP score with the own prompt", at("fidelity.clip_score.point")),
    "clip_kept": ("share of the baseline's CLIP margin", at("fidelity.clip_kept.point")),
    "clip_kept_low": ("its 95 % interval, lower end", at("fidelity.clip_kept.low")),
    "clip_kept_high": ("upper end", at("fidelity.clip_kept.high")),
    "witness_kept": ("the same by a second model", at("fidelity.witness.mean.point")),
    "clip_similarity": ("of CLIP's embeddings to the baseline's images", at("fidelity.clip_similarity.point")),
    "outside_psnr_db": ("PSNR to the source outside of the mask, dB", at("fidelity.outside_psnr_db.point")),
    "outside_match": ("share of the source's contrast outside of the mask", at("fidelity.outside.mean.point")),
    "source_similarity": ("of CLIP's embeddings to the sources", at("fidelity.source_similarity.point")),
    "lpips": ("mean LPIPS to the baseline's images", at("fidelity.lpips.point")),
    "sharpness": ("mean sharpness", at("fidelity.alone.sharpness.mean")),
    "colourfulness": ("mean colourfulness", at("fidelity.alone.colourfulness.mean")),
    "entropy_bits": ("mean entropy, bits", at("fidelity.alone.entropy_bits.mean")),
    **{f"{name}_s": (f"seconds per image: {about}", at(f"stages_s.{name}")) for name, about in _STAGES.items()},
    "step_s": ("one call of the denoiser", at("step_s")),
    "vae_s": ("decoding by the VAE", at("stages_s.vae")),
    "other_s": ("everything else", at("stages_s.other")),
    "first_call_s": ("seconds of the first call after loading, with compiling", at("first_call_s")),
    "compile_fresh_s": ("of it compiling with an empty cache", at("compilation.fresh_s")),
    "compile_cached_s": ("of it loading compiled code from the cache", at("compilation.cached_s")),
    "break_even_images": ("images from which compiling has paid", at("compilation.break_even_images")),
    "load_s": ("seconds to load the model", at("load_s")),
    "model_bytes": ("memory after the recipe was applied", at("memory.model_bytes")),
    "peak_bytes": ("most memory during the timed calls", at("memory.peak_bytes")),
    "weights_bytes": ("size of the weights", at("memory.weights_bytes")),
    "gpu_busy_s": ("seconds per image in which the GPU computes", at("gpu_busy_s")),
    "limit_s": ("seconds per image at the device's measured ceilings", at("limit.limit_s")),
    "limit_share": ("that over the median", at("limit.share")),
    "lost_to_kernels_s": ("time beyond the limit in which the GPU is busy", at("limit.kernels_s")),
    "launch_gaps_s": ("time in which it waits between kernels", at("limit.gaps_s")),
    "outside_components_s": ("time outside of the components", at("limit.outside_s")),
    "energy_j": ("joules per image, of the whole card", at("gpu.energy_j")),
    "energy_from": ("counter, or sampled power", at("gpu.energy_from")),
    "power_w": ("mean power, W", at("gpu.power_w")),
    "sm_clock_mhz": ("median clock, MHz", at("gpu.sm_clock_mhz")),
    "gpu_temperature_c": ("highest temperature, °C", at("gpu.max_temperature_c")),
    "throttled": ("why clocks were held down", _listed("gpu.throttled")),
    "cost_per_1000": ("cost of 1,000 images, in the currency of the price", at("cost_per_1000")),
    "cpu_share": ("least share of its threads' time that the process got, on a CPU", at("cpu_share")),
    "device": ("cpu, cuda, ...", at("record.environment.device")),
    "device_name": ("of the GPU, or the CPU", at("record.environment.device_name")),
    "gpu_index": ("number of the GPU on its host", _place("gpu_index")),
    "gpu_uuid": ("the GPU's own name", _place("gpu_uuid")),
    "host": ("name of the host, where there were several", at("record.environment.place.host")),
    "warnings": ("what to read before trusting the row", lambda row: "; ".join(row.warnings)),
}  # fmt: skip
"""The columns, each with what it means and how it is made of a row."""


def csv_row(row: Row) -> dict[str, object]:
    return {name: of(row) for name, (_, of) in COLUMNS.items()}
