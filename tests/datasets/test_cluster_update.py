"""What a measurement changes in a cluster, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_update import update
from foreplan.datasets.specs import validate

CPU = {"name": "cpu:threads=1", "host": "big", "profile": "cpu-threads-1.json"}
AVX = {"name": "cpu:threads=1,isa=avx2", "host": "big", "profile": "cpu-threads-1-isa-avx2.json"}


def tier(bandwidth: float, **more: Any) -> dict[str, Any]:
    return {
        "group": ["big"], "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": bandwidth,
        "source": "measured", **more,
    }  # fmt: skip


def contention(factor: float) -> dict[str, Any]:
    return {"kind": "memory", "factors": {"2": factor}, "host": "big", "source": "measured"}


def cluster(*devices: dict[str, Any], **more: Any) -> Cluster:
    return validate(Cluster, {"devices": list(devices), **more}, "test")


def test_devices_that_were_measured_before_stay() -> None:
    found, notes = update(cluster(CPU), cluster(AVX))
    assert [str(entry.name) for entry in found.devices] == [CPU["name"], AVX["name"]]
    assert [entry.profile for entry in found.devices] == [CPU["profile"], AVX["profile"]]
    assert notes == ["not measured now, and kept: big/cpu:threads=1"]


def test_what_was_written_by_hand_stays() -> None:
    by_hand = CPU | {"memory_bytes": 1 << 30, "price_per_hour": 0.5, "count": 4}
    known = cluster(
        by_hand, {"name": "t4", "host": "far", "count": 2},
        tiers=[tier(1e9, scope="network", group=["big", "far"], source="a data sheet")],
        assumptions=["a quiet network"],
    )  # fmt: skip
    found, notes = update(known, cluster(CPU, tiers=[tier(2e9, backend="gloo")]))
    assert found.devices == known.devices
    assert [t.scope for t in found.tiers] == ["network", "host"]
    assert found.assumptions == known.assumptions
    assert notes == ["not measured now, and kept: far/t4"]


@pytest.mark.parametrize(("before", "now", "ranks"), [(1, 3, 3), (2, 2, 2), (3, 1, 3)])
def test_a_processor_is_named_once_for_each_rank(before: int, now: int, ranks: int) -> None:
    found, notes = update(cluster(*[CPU] * before), cluster(*[CPU] * now))
    assert len(found.ranks()) == ranks
    assert notes == []
    counted, _ = update(cluster(CPU | {"count": before}), cluster(*[CPU] * now))
    assert len(counted.ranks()) == ranks


def test_the_same_measurement_changes_nothing() -> None:
    known = cluster(CPU, AVX, tiers=[tier(1e9)], contention=[contention(1.5)])
    assert update(known, known) == (known, [])


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            cluster(CPU | {"memory_bytes": 1 << 30}), cluster(CPU | {"memory_bytes": 1 << 29}),
            "memory_bytes 536870912 takes the place of 1073741824",
        ),
        (
            cluster(CPU | {"profile": "theirs.json"}), cluster(CPU),
            "cpu-threads-1.json takes the place of profile theirs.json",
        ),
        (cluster(CPU, tiers=[tier(1e9)]), cluster(CPU, tiers=[tier(2e9)]), "host: big"),
        (
            cluster(CPU, contention=[contention(1.5)]), cluster(CPU, contention=[contention(1.6)]),
            "memory contention of big: measured anew",
        ),
    ],
)  # fmt: skip
def test_what_gives_way_is_told(before: Cluster, now: Cluster, told: str) -> None:
    found, notes = update(before, now)
    assert found == now
    assert len(notes) == 1
    assert told in notes[0]
