"""The paths that `write_paths` breaks: what each command writes, with made-up measurements."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
from rich.console import Console

from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.measurement import Measurement

Work = Callable[[Path], None]
#: Written beside the folder for each measurement, so that those made twice are counted.
_LOG = "log"


def _nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True)
class WritePath:
    """A command's writing.

    Attributes:
        run: does it in a folder; resumes what an earlier run left.
        finished: asserts that the folder holds the whole result.
        whole: asserts that whatever is there can be read, in any state in between.
        prepare: what lies in the folder before.
        may_repeat: measurements that may be made again after a fault: those in flight.
    """

    run: Work
    finished: Work
    whole: Work = field(default=_nothing)
    prepare: Work = field(default=_nothing)
    may_repeat: int = 0


# -------------------------------------------------------------------------------------- profile

_PROGRAMS = [program("add", Variant("bf16", "bf16", "torch.add"), rows=n, cols=64) for n in (1, 2)]


class _Worker:
    """A measuring process that makes its times up."""

    identity: Mapping[str, Any] = {
        "chip": "c", "vendor": "v", "kind": "cpu", "board": "b", "units": 1, "isa": [],
        "memory_bytes": 1 << 30, "last_level_cache_bytes": 1 << 20, "software": {"torch": "1"},
    }  # fmt: skip

    def __init__(self, device: Any, *, cores: Any = None, memory_bytes: Any = None) -> None:
        self.device, self.cores, self.memory_bytes = device, (0,), memory_bytes
        self.log: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {"peak_flops.fp32": 1e9, "memory_bandwidth": 1e9, "launch_overhead_s": 1e-6}

    def measure(self, measured: Program, effort: object) -> Measurement:
        assert _Worker.where is not None
        with (_Worker.where / _LOG).open("a") as stream:
            stream.write(".")
        return Measurement((1e-5, 2e-5, 3e-5), 3)

    where: Path | None = None


def _profile(folder: Path) -> None:
    from foreplan.datasets.ranks.contention import Contention
    from foreplan.datasets.tier import Tier
    from foreplan.datasets.timing.profile_grid import ProfileGrid
    from foreplan.planner import host_together, profile_command

    class Made:
        def tier(self, group: Any, scope: Any, source: str) -> Tier:
            return Tier(group=group, scope=scope, latency_s=1e-4, bandwidth_bytes_per_s=1e9,
                        source=source)  # fmt: skip

    slow = Contention(kind="memory", factors={2: 1.5}, host="localhost")
    _Worker.where = folder.parent
    with (
        patch("foreplan.datasets.timing.profiling.Worker", _Worker),
        patch.object(host_together, "measure_links", lambda devices: Made()),
        patch.object(host_together, "measure_contention", lambda *_, **__: (slow,)),
        patch.object(ProfileGrid, "generic", lambda kind: ProfileGrid.exact(_PROGRAMS)),
    ):
        profile_command.profile_host(
            ["cpu:threads=1,isa=avx2", "cpu:threads=1"], folder, models=(), workload=None,
            purpose="serving", memory=(), quick=False, host="localhost",
            console=Console(quiet=True),
        )  # fmt: skip


def _profiled(folder: Path) -> None:
    from foreplan.datasets.cluster import Cluster
    from foreplan.datasets.profile import load_profiles

    cluster = Cluster.load(folder / "cluster.yaml")
    profiles = load_profiles(cluster, folder)
    assert len(profiles) == len(cluster.ranks()) == 2
    assert all(len(profile.rows) == len(_PROGRAMS) for profile in profiles.values())
    assert len(cluster.tiers) == len(cluster.contention) == 1
    assert not list(folder.glob("*.journal"))


def _profiles_whole(folder: Path) -> None:
    from foreplan.datasets.cluster import Cluster
    from foreplan.datasets.profile import Profile

    for path in folder.glob("cpu*.json"):
        Profile.load(path)
    if (folder / "cluster.yaml").exists():
        Cluster.load(folder / "cluster.yaml")
    if (folder / "links.json").exists():
        json.loads((folder / "links.json").read_text())


# -------------------------------------------------------------------------------- dataset build

_TASKS, _DRAWN = 3, 2


class _Builder:
    """A process that builds and times programs, made up."""

    def __init__(self, environment: Any = None, cores: Sequence[int] = ()) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if request["do"] == "time":
            return {"times_s": [1e-5, 1.1e-5], "calls": 1, "slow": False}
        names = [f"{request['module']}-{n}" for n in range(request["count"])]
        new = [name for name in names if name not in request["known"]]
        programs = [{"key": name, "seed": 0, "module": name, "trace": ""} for name in new]
        return {"programs": programs, "arguments": []}


def _dataset(folder: Path) -> None:
    from foreplan.datasets.tir import build_dataset, measure, shard_journal, site
    from foreplan.datasets.tir.target import TargetDevice
    from foreplan.datasets.tir.toolchain import Toolchain

    device = TargetDevice("cpu:threads=1", "llvm", 0, "chip", {"kind": "llvm"})
    with (
        patch.object(site, "WorkerProcess", _Builder),
        patch.object(measure, "require_tvm", lambda: Toolchain("1", "1")),
        patch.object(shard_journal, "_SHARD_ROWS", 2),
        patch.object(build_dataset, "_targets", lambda devices, chip: [device]),
    ):
        build_dataset.build_dataset(
            folder, tasks=folder.parent / "tasks.jsonl",
            options=measure.MeasureOptions(samples=_DRAWN, rounds=1),
        )  # fmt: skip


def _dataset_tasks(folder: Path) -> None:
    from foreplan.datasets.tir.task import Task
    from foreplan.datasets.tir.tir_jsonl import write_tasks

    tasks = [Task(f"t{n}", "x", f"m{n}", {"n/batch=1": 1}, frozenset({"f"})) for n in range(_TASKS)]
    write_tasks(tasks, folder.parent / "tasks.jsonl")


def _dataset_built(folder: Path) -> None:
    from foreplan.datasets.tir.records import read_records

    for where in (folder, folder / "shards"):
        keys = [r.program_key for r in read_records(where) if r.program_key]
        assert len(keys) == len(set(keys)), f"programs twice: {keys}"
        assert set(keys) == {f"m{t}-{n}" for t in range(_TASKS) for n in range(_DRAWN)}
    assert json.loads((folder / "summary.json").read_text())["measured_tasks"] == _TASKS


def _dataset_whole(folder: Path) -> None:
    from foreplan.datasets.tir.records import read_records

    for path in [*folder.glob("*.parquet"), *folder.glob("shards/*.parquet")]:
        assert list(read_records(path))
    finished = (folder / "shards" / "jobs.txt").read_text() if (
        folder / "shards" / "jobs.txt"
    ).exists() else ""  # fmt: skip
    found = {r.task_key for path in folder.glob("shards/*.parquet") for r in read_records(path)}
    # What the journal calls done is on the disk; its last line may be torn.
    assert {line.partition("/")[0] for line in finished.split("\n")[:-1]} <= found


# ------------------------------------------------------------------------------------- training


@functools.cache
def _models() -> tuple[Any, Any, Any]:
    """Two fitted models and a table that they answer differently."""
    from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
    from foreplan.datasets.sweeps.operator_table import operator_table, texts

    random = np.random.default_rng(0)
    dims = {k: 2.0 ** random.integers(4, 11, 400) for k in ("m", "n", "k")} | {"b": np.ones(400)}
    flops = 2 * dims["m"] * dims["n"] * dims["k"]
    table = operator_table(
        op=texts(["linear"] * 400), kind=texts(["linear"] * 400), dtype=texts(["fp32"] * 400),
        library=texts(["torch-2.1-cuda"] * 400), device=texts(["t4", "h200"] * 200), dims=dims,
        latency_s=1e-5 + flops / 5e12,
    )  # fmt: skip
    first, second = OperatorPredictor(trees=3), OperatorPredictor(trees=5)
    first.fit(table)
    second.fit(table, 2 * table.latency_s)
    return first, second, table


def _answers(folder: Path) -> Any:
    from foreplan.cost_models.model_store import load_operator_model

    return load_operator_model(str(folder / "model")).predict(_models()[2])


def _save(which: int) -> Work:
    def save(folder: Path) -> None:
        _models()[which].save(folder / "model", sources=[])

    return save


def _is(which: int, folder: Path) -> bool:
    told = _models()[which].predict(_models()[2])
    return bool(np.allclose(_answers(folder), told, rtol=5e-3))


def _trained(folder: Path) -> None:
    assert _is(1, folder)


def _old_or_new(folder: Path) -> None:
    assert _is(0, folder) != _is(1, folder)


# ---------------------------------------------------------------------------- plans and verify


def _verify(folder: Path) -> None:
    from foreplan.planner.verify import command
    from foreplan.planner.verify.verification import load_verification
    from foreplan.planner.verify.verify import VerificationRun

    document = load_verification(folder.parent / "run.json")
    with patch.object(command, "verify", lambda plan, **_: VerificationRun(document)):
        command.verify_command(
            folder.parent / "plan.json", folder / "verification.json", tolerance=None, rounds=1,
            thorough=False, only=None, trace=folder / "trace.json", report=folder / "report.html",
            rdzv_endpoint=None, host=None, dry_run=False, trust_paths=False, as_json=False,
            console=Console(quiet=True), show=Console(quiet=True).print,
        )  # fmt: skip


def _verify_inputs(folder: Path) -> None:
    from tests.robustness.plan_readers import plan_and_run

    plan, run = plan_and_run()
    (folder.parent / "plan.json").write_bytes(plan)
    (folder.parent / "run.json").write_bytes(run)
    (folder / "verification.json").write_bytes(run)  # of an earlier run


def _verified(folder: Path) -> None:
    _verify_whole(folder)
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    json.loads((folder / "trace.json").read_text())


def _verify_whole(folder: Path) -> None:
    from foreplan.planner.verify.verification import load_verification

    load_verification(folder / "verification.json")


def _plan(folder: Path) -> None:
    from foreplan.planner.plan_command import plan_files

    plan_files(
        "serving", "tiny-llama-random", "2xt4", "batch=2,prompt_tokens=8,new_tokens=2",
        costs="roofline", seed=0, output=folder / "plan.json",
    )  # fmt: skip


def _planned(folder: Path) -> None:
    from foreplan.planner.plan import load_plan

    load_plan(folder / "plan.json")


def _plan_whole(folder: Path) -> None:
    if (folder / "plan.json").exists():
        _planned(folder)


def _export(folder: Path) -> None:
    from foreplan.planner.export import export_plan
    from foreplan.planner.plan import load_plan

    export_plan(load_plan(folder.parent / "plan.json"), "vllm", folder)


def _export_inputs(folder: Path) -> None:
    _plan(folder.parent)


def _exported(folder: Path) -> None:
    assert (folder / "launch.sh").read_text().endswith('"$@"\n')
    assert (folder / "launch.sh").stat().st_mode & 0o111


def _import(folder: Path) -> None:
    from foreplan.cost_models.commands import import_operators

    import_operators(folder.parent / "n.csv", "neusight", folder / "ops.parquet")


def _import_inputs(folder: Path) -> None:
    from tests.robustness.measurement_readers import NEUSIGHT

    (folder.parent / "n.csv").write_text(NEUSIGHT)


def _imported(folder: Path) -> None:
    from foreplan.datasets.importers import read_operators

    assert len(read_operators(folder / "ops.parquet", "foreplan")) == 2


def cases() -> dict[str, WritePath]:
    """Every path by name."""
    return {
        "profile": WritePath(_profile, _profiled, _profiles_whole, may_repeat=1),
        "dataset build": WritePath(_dataset, _dataset_built, _dataset_whole, _dataset_tasks),
        "train": WritePath(_save(1), _trained, _old_or_new, _save(0)),
        "verify": WritePath(_verify, _verified, _verify_whole, _verify_inputs),
        "plan": WritePath(_plan, _planned, _plan_whole),
        "export": WritePath(_export, _exported, prepare=_export_inputs),
        "dataset import": WritePath(_import, _imported, prepare=_import_inputs),
    }
