"""All rules by name."""

from __future__ import annotations

from vivace.evidence.lint import comparing_rules, profile_rules, speedup_rules, timing_rules
from vivace.evidence.lint.faults import Rule

RULES: dict[str, Rule] = {
    "mean-in-range": timing_rules.mean_in_range,
    "percentiles-in-order": timing_rules.percentiles_in_order,
    "mean-fits-percentiles": timing_rules.mean_fits_percentiles,
    "positive": timing_rules.positive,
    "percentage": profile_rules.percentages,
    "self-percentages": profile_rules.self_percentages_add_up,
    "self-within-total": profile_rules.self_within_total,
    "average-times-calls": profile_rules.average_times_calls,
    "counted-twice": profile_rules.counted_twice,
    "tuning-inside": profile_rules.tuning_inside,
    "tail-samples": timing_rules.tails_need_samples,
    "speedup": speedup_rules.speedup_fits_times,
    "throughput": timing_rules.throughput_fits_latency,
    "steps-total": timing_rules.steps_fit_total,
    "peak-memory": timing_rules.peak_holds_model,
    "units": timing_rules.units_alike,
    "repeated-rows": timing_rules.rows_repeat,
    "chip-limit": timing_rules.chip_is_fast_enough,
    "ruined-images": timing_rules.images_are_whole,
    "threshold-order": timing_rules.thresholds_in_order,
    "added-technique": comparing_rules.techniques_add_alike,
    "quantised-memory": comparing_rules.quantised_weights_are_smaller,
    "gpu-order": comparing_rules.gpus_keep_their_order,
}
