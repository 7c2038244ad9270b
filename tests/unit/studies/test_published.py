"""The published numbers: every cell of the five sources' tables, typed, and empty only with a reason."""

from collections import Counter

import pytest

from vivace.errors import UsageError
from vivace.evidence.studies.expand import expand
from vivace.evidence.studies.study_columns import COLUMNS, parse_published
from vivace.evidence.studies.study_file import published_studies, read_study
from vivace.recipes.resolve import resolve

CELLS = {
    # rows x columns of each table of the source
    ("000", "results"): 40 * (6 + 9),
    ("002", "runs"): 7 * 4,  # the call's time, two totals, and the memory that the source lacks
    **{
        ("002", f"operators: {run}"): 10 * 10
        for run in (
            "Initial", "Compiled", "FlashAttention", "inference_mode", "bf16", "fp16", "FlashAttention, bf16"
        )
    },
    ("001", "configurations"): 9 * 4,
    ("001", "statements"): 2,
    ("003", "datasheet"): 9 * 3,
    ("003", "modes"): 8 * 6,
    ("003", "results"): 37 * (8 + 1) + (9 * 9 - 37),
    ("003", "fp8 modes"): 2 * 4,
    ("004", "A100"): 13 * 6,
    ("004", "H100"): 13 * 6,
    ("004", "advanced"): 7 * 6,
}  # fmt: skip
EMPTY = {"000": 36, "001": 18, "002": 7, "003": 37 + 44 + 4, "004": 33}
STUDIES = published_studies()


def test_every_cell_of_the_tables_is_there() -> None:
    counts = Counter((name, cell.table) for name in STUDIES for cell in read_study(name).cells)
    assert counts == CELLS


@pytest.mark.parametrize("name", STUDIES)
def test_empty_cells_have_reasons(name: str) -> None:
    empty = [cell for cell in read_study(name).cells if not cell.value]
    assert len(empty) == EMPTY[name]
    assert all(len(cell.note) > 10 for cell in empty)


@pytest.mark.parametrize("name", STUDIES)
def test_no_cell_is_twice(name: str) -> None:
    keys = Counter((c.table, c.gpu, c.model, c.row, c.metric) for c in read_study(name).cells)
    assert not [key for key, number in keys.items() if number > 1]


def test_values_are_those_of_the_sources() -> None:
    def value(name: str, **expected: str) -> str:
        (cell,) = [
            row for row in read_study(name).cells if all(getattr(row, k) == v for k, v in expected.items())
        ]
        return cell.value

    config = {"model": "flux-dev", "row": "Full Opt", "metric": "latency"}
    assert [value("000", gpu=gpu, **config) for gpu in ("A100", "RTX 4090", "H100")] == [
        "12.09",
        "8.93",
        "5.30",
    ]
    assert value("000", model="pony", row="Config 9", metric="quantize_vae") == "false"
    assert value("001", row="Final", metric="latency") == "0.297"
    assert value("002", table="runs", row="bf16", metric="self_cuda_total") == "80.765"
    softmax = {"table": "operators: Initial", "row": "aten::softmax"}
    assert value("002", metric="cuda_time_avg", **softmax) == "0.065971"  # 65.971ms
    assert value("003", model="sdxl", row="nf4", metric="colourfulness") == "51.9"
    assert value("004", table="advanced", row="BF16+FA2+TeaCache (0.6)", metric="p99") == "4.39"


@pytest.mark.parametrize("name", STUDIES)
def test_every_configuration_is_a_row_of_the_study_with_the_same_recipe(name: str) -> None:
    """The recipe that stands beside a published number is the one that is measured beside it."""
    file = read_study(name)
    measured = {(part.model, case.label): case.recipe for part in expand(file) for case in part.cases}
    with_recipe = [cell for cell in file.cells if cell.recipe and cell.model]
    assert len(with_recipe) > 30
    for cell in with_recipe:
        if cell.table.startswith("operators"):
            continue
        assert measured[cell.model, cell.row] == resolve(cell.recipe).text, cell


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("s,t,g,m,row,,latency,s,fast,", "could not convert"),
        ("s,t,g,m,row,,latency,s,nan,", "finite number"),
        ("s,t,g,m,row,,latency,s,,", "needs its reason"),
        ("s,t,g,m,row,,latency,s,1", "9 columns instead of 10"),
    ],
)
def test_a_wrong_cell_is_named_with_its_line(line: str, message: str) -> None:
    text = f"{','.join(COLUMNS)}\ns,t,g,m,row,,latency,s,1,\n{line}\n"
    with pytest.raises(UsageError, match="line 3") as caught:
        parse_published(text, "x.csv")
    assert message in str(caught.value)


def test_another_heading_is_refused() -> None:
    with pytest.raises(UsageError, match="first line must be study,table"):
        parse_published("a,b\n1,2\n", "x.csv")
