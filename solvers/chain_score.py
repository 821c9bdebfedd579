"""`ChainAssignment` and what it costs: `evaluate` prices stages by the law of ``chain_problem``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.chain_problem import ChainProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """Layers ``[start, end)`` on one device.

    Attributes:
        device_type: index of the type.
        start: first layer.
        end: one past the last layer.
        variants: variant of each layer, ``end - start`` of them.
        prefill_s: seconds of the stage for one prefill micro-batch, edges included, links not.
        decode_s: seconds of the stage for one token of one decode micro-batch.
        memory_bytes: bytes on the device, edges, fixed part and workspace included.
    """

    device_type: int
    start: int
    end: int
    variants: tuple[int, ...]
    prefill_s: float
    decode_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class ChainAssignment:
    """A decision: the stages in chain order."""

    stages: tuple[ChainStage, ...]

    @property
    def variants(self) -> tuple[int, ...]:
        """Variant of each layer of the chain."""
        return tuple(v for stage in self.stages for v in stage.variants)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainScore:
    """What an assignment costs, broken down.

    Attributes:
        objective: ``latency_s + theta * omega``, seconds; ``inf`` if a variant is missing.
        latency_s: the law in the module docstring, seconds.
        prefill_sum_s: stages and hops, seconds.
        prefill_max_s: the slowest stage or hop, seconds.
        decode_sum_s: stages, hops and the return hop, seconds.
        decode_max_s: the slowest of these, seconds.
        omega: total quality loss.
        cost2: total second cost.
        violations: one line per broken limit; empty if feasible.
    """

    objective: float
    latency_s: float
    prefill_sum_s: float
    prefill_max_s: float
    decode_sum_s: float
    decode_max_s: float
    omega: float
    cost2: float
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether every limit holds."""
        return not self.violations


def make_stage(
    problem: ChainProblem, device_type: int, start: int, end: int, variants: Sequence[int]
) -> ChainStage:
    """Price one stage.

    Args:
        problem: the instance.
        device_type: index of the type, ``< K``.
        start: first layer.
        end: one past the last layer; ``0 <= start < end <= L``.
        variants: ``end - start`` variant indices.

    Raises:
        SpecError: an index out of range or the wrong number of variants.
    """
    if not 0 <= device_type < problem.n_types:
        raise SpecError("stage.device_type", got=device_type, expected=f"0..{problem.n_types - 1}")
    if not 0 <= start < end <= problem.n_layers:
        raise SpecError(
            "stage", got=(start, end), expected=f"0 <= start < end <= {problem.n_layers}"
        )
    index = np.asarray(variants, dtype=np.int64)
    if index.shape != (end - start,) or (index < 0).any() or (index >= problem.n_variants).any():
        raise SpecError(
            "stage.variants", got=variants, expected=f"{end - start} of 0..{problem.n_variants - 1}"
        )
    layers = np.arange(start, end)
    prefill = float(problem.prefill_s[device_type, layers, index].sum())
    decode = float(problem.decode_s[device_type, layers, index].sum())
    memory = float(problem.memory_bytes[device_type, layers, index].sum())
    memory += float(problem.once_bytes(device_type, start, end, problem.needs[layers, index]))
    if start == 0:
        prefill += float(problem.first_prefill_s[device_type])
        decode += float(problem.first_decode_s[device_type])
    if end == problem.n_layers:
        prefill += float(problem.last_prefill_s[device_type])
        decode += float(problem.last_decode_s[device_type])
    return ChainStage(
        device_type=device_type,
        start=start,
        end=end,
        variants=tuple(int(v) for v in index),
        prefill_s=prefill,
        decode_s=decode,
        memory_bytes=memory,
    )


def evaluate(problem: ChainProblem, assignment: ChainAssignment) -> ChainScore:
    """Score an assignment from the problem's arrays alone; the one evaluator of this problem.

    Args:
        problem: the instance.
        assignment: stages in chain order; their stored times are not trusted.

    Returns:
        The score; broken limits stand in ``violations``, with ``objective`` still computed.

    Raises:
        SpecError: the stages are not a partition of the chain into at least one stage.
    """
    return score_stages(
        problem,
        [make_stage(problem, s.device_type, s.start, s.end, s.variants) for s in assignment.stages],
    )


def score_stages(problem: ChainProblem, stages: Sequence[ChainStage]) -> ChainScore:
    """`evaluate` for stages that `make_stage` has just priced; many chains share some.

    Raises:
        SpecError: the stages are not a partition of the chain into at least one stage.
    """
    if not stages:
        raise SpecError("assignment.stages", got=(), expected="at least one stage")
    ends = [0] + [s.end for s in stages]
    if [s.start for s in stages] != ends[:-1] or ends[-1] != problem.n_layers:
        raise SpecError(
            "assignment.stages",
            got=[(s.start, s.end) for s in stages],
            expected=f"a partition of layers 0..{problem.n_layers} in order",
        )
    types = [s.device_type for s in stages]
    hops = list(itertools.pairwise(types))
    prefill_hops = [float(problem.link_prefill_s[hop]) for hop in hops]
    decode_hops = [float(problem.link_decode_s[hop]) for hop in hops]
    if hops:
        decode_hops.append(float(problem.link_return_decode_s[types[-1], types[0]]))
    prefill = [s.prefill_s for s in stages] + prefill_hops
    decode = [s.decode_s for s in stages] + decode_hops
    prefill_sum, prefill_max = math.fsum(prefill), max(prefill)
    decode_sum, decode_max = math.fsum(decode), max(decode)
    variants = np.array([v for s in stages for v in s.variants], dtype=np.int64)
    chosen = (np.arange(problem.n_layers), variants)
    omega = float(problem.omega[chosen].sum())
    cost2 = float(problem.cost2[chosen].sum())
    latency = prefill_sum
    # The guards keep 0 * inf out of the sum.
    if problem.prefill_microbatches > 1:
        latency += (problem.prefill_microbatches - 1) * prefill_max
    if problem.new_tokens > 1:
        round_s = max(decode_sum, problem.decode_microbatches * decode_max)
        latency += (problem.new_tokens - 1) * round_s
    violations = _violations(problem, stages, omega, cost2)
    if not (math.isfinite(prefill_sum) and math.isfinite(decode_sum)):
        violations.append("a stage, edge or hop that its device type does not have")
        latency = math.inf
    return ChainScore(
        objective=latency + problem.theta * omega,
        latency_s=latency,
        prefill_sum_s=prefill_sum,
        prefill_max_s=prefill_max,
        decode_sum_s=decode_sum,
        decode_max_s=decode_max,
        omega=omega,
        cost2=cost2,
        violations=tuple(violations),
    )


def _violations(
    problem: ChainProblem, stages: Sequence[ChainStage], omega: float, cost2: float
) -> list[str]:
    broken = []
    for k in range(problem.n_types):
        used = sum(s.device_type == k for s in stages)
        if used > problem.counts[k]:
            broken.append(f"{used} stages on type {k}, which has {problem.counts[k]} devices")
    for j, stage in enumerate(stages):
        if not stage.memory_bytes <= problem.capacity_limit_bytes[stage.device_type]:
            broken.append(
                f"stage {j} needs {stage.memory_bytes:.0f} bytes, type {stage.device_type} has "
                f"{problem.capacity_bytes[stage.device_type]:.0f}"
            )
    if omega > problem.omega_limit:
        broken.append(f"omega {omega:.6g} above {problem.max_omega:.6g}")
    if cost2 > problem.cost2_limit:
        broken.append(f"cost2 {cost2:.6g} above {problem.max_cost2:.6g}")
    return broken
