"""`train`: data-parallel training with a plan a rank, in real processes or simulated in this one.

Each rank is a process that is its device before torch loads (instruction set, threads, cores), and
runs the schedule of a training step again and again on the one runtime; gradients really travel.
The simulated form computes the same numbers in one process, one rank after another: for questions
of accuracy over many seeds. Its times mean nothing, so it has none.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import SpecError, VerificationError
from foreplan.planner.precision.spec import PrecisionDecision, PrecisionWorkload

WORKER = "foreplan.planner.precision.execution.rank_worker"
#: How long ranks may still speak when one of them has failed.
_LAST_WORDS_S = 2.0


class RankRun(StrictModel):
    """What one rank did.

    Attributes:
        device: what its process was.
        losses: of its own batches, step by step, in nats.
        step_s: seconds of each step, from the first action to the last; empty if simulated.
        compute_s: of these, in forward, backward and optimizer.
        saved_bytes: kept for the backward pass of the first step, counted exactly.
        peak_bytes: largest resident set of the process (GPU: largest allocation).
        facts: torch's version, instruction set, threads.
    """

    device: str
    losses: tuple[float, ...]
    step_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    saved_bytes: int = 0
    peak_bytes: int = 0
    facts: dict[str, str] = Field(default_factory=dict)


class TrainingRun(StrictModel):
    """Result of a training run.

    Attributes:
        kind: ``real`` processes, or ``simulated`` one rank after another.
        seed: of weights, batches and rounding.
        source: where the samples came from.
        ranks: what each did.
        validation_loss: of the trained fp32 weights on held-out samples, in nats; ``None`` where
            the task has none.
    """

    kind: Literal["real", "simulated"]
    seed: int
    source: str
    ranks: tuple[RankRun, ...]
    validation_loss: float | None


class RankOrder(StrictModel):
    """What a rank's process is told.

    Attributes:
        workload, decision, seed, steps, validation_batches: of the run.
        rank: which one this is.
        devices: of all ranks.
        store: file that ranks meet by.
        backend: ``gloo`` or ``nccl``.
        timeout_s: after which a transfer counts as lost.
    """

    workload: PrecisionWorkload
    decision: dict[str, Any]
    seed: int
    steps: int
    validation_batches: int
    rank: int
    devices: tuple[DeviceName, ...]
    store: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float


def train(
    workload: PrecisionWorkload,
    decision: PrecisionDecision,
    devices: Sequence[DeviceName],
    *,
    steps: int,
    seed: int = 0,
    validation_batches: int = 8,
    backend: Literal["gloo", "nccl"] = "gloo",
    timeout_s: float = 600.0,
) -> TrainingRun:
    """Train in one process a rank on this machine.

    Args:
        workload: network, batch and optimizer.
        decision: a plan for each rank.
        devices: of this machine, one a rank.
        steps: training steps.
        seed: of weights, batches and rounding.
        validation_batches: held-out batches to evaluate at the end; 0 for none.
        backend: of the all-reduces; a GPU and a CPU together need ``gloo``.
        timeout_s: for the whole run.

    Raises:
        SpecError: devices that do not fit the decision or this machine.
        VerificationError: a rank failed (names it and why), or the time ran out.
    """
    if len(devices) != len(decision.workers):
        raise SpecError(
            "devices", got=len(devices), expected=f"{len(decision.workers)}, one a rank of the plan"
        )
    with tempfile.TemporaryDirectory() as folder:
        orders = [
            RankOrder(
                workload=workload, decision=decision.model_dump(mode="json"), seed=seed,
                steps=steps, validation_batches=validation_batches, rank=rank,
                devices=tuple(devices), store=str(Path(folder) / "store"), backend=backend,
                timeout_s=timeout_s,
            )
            for rank in range(len(devices))
        ]  # fmt: skip
        said = _run_processes(orders, Path(folder))
    return TrainingRun(
        kind="real", seed=seed, source=said[0]["source"],
        ranks=tuple(validate(RankRun, one["run"], f"rank {i}") for i, one in enumerate(said)),
        validation_loss=said[0]["validation_loss"],
    )  # fmt: skip


def simulate_training(
    workload: PrecisionWorkload,
    decision: PrecisionDecision,
    *,
    steps: int,
    seed: int = 0,
    validation_batches: int = 8,
) -> TrainingRun:
    """Train all ranks one after another in this process; same arguments as `train`."""
    from foreplan.planner.precision.execution.reference import LocalRanks
    from foreplan.planner.precision.task import training_task

    task = training_task(None, workload, seed)
    local = LocalRanks(task, workload, decision, count_memory=True)
    try:
        for _ in range(steps):
            local.step()
        result = local.result()
        return TrainingRun(
            kind="simulated", seed=seed, source=str(getattr(task, "source", task.name)),
            ranks=tuple(
                RankRun(
                    device="simulated", losses=tuple(result[f"losses_{i}"]),
                    saved_bytes=rank.saved_bytes,
                )
                for i, rank in enumerate(local.ranks)
            ),
            validation_loss=evaluate(local.ranks[0], task, validation_batches),
        )  # fmt: skip
    finally:
        local.close()


def evaluate(kernels: Any, task: Any, batches: int) -> float | None:
    """Loss on held-out batches, where a task has them."""
    draw = getattr(task, "validation_batch", None)
    if draw is None or not batches:
        return None
    return float(kernels.validation_loss(draw(index) for index in range(batches)))


def _run_processes(orders: Sequence[RankOrder], folder: Path) -> list[dict[str, Any]]:
    """Start a process an order; what each said."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for order in orders:
            with (
                _file(folder, order, "out").open("w") as out,
                _file(folder, order, "err").open("w") as errors,
            ):
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", WORKER], text=True, stdin=subprocess.PIPE,
                    stdout=out, stderr=errors, env=worker_environment(order.devices[order.rank]),
                )  # fmt: skip
            processes.append(process)
            if process.stdin is not None:
                process.stdin.write(order.model_dump_json() + "\n")
                process.stdin.close()
        _wait(processes, orders[0].timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _answers([process.returncode for process in processes], orders, folder)


def _wait(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> None:
    """Until all have ended, or one has failed and the others had time to say what they know."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if not failed and any(codes):
            failed, deadline = True, min(deadline, time.monotonic() + _LAST_WORDS_S)
        time.sleep(0.02)


def _answers(
    codes: Sequence[int], orders: Sequence[RankOrder], folder: Path
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    failures: list[tuple[int, str]] = []
    for code, order in zip(codes, orders, strict=True):
        where = f"rank {order.rank} ({order.devices[order.rank]})"
        line = _file(folder, order, "out").read_text()
        said = json.loads(line) if line.endswith("}\n") else {}
        if code == 0 and "run" in said:
            found.append(said)
            continue
        tail = _file(folder, order, "err").read_text().strip().splitlines()[-1:] or ["nothing"]
        ended = code == -signal.SIGKILL
        silent = f"did not end in {order.timeout_s:.0f} s" if ended else f"exit code {code}"
        why = said.get("failed", f"{silent}; it said last: {tail[0]}")
        # A rank that lost another one, or that we ended, is not the cause where there is another.
        failures.append((1 if said.get("peer") else 2 if ended else 0, f"{where}: {why}"))
    if failures:
        raise VerificationError(sorted(failures)[0][1])
    return found


def _file(folder: Path, order: RankOrder, kind: str) -> Path:
    return folder / f"rank{order.rank}.{kind}"
