"""Trials spread over a Ray cluster of several nodes on this machine, of which one ends meanwhile."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import stub_worker
from tests.unit.benchmark.test_spread_trials import RECIPES, TIMING, check_comparisons
from vivace.benchmark import Run, Store, Study
from vivace.benchmark.places.ray_nodes import RayNodes
from vivace.benchmark.progress import Progress
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.studies import run_study
from vivace.errors import Unsupported
from vivace.foundation.spec.record import Outcome, Round

ROOT = Path(__file__).parents[3]


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unsupported, match=r"--ray needs Ray on every node: pip install ray"):
        RayNodes("auto", "cpu")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("somewhere", "give HOST:PORT of the cluster's head"),
        ("host:port", "give HOST:PORT of the cluster's head"),
        (
            "127.0.0.1:1",
            r"nothing answers there \(Connection refused\); start a cluster with `ray start --head`",
        ),
        ("no-such-host.invalid:6379", "nothing answers there"),
    ],
)
def test_a_wrong_address_is_told_at_once(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        pytest.fail("Ray tries for a minute and a half")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(Unsupported, match=message):
        RayNodes(address, "cpu")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that measures nothing and three nodes of one CPU."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    # Nodes and their workers find the stub worker by this.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("VIVACE_STUB_ROUND_S", "1.0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80_000_000}
    quickly = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    ray_cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quickly, **small},
    )
    try:
        for _ in range(3):
            ray_cluster.add_node(num_cpus=1, **small)
        yield ray_cluster
    finally:
        ray_cluster.shutdown()


class Ending(Progress):
    """Ends a node without notice when it has returned its first round."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.store: Store | None = None
        self.ended: list[tuple[int, int]] = []
        self.lost: str | None = None

    def end_round(self, index: int, round_: Round) -> None:
        self.ended.append((index, round_.index))
        if self.lost is None and len(self.ended) == 2:
            node = next(iter(self.cluster.worker_nodes))
            self.lost = node.node_id
            self.cluster.remove_node(node, allow_graceful=False)


def bench(cluster: Any, store: Path, progress: Progress) -> Run:
    study = Study.of(
        "tiny-sd", RECIPES, num_inference_steps=2, quality=False, device="cpu", timing=TIMING, rivals=False
    )
    with contextlib.closing(RayNodes(cluster.address, "cpu", stub_worker.COMMAND)) as pool:
        return run_study(study, RunSettings(store=store, progress=progress, pool=pool))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_node_ends_and_its_trials_run_elsewhere(cluster: Any, tmp_path: Path) -> None:
    progress = Ending(cluster)
    run = bench(cluster, tmp_path / "store", progress)
    assert progress.lost is not None
    check_comparisons(run)
    assert all(record.outcome is Outcome.MEASURED for record in run)
    assert all(len(r.rounds) == TIMING.rounds for c in run.comparisons for r in c.records[1:])
    trials = {record.trial.recipe.text: record.trial for record in run}
    with Store.read_only(tmp_path / "store") as store:
        rows = {
            (environment.place.uuid, trial.recipe.text, index)
            for trial in trials.values()
            for environment in store.environments(trial)
            if environment.place is not None
            for index in store.rounds(trial.key(environment))
        }
    assert len(rows) == len(progress.ended), "every round that was returned is stored once"
    assert len({place for place, _, _ in rows}) > 1, "Ray spread them"
    for comparison in run.comparisons:
        for record in comparison.records[1:]:
            place = record.environment.place
            assert place is not None
            kept = {
                index for uuid, text, index in rows if (uuid, text) == (place.uuid, record.trial.recipe.text)
            }
            assert len(kept) == TIMING.rounds, (
                "all its rounds are of one node, of another than the one that ended"
            )

    again = Ending(cluster)
    again.lost = "nothing"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            "vivace.benchmark.places.spread_trials.SpreadTrials.take",
            lambda *_: pytest.fail("measured again"),
        )
        repeated = bench(cluster, tmp_path / "store", again)
    assert not again.ended
    assert [r.trial.recipe.text for r in repeated] == [r.trial.recipe.text for r in run]
