"""Rows of a comparison as flat data, one dictionary a row: what `vivace bench --format csv` prints."""

from __future__ import annotations

from vivace.report.rows import Row

_CSV_FIELDS = (
    "model", "source", "recipe", "batch", "height", "width", "num_inference_steps", "guidance_scale", "text", "task",
    "strength", "outcome", "reason", "median_s", "ci95_low_s", "ci95_high_s", "mean_s", "min_s", "max_s", "p90_s",
    "p99_s", "n", "rounds", "speedup", "speedup_low", "speedup_high", "verdict", "quality", "quality_reason",
    "num_pictures", "num_identical", "psnr_db", "worst_psnr_db", "ssim", "match", "clip_score", "clip_kept",
    "clip_kept_low", "clip_kept_high", "witness_kept", "clip_similarity", "outside_psnr_db", "outside_match",
    "source_similarity", "lpips", "sharpness", "colourfulness", "entropy_bits", "text_s", "encode_s", "steps_s",
    "step_s", "vae_s", "other_s", "first_call_s", "compile_fresh_s", "compile_cached_s", "break_even_images", "load_s",
    "model_bytes", "peak_bytes", "weights_bytes", "gpu_busy_s", "limit_s", "limit_share", "lost_to_kernels_s",
    "launch_gaps_s", "outside_components_s", "energy_j", "energy_from", "power_w", "sm_clock_mhz",
    "gpu_temperature_c", "throttled", "cost_per_1000", "cpu_share", "device", "device_name", "gpu_index", "gpu_uuid",
    "host", "warnings",
)  # fmt: skip


def csv_row(row: Row) -> dict[str, object]:
    """Return a row as flat data; fields that it lacks are None."""
    fields = _csv_fields(row)
    return {name: fields.get(name) for name in _CSV_FIELDS}


def _csv_fields(row: Row) -> dict[str, object]:
    environment, workload = row.record.environment, row.record.trial.workload
    sizes = ("batch", "height", "width", "num_inference_steps", "guidance_scale", "text", "task", "strength")
    fields: dict[str, object] = {
        **{name: getattr(workload, name) for name in sizes},
        "model": row.model,
        "source": row.record.trial.model.source,
        "recipe": row.recipe,
        "outcome": row.outcome.value,
        "reason": row.reason,
        "device": environment.device,
        "device_name": environment.device_name,
        "warnings": "; ".join(row.warnings),
        **_csv_place(row),
    }
    if row.latency is None:
        return fields
    fields |= {
        "median_s": row.latency.median.point,
        "ci95_low_s": row.latency.median.low,
        "ci95_high_s": row.latency.median.high,
        "mean_s": row.latency.mean_s,
        "min_s": row.latency.min_s,
        "max_s": row.latency.max_s,
        "p90_s": row.latency.p90_s,
        "p99_s": row.latency.p99_s,
        "n": row.latency.n,
        "rounds": len(row.latency.samples_s),
        "step_s": row.step_s,
        "gpu_busy_s": row.gpu_busy_s,
        "cpu_share": row.cpu_share,
        "cost_per_1000": row.cost_per_1000,
        "first_call_s": row.first_call_s,
        "load_s": row.load_s,
    }
    if row.gpu is not None:
        fields |= {
            "energy_j": row.gpu.energy_j,
            "energy_from": row.gpu.energy_from,
            "power_w": row.gpu.power_w,
            "sm_clock_mhz": row.gpu.sm_clock_mhz,
            "gpu_temperature_c": row.gpu.max_temperature_c,
            "throttled": ", ".join(row.gpu.throttled),
        }
    if row.limit is not None:
        fields |= {
            "limit_s": row.limit.limit_s,
            "limit_share": row.limit.share,
            "lost_to_kernels_s": row.limit.kernels_s,
            "launch_gaps_s": row.limit.gaps_s,
            "outside_components_s": row.limit.outside_s,
        }
    if row.compilation is not None:
        fields |= {
            "compile_fresh_s": row.compilation.fresh_s,
            "compile_cached_s": row.compilation.cached_s,
            "break_even_images": row.compilation.break_even_images,
        }
    fields |= {f"{stage}_s": value for stage, value in row.stages_s.items()}
    if row.speedup is not None:
        fields |= {
            "speedup": row.speedup.point,
            "speedup_low": row.speedup.low,
            "speedup_high": row.speedup.high,
            "verdict": row.outcome.value if row.failed_quality else row.verdict and row.verdict.value,
        }
    fields |= _csv_quality(row)
    if row.memory is not None:
        fields |= {
            "model_bytes": row.memory.model_bytes,
            "peak_bytes": row.memory.peak_bytes,
            "weights_bytes": row.memory.weights_bytes,
        }
    return fields


def _csv_place(row: Row) -> dict[str, object]:
    """Return the GPU of a row: the place's, or the one that its rounds reported."""
    place = row.record.environment.place
    if place is not None:
        return {"gpu_index": place.index, "gpu_uuid": place.uuid, "host": place.host}
    conditions = row.record.rounds[0].conditions
    return {"gpu_index": conditions.get("gpu_index"), "gpu_uuid": conditions.get("gpu_uuid")}


_CSV_INTERVALS = (
    "psnr_db", "ssim", "clip_score", "clip_kept", "clip_similarity", "lpips", "outside_psnr_db", "source_similarity"
)  # fmt: skip


def _csv_quality(row: Row) -> dict[str, object]:
    fields: dict[str, object] = {}
    if row.judgement is not None:
        fields |= {"quality": row.judgement.gate.value, "quality_reason": row.judgement.reason}
    if row.fidelity is not None:
        for name in ("num_pictures", "num_identical", "worst_psnr_db"):
            fields[name] = getattr(row.fidelity, name)
        for name in _CSV_INTERVALS:
            interval = getattr(row.fidelity, name)
            fields[name] = None if interval is None else interval.point
        for name in ("sharpness", "colourfulness", "entropy_bits"):
            if name in row.fidelity.alone:
                fields[name] = row.fidelity.alone[name].mean
        kept_shares = {"match": "match", "witness_kept": "witness", "outside_match": "outside"}
        for name, attribute in kept_shares.items():
            share = getattr(row.fidelity, attribute)
            fields[name] = None if share is None else share.mean.point
        kept = row.fidelity.clip_kept
        fields |= {} if kept is None else {"clip_kept_low": kept.low, "clip_kept_high": kept.high}
    return fields
