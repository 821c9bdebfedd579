"""What is measured among the devices of a host, and when it is measured again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foreplan.datasets.device import Device
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.ranks.together import PassTimes
from foreplan.datasets.tier import Contention, Tier
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner import host_together
from foreplan.planner.host_together import together

CPU = DeviceName.parse("cpu:threads=1")
FP32 = Variant("fp32", "fp32", "torch.linear")
FORWARD, BACKWARD = (
    program(f"linear_{way}", FP32, rows=8, n=64, k=64) for way in ("forward", "backward")
)
CALLS = {FORWARD: 2, BACKWARD: 1}


def profile(*seconds: float) -> dict[DeviceName, Profile]:
    rows = tuple(
        Row(
            op=item.op, dims=item.dims, variant=str(item.variant), status="ok", samples=9,
            low_s=s, median_s=s, high_s=s,
        )
        for item, s in zip(CALLS, seconds, strict=False)
    )  # fmt: skip
    device = Device(name="cpu:threads=1", chip="c", vendor="v", kind="cpu")
    return {CPU: Profile(device=device, software={"torch": "2.13"}, rows=rows)}


class Measuring:
    """Stands in for the host, and counts what is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links, self.stand_ins = 0, 0
        self.passes: list[Any] = []
        monkeypatch.setattr(host_together, "measure_links", self._links)
        monkeypatch.setattr(host_together, "measure_contention", self._stand_ins)
        monkeypatch.setattr(host_together, "measure_together", self._passes)
        monkeypatch.setattr(host_together, "measure_recorded", self._record)
        self.recorded: list[Any] = []
        monkeypatch.setattr(host_together, "assign_cores", lambda devices: ((0,), (1,)))

    def _links(self, devices: Any) -> Any:
        self.links += 1
        return self

    def tier(self, group: Any, scope: Any, source: str) -> Tier:
        return Tier(
            group=group, scope=scope, latency_s=1e-4, bandwidth_bytes_per_s=1e9, source=source
        )

    def _stand_ins(self, *_: Any, **__: Any) -> tuple[Contention, ...]:
        self.stand_ins += 1
        return (Contention(kind="memory", factors={2: 1.5}),)

    def _passes(self, devices: Any, calls: Any, price_s: Any, **how: Any) -> PassTimes:
        self.passes.append((calls, price_s, how["counts"]))
        return PassTimes({1: 0.9, 2: 1.1}, {CPU: {FORWARD: 0.8, BACKWARD: 1.1}})

    def _record(self, devices: Any, calls: Any, price_s: Any, **how: Any) -> PassTimes:
        self.recorded.append(calls)
        return PassTimes({1: 0.4}, {device: dict.fromkeys(calls, 0.4) for device in devices})


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    return Measuring(monkeypatch)


def found(
    folder: Path, profiles: dict[DeviceName, Profile], calls: dict[Program, int],
    devices: Sequence[DeviceName] = (CPU, CPU),
) -> dict[str, dict[int, float]]:  # fmt: skip
    tiers, contention = together(
        devices, profiles, [calls] if calls else [], folder, "here", Console(quiet=True)
    )  # fmt: skip
    assert len(tiers) == 1
    return {item.kind: dict(item.factors) for item in contention}


def test_passes_are_timed_over_their_price_and_kept(measuring: Measuring, tmp_path: Path) -> None:
    profiles = profile(1e-3, 3e-3)
    for _ in "ab":
        assert found(tmp_path, profiles, CALLS) == {"training": {1: 0.9, 2: 1.1}}
    priced = {CPU: {FORWARD: pytest.approx(1e-3), BACKWARD: pytest.approx(3e-3)}}
    assert measuring.passes == [(CALLS, priced, (1, 2))]
    assert (measuring.links, measuring.stand_ins) == (1, 0)
    # Another workload's pass is no reason; other prices of that which was timed are.
    found(tmp_path, profiles, {FORWARD: 7})
    assert len(measuring.passes) == 1
    found(tmp_path, profile(1e-3, 4e-3), CALLS)
    assert [price for _, price, _ in measuring.passes[1:]] == [
        {CPU: {FORWARD: pytest.approx(1e-3), BACKWARD: pytest.approx(4e-3)}}
    ]


def test_each_programs_part_is_kept_too(measuring: Measuring, tmp_path: Path) -> None:
    for _ in "ab":
        _, (contention,) = together(
            [CPU, CPU], profile(1e-3, 3e-3), [CALLS], tmp_path, "here", Console(quiet=True)
        )
        assert {each.program(): each.factor for each in contention.programs} == {
            FORWARD: 0.8, BACKWARD: 1.1,
        }  # fmt: skip
        assert {each.device for each in contention.programs} == {str(CPU)}
    assert len(measuring.passes) == 1
    # A file that has none is of an older version.
    path = tmp_path / "links.json"
    known = json.loads(path.read_text())
    del known["passes"]["contention"]["programs"]
    path.write_text(json.dumps(known))
    found(tmp_path, profile(1e-3, 3e-3), CALLS)
    assert len(measuring.passes) == 2


GPUS = [DeviceName.parse(f"cuda:{k}") for k in range(2)]


def test_gpus_know_every_program_of_the_folder(measuring: Measuring, tmp_path: Path) -> None:
    """What is issued and what is recorded differ by more than the nearest program could say."""
    profiles = dict.fromkeys(GPUS, profile(1e-3, 3e-3)[CPU])
    for calls in ({FORWARD: 2}, {FORWARD: 2}, {BACKWARD: 1}, {FORWARD: 9}):
        assert found(tmp_path, profiles, calls, GPUS) == {"training": {1: 0.4}}
    assert measuring.recorded == [{FORWARD: 2}, {FORWARD: 2, BACKWARD: 1}]
    assert (measuring.links, measuring.passes) == (1, [])


@pytest.mark.parametrize("names", [["cuda:0"], ["cuda:0", "cuda:0/sms=32"]])
def test_a_gpus_passes_are_its_own(names: list[str], measuring: Measuring, tmp_path: Path) -> None:
    """Plans of many such GPUs rest on the profile of one."""
    devices = [DeviceName.parse(name) for name in names]
    profiles = dict.fromkeys(devices, profile(1e-3, 3e-3)[CPU])
    console = Console(quiet=True)
    assert together(devices, profiles, [], tmp_path, "here", console) == ([], [])
    for passes in ([CALLS], [CALLS], []):
        tiers, (contention,) = together(devices, profiles, passes, tmp_path, "here", console)
        assert tiers == []
        assert contention.factors == {1: 0.4}
    assert (measuring.links, measuring.stand_ins, len(measuring.recorded)) == (0, 0, 1)


def test_passes_wait_until_all_their_programs_are_priced(
    measuring: Measuring, tmp_path: Path
) -> None:
    assert found(tmp_path, profile(1e-3), CALLS) == {}
    assert measuring.passes == []


def test_other_plans_have_programs_that_stand_for_decoding(
    measuring: Measuring, tmp_path: Path
) -> None:
    profiles = profile(1e-3, 3e-3)
    assert found(tmp_path, profiles, {}) == {"memory": {2: 1.5}}
    assert found(tmp_path, profiles, CALLS) == {"memory": {2: 1.5}, "training": {1: 0.9, 2: 1.1}}
    assert found(tmp_path, profiles, {}) == {"memory": {2: 1.5}, "training": {1: 0.9, 2: 1.1}}
    assert (measuring.links, measuring.stand_ins, len(measuring.passes)) == (1, 1, 1)


def test_a_step_of_each_precision_is_a_pass_of_its_own(
    measuring: Measuring, tmp_path: Path
) -> None:
    """What several have counts by the mean; what a device could not run is left out."""
    profiles = profile(1e-3, 3e-3)
    unpriced = program("linear_forward", FP32, rows=9, n=64, k=64)
    passes = [CALLS, {unpriced: 1}, {FORWARD: 5}]
    console = Console(quiet=True)
    for _ in "ab":
        _, (contention,) = together([CPU, CPU], profiles, passes, tmp_path, "here", console)
        assert contention.factors == {1: 0.9, 2: 1.1}
    assert [calls for calls, _, _ in measuring.passes] == [CALLS, {FORWARD: 5}]


def test_a_pass_that_does_not_run_is_told_and_prices_stay(
    measuring: Measuring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any, calls: Any, price_s: Any, **how: Any) -> PassTimes:
        if BACKWARD in calls:
            raise MissingDataError("ranks at work together on cpu: no memory")
        return PassTimes({1: 0.5, 2: 0.5}, {CPU: dict.fromkeys(calls, 0.5)})

    monkeypatch.setattr(host_together, "measure_together", broken)
    console = Console(record=True, width=100)
    for passes, kinds in (([CALLS], []), ([CALLS, {FORWARD: 1}], ["training"])):
        _, contention = together([CPU, CPU], profile(1e-3, 3e-3), passes, tmp_path, "here", console)
        assert [one.kind for one in contention] == kinds
    assert "pass not timed (1 of 2): ranks at work together on cpu: no memory" in (
        console.export_text()
    )


def test_another_workloads_pass_keeps_what_was_timed(measuring: Measuring, tmp_path: Path) -> None:
    profiles, console = profile(1e-3, 3e-3), Console(quiet=True)
    for passes in ([{FORWARD: 2}], [{BACKWARD: 1}], [{FORWARD: 2}]):
        _, (contention,) = together([CPU, CPU], profiles, passes, tmp_path, "here", console)
    assert [calls for calls, _, _ in measuring.passes] == [{FORWARD: 2}, {BACKWARD: 1}]
    assert len({one.program() for one in contention.programs}) == len(contention.programs) == 2


def test_a_single_processor_has_passes_and_no_links(measuring: Measuring, tmp_path: Path) -> None:
    console = Console(quiet=True)
    for passes in ([CALLS], [CALLS]):
        tiers, (contention,) = together(
            [CPU], profile(1e-3, 3e-3), passes, tmp_path, "here", console
        )
        assert tiers == []
        assert contention.programs
    assert (measuring.links, [counts for _, _, counts in measuring.passes]) == (0, [(1,)])
    assert together([CPU], profile(1e-3, 3e-3), [], tmp_path / "b", "here", console) == ([], [])


@pytest.mark.parametrize("broken", [{"price_s": 7}, {"programs": [{}]}, {"contention": None}])
def test_a_broken_file_is_refused_in_a_line(
    measuring: Measuring, tmp_path: Path, broken: dict[str, Any]
) -> None:
    found(tmp_path, profile(1e-3, 3e-3), CALLS)
    path = tmp_path / "links.json"
    known = json.loads(path.read_text())
    known["passes"] |= broken
    path.write_text(json.dumps(known))
    with pytest.raises(SpecError, match=r"links\.json"):
        found(tmp_path, profile(1e-3, 3e-3), CALLS)
