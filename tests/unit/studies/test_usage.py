"""Energy, time and limits of measured rows: the usage table, on every page that shows it."""

from tests.make import make_round
from tests.unit.report.test_limit import CEILINGS, WORK
from tests.unit.studies.test_sittings import FEW, VAE, lasting, run, sitting
from vivace.answers.answer import Table
from vivace.evidence.studies.study_answer import PartView, views
from vivace.foundation.spec.ceilings import Work
from vivace.foundation.spec.record import GpuWindow, Outcome
from vivace.report.usage import no_limit, usage_table

WINDOW = GpuWindow(
    calls=10, seconds=10.0, num_readings=90, energy_j=15_050.0, energy_from="counter", power_w=700.0,
    sm_clock_mhz=1785.0, throttled=("power cap",),
)  # fmt: skip
COUNTED = sitting(
    baseline=lasting(1.0, work=WORK, gpu_busy_s=0.6, gpu=WINDOW),
    **{
        VAE: lasting(0.5, work=Work(reason="one image on several GPUs")),
        FEW: make_round(0, outcome=Outcome.OUT_OF_MEMORY, reason="too large"),
    },
).model_copy(update={"ceilings": CEILINGS})


def table_of(view: PartView, names: tuple[str, ...] = ()) -> Table:
    return usage_table([entry for row in view.rows for entry in row.labelled], names)


def headings(table: Table) -> list[str]:
    return [column.name for column in table.columns][1:]


def test_the_table_has_limit_energy_and_hours() -> None:
    (view,) = views(run(COUNTED))
    usage = table_of(view)
    cells = {
        row.cells[0].text: dict(zip(headings(usage), (cell.text for cell in row.cells[1:]), strict=True))
        for row in usage.rows
    }
    assert cells == {
        "baseline": {
            "at the limit": "0.350 s", "speed, of the limit's": "35 %", "lost to kernels": "0.250 s",
            "to gaps": "0.314 s", "outside": "90.4 ms", "GPU busy": "60 %",
            "energy an image": "1,505 J", "mean power": "700 W",
            "SM clock": "1785 MHz", "hours for 1,000 images": "0.279", "clocks held down by": "power cap",
        },
        "VAE": dict.fromkeys(headings(usage), "–")
        | {"hours for 1,000 images": "0.14", "clocks held down by": "nothing"},
    }  # fmt: skip
    reason = "no limit: the work of this recipe was not counted: one image on several GPUs"
    assert list(no_limit(entry for row in view.rows for entry in row.labelled)) == [("VAE", reason)]
