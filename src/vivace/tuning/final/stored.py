"""A store's results for a model: those of the same search, which continues, and figures of other runs."""

from __future__ import annotations

from vivace.benchmark.store import Store
from vivace.benchmark.store.invocation import Purpose
from vivace.tuning.final.measuring import Bench
from vivace.tuning.model.priors import PriorSource
from vivace.tuning.model.regression import Datum
from vivace.tuning.search.results import Result, Rung, latest

_OTHER_WORKLOAD, _OTHER_MACHINE = 0.1, 0.25
"""Standard errors of a stored gain as a prediction of the present one."""


def history_of(bench: Bench) -> tuple[list[Result], PriorSource]:
    """Return the results of the same search, and the figures of other runs, with its finals."""
    results: list[Result] = []
    others: list[Datum] = []
    with Store.create(bench.run.folder) as store:
        for compared in reversed(list(store.comparisons(repeated=True))):
            run, baseline = compared.run, compared.records[0]
            assert run is not None
            trial, environment = baseline.trial, baseline.environment
            if not trial.recipe.is_baseline or run.purpose is Purpose.IMAGES:  # whose times are of one call
                continue
            if trial.model != bench.located.model or trial.device != bench.environment.device:
                continue
            rung, steps = bench.rung_of(run, trial.workload)
            is_here = environment.model_copy(update={"place": None}) == bench.environment
            if is_here and rung is Rung.FINAL and bench.judged_by.is_of(run):
                bench.finals.compared.append(compared)
                rows = bench.finals.rows_with_images(compared.records, compared.quality, store)
            else:
                rows = compared.rows(bench.objective.limits)
            for row in rows:
                result = bench.judged_by.adjust(
                    bench.result_of(row, rows[0], rung or Rung.SCREENED, steps), run
                )
                if result is None:
                    continue
                if rung is Rung.FINAL and result.is_measured and bench.judges and result.gate is None:
                    continue  # of a final that was interrupted
                if is_here and rung is not None:
                    results.append(result)
                elif result.gain is not None and not result.recipe.is_baseline:
                    error = _OTHER_WORKLOAD if is_here else _OTHER_MACHINE
                    others.append(Datum(result.recipe, result.gain, error))
    if bench.finals.compared:
        bench.finals.read()
    bench.time.note(latest(results).values())
    return results, PriorSource("this store", tuple(others))
