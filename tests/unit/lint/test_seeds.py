"""The faults in five published studies of diffusion pipelines; figures are typed from their tables."""

from pathlib import Path

import pytest

from vivace.evidence.lint.check import lint
from vivace.evidence.lint.findings import Finding

PROFILE_HEADINGS = (
    "| Name | Self CPU % | Self CPU | CPU total % | CPU total | CPU time avg | Self CUDA | Self CUDA % | CUDA total | "
    "CUDA time avg | # of Calls |\n" + "|---" * 11 + "|\n"
)
COMPILED = """\
| model_inference | 0.00% | 0.000us | 0.00% | 0.000us | 0.000us | 204.634s | 105.62% | 204.634s | 102.317s | 2 |
| model_inference | 0.08% | 169.650ms | 100.00% | 204.646s | 204.646s | 0.000us | 0.00% | 194.405s | 194.405s | 1 |
| aten::bmm | 0.07% | 134.943ms | 0.10% | 196.386ms | 58.448us | 87.831s | 45.33% | 88.376s | 26.303ms | 3360 |
| triton_red_fused__softmax_14 | 0.00% | 3.053ms | 0.00% | 7.021ms | 28.084us | 48.017s | 24.78% | 48.017s | 192.069ms | 250 |
| triton_red_fused__softmax_14 | 0.00% | 0.000us | 0.00% | 0.000us | 0.000us | 48.017s | 24.78% | 48.017s | 192.069ms | 250 |
"""  # noqa: E501
EAGER = """\
| model_inference | 23.54% | 109.568s | 100.00% | 465.392s | 465.392s | 1.030s | 0.22% | 465.378s | 465.378s | 1 |
| aten::cudnn_convolution | 2.80% | 13.024s | 2.82% | 13.101s | 2.654ms | 140.309s | 30.15% | 140.390s | 28.442ms | 4936 |
| aten::matmul | 8.11% | 37.726s | 23.77% | 110.646s | 17.152ms | 227.631ms | 0.05% | 117.255s | 18.176ms | 6451 |
| aten::bmm | 1.86% | 8.644s | 1.86% | 8.644s | 2.660ms | 111.117s | 23.88% | 111.117s | 34.190ms | 3250 |
"""  # noqa: E501
TUNED = """\
| model_inference | 0.00% | 0.000us | 0.00% | 0.000us | 0.000us | 93.961s | 270.83% | 93.961s | 46.980s | 2 |
| InductorBenchmarker.benchmark_gpu (dynamo_timed) | 2.74% | 2.576s | 22.77% | 21.395s | 58.940ms | 0.000us | 0.00% | 6.794s | 18.715ms | 363 |
"""  # noqa: E501
LATENCIES = """\
### H100 GPU Performance (1024x1024, 28 steps)

| Optimization Technique | Average Time (s) | Min Time (s) | P50 Time (s) | P90 Time (s) | P99 Time (s) |
|---|---|---|---|---|---|
| Baseline (FP16)      | 7.23 | 7.18 | 7.18 | 7.19 | 7.66 |
| FBCache (0.2)        | 2.56 | 2.53 | 2.57 | 2.57 | 2.60 |
| FBCache (0.3)        | 2.05 | 2.09 | 2.10 | 2.12 | 2.30 |
"""
A100 = """\
| Optimization Technique | Average Time (s) | Min Time (s) | P50 Time (s) | P90 Time (s) | P99 Time (s) |
|---|---|---|---|---|---|
| FBCache (0.15) | 5.09 | 4.99 | 5.04 | 5.16 | 5.53 |
| FBCache (0.2) | 5.17 | 4.97 | 5.08 | 5.33 | 6.12 |
| FBCache (0.3) | 4.09 | 4.03 | 4.07 | 4.12 | 4.34 |
"""
MEMORY = """\
| Model | Compile VAE | A100 (s) | RTX 4090 (s) | Model Memory A100 (GB) | Model Memory RTX 4090 (GB) | Inference Memory A100 (GB) | Inference Memory RTX 4090 (GB) |
|---|---|---|---|---|---|---|---|
| **FLUX Dev** ||||||||
| Base | no | 15.43 | null | 31.44 | null | 33.83 | null |
| Config 3 | yes | 11.22 | null | 31.45 | null | 31.46 | null |
| Full Opt | yes | 12.09 | 8.93 | 16.09 | 16.16 | 16.11 | 16.18 |
"""  # noqa: E501
STEPS = """\
Model,Quant,Avg Time (s),s/step,Steps,VRAM peak (GB),VRAM model (GB),CLIP score
LCM-SDXL,fp16,0.49,0.1233,4,11.1,6.9,0.2850
LCM-SDXL,int8,1.09,0.2724,4,8.9,4.7,0.1348
SDXL,fp16,3.70,0.1235,30,11.1,6.9,0.2924
Flux.1 Dev,fp8_static,4.75,0.1698,28,24.4,21.8,-
"""


def findings_in(folder: Path, text: str, name: str = "table.md") -> list[Finding]:
    (folder / name).write_text(text)
    return lint([folder / name])


def rules(findings: list[Finding]) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in findings}


def test_a_label_of_105_percent_and_a_kernel_that_counts_twice(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, PROFILE_HEADINGS + COMPILED)
    assert rules(findings) == {
        "percentage": "impossible", "self-percentages": "impossible", "counted-twice": "doubtful"
    }  # fmt: skip
    (label,) = (finding for finding in findings if finding.rule == "percentage")
    assert (label.row, label.label, label.numbers) == (3, "model_inference", "self cuda percent 105.62%")
    (total,) = (finding for finding in findings if finding.rule == "self-percentages")
    assert "200.51 % together" in total.numbers


def test_the_eager_profile_is_possible(tmp_path: Path) -> None:
    assert findings_in(tmp_path, PROFILE_HEADINGS + EAGER) == []


def test_a_profile_that_tunes_inside_its_window(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, PROFILE_HEADINGS + TUNED)
    assert rules(findings)["tuning-inside"] == "doubtful"
    assert any("270.83%" in finding.numbers for finding in findings)


def test_a_mean_below_the_minimum(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, LATENCIES)
    (wrong,) = (finding for finding in findings if finding.severity == "impossible")
    assert (wrong.rule, wrong.row, wrong.label) == ("mean-in-range", 7, "FBCache (0.3)")
    assert wrong.numbers == "mean 2.05, min 2.09"
    assert rules(findings)["tail-samples"] == "doubtful", "nobody knows of how many samples the p99 is"


def test_a_higher_threshold_that_is_slower(tmp_path: Path) -> None:
    (row,) = (finding for finding in findings_in(tmp_path, A100) if finding.rule == "threshold-order")
    assert row.label == "FBCache (0.2)"
    assert row.severity == "doubtful"


def test_a_label_that_another_recipe_contradicts(tmp_path: Path) -> None:
    """FlashAttention 2 adds a quarter to FBCache at 0.2 and nothing to TeaCache: the row is that of 0.15."""
    rows = """\
| TeaCache (0.6)       | 2.65 | 2.44 | 2.69 | 2.73 | 2.74 |
| TeaCache+FA2 (0.6)   | 2.63 | 2.45 | 2.70 | 2.73 | 2.73 |
| FBCache+FA2 (0.2)    | 3.20 | 3.02 | 3.27 | 3.28 | 3.28 |
"""
    (row,) = (
        finding for finding in findings_in(tmp_path, LATENCIES + rows) if finding.rule == "added-technique"
    )
    assert (row.label, row.severity) == ("FBCache+FA2 (0.2)", "doubtful")
    assert "1.27 times as long" in row.why


def test_four_bits_that_take_more_than_sixteen(tmp_path: Path) -> None:
    text = "Model,Quant,VRAM peak (GB),VRAM model (GB)\nSDXL,fp16,11.1,6.9\nSDXL,int8,8.9,4.7\n"
    text += "SDXL,int4_gemm,11.4,7.3\n"
    (row,) = findings_in(tmp_path, text, "table.csv")
    assert (row.rule, row.label) == ("quantised-memory", "SDXL, int4_gemm")


def test_calls_without_activations(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, MEMORY)
    assert [(finding.rule, finding.label) for finding in findings] == [
        ("peak-memory", "FLUX Dev, Config 3, A100"),
        ("peak-memory", "FLUX Dev, Full Opt, A100"),
        ("peak-memory", "FLUX Dev, Full Opt, RTX 4090"),
    ]
    assert {finding.severity for finding in findings} == {"doubtful"}


def test_a_step_that_is_the_total_divided_and_a_ruined_image(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, STEPS, "table.csv")
    assert rules(findings) == {"steps-total": "doubtful", "ruined-images": "doubtful"}
    (ruined,) = (finding for finding in findings if finding.rule == "ruined-images")
    assert (ruined.row, ruined.label) == (3, "LCM-SDXL, int8")


@pytest.mark.parametrize("text", [LATENCIES.replace("2.05", "2.11"), PROFILE_HEADINGS + EAGER])
def test_nothing_is_impossible_without_the_fault(tmp_path: Path, text: str) -> None:
    assert all(finding.severity == "doubtful" for finding in findings_in(tmp_path, text))
