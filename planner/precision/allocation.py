"""One device's precisions as a multiple-choice problem, and its answers.

For a device and a target ``T`` for the iteration, with ``x`` the options, ``c`` the casts of edges
(both from `StepTables`), ``omega`` the indicator and ``C_j`` the all-reduce of bucket ``j``::

    minimise   sum omega[o, x_o]
    subject to Fwd(x) + Bwd(x, until bucket q is ready) + sum_(j >= q) C_j <= T - optimizer   each q
               Fwd(x) + Bwd(x)                                             <= T - optimizer
               Host(x)                                                     <= T - optimizer
               (Bwd with what all-reduces beside it take, a constant of each row)
               masters + gradients + states + workspace + saved(x)        <= memory

``Host`` is what a GPU's host takes to issue all calls, where it is known: each part of a step takes
the longer of both, so that all parts take at least the host's sum. The first rows are the exact
unrolling of a FIFO queue of all-reduces: ``end_q = max(end_(q-1), ready_q) + C_q`` is at most T if
and only if every ``ready_q + sum_(j >= q) C_j`` is (rows by `ChoiceProblem`).
``ready_q`` is a maximum over ranks, so that a row for each device bounds it, and devices separate.
Dependent operators follow their producers; operators of one module, or of one position in repeated
blocks, share a group. ``saved`` is the linear form of `SavedBytes`, never above the exact count, so
that the solver's bound holds; what it leaves out is added as a tighter limit by the planner.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreplan.cost_models.schedule import FloatArray, IntArray
from foreplan.planner.precision.replay import DeviceReplay
from foreplan.solvers.choice_problem import ChoiceItem, ChoicePair, ChoiceProblem

#: Omega of a module's variants: by module, then by the variant's text.
Omega = Mapping[str, Mapping[str, float]]
MEMORY, HOST = "memory", "host"


class Allocation:
    """Multiple-choice problems of one device.

    Args:
        device: its tables and replay.
        omega: what each variant of a module costs in quality; also of variants that it lacks.
        all_reduce_s: seconds of each bucket's all-reduce.
        beside_s: seconds that each part of the backward pass loses to the all-reduces beside it.
        share_layers: one choice for operators at one position of repeated blocks.
    """

    def __init__(
        self, device: DeviceReplay, omega: Omega, all_reduce_s: FloatArray, beside_s: FloatArray,
        *, share_layers: bool,
    ) -> None:  # fmt: skip
        self.device, self._omega = device, omega
        tables = device.tables
        self._follows = tables.follows
        lost = np.cumsum(beside_s)
        self.communication_s = np.concatenate(
            (np.cumsum(all_reduce_s[::-1])[::-1] + lost, lost[-1:])
        )
        self._groups = self._group_numbers(share_layers)
        terms = device.saved.linear_terms()
        parts = len(all_reduce_s)
        late = np.minimum(np.array(device.buckets.part), parts)  # rows >= late hold its backward
        issue = device.issue
        # Parts of the backward pass without work have no share of what runs around its calls, and
        # which they are a plan decides: the row leaves it out, so that the bound holds.
        self._around_s = 0.0 if issue is None else issue.once_s
        self._items = [
            self._weights(
                [p.forward_s for p in options], [p.backward_s for p in options],
                None if issue is None else issue.of_options[i], terms.items[i], int(late[i]), parts,
            )
            for i, options in enumerate(tables.options)
        ]  # fmt: skip
        self._pairs = [
            self._weights(
                edge.forward_s, edge.backward_s, None if issue is None else issue.of_edges[e],
                terms.edges[e], int(late[edge.consumer]), parts,
            )
            for e, edge in enumerate(tables.edges)
        ]  # fmt: skip

    @staticmethod
    def _weights(
        forward: object, backward: object, host: FloatArray | None, memory: FloatArray, late: int,
        parts: int,
    ) -> FloatArray:  # fmt: skip
        """``[..., rows]``: buckets, the whole backward pass, the host where it is known, memory."""
        first, second = np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)
        rows = np.repeat(first[..., None], parts + 1, axis=-1)
        rows[..., late:] += second[..., None]
        others = [memory] if host is None else [host, memory]
        return np.concatenate([rows, *(np.asarray(o, dtype=float)[..., None] for o in others)], -1)

    @staticmethod
    def _longest(weights: FloatArray, parts: int) -> FloatArray:
        """Seconds of both passes, or of the host where it takes longer."""
        return weights[..., parts:-1].max(axis=-1)  # type: ignore[no-any-return]

    def _group_numbers(self, share_layers: bool) -> dict[int, int]:
        """Group of every adjustable operator that is not alone."""
        tables = self.device.tables
        members: dict[object, list[int]] = {}
        for i in tables.graph.adjustable:
            o = tables.graph.operators[i]
            members.setdefault(o.position if share_layers and o.position else o.module, []).append(
                i
            )
        return {
            i: number
            for number, found in enumerate(members.values())
            if len(found) > 1
            for i in found
        }

    def problem(
        self, target_s: float, optimizer_s: float, saved_limit: float, *, fastest: bool = False
    ) -> ChoiceProblem:
        """The problem for a target.

        Args:
            target_s: seconds that an iteration may take; ``inf`` for none.
            optimizer_s: seconds of the update.
            saved_limit: bytes that saved tensors may take.
            fastest: minimise the seconds of both passes instead of omega; of a GPU whose host is
                known each option counts by the longer of both.
        """
        tables = self.device.tables
        parts = len(self.communication_s) - 1
        open_s = target_s - optimizer_s
        hosts = [] if self.device.issue is None else [HOST]
        limits = np.concatenate(
            (open_s - self.communication_s, [open_s - self._around_s for _ in hosts], [saved_limit])
        )
        items, counted = [], set()
        for i, options in enumerate(tables.options):
            o = tables.graph.operators[i]
            values = np.zeros(len(options))
            if fastest:
                values = self._longest(self._items[i], parts)
            elif o.adjustable and o.module not in counted:
                counted.add(o.module)
                values = np.array([self._omega[o.module][p.name] for p in options])
            items.append(
                ChoiceItem(
                    values=values,
                    weights=self._items[i],
                    emits=np.array([p.state for p in options]),
                    follows=o.producers if self._follows[i] else (),
                    group=self._groups.get(i),
                    label=o.module or o.node.name,
                )
            )
        pairs = tuple(
            ChoicePair(
                producer=edge.producer, consumer=edge.consumer, weights=self._pairs[e],
                values=self._longest(self._pairs[e], parts)
                if fastest
                else np.zeros(edge.forward_s.shape),
            )
            for e, edge in enumerate(tables.edges)
            if self._pairs[e].any()
        )  # fmt: skip
        names = tuple(f"bucket {q}" for q in range(parts))
        return ChoiceProblem(
            items=tuple(items), limits=limits, pairs=pairs,
            rows=(*names, "backward", *hosts, MEMORY),
        )  # fmt: skip

    def omega(self, choice: IntArray) -> float:
        """Summed indicator of a choice; a module counts once however often it runs."""
        return sum(
            self._omega[module][name] for module, name in self.device.tables.names(choice).items()
        )
