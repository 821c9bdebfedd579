"""The chain problem: layers in a row, cut into stages, one device a stage, one variant a layer.

Shape legend: ``K`` device types, ``L`` layers, ``V`` variants (bit-width and kernel of a layer),
``R`` kinds of need for workspace.

Law (seconds), for stages ``j`` with prefill time ``P_j`` and decode time ``D_j`` per micro-batch::

    latency   = sum P + (Mp - 1) * max P + (n - 1) * max(sum D, m * max D)
    objective = latency + theta * sum omega

``Mp`` prefill micro-batches, ``m`` decode micro-batches, ``n`` new tokens a request (the first
one comes out of prefill, so ``n = 1`` has no decode term). A link is a pipeline stage of its own:
each hop's time is added to the sum and can be the maximum. Decode also has the hop that returns
the token from the last stage to the first; a single stage has no hop at all.

Source of the law: pipeline fill for prefill; for decode a micro-batch needs ``sum D`` to come
round again, and the bottleneck serves ``m`` of them in the meantime (replaces the ``m - 1`` law
of LLM-PQ, which is wrong for small ``m``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreplan.errors import SpecError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

RELATIVE_TOLERANCE = 1e-9
"""Slack on every limit, so that a sum of floats that should equal its limit meets it."""


def _unset() -> FloatArray:
    return np.empty(0)


def _no_needs() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainProblem:
    """One instance; arrays are copied, checked and made read-only.

    Attributes:
        counts: ``[K]`` devices of each type; any order along the chain, unused ones are allowed.
        prefill_s: ``[K, L, V]`` seconds of a layer for one prefill micro-batch; ``inf`` in this or
            in ``decode_s`` means that the type has no such variant.
        decode_s: ``[K, L, V]`` seconds of a layer for one token of one decode micro-batch.
        memory_bytes: ``[K, L, V]`` bytes that the layer occupies (weights and cache).
        capacity_bytes: ``[K]`` bytes a device can give to a stage.
        omega: ``[L, V]`` quality loss, at least 0.
        first_prefill_s: ``[K]`` extra of the stage that holds layer 0 (embedding); likewise
            ``first_decode_s``, ``first_memory_bytes`` and, for the stage that holds layer L-1
            (head), ``last_*``; one stage that holds both pays both.
        fixed_memory_bytes: ``[K]`` bytes of every stage, however short (context, tables).
        workspace_bytes: ``[K, R, 4, L]`` bytes that a stage needs once for layers of need r: by
            type, need, place (0 between others, 1 first, 2 last, 3 alone) and its number of layers
            less one. A stage takes the most over the needs of its layers, so that what it leaves
            room for follows from the variants that it uses.
        needs: ``[L, V]`` integers below R: which need a layer at a variant has.
        link_prefill_s: ``[K, K]`` seconds of the hop from a stage on type k to the next on type k'.
        link_decode_s: ``[K, K]`` the same for a decode micro-batch.
        link_return_decode_s: ``[K, K]`` hop from the last stage's type to the first stage's.
        prefill_microbatches: ``Mp``.
        decode_microbatches: ``m``.
        new_tokens: ``n``.
        theta: seconds per unit of omega in the objective.
        max_omega: hard limit on the sum of omega, or ``None``.
        cost2: ``[L, V]`` second additive cost of any sign (minus bits, for an average-bits floor).
        max_cost2: hard limit on the sum of ``cost2``, or ``None``.

    Arrays left out are zeros.

    Raises:
        SpecError: a wrong shape, a NaN, a negative size or time, a count that is no integer.
    """

    counts: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    memory_bytes: FloatArray
    capacity_bytes: FloatArray
    omega: FloatArray = field(default_factory=_unset)
    first_prefill_s: FloatArray = field(default_factory=_unset)
    first_decode_s: FloatArray = field(default_factory=_unset)
    first_memory_bytes: FloatArray = field(default_factory=_unset)
    last_prefill_s: FloatArray = field(default_factory=_unset)
    last_decode_s: FloatArray = field(default_factory=_unset)
    last_memory_bytes: FloatArray = field(default_factory=_unset)
    fixed_memory_bytes: FloatArray = field(default_factory=_unset)
    workspace_bytes: FloatArray = field(default_factory=_unset)
    needs: IntArray = field(default_factory=_no_needs)
    link_prefill_s: FloatArray = field(default_factory=_unset)
    link_decode_s: FloatArray = field(default_factory=_unset)
    link_return_decode_s: FloatArray = field(default_factory=_unset)
    prefill_microbatches: int = 1
    decode_microbatches: int = 1
    new_tokens: int = 1
    theta: float = 0.0
    max_omega: float | None = None
    cost2: FloatArray = field(default_factory=_unset)
    max_cost2: float | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.prefill_s)
        if len(shape) != 3 or 0 in shape:
            raise SpecError("ChainProblem.prefill_s", got=shape, expected="shape [K, L, V], none 0")
        k, n_layers, n_variants = shape
        self._set("prefill_s", shape)
        self._set("decode_s", shape)
        self._set("memory_bytes", shape)
        self._set("capacity_bytes", (k,), required=True)
        for edge in ("first", "last"):
            for quantity in ("prefill_s", "decode_s", "memory_bytes"):
                self._set(f"{edge}_{quantity}", (k,))
        self._set("fixed_memory_bytes", (k,))
        self._set_workspace()
        for link in ("link_prefill_s", "link_decode_s", "link_return_decode_s"):
            self._set(link, (k, k))
        self._set("omega", (n_layers, n_variants), infinite=False)
        self._set("cost2", (n_layers, n_variants), infinite=False, negative=True)
        counts = np.asarray(self.counts)
        if (
            counts.shape != (k,)
            or not np.issubdtype(counts.dtype, np.integer)
            or (counts < 0).any()
        ):
            raise SpecError("ChainProblem.counts", got=self.counts, expected=f"{k} integers >= 0")
        counts = counts.astype(np.int64)
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)
        for name in ("prefill_microbatches", "decode_microbatches", "new_tokens"):
            got = getattr(self, name)
            if not isinstance(got, (int, np.integer)) or got < 1:
                raise SpecError(f"ChainProblem.{name}", got=got, expected="an integer >= 1")
        if not (math.isfinite(self.theta) and self.theta >= 0):
            raise SpecError("ChainProblem.theta", got=self.theta, expected="finite, >= 0")
        if self.max_omega is not None and not (
            math.isfinite(self.max_omega) and self.max_omega >= 0
        ):
            raise SpecError("ChainProblem.max_omega", got=self.max_omega, expected="finite, >= 0")
        if self.max_cost2 is not None and not math.isfinite(self.max_cost2):
            raise SpecError("ChainProblem.max_cost2", got=self.max_cost2, expected="finite")

    def _set_workspace(self) -> None:
        """Copy in what stages need once, and which layers need it."""
        k, n_layers, n_variants = self.prefill_s.shape
        shape = np.shape(self.workspace_bytes)
        n_needs = shape[1] if len(shape) == 4 and shape[1] else 1
        self._set("workspace_bytes", (k, n_needs, 4, n_layers), infinite=False)
        needs = np.asarray(self.needs)
        if needs.size == 0:
            needs = np.zeros((n_layers, n_variants), dtype=np.int64)
        if (
            needs.shape != (n_layers, n_variants)
            or not np.issubdtype(needs.dtype, np.integer)
            or (needs < 0).any()
            or (needs >= n_needs).any()
        ):
            raise SpecError(
                "ChainProblem.needs", got=self.needs,
                expected=f"[{n_layers}, {n_variants}] integers of 0..{n_needs - 1}",
            )  # fmt: skip
        needs = needs.astype(np.int64)
        needs.setflags(write=False)
        object.__setattr__(self, "needs", needs)

    def _set(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        required: bool = False,
        infinite: bool = True,
        negative: bool = False,
    ) -> None:
        """Copy one array in as read-only float64, or zeros if it was left out."""
        where = f"ChainProblem.{name}"
        try:
            # One memory layout, so that the solvers' loops are compiled once.
            array = np.array(getattr(self, name), dtype=np.float64, order="C")
        except (TypeError, ValueError) as error:
            raise SpecError(where, got=getattr(self, name), expected="numbers") from error
        if array.size == 0 and not required:
            array = np.zeros(shape)
        if array.shape != shape:
            raise SpecError(where, got=array.shape, expected=f"shape {list(shape)}")
        if np.isnan(array).any():
            raise SpecError(where, got="NaN", expected="numbers")
        if not negative and (array < 0).any():
            raise SpecError(where, got=float(array.min()), expected=">= 0")
        if not infinite and np.isinf(array).any():
            raise SpecError(where, got="inf", expected="finite numbers")
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    @property
    def n_types(self) -> int:
        """``K``."""
        return int(self.prefill_s.shape[0])

    @property
    def n_layers(self) -> int:
        """``L``."""
        return int(self.prefill_s.shape[1])

    @property
    def n_variants(self) -> int:
        """``V``."""
        return int(self.prefill_s.shape[2])

    @property
    def available(self) -> npt.NDArray[np.bool_]:
        """``[K, L, V]`` whether the type can run the layer at the variant at all."""
        return (
            np.isfinite(self.prefill_s)
            & np.isfinite(self.decode_s)
            & np.isfinite(self.memory_bytes)
        )

    def once_bytes(self, k: int, start: int, end: int, needs: IntArray) -> FloatArray:
        """Bytes ``[...]`` beside its layers of stages ``[start, end)`` on a type.

        Args:
            k: the type.
            start: first layer.
            end: one past the last.
            needs: ``[..., end - start]`` of the stages' layers.
        """
        last = end == self.n_layers
        place = int(start == 0) + 2 * int(last)
        once = self.workspace_bytes[k, :, place, end - start - 1][needs].max(axis=-1)
        once = once + self.fixed_memory_bytes[k]
        if start == 0:
            once = once + self.first_memory_bytes[k]
        if last:
            once = once + self.last_memory_bytes[k]
        found: FloatArray = once
        return found

    @property
    def capacity_limit_bytes(self) -> FloatArray:
        """``[K]`` capacity with the float slack that every solver shares."""
        limit: FloatArray = self.capacity_bytes * (1 + RELATIVE_TOLERANCE)
        return limit

    @property
    def omega_limit(self) -> float:
        """``max_omega`` with float slack; ``inf`` without a limit."""
        return math.inf if self.max_omega is None else self.max_omega * (1 + RELATIVE_TOLERANCE)

    @property
    def cost2_limit(self) -> float:
        """``max_cost2`` with float slack; ``inf`` without a limit."""
        if self.max_cost2 is None:
            return math.inf
        # Costs of both signs cancel, so the slack must not vanish with the limit.
        return self.max_cost2 + RELATIVE_TOLERANCE * max(
            abs(self.max_cost2), 1e-3 * float(np.abs(self.cost2).max(axis=1).sum())
        )
