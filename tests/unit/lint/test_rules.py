"""Each rule finds its fault, and leaves the same table without it alone."""

import json
from pathlib import Path

import pytest

from tests.typed import run_vivace
from vivace.errors import UsageError
from vivace.evidence.lint.check import RULES, lint
from vivace.evidence.lint.model_limits import flops_of
from vivace.foundation.hardware import named_gpu

ROOT = Path(__file__).parents[3]
TIMED = "recipe,mean (s),min (s),median (s),p90 (s),p99 (s),max (s),n\n"

# rule: a table with the fault, and the same without it
CASES = {
    "mean-in-range": ("recipe,mean_s,max_s\na,2.5,2.1\n", "recipe,mean_s,max_s\na,2.1,2.1\n"),
    "percentiles-in-order": (
        TIMED + "a,1.05,0.90,1.20,1.10,1.30,1.40,300\n", TIMED + "a,1.05,0.9,1.0,1.1,1.3,1.4,300\n"
    ),
    "mean-fits-percentiles": (TIMED + "a,1.90,0.9,1.0,1.1,1.3,2.0,300\n", TIMED + "a,1.05,0.9,1.0,1.1,1.3,2.0,300\n"),
    "positive": ("recipe,time\na,-0.5 s\nb,1 s\n", "recipe,time\na,0.5 s\nb,1 s\n"),
    "percentage": ("name,GPU utilisation\na,130 %\n", "name,GPU utilisation\na,100 %\n"),
    "self-percentages": ("name,Self CPU %\na,60 %\nb,50 %\n", "name,Self CPU %\na,60 %\nb,40 %\n"),
    "self-within-total": ("name,Self CPU,CPU total\na,2.0ms,1.0ms\n", "name,Self CPU,CPU total\na,1.0ms,2.0ms\n"),
    "average-times-calls": (
        "name,CPU total,CPU time avg,# of calls\na,10.00ms,1.00ms,20\n",
        "name,CPU total,CPU time avg,# of calls\na,10.00ms,1.00ms,10\n",
    ),
    "counted-twice": (
        "name,Self CUDA,# of calls\naten::mm,12.345ms,7\ngemm,12.345ms,7\n",
        "name,Self CUDA,# of calls\naten::mm,12.345ms,7\ngemm,10.345ms,7\n",
    ),
    "tuning-inside": (
        "name,CPU total,# of calls\nCachingAutotuner.benchmark_all_configs,1s,3\n",
        "name,CPU total,# of calls\naten::mm,1s,3\n",
    ),
    "tail-samples": ("recipe,p99 (ms),n\na,120,10\n", "recipe,p99 (ms),n\na,120,200\n"),
    "speedup": (
        "recipe,s/image,speed-up\nbaseline,1.30,1\nb,0.55,3.1x\n",
        "recipe,s/image,speed-up\nbaseline,1.30,1\nb,0.55,2.36x\n",
    ),
    "throughput": (
        "recipe,latency (ms),images/s,batch\na,500,4.0,1\n", "recipe,latency (ms),images/s,batch\na,500,4.0,2\n"
    ),
    "steps-total": (
        "recipe,time (s),s/step,steps\na,1.00,0.05,30\n", "recipe,time (s),s/step,steps\na,1.00,0.03,30\n"
    ),
    "peak-memory": (
        "recipe,model memory (GB),peak memory (GB)\na,8.0,7.5\n",
        "recipe,model memory (GB),peak memory (GB)\na,8.0,9.5\n",
    ),
    "units": (
        "recipe,time\na,1.2\nb,1.1\nc,1300\nd,1.4\ne,1.3\n", "recipe,time\na,1.2\nb,1.1\nc,1.3\nd,1.4\ne,1.3\n"
    ),
    "repeated-rows": (
        "recipe,mean (s),min (s),max (s)\na,1.234,1.111,1.456\nb,1.234,1.111,1.456\n",
        "recipe,mean (s),min (s),max (s)\na,1.234,1.111,1.456\nb,1.235,1.111,1.456\n",
    ),
    "chip-limit": (
        "model,recipe,GPU,steps,time (s)\nFLUX.1-dev,bf16,A100,28,4.0\n",
        "model,recipe,GPU,steps,time (s)\nFLUX.1-dev,bf16,A100,28,14.0\n",
    ),
    "ruined-images": (
        "model,quant,CLIP score,time (s)\nSDXL,fp16,0.28,1\nSDXL,int8,0.13,1\n",
        "model,quant,CLIP score,time (s)\nSDXL,fp16,0.28,1\nSDXL,int8,0.27,1\n",
    ),
    "threshold-order": (
        "recipe,time (s)\nTeaCache (0.2),5.10\nTeaCache (0.4),5.90\n",
        "recipe,time (s)\nTeaCache (0.2),5.10\nTeaCache (0.4),4.90\n",
    ),
    "added-technique": (
        "recipe,time (s)\nA (0.2),2.56\nB (0.6),2.65\nA+FA2 (0.2),3.20\nB+FA2 (0.6),2.63\n",
        "recipe,time (s)\nA (0.2),2.56\nB (0.6),2.65\nA+FA2 (0.2),3.20\nB+FA2 (0.6),3.31\n",
    ),
    "quantised-memory": (
        "model,quant,VRAM model (GB)\nSDXL,fp16,6.9\nSDXL,int4_gemm,7.3\n",
        "model,quant,VRAM model (GB)\nSDXL,fp16,6.9\nSDXL,int4_gemm,3.6\n",
    ),
    "gpu-order": (
        "recipe,A100 (s),H100 (s)\n" + "".join(f"r{k},3.{k},2.{k}\n" for k in range(9)) + "int8,4.30,9.10\n",
        "recipe,A100 (s),H100 (s)\n" + "".join(f"r{k},3.{k},2.{k}\n" for k in range(9)) + "int8,4.30,4.40\n",
    ),
    "one-baseline": (
        "recipe,GPU,CLIP score\nbaseline,A100,0.32\nours,A100,0.31\nbaseline of theirs,A100,0.30\n",
        "recipe,GPU,CLIP score\nbaseline,A100,0.32\nours,A100,0.31\nbaseline,H100,0.30\n",
    ),
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", CASES)
def test_the_fault_is_found_and_its_absence_is_not(rule: str, tmp_path: Path) -> None:
    with_fault, without = CASES[rule]
    path = tmp_path / "table.csv"
    path.write_text(with_fault)
    findings = [finding for finding in lint([path]) if finding.rule == rule]
    assert findings
    assert all(finding.numbers and finding.why and finding.check and finding.row for finding in findings)
    path.write_text(without)
    assert lint([path]) == []


def test_scores_of_a_table_that_are_relative_to_two_baselines(tmp_path: Path) -> None:
    table = (
        "# Caches on FLUX.1-dev\n\n| Method | ImageReward(↑) | SpeedUp(↑) |\n| --- | --- | --- |\n"
        "| 50 steps, ours | 1.0412 | 1.00× |\n| cache A | 1.0370 | 1.80× |\n| cache B | 1.0065 | 2.66× |\n"
        "| 50 steps, of their paper | {theirs} | 1.00× |\n| cache C | 0.9891 | 3.10× |\n"
    )
    path = tmp_path / "caches.md"
    path.write_text(table.format(theirs="0.9898"))
    (finding,) = lint([path])
    assert (finding.rule, finding.severity, finding.label) == ("one-baseline", "doubtful", "the whole table")
    assert finding.numbers == "image reward 0.9898 (50 steps, of their paper), 1.0412 (50 steps, ours)"
    assert "5.2 %" in finding.why
    path.write_text(table.format(theirs="1.0400"))
    assert lint([path]) == []


def test_rounding_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("recipe,mean (s),min (s)\na,2.0,2.04\n")
    assert lint([path]) == []
    path.write_text("recipe,mean (s),min (s)\na,2.00,2.04\n")
    assert [finding.rule for finding in lint([path])] == ["mean-in-range"]


def test_the_command_names_file_and_line_and_its_exit_code_tells(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("recipe,mean_s,min_s\nslow,2.05,2.09\n")
    (tmp_path / "b.md").write_text("text\n\n| recipe | p99 (s) | n |\n|---|---|---|\n| a | 1.2 | 10 |\n")
    done = run_vivace(tmp_path, "lint", "a.csv", "b.md", code=1)
    assert "a.csv:2 (slow): impossible, mean-in-range\n  mean 2.05, min 2.09\n" in done.stdout
    assert "b.md:5 (a): doubtful, tail-samples" in done.stdout
    assert "1 impossible, 1 doubtful in 2 files" in done.stderr
    answer = json.loads(run_vivace(tmp_path, "lint", "b.md", "--format", "json").stdout)
    assert [(finding["rule"], finding["row"], finding["severity"]) for finding in answer] == [
        ("tail-samples", 5, "doubtful")
    ]


def test_a_text_has_tables_or_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n\n| recipe | p99 (s) | n |\n|---|---|---|\n| a | 1.2 | 10 |\n")
    (tmp_path / "b.txt").write_text("1.30 s an image at first, 0.30 s at last\n")
    done = run_vivace(tmp_path, "lint", "a.txt", "b.txt")
    assert "a.txt:5 (a): doubtful, tail-samples" in done.stdout
    assert "b.txt: no table in it" in done.stderr
    assert "a.txt" not in done.stderr


def test_what_the_rows_do_not_name_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("recipe,time (s)\nbf16,0.5\n")
    run_vivace(tmp_path, "lint", "a.csv")
    done = run_vivace(
        tmp_path, "lint", "a.csv", "--model", "flux-dev", "--gpu", "H100", "--steps", "28", code=1
    )
    assert "3,787 TFLOP/s; the chip has 990 in 16 bits" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"", "give a file that ends in"),
        ("a.json", b"{", "cannot be read"),
        ("a.csv", b"\xff\xfe", "not UTF-8"),
        ("none.csv", None, "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        lint([tmp_path / name])


@pytest.mark.long
def test_nothing_that_vivace_publishes_is_impossible() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    records = sorted((ROOT / "results").glob("techniques-*.json"))
    findings = lint([*pages, ROOT / "results" / "demo-cpu.json", *records])
    assert [finding for finding in findings if finding.severity == "impossible"] == []


@pytest.mark.parametrize("gpu", ["B200", "RTX 5090", "Tesla T4", "RTX 6000 Ada"])
@pytest.mark.parametrize(("label", "rate"), [("bf16", "half"), ("fp8", "eight"), ("nvfp4", "four")])
def test_chips_of_all_generations_have_a_limit(gpu: str, label: str, rate: str, tmp_path: Path) -> None:
    model = flops_of("flux-dev")
    assert model is not None
    least = 28 * model.step_flop / 1e12 / getattr(named_gpu(gpu).chip, rate)
    for factor, rules in ((0.9, ["chip-limit"]), (1.1, [])):
        file = tmp_path / "table.csv"
        file.write_text(f"recipe,model,gpu,steps,mean (s)\n{label},flux-dev,{gpu},28,{factor * least:.5f}\n")
        assert [finding.rule for finding in lint([file])] == rules


def _found(text: str, tmp_path: Path) -> list[tuple[str, str]]:
    (tmp_path / "table.md").write_text(text)
    return [(finding.rule, finding.severity) for finding in lint([tmp_path / "table.md"])]


TABLE = "| recipe | {heading} |\n|---|---|\n| baseline | {cell} |\n"


@pytest.mark.parametrize(
    ("above", "heading", "cell", "is_found"),
    [
        ("# FLUX.1-dev on A100 at 1024x1024, 28 steps", "latency s/image", "0.4", True),
        ("# FLUX.1-dev, A100, 28 steps, 1024 x 1024 px", "seconds per image", "0.4", True),
        ("# Results\n## SDXL on A100\n50 steps at 1024×1024", "time (s)", "0.05", True),
        ("# SDXL, 50 steps", "A100", "0.05 s", True),
        ("# 4x A100: SDXL, 50 steps", "time (s)", "0.05", False),
        ("# SDXL on 8 H100s, 50 steps", "time (s)", "0.05", False),
        ("# SDXL on A100 x4, 50 steps", "time (s)", "0.05", False),
        ("# SDXL on A100 at 512x512, 50 steps", "time (s)", "0.05", False),
        ("# SDXL Turbo on A100, 50 steps", "time (s)", "0.05", False),
        ("# SDXL and FLUX.1-dev on A100, 50 steps", "time (s)", "0.05", False),
    ],
)
def test_the_chip_s_limit_holds_whatever_names_model_size_and_unit(
    above: str, heading: str, cell: str, is_found: bool, tmp_path: Path
) -> None:
    found = _found(f"{above}\n\n{TABLE.format(heading=heading, cell=cell)}", tmp_path)
    assert (("chip-limit", "impossible") in found) == is_found


def test_a_row_of_another_model_does_not_take_the_heading_s(tmp_path: Path) -> None:
    table = "# SDXL on A100, 50 steps\n\n| recipe | time (s) |\n|---|---|\n| sd-turbo | 0.05 |\n"
    assert _found(table, tmp_path) == []


@pytest.mark.parametrize(
    ("above", "severity"),
    [("", "impossible"), ("on 8x A100", "doubtful"), ("8 concurrent clients", "doubtful")],
)
def test_a_throughput_beyond_the_batch_contradicts_the_time(
    above: str, severity: str, tmp_path: Path
) -> None:
    table = "| recipe | batch | time | throughput |\n|---|---|---|---|\n| a | 1 | 1.0 s | 600 images/min |\n"
    assert _found(f"{above}\n\n{table}", tmp_path) == [("throughput", severity)]


@pytest.mark.parametrize(("fast", "is_found"), [("1.0", True), ("3.0", False)])
@pytest.mark.parametrize("headings", ["H100 (s) | RTX 3060 (s)", "H100 | RTX 3060"])
def test_columns_of_two_cards_are_compared(headings: str, fast: str, is_found: bool, tmp_path: Path) -> None:
    cells = f"2.0 s | {fast} s"
    table = f"| recipe | {headings} |\n|---|---|---|\n| a | {cells} |\n"
    assert (("gpu-order", "doubtful") in _found(table, tmp_path)) == is_found
