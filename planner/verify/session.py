"""`Session`: one rank of one candidate decision, in a process of its own.

A session loads the planner's kernels under the rank's memory cap and then runs its program each
time the leader says so, so that several candidates stay loaded side by side and their rounds can be
interleaved. It speaks JSON with the leader (see `wire`), tensors with the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from pydantic import Field

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.memory import show_bytes
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.timing.host_memory import data_bytes
from foreplan.errors import ForeplanError
from foreplan.planner.base import Planner, Problem
from foreplan.planner.pace import PaceProgram
from foreplan.planner.plan import Plan
from foreplan.planner.verify.channels import connect
from foreplan.planner.verify.clock import Clock, CudaClock, HostClock
from foreplan.planner.verify.connections import ConnectionLost
from foreplan.planner.verify.pace_process import keep_pace
from foreplan.planner.verify.placement import (
    Seat,
    assign_cores,
    cap_memory,
    lift_cap,
    take_seat,
)
from foreplan.planner.verify.rank_program import RankProgram, rank_programs
from foreplan.planner.verify.runtime import Runtime, describe
from foreplan.planner.verify.watchdog import CONNECTING_S, Watchdog
from foreplan.planner.verify.wire import Wire, WireClosed

#: Share of the time for a run after which a rank says where it stands; then the leader's is over.
_PATIENCE = 0.9


class Job(StrictModel):
    """What one process of a candidate is to do.

    Attributes:
        kind: ``rank`` of a run, ``live`` rank of one that serves what comes, the ``reference`` of
            either, computed alone, or the ``pace`` of a rank, timed between runs.
        decision: the candidate's decision, as the planner writes it.
        mode: ``fast`` or ``reference``, for the kernels.
        rank, ranks: place in the candidate's schedule and their number.
        devices: the candidate's devices on this host; they share its cores.
        place: which of them the process is.
        label: the device's name in the cluster, for messages.
        capacity_bytes: memory cap.
        backend: ``gloo`` or ``nccl``.
        timeout_s: after which a transfer counts as lost.
        given: what a reference of a live run was asked; nothing for that of a plain one.
        programs: what a ``pace`` is told by, and ``in_pass`` and ``issued``, how (`RankPace`).
    """

    kind: Literal["rank", "live", "reference", "pace"]
    decision: dict[str, Any]
    mode: str
    rank: int = 0
    ranks: int = 1
    devices: tuple[DeviceName, ...]
    place: int = 0
    label: str
    capacity_bytes: int | None = Field(default=None, ge=0)
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: float
    given: dict[str, Any] = Field(default_factory=dict)
    programs: tuple[PaceProgram, ...] = ()
    in_pass: bool = True
    issued: bool = False


def problem_of(plan: Plan, planner: Planner[Any, Any]) -> Problem[Any]:
    """The problem of a plan as a rank's process needs it: without costs, without a simulator.

    Raises:
        SpecError: the workload is not one of the plan's kind.
    """
    workload = validate(planner.workload_type, plan.workload, "plan: workload")
    return Problem(plan.model, plan.cluster, workload, CostBook(()), plan.provenance.seed)


def serve(wire: Wire, planner: Planner[Any, Any], problem: Problem[Any], job: Job) -> int:
    """Do a job until the leader ends it; what goes wrong is reported, not raised.

    Returns:
        The exit code of the process.
    """
    try:
        if job.kind == "pace":
            keep_pace(wire, job)
            return 0
        decision = validate(planner.decision_type, job.decision, f"decision of {job.label}")
        if job.kind == "reference":
            seat = seat_of(job)
            with seat.computing():
                cap_memory(seat, job.capacity_bytes)
                if job.given:
                    found: Any = planner.alone(problem, decision, job.given)
                else:
                    found = planner.reference(problem, decision, mode=job.mode)
                wire.send({"reference": found})
        elif job.kind == "live":
            from foreplan.planner.verify.live_session import LiveSession

            LiveSession(wire, planner, problem, decision, job).run()
        else:
            Session(wire, planner, problem, decision, job).run()
    except WireClosed:
        return 1
    except BaseException as error:  # a planner's kernels may fail in any way, also in memory
        with contextlib.suppress(WireClosed):
            lift_cap()  # saying that memory ran out takes some
            wire.send(_failure(error))
        return 1
    return 0


def _failure(error: BaseException) -> dict[str, Any]:
    known = isinstance(error, ForeplanError)
    return {
        "failed": (str(error) if known else describe(error)) + _gpu_peak(),
        "error": type(error).__name__ if known else "VerificationError",
        "peer": isinstance(error, ConnectionLost),
    }


def _gpu_peak() -> str:
    """What this process held at most on its GPU, if it has one."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return ""
    held, taken = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    return f"; tensors held {show_bytes(held)} at most, torch {show_bytes(taken)}"


def seat_of(job: Job) -> Seat:
    """Become the device of a job."""
    return take_seat(job.devices[job.place], assign_cores(job.devices)[job.place], job.label)


class Session:
    """See the module; one object a process.

    Args:
        wire: to the leader.
        planner, problem, decision: what runs.
        job: this process's part of it.
    """

    def __init__(
        self, wire: Wire, planner: Planner[Any, Any], problem: Problem[Any], decision: Any, job: Job
    ) -> None:
        self._wire = wire
        self._planner = planner
        self._problem = problem
        self._decision = decision
        self._job = job

    def run(self) -> None:
        """Load, report, and follow the leader's words until it hangs up or says ``exit``."""
        job = self._job
        ordered = job.backend == "nccl"
        if ordered:  # what takes no GPU is done beside other candidates, the rest in one's turn
            programs = self._prepare()
            self._wire.send({"prepared": 1})
            self._wire.receive()
        with self._watched("starting the device"):
            seat = seat_of(job)
        with seat.computing():
            if not ordered:
                programs = self._prepare()
            program = programs[job.rank]
            clock = _clock(seat, len(program.steps))
            self._meet()  # so that nobody connects while another one still makes its schedule
            with self._watched("opening connections over NCCL"):
                channels = connect(
                    programs, job.rank, backend=job.backend, clock=clock, device=seat.device,
                    timeout_s=job.timeout_s,
                )  # fmt: skip
                self._meet()
            if ordered:  # now it is the next candidate's turn
                self._wire.send({"connected": 1})
            cap_memory(seat, job.capacity_bytes)
            before = data_bytes()
            kernels = self._planner.kernels(self._problem, self._decision, job.rank, mode=job.mode)
            # Whoever has less to load waits here.
            with self._watched("opening messages over NCCL", job.timeout_s):
                runtime = Runtime(program, kernels, channels, clock)
            self._wire.send(
                {"ready": {**facts_of(seat), "messages": channels.messages},
                 "memory_bytes": _plain(kernels.memory_bytes()),
                 "held_bytes": held_bytes(seat, before)}
            )  # fmt: skip
            while True:
                word = self._wire.receive()
                if "clock" in word:
                    self._wire.send({"clock": time.monotonic_ns()})
                elif "run" in word:
                    kernels.reset()
                    limit_s = _PATIENCE * job.timeout_s
                    with self._watched("running", limit_s, runtime.standing):
                        record = runtime.execute(self._meet)
                    self._wire.send(
                        {"ran": word["run"], "start_ns": record.start_ns, "end_ns": record.end_ns,
                         "result": kernels.result() if word["result"] else None,
                         "memory_bytes": _plain(kernels.memory_bytes()),
                         "held_bytes": held_bytes(seat, before)}
                    )  # fmt: skip
                else:
                    return

    def _prepare(self) -> tuple[RankProgram, ...]:
        """Join the other ranks, and make everybody's program."""
        self._join()
        schedule, _ = self._planner.real(self._problem, self._decision)
        return rank_programs(schedule, ordered=self._job.backend == "nccl")

    def _watched(
        self, doing: str, limit_s: float = CONNECTING_S, detail: Callable[[], str] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Watch what has no limit of its own: a GPU and NCCL; gloo's calls end by themselves."""
        if self._job.backend != "nccl":
            return contextlib.nullcontext()
        return Watchdog(self._give_up).phase(f"{doing} on {self._job.label}", limit_s, detail)

    def _give_up(self, why: str) -> None:
        """Tell the leader, from the watchdog's thread, what this process is stuck at."""
        with contextlib.suppress(WireClosed):
            self._wire.send({"failed": why, "error": "VerificationError", "peer": False})

    def _join(self) -> None:
        """Join the candidate's process group; rank 0 keeps the store."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        job, timeout = self._job, timedelta(seconds=self._job.timeout_s)
        interface = _interface(self._wire.here)
        if interface is not None:
            # gloo would guess an interface from the host's name, which often is not in any DNS.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            if job.rank == 0:
                store = TCPStore(
                    self._wire.here, 0, is_master=True, timeout=timeout, wait_for_workers=False
                )
                self._wire.send({"store": store.port})
            else:
                address = self._wire.receive(job.timeout_s)
                store = TCPStore(
                    address["store"][0], int(address["store"][1]), is_master=False, timeout=timeout
                )
            dist.init_process_group(
                "gloo", store=store, rank=job.rank, world_size=job.ranks, timeout=timeout
            )
        except RuntimeError as error:
            raise ConnectionLost(f"no connection to the other ranks: {error}") from error

    def _meet(self) -> None:
        import torch.distributed as dist

        try:
            dist.barrier()
        except RuntimeError as error:
            raise ConnectionLost(f"another rank did not come to the start: {error}") from error


def _clock(seat: Seat, steps: int) -> Clock:
    return HostClock(steps) if seat.device.type == "cpu" else CudaClock(steps, seat.device)


def _plain(sizes: dict[str, int]) -> dict[str, int]:
    return {name: int(size) for name, size in sizes.items()}


def held_bytes(seat: Seat, before: int) -> int:
    """Bytes the process took for the kernels: on a GPU at the peak, on a CPU right now."""
    import torch

    if seat.device.type == "cpu":
        return data_bytes() - before
    return int(torch.cuda.max_memory_allocated(seat.device))


def facts_of(seat: Seat) -> dict[str, Any]:
    """What this process turned out to be."""
    import torch

    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if seat.device.type != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(seat.device)
    return facts


def _interface(address: str) -> str | None:
    """Name of the network interface that has an address."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None
