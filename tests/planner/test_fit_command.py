"""``profile --fit`` without a clock: which tasks are timed, what is kept, what the book prices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.rates.operator_rates import rate_terms
from foreplan.cost_models.sources.device_fit import DeviceFit, fit_path
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model_zoo import zoo_model
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import validate
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner.api import plan
from foreplan.planner.fit_command import FittedDevice, fit_line, importance
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.serving.spec import ServingWorkload

WORKLOAD = {"batch": 4, "prompt_tokens": 32, "new_tokens": 8}
DEVICE = {
    "name": "cpu:threads=1", "chip": "test", "vendor": "test", "kind": "cpu", "isa": ("avx2",),
    "peak_flops": {"fp32/vector": 1e11, "bf16/vector": 4e11, "int8/vector": 8e11},
    "memory_bandwidth": 4e10, "launch_overhead_s": 1e-6, "memory_bytes": 8 << 30,
    "sources": dict.fromkeys(
        ("peak_flops.fp32/vector", "peak_flops.bf16/vector", "peak_flops.int8/vector",
         "memory_bandwidth", "launch_overhead_s"), "measured"),
}  # fmt: skip


class Machine:
    """Measures as `profile_command` does, on a device that takes 1.7 times its full rate."""

    def __init__(self, path: Path, torch: str = "2") -> None:
        self.path, self.torch = path, torch
        self.timed: list[Program] = []

    def __call__(self, programs: Sequence[Program]) -> Profile:
        old = Profile.load(self.path).rows if self.path.exists() else ()
        known = {row.program(): row for row in old}
        device = validate(Profile, self._document([]), "test").device
        for item in programs:
            self.timed.append(item)
            seconds = 1.7 * float(rate_terms([item], device).sum())
            known[item] = Row(op=item.op, dims=item.dims, variant=str(item.variant), status="ok",
                              low_s=seconds, median_s=seconds, high_s=seconds)  # fmt: skip
        rows = [row.model_dump(exclude_none=True) for row in known.values()]
        profile = validate(Profile, self._document(rows), "test")
        profile.save(self.path)
        return profile

    def _document(self, rows: list[dict[str, object]]) -> dict[str, object]:
        return {"schema": "foreplan.profile/1", "device": DEVICE, "rows": rows,
                "software": {"torch": self.torch}}  # fmt: skip


@pytest.fixture(scope="module")
def candidates() -> list[Program]:
    asked = validate(ServingWorkload, WORKLOAD, "workload")
    return serving_programs(zoo_model("demo-llama-random"), asked, "cpu")


def test_a_few_tasks_are_timed_and_a_second_call_adds_to_them(
    candidates: list[Program], tmp_path: Path
) -> None:
    path = tmp_path / "cpu-threads-1.json"
    machine = Machine(path)
    first = FittedDevice(candidates, path, machine).fit(12)
    assert len(first.tasks) == len(machine.timed) == 12
    assert set(machine.timed) <= set(candidates)
    assert DeviceFit.load(fit_path(path)) == first
    assert "fitted to 12 tasks" in fit_line(first)
    norms = [
        program("norm_backward", Variant("fp32", "fp32", "torch.layer_norm"), rows=r, cols=c)
        for r in (64, 512) for c in (256, 2048)
    ]  # fmt: skip
    second = FittedDevice(norms, path, machine).fit(2)
    assert set(second.programs) > set(first.programs)
    assert 12 < len(second.tasks) <= 14
    assert len(Profile.load(path).rows) == len(second.tasks)
    same = FittedDevice(candidates, path, machine).fit(12)
    assert same == second, "the earlier tasks cover these candidates"


def test_another_torch_starts_anew(candidates: list[Program], tmp_path: Path) -> None:
    path = tmp_path / "cpu-threads-1.json"
    FittedDevice(candidates, path, Machine(path)).fit(10)
    path.unlink()
    newer = FittedDevice(candidates[:40], path, Machine(path, torch="3")).fit(5)
    assert len(newer.tasks) == 5
    assert newer.software == {"torch": "3"}


def test_too_few_tasks_are_refused(candidates: list[Program], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(SpecError, match="at least 2"):
        FittedDevice(candidates, path, Machine(path)).fit(1)
    assert not list(tmp_path.iterdir())


def test_a_number_of_tasks_without_a_fit_is_refused() -> None:
    from foreplan.cli import app

    with pytest.raises(SpecError, match="--fit"):
        app(["profile", "--tasks", "12"], standalone_mode=False)


def test_kernels_that_no_plan_would_choose_matter_little(tmp_path: Path) -> None:
    device = Machine(tmp_path / "x.json")(()).device
    sizes = {"rows": 1, "n": 2048, "k": 2048}
    good, bad = (
        program("linear", Variant("int4", dtype, kernel), **sizes)
        for dtype, kernel in (("bf16", "torch.int4pack_mm"), ("fp32", "torch.unpack_linear"))
    )
    weights = importance([good, bad], device)
    assert weights[0] > 2 * weights[1] > 0
    assert weights.mean() == pytest.approx(1)


def test_predicted_costs_come_from_the_fit_and_the_plan_says_so(
    candidates: list[Program], tmp_path: Path
) -> None:
    path = tmp_path / "cpu-threads-1.json"
    fit = FittedDevice(candidates, path, Machine(path)).fit(12)
    document = {"devices": [{"name": "cpu:threads=1", "profile": path.name}]}
    (tmp_path / "cluster.yaml").write_text(validate(Cluster, document, "c").to_yaml())
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    profiles = Profiles.of(cluster, tmp_path)
    label = cluster.ranks()[0].label
    book = cost_book(cluster, profiles, "predicted")
    found = [book.cost(item, label) for item in candidates]
    timed = [item for item, estimate in zip(candidates, found, strict=True)
             if estimate.source == "measured"]  # fmt: skip
    assert set(timed) == set(fit.programs)
    assert {estimate.source for estimate in found} == {"measured", "predicted"}
    said = DeviceFit.load(fit_path(path)).model.forecast(candidates).mean_s
    for estimate, seconds in zip(found, said, strict=True):
        assert estimate.source == "measured" or estimate.mean_s == pytest.approx(seconds)
    assert cost_book(cluster, profiles, "roofline").cost(candidates[0], label).source == "roofline"
    made = plan("serving", "demo-llama-random", tmp_path / "cluster.yaml", WORKLOAD,
                costs="predicted")  # fmt: skip
    assert set(made.provenance.source_share) <= {"measured", "predicted"}
    assert made.provenance.source_share["predicted"] > 0.5
    assert f"{label} fit" in made.provenance.profiles
    assert np.isfinite(made.predicted.total_s)


def test_a_fit_of_another_device_is_refused(candidates: list[Program], tmp_path: Path) -> None:
    path = tmp_path / "cpu-threads-1.json"
    made = FittedDevice(candidates, path, Machine(path)).fit(8)
    other = made.device.model_copy(update={"chip": "another"})
    made.model_copy(update={"device": other}).save(fit_path(path))
    document = {"devices": [{"name": "cpu:threads=1", "profile": path.name}]}
    with pytest.raises(SpecError, match="chip"):
        Profiles.of(validate(Cluster, document, "c"), tmp_path)


def test_without_a_bandwidth_there_is_nothing_to_fit() -> None:
    bare = {**DEVICE, "memory_bandwidth": None}
    device = validate(Profile, {"schema": "foreplan.profile/1", "device": bare,
                                "software": {}}, "test").device  # fmt: skip
    with pytest.raises(MissingDataError, match="bandwidth"):
        importance([program("add", Variant("bf16", "bf16", "torch.add"), rows=1, cols=8)], device)
