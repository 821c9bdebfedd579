"""A fourth planner in one file: local SGD whose slow all-reduce hides behind tau steps (CO2)."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from foreplan.cost_models.costs import Collective, Segment
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.datasets.specs import StrictModel
from foreplan.planner.base import Bound, Choice, Planner

STEP, STEPS = Segment("step"), 28


class Workload(StrictModel):
    step_s: float
    parameters: int


class Decision(StrictModel):
    tau: int


class LocalSgd(Planner[Workload, Decision]):
    kind, needs_model = "local-sgd", False
    workload_type, decision_type = Workload, Decision

    def given(self, workload):
        return {STEP: workload.step_s}

    def _reduce(self, problem):
        group = tuple(rank.index for rank in problem.cluster.ranks())
        return Collective("all_reduce", 4 * problem.workload.parameters, group, "fp32")

    def decide(self, problem):
        first = problem.cluster.ranks()[0].label
        hidden = problem.costs.cost(self._reduce(problem), first).mean_s / problem.workload.step_s
        return Choice(Decision(tau=max(1, math.ceil(hidden))), Bound("optimal", None, 0.0, "law"))

    def baselines(self, problem):
        return {"every step": Decision(tau=1)}

    def schedule(self, problem, decision):
        labels = [rank.label for rank in problem.cluster.ranks()]
        builder, averaged = ScheduleBuilder(labels), {}
        for r in range(STEPS // decision.tau):
            for rank in range(len(labels)):
                stale = (averaged[r - 2, rank],) if r >= 2 else ()
                for i in range(decision.tau):
                    last = builder.add("step", rank, STEP, dependencies=() if i else stale)
                averaged[r, rank] = builder.add(
                    "all_reduce", rank, self._reduce(problem), step=r, rendezvous=r,
                    dependencies=(last,), resources=("link",),
                )  # fmt: skip
        return builder.build()

    def memory(self, problem, decision):
        items = {"parameters": 8 * problem.workload.parameters}
        return tuple(MemoryLedger(r.label, r.memory_bytes, items) for r in problem.cluster.ranks())

    def kernels(self, problem, decision, rank, *, mode):
        return Kernels(problem.workload, rank)


class Kernels:
    def __init__(self, workload, rank):
        self.step_s, self.rank = workload.step_s, rank
        self.sums = [torch.empty(workload.parameters) for _ in range(2)]

    def reset(self):
        for tensor in self.sums:
            tensor.fill_(self.rank + 1.0)

    def run(self, action):
        time.sleep(self.step_s)

    def payload(self, action):
        return self.sums[action.step % 2]

    buffer = payload

    def result(self):
        return {"sums": [float(tensor[0]) for tensor in self.sums]}

    def memory_bytes(self):
        return {"parameters": sum(tensor.nbytes for tensor in self.sums)}


def test_one_file_gets_command_schema_simulation_verification_and_report(tmp_path):
    info = tmp_path / "fourth-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fourth\nVersion: 1.0\n")
    point = f"local-sgd = {Path(__file__).stem}:LocalSgd\n"
    (info / "entry_points.txt").write_text("[foreplan.planners]\n" + point)
    fit = {"kind": "all_reduce", "alpha_s": 3e-4, "beta_s_per_byte": 2e-9, "residual": 0.1}
    tier = {"group": "all", "scope": "host", "latency_s": 1e-4, "bandwidth_bytes_per_s": 2e9}
    tier |= {"backend": "gloo", "source": "test", "collectives": [fit | {"samples": 8}]}
    devices = [{"name": "cpu:threads=1", "count": 2, "memory_bytes": 1 << 31}]
    (tmp_path / "c.json").write_text(json.dumps({"devices": devices, "tiers": [tier]}))
    places = [str(tmp_path), str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}

    def run(*words):
        command = [sys.executable, "-m", "foreplan.cli", *words, "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plan = run("plan", "local-sgd", "-c", "c.json", "-w", "step_s=0.005,parameters=4000000")
    assert plan["decision"] == {"tau": 7}  # 0.3 ms + 16 MB * 2 ns/B over 5 ms
    assert run("verify", "plan.json", "--tolerance", "1.0")["passed"]
    run("report", "plan.json", "--verification", "verification.json")
    assert "local-sgd" in (tmp_path / "report.html").read_text()
