"""A step's programs as a profile times them, over what the step's own actions take, on one core.

    taskset -c 0 python tests/benchmarks/bubbles_programs_in_step.py PLAN.json [ROUNDS]

PLAN is of pipeline ranks without lanes; its step runs in one process. Programs are timed behind
operators of 4 MiB as in profiles, behind some as large as the step's own, in a loop, and as a pass
of a micro-batch runs them, one behind the other: each by its own time there, with and without what
the operator before has written, and all by one factor on what is profiled. All times are the
core's, so that other work beside counts little. Printed: actions over their price.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional as F

from foreplan.cost_models.costs import Segment
from foreplan.datasets.kernels import cold_operands
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.freed_memory import keep_freed_memory
from foreplan.planner.bubbles.execution.profile import profile_step
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.plan import load_plan
from foreplan.planner.verify import clock
from foreplan.planner.verify.session import problem_of

OPS = ("F", "B", "encode", "encode_backward")
LEAST, LEAST_S, LEAST_PASSES = 7, 0.02, 20


def leaves(work, count=1):
    if isinstance(work, Segment):
        for part, times in work.parts:
            yield from leaves(part, times * count)
    elif isinstance(work, Program):
        yield work, count


def others(rows: int) -> Callable[[], None]:
    a, b = torch.randn(rows, 512), torch.randn(512, 256)

    def run() -> None:
        F.layer_norm(F.gelu(a @ b), (256,))
        F.gelu(a)

    return run


def timed(call: Callable[[], object], before: Callable[[], None]) -> float:
    def once() -> float:
        started = time.process_time()
        call()
        return time.process_time() - started

    for _ in range(3):
        once()
    times: list[float] = []
    while len(times) < LEAST or sum(times) < LEAST_S:
        before()
        times.append(once())
    return statistics.median(times)


def prices_s(program: Program, ways: dict[str, Callable[[int], Callable[[], None]]]):
    """Seconds of a program by way of timing it."""
    call = training_call(program, "cpu")
    rows = program.dims.get("rows") or program.dims.get("queries") or 512
    with torch.enable_grad():
        return {way: timed(call, before(rows)) for way, before in ways.items()}


def pass_s(often: dict[Program, int], *, written: bool) -> dict[Program, float]:
    """Seconds of each program, run one behind the other as a pass of a micro-batch does."""
    calls = {item: training_call(item, "cpu").limited(count) for item, count in often.items()}
    most = max(often.values())
    order = [item for turn in range(most) for item, count in often.items() if turn < count]
    times: dict[Program, list[float]] = {item: [] for item in often}
    with torch.enable_grad():
        for _ in range(2 + LEAST_PASSES):
            for item in order:
                if written:
                    calls[item].warm_up()
                started = time.process_time()
                calls[item]()
                times[item].append(time.process_time() - started)
    return {item: statistics.fmean(took[2 * often[item] :]) for item, took in times.items()}


def in_passes(
    found: dict[Program, dict[str, float]], counts: Counter[Program], microbatches: int
) -> None:
    """Add what programs take in passes to what is found."""
    often = {item: max(1, round(count / microbatches)) for item, count in counts.items()}
    own = pass_s(often, written=True)
    cold = pass_s(often, written=False)
    factor = sum(own[item] * n for item, n in counts.items()) / sum(
        found[item]["as profiled"] * n for item, n in counts.items()
    )
    for item, prices in found.items():
        prices["in a pass"] = own[item]
        prices["in a pass, nothing written before"] = cold[item]
        prices["as profiled, by one factor of the pass"] = prices["as profiled"] * factor


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    planner, plan = BubblesPlanner(), load_plan(Path(sys.argv[1]))
    problem = problem_of(plan, planner)
    decision = validate(planner.decision_type, plan.decision, "decision")
    schedule = planner.schedule(problem, decision)
    kernels = [planner.kernels(problem, decision, r, mode="fast") for r in range(schedule.ranks)]
    counts = Counter(action.work for action in schedule if action.op in OPS)
    programs = Counter[Program]()
    for work, count in counts.items():
        for item, times in leaves(work, count):
            programs[item] += times
    behind = functools.cache(others)
    ways = {
        "as profiled": lambda rows: cold_operands._others,
        "as large as the step's own": lambda rows: behind(min(2048, 4 * rows)),
        "nothing in between": lambda rows: lambda: None,
    }
    for number in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        found = {}
        for program in programs:
            found[program] = prices_s(program, ways)
            gc.collect()
        in_passes(found, programs, problem.workload.microbatches)
        with mock.patch.object(clock.time, "monotonic_ns", time.process_time_ns):
            step = profile_step(schedule, decision, kernels, torch.device("cpu"), rounds=5)
        for way in next(iter(found.values())):
            took, price = Counter(), Counter()
            for work, count in counts.items():
                cost_s = count * sum(found[p][way] * n for p, n in leaves(work))
                for key in ("all", work.name):
                    took[key] += count * step.prices[work]
                    price[key] += cost_s
            shares = ", ".join(f"{key} {took[key] / price[key]:.2f}" for key in took)
            print(f"round {number + 1}, {way}: {shares}", flush=True)


if __name__ == "__main__":
    main()
