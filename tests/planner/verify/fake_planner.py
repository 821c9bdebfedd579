"""A planner of two-stage toy pipelines, registered by entry point as a stranger's package would be.

Rank 0 makes a matrix a micro-batch and sends it, rank 1 adds a layer; both all-reduce a vector
while they compute. Busy time is slept, so that it is known; matrices make the result checkable.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from foreplan.cost_models.costs import HostLaunch, Segment, Work
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Action, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.datasets.specs import StrictModel
from foreplan.planner.base import Bound, Choice, Planner, Problem

if "TOY_THREAD" in os.environ and "foreplan.planner.verify.worker" in sys.orig_argv:
    # A library that starts a thread when it is imported.
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()

ROWS = 16
GPU_HZ = 1.9e9  # clock of the cycles that torch.cuda._sleep counts, about
MORE = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")


class ToyWorkload(StrictModel):
    microbatches: int = 4
    seconds: float = 0.004
    steps: int = 1
    broken: str = ""
    held_bytes: int = 0
    collectives: bool = False
    judged: bool = False


class ToyDecision(StrictModel):
    order: tuple[int, ...] = (0, 1)
    slow: float = 1.0
    deadlock: bool = False
    cap_bytes: int | None = None
    die: str = ""


class ToyKernels:
    def __init__(
        self, workload: ToyWorkload, decision: ToyDecision, rank: int, mode: str, device: str
    ) -> None:
        import torch

        self._device = device
        self._torch, self._workload, self._decision = torch, workload, decision
        self._rank, self._mode = rank, mode
        if decision.die == "load" and rank == 1:
            raise ValueError("no weights today")
        self._held = torch.zeros(workload.held_bytes // 4, device=device)
        self.reset()

    def reset(self) -> None:
        torch = self._torch
        count, device = self._workload.microbatches, self._device
        self._weight = torch.eye(ROWS, device=device) * (self._rank + 2)
        self._out = [torch.zeros(ROWS, ROWS, device=device) for _ in range(count)]
        self._in = [torch.zeros(ROWS, ROWS, device=device) for _ in range(count)]
        self._sum = torch.full((8,), float(self._rank + 1), device=device)
        mine = torch.arange(4.0, device=device) + 10 * (self._rank + 1)
        self._moved = {op: mine.clone() for op in MORE}

    def run(self, action: Action) -> None:
        torch, batch = self._torch, action.microbatch
        if action.op == "F":
            if self._decision.die and self._rank == 1 and batch == 2:
                self._die()
            made = torch.full((ROWS, ROWS), float(batch + 1), device=self._device)
            source = made if self._rank == 0 else self._in[batch]
            self._out[batch] = source @ self._weight
        seconds = self._workload.seconds * self._decision.slow
        if self._device == "cuda":
            torch.cuda._sleep(int(seconds * GPU_HZ))
        else:
            time.sleep(seconds)

    def _die(self) -> None:
        if self._decision.die == "exit":
            os._exit(7)
        if self._decision.die == "raise":
            raise ValueError("a kernel is broken")
        if self._decision.die == "hang":
            time.sleep(3600)
        if self._decision.die == "memory":
            size = (96 if self._device == "cpu" else 512) << 20  # beyond cap and allowance
            self._torch.zeros(size, dtype=self._torch.uint8, device=self._device)

    def payload(self, action: Action) -> Any:
        if action.op in MORE:
            return self._moved[action.op]
        return self._sum if action.op == "all_reduce" else self._out[action.microbatch]

    def buffer(self, action: Action) -> Any:
        return self._in[action.microbatch]

    def result(self) -> dict[str, Any]:
        wrong = 1.0 if self._workload.broken == self._mode else 0.0
        found: dict[str, Any] = {"sum": [float(x) + wrong for x in self._sum[:2]]}
        if self._rank == self._decision_ranks() - 1:
            found["last"] = [float(out[0, 0]) for out in self._out]
        if self._workload.collectives:
            found[f"moved{self._rank}"] = {k: v.tolist() for k, v in self._moved.items()}
        return found

    def _decision_ranks(self) -> int:
        return len(self._decision.order)

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": self._workload.held_bytes}


class ToyPlanner(Planner[ToyWorkload, ToyDecision]):
    kind = "toy"
    workload_type = ToyWorkload
    decision_type = ToyDecision
    needs_model = False

    def decide(self, problem: Problem[ToyWorkload]) -> Choice[ToyDecision]:
        return Choice(ToyDecision(), Bound("heuristic", None, None, "toy"))

    def baselines(self, problem: Problem[ToyWorkload]) -> dict[str, ToyDecision | str]:
        return {"slow": ToyDecision(slow=2.0)}

    def given(self, workload: ToyWorkload) -> Mapping[Work, float]:
        return {Segment("F"): workload.seconds, Segment("slow"): 2 * workload.seconds,
                Segment("hop"): 1e-4}  # fmt: skip

    def ranks(self, problem: Problem[ToyWorkload], decision: ToyDecision) -> tuple[int, ...]:
        return decision.order

    def schedule(self, problem: Problem[ToyWorkload], decision: ToyDecision) -> Schedule:
        known = problem.cluster.ranks()
        builder = ScheduleBuilder([known[r].label for r in decision.order])
        work = Segment("F" if decision.slow == 1.0 else "slow")
        last = len(decision.order) - 1
        reduced = []
        for rank in range(last + 1):
            reduced.append(
                builder.add("all_reduce", rank, Segment("hop"), resources=("wire",), rendezvous=0)
            )
        for batch in range(problem.workload.microbatches):
            done = builder.add("F", 0, work, stage=0, microbatch=batch)
            for rank in range(1, last + 1):
                sent = builder.add(
                    "send", rank - 1, Segment("hop"), stage=rank, microbatch=batch, peer=rank,
                    dependencies=(done,), resources=(f"link:{rank}",),
                )  # fmt: skip
                got = builder.add(
                    "recv", rank, HostLaunch(0), stage=rank, microbatch=batch, peer=rank - 1,
                    dependencies=(sent,), resources=(),
                )  # fmt: skip
                done = builder.add(
                    "F", rank, work, stage=rank, microbatch=batch, dependencies=(got,)
                )
        waits = [[index] for index in reduced]
        for number, op in enumerate(MORE if problem.workload.collectives else (), 1):
            for rank in range(last + 1):
                index = builder.add(
                    op, rank, Segment("hop"), resources=("wire",), rendezvous=number, peer=0
                )
                waits[rank].append(index)
        for rank in range(last + 1):
            builder.add("end", rank, HostLaunch(0), stage=rank, dependencies=waits[rank])
        if decision.deadlock:
            for rank in (0, 1):
                builder.add("send", rank, HostLaunch(0), peer=1 - rank, microbatch=90 + rank)
            for rank in (0, 1):
                builder.add("recv", rank, HostLaunch(0), peer=1 - rank, microbatch=91 - rank)
        return builder.build()

    def memory(
        self, problem: Problem[ToyWorkload], decision: ToyDecision
    ) -> tuple[MemoryLedger, ...]:
        known = problem.cluster.ranks()
        items = {"weights": problem.workload.held_bytes}
        return tuple(
            MemoryLedger(known[r].label, decision.cap_bytes, items) for r in decision.order
        )

    def kernels(
        self, problem: Problem[ToyWorkload], decision: ToyDecision, rank: int, *, mode: str
    ) -> ToyKernels:
        name = problem.cluster.ranks()[decision.order[rank]].name
        device = "cuda" if name.kind == "cuda" else "cpu"
        return ToyKernels(problem.workload, decision, rank, mode, device)

    def rivals(
        self, problem: Problem[ToyWorkload], decision: ToyDecision, count: int
    ) -> dict[str, ToyDecision]:
        return {"rival": ToyDecision(slow=2.0), "itself": decision}

    def judges(self, problem: Problem[ToyWorkload]) -> bool:
        return problem.workload.judged

    def reference(
        self, problem: Problem[ToyWorkload], decision: ToyDecision, *, mode: str
    ) -> dict[str, Any]:
        if mode == "quality":
            if decision.die == "judge":
                raise ValueError("no judge today")
            return {"slowness": decision.slow}
        size = len(decision.order)
        scale = 1.0
        for rank in range(size):
            scale *= rank + 2
        last = [(batch + 1) * scale for batch in range(problem.workload.microbatches)]
        total = float(sum(range(1, size + 1)))
        found: dict[str, Any] = {"sum": [total, total], "last": last}
        if problem.workload.collectives:
            found["moved0"] = {
                "all_gather": [10.0, 11.0, 22.0, 23.0], "reduce_scatter": [30.0, 32.0, 12.0, 13.0],
                "all_to_all": [10.0, 11.0, 20.0, 21.0], "broadcast": [10.0, 11.0, 12.0, 13.0],
            }  # fmt: skip
            found["moved1"] = {
                "all_gather": [10.0, 11.0, 22.0, 23.0], "reduce_scatter": [20.0, 21.0, 34.0, 36.0],
                "all_to_all": [12.0, 13.0, 22.0, 23.0], "broadcast": [10.0, 11.0, 12.0, 13.0],
            }  # fmt: skip
        return found
