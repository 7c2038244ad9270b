"""Tables as people write them: what is right is never called impossible, and what is not read is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.typed import run_vivace
from vivace.evidence.lint.check import checked, lint
from vivace.evidence.lint.columns import column_of
from vivace.evidence.lint.findings import Finding
from vivace.evidence.lint.read_tables import read_tables
from vivace.evidence.lint.values import read_number

HYPERFINE = {
    "results": [
        {"command": f"sleep {mean}", "mean": mean, "stddev": 0.001, "median": mean, "user": 0.001, "system": 0.001,
         "min": mean - 0.01, "max": mean + 0.01, "times": [mean - 0.01, mean, mean + 0.01], "exit_codes": [0, 0, 0]}
        for mean in (0.1, 0.2)
    ]
}  # fmt: skip


def findings_in(folder: Path, name: str, content: str) -> list[Finding]:
    (folder / name).write_text(content)
    return lint([folder / name])


def rules(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.rule, finding.severity) for finding in findings]


RIGHT = {
    "a speed-up in percent": "recipe,time (s),speed-up\nbase,2.0,\nb,1.6,+25%\n",
    "in words": "recipe,time (s),speed-up\nbase,2.0,-\nb,1.6,25% faster\nc,2.5,20% slower\nd,1.0,2.0x faster\n",
    "of a hundred": "recipe,time (s),speed-up\nbase,2.0,100%\nb,1.6,125%\nc,4.0,50%\n",
    "percent that nobody names": "recipe,time (s),speed-up\nbase,2.0,0\nb,1.6,25\nc,2.5,-20\n",
    "of the mean, beside a median": "recipe,mean (s),median (s),speed-up\nbase,2.2,2.0,1\nb,1.1,1.6,2.0\n",
    "of the throughput": "recipe,time (s),img/s,speed-up\nbase,2.0,0.50,1\nb,1.6,1.00,2.0\n",
    "two baselines": "recipe,size,time (s),speed-up\nbase,512,2.0,1\nb,512,1.0,2\nbase,1024,8.0,1\nb,1024,2.0,4\n",
    "semicolons and commas": "recipe;mean (s);min (s);max (s)\na;0,512;0,498;0,530\nb;1,204;1,198;1,300\n",
    "quoted commas": 'recipe,mean (s),min (s),time (ms)\na,"0,512","0,498","512,0"\n',
    "thousands": 'recipe,mean (ms),min (ms)\na,"1,234.5","1,200.1"\nb,980.0,970.0\n',
    "a spreadsheet's first line": "sep=;\nrecipe;mean (s);min (s)\na;2,1;2,0\n",
    "lines above": "# a run of mine\n# on a Monday\nrecipe,mean (s),min (s)\na,2.1,2.0\n",
    "rates": "recipe,speed,steps,time\na,2.0 it/s,30,16 s\nb,0.5 s/it,30,15.5 s\n",
    "a batch": "recipe,latency (s),throughput (img/s),batch size\na,2.0,2.0,4\nb,1.0,4.0,4\n",
    "units of size": "recipe,model memory,peak memory\na,22.0 GB,20.9 GiB\nb,6900 MB,6.9 GiB\n",
    "offloaded weights": "recipe,model memory (GB),peak memory (GB)\nbf16 + CPU offload,24,8\n",
    "several GPUs": "model,recipe,GPU,steps,time (s)\nFLUX.1-dev,bf16,4x A100,28,4.0\n",
    "a negative difference": "metric,mean,min,max\nPSNR change,-0.5,-1.2,0.3\n",
    "all runs together": "recipe,total time (s),max (s),runs\na,100,11,10\n",
    "a spread": "recipe,mean,min,max\na,1.2 ± 0.1 s,1.1 s,1.3 s\nb,107 ms ± 9 ms,98 ms,116 ms\n",
    "an interval in milliseconds": "recipe,time (ms),speed-up\nbase,2000 [1900; 2100],1\nb,1600 [1500; 1700],1.35\n",
    "times over the row before": "recipe,time (s),speed-up\nbase,2.0,1\nb,1.6,1.25\nc,1.28,1.25\n",
    "not a single base": "recipe,time (s),speed-up\nb,1.6,1.4\nc,1.28,1.2\n",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_table_is_not_impossible_and_is_read(name: str, tmp_path: Path) -> None:
    findings = findings_in(tmp_path, "table.csv", RIGHT[name])
    assert [finding for finding in findings if finding.severity == "impossible"] == []
    (table,) = read_tables(tmp_path / "table.csv")
    assert checked(table).coverage.figures


WRONG = {
    "a percentage that does not fit": ("recipe,time (s),speed-up\nbase,2.0,0%\nb,1.6,+60%\n", "speedup"),
    "a word that does not fit": ("recipe,time (s),speed-up\nbase,2.0,1x\nb,1.6,1.25x slower\n", "speedup"),
    "neither baseline": (
        "recipe,time (s),speed-up\nbase,2.0,1\nb,1.0,3\nbase,8.0,1\nb,2.0,9\n", "speedup"
    ),
    "semicolons": ("recipe;mean (s);min (s)\na;0,512;0,598\n", "mean-in-range"),
    "thousands and a comma": ('recipe,mean (s),min (s),time (ms)\na,"1,512","1,598","512,0"\n', "mean-in-range"),
    "both readings": ('recipe,mean (ms),min (ms)\na,"1,234","1,300"\n', "mean-in-range"),
    "minutes": ("recipe,mean,min\na,1m30s,1:32\n", "mean-in-range"),
    "steps a second": ("recipe,it/s,steps,time (s)\na,2.0,30,14\n", "steps-total"),
    "negative": ("recipe,time\na,-1 s\nb,1 s\n", "positive"),
    "zero": ("recipe,time (s)\na,0.00\nb,1\n", "positive"),
    "a negative throughput": ("recipe,img/s\na,-3\n", "positive"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_impossible(name: str, tmp_path: Path) -> None:
    content, rule = WRONG[name]
    assert (rule, "impossible") in rules(findings_in(tmp_path, "table.csv", content))


def test_what_can_be_read_in_two_ways_is_said_and_not_held_against_anybody(tmp_path: Path) -> None:
    # 30 steps of 0.045 s are 1.35 s: longer than 1.234 s, and not than 1234 s.
    content = 'recipe,s/step,steps,time (s)\na,45 ms,30,"1,234"\n'
    assert [
        finding for finding in findings_in(tmp_path, "table.csv", content) if finding.severity == "impossible"
    ] == []
    done = run_vivace(tmp_path, "lint", "table.csv")
    assert "figures such as 1,234 can be 1234 or 1.234 here" in done.stderr


def test_a_speed_up_that_is_a_relative_time_is_doubtful(tmp_path: Path) -> None:
    findings = findings_in(tmp_path, "a.csv", "recipe,time (s),speed-up\nbase,2.0,1\nb,1.6,0.80\nc,1.0,0.5\n")
    assert rules(findings) == [("speedup", "doubtful")]
    assert "a relative time, not a speed-up" in findings[0].why


JSON: dict[str, tuple[Any, int]] = {
    "of hyperfine": (HYPERFINE, 8),
    "a list of numbers": ([1.0, 2.0], 0),
    "lists of numbers": ([[1, 2], [3, 4]], 0),
    "nothing but lists": ({"times": [1, 2, 3], "exit_codes": [0, 0, 0]}, 3),
    "lists with headings": ([["recipe", "mean (s)", "min (s)"], ["a", 2.1, 2.0]], 2),
    "lists beside headings": ({"columns": ["recipe", "mean_s"], "data": [["a", 2.1], ["b", 2.0]]}, 2),
    "a list for each column": ({"recipe": ["a", "b"], "mean_s": [2.1, 1], "min_s": [2.0, 1]}, 4),
    "an object for each row": ({"a": {"mean_s": 2.1, "min_s": 2.0}, "b": {"mean_s": 1, "min_s": 1}}, 4),
    "deep": ({"runs": {"gpu": {"rows": [{"recipe": "a", "stats": {"mean": 2.1, "min": 2.0}}]}}}, 2),
    "texts with units": ([{"recipe": "a", "time": "1.2 s"}], 1),
    "a number": (3, 0), "null": (None, 0), "a text": ("x", 0), "an empty list": ([], 0), "an empty object": ({}, 0),
    "lists of objects of lists": ([{"a": [1]}, {"a": []}, {}], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", JSON)
def test_json_of_any_shape_is_read_or_said_to_hold_nothing(name: str, tmp_path: Path) -> None:
    content, figures = JSON[name]
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert sum(checked(table).coverage.figures for table in read_tables(tmp_path / "a.json")) == figures
    done = run_vivace(tmp_path, "lint", "a.json")
    assert ("vivace: warning: a.json: no" in done.stderr) == (not figures)


def test_times_of_different_things_in_json_are_not_held_against_each_other(tmp_path: Path) -> None:
    content = [
        {"recipe": "a", "load_time": {"mean_s": 3.0}, "latency": {"mean_s": 2.0, "min_s": 1.9, "max_s": 2.1}}
    ]
    assert findings_in(tmp_path, "a.json", json.dumps(content)) == []
    content[0]["latency"] = {"mean_s": 2.3, "min_s": 1.9, "max_s": 2.1}
    assert [rule for rule, _ in rules(findings_in(tmp_path, "a.json", json.dumps(content)))] == [
        "mean-in-range"
    ]


def test_a_line_of_json_may_hold_a_line_separator(tmp_path: Path) -> None:
    row = json.dumps({"recipe": "a\u2028b", "mean_s": 2.05, "min_s": 2.09}, ensure_ascii=False)
    assert rules(findings_in(tmp_path, "a.jsonl", f"{row}\n{row}\n"))[0] == ("mean-in-range", "impossible")


def test_tables_of_hyperfine_in_markdown(tmp_path: Path) -> None:
    text = (
        "| Command | Mean [ms] | Min [ms] | Max [ms] | Relative |\n|:---|---:|---:|---:|---:|\n"
        "| `a` | 103.3 ± 0.5 | 102.2 | 104.0 | 1.00 |\n| `b \\| c` | {mean} ± 0.9 | 205.0 | 208.0 | 2.00 ± 0.01 |\n"
    )
    assert findings_in(tmp_path, "a.md", text.format(mean="206.5")) == []
    findings = findings_in(tmp_path, "a.md", text.format(mean="203.5"))
    assert [(finding.rule, finding.label) for finding in findings] == [("mean-in-range", "b | c")]


@pytest.mark.parametrize("name", ["a.html", "a.md"])
def test_tables_of_html(name: str, tmp_path: Path) -> None:
    text = (
        "<h2>Results</h2>\n<table><thead><tr><th>recipe</th><th>mean&nbsp;(s)</th><th>min<br>(s)</th></tr></thead>\n"
        "<tr><td><b>a</b></td><td>2.05</td><td>2.09</td></tr>\n<tr><td>b<td>1.0<td>0.9\n</table>"
    )
    findings = findings_in(tmp_path, name, text)
    assert [(finding.rule, finding.label, finding.row) for finding in findings] == [("mean-in-range", "a", 3)]


def test_what_was_read_is_said_and_what_was_not_and_why(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "Recipe,Mean (s),Sharpness,Average (s),Time (ms)\na,1.2,3,1.3,fast\nb,1.3,4,1.4,1400\nc,1,2,3,4,5\n"
    )
    done = run_vivace(tmp_path, "lint", "a.csv")
    assert done.stdout.splitlines()[0] == "a.csv:2: read Recipe (label), Mean (s) (mean), Time (ms) (time)"
    assert done.stderr.splitlines()[:1] == [
        "a.csv:2: not read: Sharpness: vivace does not know this heading; Average (s): means the same as 'Mean (s)'; "
        "Time (ms): 1 of 2 cells: 'fast'; line 4: it has 6 cells for 5 headings",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "foo,bar\n1,2\n"),
        ("a.csv", "recipe,mean (s)\na,fast\n"),
        ("a.md", "| foo | bar |\n|---|---|\n| 1 | 2 |\n"),
        ("a.json", '[{"foo": 1}]'),
    ],
)
def test_a_file_of_which_nothing_was_read_does_not_pass_in_silence(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    done = run_vivace(tmp_path, "lint", name)
    assert f"warning: {name}: nothing was checked, as no figure in it was read" in done.stderr


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("0,512 s", 0.512, "time"), ("1.234,5 ms", 1.2345, "time"), ("1 234,5", 1234.5, None),
        ("1'234.5", 1234.5, None),
        ("+25%", 25, "percent"), ("25 % faster", 25, "percent"), ("−20%", -20, "percent"), ("x2.1", 2.1, "ratio"),
        ("2.1x faster", 2.1, "ratio"), ("1.25×", 1.25, "ratio"), ("2.31 it/s", 2.31, "steps a second"),
        ("1.2s/it", 1.2, "time a step"), ("30 img/min", 0.5, "images a second"),
        ("3 images per second", 3, "images a second"),
        ("1.5 sec per image", 1.5, "time an image"), ("1m32s", 92, "time"), ("1 min 32 s", 92, "time"),
        ("1:32", 92, "time"),
        ("1:02:03.5", 3723.5, "time"), ("2.5 min", 150, "time"), ("90 secs", 90, "time"),
        ("12 GiB", 12 * 2**30, "bytes"),
        ("23,456 MiB", 23456 * 2**20, "bytes"), ("1.2 ± 0.1 s", 1.2, "time"), ("(1.2 ± 0.1) s", 1.2, "time"),
        ("**2.5** s", 2.5, "time"), ("2.5 s[^1]", 2.5, "time"), ("7 s (28 steps)", 7, "time"), (".5", 0.5, None),
        ("2.0 → 1.6", None, None), ("32 GB / 80 GB", None, None), ("2026-01-02", None, None), ("v1.2", None, None),
        ("n/a", None, None), ("OOM", None, None), ("1.2.3", None, None),
    ],
)  # fmt: skip
def test_numbers_and_units(text: str, value: float | None, kind: str | None) -> None:
    number = read_number(text)
    assert (
        (None, None)
        if number is None
        else (number.value, number.kind)
        == (
            None if value is None else pytest.approx(value),
            kind,
        )
    )


@pytest.mark.parametrize(
    ("heading", "role", "factor"),
    [
        ("Mean [ms]", "mean", 0.001), ("time, s", "time", 1), ("Time in seconds", "time", 1),
        ("p50_latency_ms", "p50", 0.001),
        ("Avg. latency", "mean", 1), ("Latency p95 (ms)", "p95", 0.001), ("inference_time_ms", "time", 0.001),
        ("Peak VRAM (GiB)", "peak_memory", 2**30), ("Speed (it/s)", "rate", 1), ("s/it", "step", 1),
        ("img/s", "throughput", 1),
        ("Latency (lower is better)", "time", 1), ("Seconds", "time", 1), ("Average<br>Time (s)", "mean", 1),
        ("Mean ± σ [ms]", "mean", 0.001), ("Relative", "relative", 1), ("Command", "label", 1), ("time / s", "time", 1),
        ("time (load)", None, 1), ("load time (s)", None, 1), ("compile time (s)", None, 1),
        ("first call (s)", None, 1),
        ("VAE time (s)", None, 1), ("cpu_time_s", None, 1), ("stddev", None, 1), ("Warmup (s)", None, 1),
    ],
)  # fmt: skip
def test_headings_as_people_write_them(heading: str, role: str | None, factor: float) -> None:
    column = column_of(heading)
    assert (None if column is None else column.role) == role
    assert column is None or column.factor == factor
