from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.plan import (
    Alternative,
    Plan,
    Provenance,
    ProvenBound,
    VerifyHints,
)
from foreplan.planner.predict import Forecast
from foreplan.planner.registry import planner
from foreplan.planner.sureness import Confidence
from foreplan.planner.times import Times
from foreplan.planner.verify import peer_words

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests import `memory_driver`
TWO = [{"name": "cpu:threads=1,isa=avx2"}, {"name": "cpu:threads=1"}]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the toy planner for this process and for those it starts."""
    home = tmp_path / "site"
    info = home / "toy_planner-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-planner\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[foreplan.planners]\ntoy = fake_planner:ToyPlanner\n")
    shutil.copy(HERE / "fake_planner.py", home / "fake_planner.py")
    monkeypatch.syspath_prepend(str(home))
    source = str(HERE.parents[2] / "src")
    paths = [str(home), source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yield home
    sys.modules.pop("fake_planner", None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CUDA driver, as far as `PeerWords` calls it."""
    from memory_driver import Driver

    made = Driver()
    monkeypatch.setattr(peer_words.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


@pytest.fixture
def make_plan(toy: Path) -> Callable[..., Plan]:
    def make(
        decision: dict[str, Any] | None = None,
        alternatives: dict[str, dict[str, Any]] | None = None,
        devices: list[dict[str, Any]] | None = None,
        tolerance: float = 0.5,
        backend: Literal["gloo", "nccl"] = "gloo",
        **workload: Any,
    ) -> Plan:
        chosen = planner("toy")
        cluster = validate(Cluster, {"devices": devices or TWO}, "cluster")
        asked = validate(chosen.workload_type, workload, "workload")
        problem: Problem[Any] = Problem(
            None, cluster, asked, CostBook((), given=chosen.given(asked))
        )

        def forecast(document: dict[str, Any]) -> Forecast:
            document = {**document, "deadlock": False}
            return Forecast(chosen, problem, validate(chosen.decision_type, document, "decision"))

        main = forecast(decision or {})
        return Plan(
            kind="toy", model=None, cluster=cluster, workload=asked.model_dump(mode="json"),
            decision=decision or {}, predicted=main.prediction(), times=Times.of(main.timeline),
            alternatives=tuple(
                Alternative(name=n, decision=d, predicted=forecast(d).prediction())
                for n, d in (alternatives or {}).items()
            ),
            confidence=Confidence(probability_best=1.0, draws=1),
            bound=ProvenBound(status="heuristic", lower_s=None, gap=None, solver="toy"),
            verify=VerifyHints(backend=backend, ranks=2, tolerance=tolerance),
            provenance=Provenance(foreplan="0", costs="measured", seed=0),
        )  # fmt: skip

    return make
