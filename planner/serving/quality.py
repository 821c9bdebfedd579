"""`PlanQuality`: the quality losses that a serving plan is made with, and what they rest on.

A table that the workload names comes first, then a measurement on the text that it names, then the
weights alone. With a curve, a limit on perplexity is a limit on the sum of losses.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreplan.cost_models.quality.quality_table import QualityTable, measure_quality
from foreplan.cost_models.quality.sensitivity import weight_sensitivity
from foreplan.datasets.models.model import Model
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.solvers.chain_problem import FloatArray

#: ``measured``: docs/results/quality.md.
_WEIGHTS_ALONE = (
    "quality losses are from the weights alone, which order layers badly: name a text or a table"
)
#: Where nobody measured it; docs/results/quality.md has what it was for our decoder of bytes.
_CACHE_UNKNOWN = (
    "the KV cache is kept in 8 bits: what that costs in quality was not measured and is in no sum"
)


@dataclass(frozen=True)
class PlanQuality:
    """Losses for one model and workload.

    Attributes:
        omega: ``[layers, len(workload.bits)]``.
        max_omega: limit on the sum over layers, from the workload's own limits less
            ``cache_omega``; ``None`` without any.
        cache_omega: loss of an 8-bit KV cache, part of every plan's sum; 0 where the cache has 16
            bits or nobody measured it.
        table: where the losses are from; ``None`` for the weights alone.
        notes: what a reader of the plan has to know.
    """

    omega: FloatArray
    max_omega: float | None
    table: QualityTable | None
    notes: tuple[str, ...]
    cache_omega: float = 0.0

    @property
    def knows_cache(self) -> bool:
        """Whether what an 8-bit KV cache loses was measured."""
        return self.table is not None and self.table.cache_omega is not None

    def perplexity_increase(self, omega: float) -> float | None:
        """Predicted for a sum of losses; ``None`` where there is no curve."""
        curve = None if self.table is None else self.table.curve
        return None if curve is None else curve.increase(omega)


def plan_quality(model: Model, workload: ServingWorkload, seed: int) -> PlanQuality:
    """Losses and limits of a plan.

    Raises:
        SpecError: a table of other weights or without some bits; text for random weights; a limit
            on perplexity without a curve; a limit and a quantised cache that was not measured.
        InfeasibleError: the cache alone is above a limit.
    """
    table = _table(model, workload, seed)
    limit = workload.max_perplexity_increase
    cache, cache_notes = _cache(table, workload)
    if table is None:
        if limit is not None:
            raise SpecError(
                "workload.max_perplexity_increase", got=limit, expected="text or a quality table",
                fix="add text=stdlib or a text file, or quality=FILE from foreplan quality",
            )  # fmt: skip
        omega = _of_weights(model, _stamp(model), workload.bits)
        told = model.weights == "trained"
        said = (_WEIGHTS_ALONE,) if told else ()
        return PlanQuality(omega, workload.max_omega, None, said + cache_notes)
    where = f"{table.indicator} on {table.windows} windows of {table.length} tokens of {table.text}"
    notes = [f"quality losses are {where} ({table.text_digest}), seed {table.seed}"]
    caps = [] if workload.max_omega is None else [workload.max_omega]
    curve = table.curve
    if curve is not None:
        notes.append(
            f"perplexity follows from their sum by a curve fitted on {curve.plans} random plans, "
            f"off by {curve.error:.0%} of the mean rise (plan left out)"
        )
    if limit is not None:
        if curve is None:
            raise SpecError(
                "workload.max_perplexity_increase", got=limit,
                expected="a quality table with a curve", fix="measure it on more text",
            )  # fmt: skip
        cap = curve.omega(limit)
        if cap > curve.largest_omega:
            notes.append("the perplexity limit lies beyond the plans that the curve was fitted on")
        caps.append(cap)
    cap_or_none = min(caps) - cache if caps else None
    if cap_or_none is not None and cap_or_none < 0:
        raise InfeasibleError(
            f"8 bits a number of the KV cache lose {cache:.3g} alone, above the limit of "
            f"{min(caps):.3g}",
            fix="plan with kv_bits=16, or relax max_omega or max_perplexity_increase",
        )
    return PlanQuality(
        table.losses(workload.bits), cap_or_none, table, (*notes, *cache_notes), cache
    )


def _cache(table: QualityTable | None, workload: ServingWorkload) -> tuple[float, tuple[str, ...]]:
    """Loss of the workload's KV cache and what to say of it."""
    if workload.cache_bits == 16:
        return 0.0, ()
    measured = None if table is None else table.cache_omega
    if measured is not None:
        return measured, (
            f"the KV cache is kept in 8 bits: {measured:.3g} of the sum, measured on all layers "
            "with weights of 16 bits",
        )
    limits = ("max_omega", "max_perplexity_increase")
    named = [name for name in limits if getattr(workload, name) is not None]
    if named:
        raise SpecError(
            "workload.kv_bits", got=workload.cache_bits,
            expected=f"16 beside {named[0]}: nothing here says what an 8-bit cache loses",
            fix="name a text, or a table that foreplan quality made with measured_kl",
        )  # fmt: skip
    return 0.0, (_CACHE_UNKNOWN,)


def _table(model: Model, workload: ServingWorkload, seed: int) -> QualityTable | None:
    if workload.quality is not None:
        table = QualityTable.load(workload.quality)
        table.check(model)
        return table
    if workload.text is None:
        return None
    if model.weights == "random":
        raise SpecError(
            "workload.text", got=workload.text, expected="none: quality of random weights means "
            "nothing", fix="leave it out, or give a model folder with weights",
        )  # fmt: skip
    return _measured(model, _stamp(model), workload.text, _lowered(workload.bits), seed)


@functools.lru_cache(maxsize=8)
def _of_weights(model: Model, stamp: tuple[object, ...], bits: tuple[int, ...]) -> FloatArray:
    omega = weight_sensitivity(model, bits)
    omega.flags.writeable = False
    return omega


@functools.lru_cache(maxsize=8)
def _measured(
    model: Model, stamp: tuple[object, ...], text: str, bits: tuple[int, ...], seed: int
) -> QualityTable:
    # A plan asks several times (baselines, metrics, what-if); files that change are read again.
    return measure_quality(model, text, bits=bits, seed=seed)


def _lowered(bits: Sequence[int]) -> tuple[int, ...]:
    return tuple(b for b in bits if b < 16) or (8,)


def _stamp(model: Model) -> tuple[object, ...]:
    """Size and time of the folder's files."""
    files = [] if model.path is None else sorted(Path(model.path).glob("*.safetensors"))
    return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
