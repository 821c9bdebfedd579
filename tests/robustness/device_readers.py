"""`device_readers`: clusters, profiles and figures of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.robustness.mutations import as_yaml
from tests.robustness.reader import Reader

from foreplan.datasets.specs import load_document

PROFILES = Path(__file__).parent.parent / "benchmarks" / "profiles"


def _cluster() -> Any:
    from tests.planner.report.conftest import CLUSTER

    return CLUSTER | {"contention": [{"kind": "memory", "factors": {"2": 1.1, "3": 1.5}}]}


def _use_cluster(path: Path) -> None:
    from foreplan.datasets.cluster import Cluster
    from foreplan.datasets.cluster_merge import merge
    from foreplan.datasets.specs import validate

    cluster = Cluster.load(path)
    ranks = cluster.ranks()
    cluster.links(range(min(len(ranks), 8)))
    cluster.rebase("a", "b/c").to_yaml()
    cluster._repr_html_()
    cluster.to_frame()
    again = path.with_name("again.yaml")
    again.write_text(cluster.to_yaml(), encoding="utf-8")
    assert Cluster.load(again) == cluster
    merge(cluster, validate(Cluster, {"devices": [{"name": "t4", "host": "other"}]}, "other"))


def _profile() -> Any:
    document = json.loads((PROFILES / "cpu-threads-1.json").read_text())
    rows = document["rows"]
    return document | {"rows": rows[:: max(1, len(rows) // 12)]}


def _use_profile(path: Path) -> None:
    from foreplan.cost_models.costs import Copy, HostLaunch
    from foreplan.cost_models.sources.tables import InterpolatedSource, MeasuredSource
    from foreplan.datasets.profile import Profile

    profile = Profile.load(path)
    for source in (MeasuredSource(profile), InterpolatedSource(profile)):
        for work in (*list(profile.by_program)[:20], Copy(1 << 20), HostLaunch(2)):
            source.estimate(work, profile.device.name)
    profile.to_json()


def _device() -> Any:
    return {
        "name": "my_gpu", "chip": "x100", "vendor": "nvidia", "kind": "cuda",
        "peak_flops": {"fp16/matrix": "312 TFLOP/s", "fp32/vector": 19.5e12},
        "memory_bytes": "80 GiB", "memory_bandwidth": "2 TB/s", "units": 108,
        "clock_hz": "1.41 GHz", "sources": {"memory_bytes": "data sheet"},
    }  # fmt: skip


def _use_device(path: Path) -> None:
    from foreplan.datasets.device import Device

    device = Device.load(path)
    device.vector()
    device.peak("fp16")
    json.dumps(device.model_dump(mode="json"))


def _fit() -> Any:
    rows = [row for row in _profile()["rows"] if row["status"] == "ok"]
    device = _profile()["device"]
    return {"schema": "foreplan.fit/1", "law": "rates/3", "device": device, "tasks": rows}


def _use_fit(path: Path) -> None:
    from foreplan.cost_models.sources.device_fit import DeviceFit

    fit = DeviceFit.load(path)
    _ = fit.programs, fit.seconds


def _journal() -> bytes:
    from foreplan.datasets.timing.profile_journal import SCHEMA

    result = {"times_s": [1e-5, 2e-5], "samples": 2, "calls": 1, "preempted": 0,
              "cache_state": "cold", "load": 0.1, "clock_hz": None, "error": None}  # fmt: skip
    line = {"op": "linear", "dims": {"m": 8, "n": 64, "k": 64},
            "variant": "bf16/bf16/torch.linear", "round": 0, "result": result}  # fmt: skip
    lines = [{"schema": SCHEMA, "identity": {"a": 1}}, {"figures": {"bandwidth": 1e9}}, line]
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def _use_journal(path: Path) -> None:
    from foreplan.datasets.timing.measurement import percentiles
    from foreplan.datasets.timing.profile_journal import ProfileJournal

    with ProfileJournal(path) as journal:
        journal.resume({"a": 1})
        for part in journal.parts.values():
            if part.times_s:
                percentiles([part])


def device_readers() -> list[Reader]:
    """Of clusters and devices."""
    return [
        Reader("cluster-yaml", _use_cluster, _cluster, file="cluster.yaml", dump=as_yaml),
        Reader("cluster-json", _use_cluster, _cluster),
        Reader("profile", _use_profile, _profile),
        Reader("device", _use_device, _device, file="device.yaml", dump=as_yaml),
        Reader("device-fit", _use_fit, _fit),
        Reader("journal", _use_journal, data=_journal, file="j.jsonl"),
        Reader("yaml", load_document, _cluster, file="x.yaml", dump=as_yaml),
    ]  # fmt: skip
