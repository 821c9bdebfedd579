"""Second opinions on "infeasible": small programmes of their own, solved by HiGHS.

They read the problem's data (prices and bytes of single options, parameters of single layers), none
of the planners' searches: the precision planner's cascade of casts, shared tensors and buckets is
written anew with a binary an option and a product an edge; the bubble planner's memory with a
binary a layer and stage, for every layout that its documentation allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import highspy
import numpy as np

from foreplan.planner.base import Problem
from foreplan.planner.bubbles.device_order import device_orders
from foreplan.planner.bubbles.ledger import capacity_bytes
from foreplan.planner.bubbles.memory import GRADIENT_BYTES, half_activation_bytes
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.precision.pricing import node_bytes
from foreplan.planner.precision.situation import Situation
from foreplan.planner.precision.spec import PrecisionWorkload

#: Rows are scaled to a right side of 1, so that HiGHS's tolerance is a share of the limit.
_TOLERANCE = 1e-9
#: Bytes that the planner's division of sums may lose to rounding, a rank.
_ROUNDING = 64
#: Ranks of a pipeline up to which every order of devices is tried, beyond the planner's own ones.
_ALL_ORDERS = 5


class _Programme:
    """Columns, between 0 and 1 as a rule, and rows; no objective: is there a point or not."""

    def __init__(self) -> None:
        self.highs = highspy.Highs()
        self.highs.silent()
        self.highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
        self.highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
        self.count = 0

    def column(self, *, whole: bool = True, low: float = 0.0, high: float = 1.0) -> int:
        self.highs.addVar(low, high)
        if whole:
            self.highs.changeColIntegrality(self.count, highspy.HighsVarType.kInteger)
        self.count += 1
        return self.count - 1

    def row(self, low: float, terms: dict[int, float], high: float) -> None:
        columns = np.array(list(terms), dtype=np.int32)
        self.highs.addRow(low, high, len(terms), columns, np.array([*terms.values()], dtype=float))

    def below(self, terms: dict[int, float], limit: float) -> None:
        """``terms <= limit``, scaled; a limit below 0 is met by nothing, as no term is negative."""
        if math.isinf(limit):
            return
        unit = max(abs(limit), *map(abs, terms.values()), 1e-300)
        self.row(-math.inf, {c: f / unit for c, f in terms.items()}, limit / unit + _TOLERANCE)

    def point(self) -> list[float] | None:
        """A feasible point, or ``None`` where HiGHS proves that there is none."""
        self.highs.run()
        status = self.highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        assert status == highspy.HighsModelStatus.kOptimal, status
        return list(self.highs.getSolution().col_value)


# ----------------------------------------------------------------------------------- precision


def precision_feasible(problem: Problem[PrecisionWorkload], *, timed: bool) -> bool:
    """Whether some plan holds in memory and, if ``timed``, takes at most the workload's target.

    Ranks meet in the all-reduces alone, whose end is the latest rank's plus what is behind it, so
    that each kind of device is feasible or not by itself (no contention between ranks is stated).
    """
    situation = Situation(problem)
    assert situation.replay.all_reduce_s.ndim == 1
    wanted = problem.workload.target_s
    target = math.inf
    if timed:
        assert wanted is not None
        target = wanted * (1.0 + problem.workload.slack)
    chosen = [_precisions_of(situation, k, target) for k in range(len(situation.kinds))]
    if any(choice is None for choice in chosen):
        return False
    replayed = situation.replay.run(situation.each([c for c in chosen if c is not None]))
    assert replayed.iteration_s <= target * (1 + 1e-6), "the programme forgets some time"
    assert situation.fits(replayed), "the programme forgets some bytes"
    return True


def _precisions_of(situation: Situation, kind: int, target: float) -> Any:
    device, p = situation.devices[kind], _Programme()
    tables, saved, graph = device.tables, device.saved, device.tables.graph
    operators = range(len(graph))
    one = p.column()
    p.row(1.0, {one: 1.0}, 1.0)

    # Options: one a module, however often it runs; of what follows by the states it reads.
    by_module: dict[tuple[str, str], int] = {}
    option: list[list[int]] = []
    for i in operators:
        o, options = graph.operators[i], tables.options[i]
        if len(options) == 1:
            option.append([one])
        elif o.adjustable:
            names = [(o.module, entry.name) for entry in options]
            if names[0] not in by_module:
                by_module |= {name: p.column() for name in names}
                p.row(1.0, dict.fromkeys((by_module[name] for name in names), 1.0), 1.0)
            option.append([by_module[name] for name in names])
        else:
            full, low = p.column(), p.column()
            p.row(1.0, {full: 1.0, low: 1.0}, 1.0)
            states = [
                [c for c, e in zip(option[u], tables.options[u], strict=True) if e.state == 1]
                for u in o.producers
            ]
            # low = every producer's state is low
            for lows in states:
                p.row(-math.inf, {low: 1.0, **dict.fromkeys(lows, -1.0)}, 0.0)
            both = dict.fromkeys((c for lows in states for c in lows), 0.0)
            for c in (c for lows in states for c in lows):
                both[c] += 1.0
            p.row(-math.inf, {**both, low: -1.0}, len(states) - 1.0)
            option.append([full, low])

    # Edges: a column for each pair of options.
    edge: list[list[list[int]]] = []
    for e in tables.edges:
        a, b = option[e.producer], option[e.consumer]
        z = [[p.column(whole=False) for _ in b] for _ in a]
        for x, line in zip(a, z, strict=True):
            p.row(0.0, {**dict.fromkeys(line, 1.0), x: -1.0}, 0.0)
        for y, line in zip(b, zip(*z, strict=True), strict=True):
            p.row(0.0, {**dict.fromkeys(line, 1.0), y: -1.0}, 0.0)
        edge.append(z)

    # Seconds until bucket q may be reduced, then the queue of all-reduces behind it.
    part, replay = device.buckets.part, situation.replay
    last_s = float(max(replay.optimizer_s))
    own_s = float(replay.optimizer_s[situation.kinds[kind][0]])
    parts = len(replay.all_reduce_s)
    for q in range(parts + 1):
        seconds: dict[int, float] = {}
        for i in operators:
            for c, entry in zip(option[i], tables.options[i], strict=True):
                back = entry.backward_s if part[i] <= q else 0.0
                seconds[c] = seconds.get(c, 0.0) + entry.forward_s + back
        for z, e in zip(edge, tables.edges, strict=True):
            for a, line in enumerate(z):
                for b, c in enumerate(line):
                    back = e.backward_s[a][b] if part[e.consumer] <= q else 0.0
                    seconds[c] = seconds.get(c, 0.0) + e.forward_s[a][b] + back
        behind = own_s if q == parts else float(sum(replay.all_reduce_s[q:])) + last_s
        p.below(seconds, target - behind)

    # Bytes: a tensor that several keep counts once.
    held: dict[int, float] = {}
    for i in operators:
        o = graph.operators[i]
        takers = [n for n, e in enumerate(tables.edges)
                  if e.producer == i and graph.operators[e.consumer].adjustable]  # fmt: skip
        for a, (c, entry) in enumerate(zip(option[i], tables.options[i], strict=True)):
            held[c] = held.get(c, 0.0) + saved.own_bytes(i, a)
            if saved._always[i]:
                kept = c
            else:
                kept = p.column(whole=False)
                for n in takers:
                    for b, product in enumerate(edge[n][a]):
                        if saved.copy_bytes(tables.edges[n], a, b) == 0:
                            p.row(0.0, {kept: 1.0, product: -1.0}, math.inf)
            held[kept] = held.get(kept, 0.0) + node_bytes(o.node, entry.state)
    for z, e in zip(edge, tables.edges, strict=True):
        for a, line in enumerate(z):
            for b, c in enumerate(line):
                held[c] = held.get(c, 0.0) + saved.copy_bytes(e, a, b)
    p.below(held, float(situation.saved_limit(kind)))

    found = p.point()
    if found is None:
        return None
    return np.array([max(range(len(cs)), key=lambda a: found[cs[a]]) for cs in option])


# ------------------------------------------------------------------------------------- bubbles


def bubbles_feasible(problem: Problem[BubblesWorkload]) -> bool:
    """Whether some layout might hold backbone and encoders in memory.

    Wider than what the planner tries: the backbone cut anywhere, as many micro-batches in flight as
    its schedule needs before the first backward pass, dealt to pipelines of the encoders as may be;
    nothing for features. "No" is a proof; "yes" is not.
    """
    return any(_layout_feasible(problem, plan, count) for plan, count in _layouts(problem))


def _layouts(problem: Problem[BubblesWorkload]) -> Iterator[tuple[BackbonePlan, int]]:
    """Layouts and micro-batches of each pipeline, by the documented rules."""
    w, ranks = problem.workload, problem.cluster.ranks()
    n = w.devices or len(ranks)
    hosts = [rank.host for rank in ranks[:n]]
    widest = min(hosts.count(host) for host in hosts)
    sizes = range(1, n + 1)
    for dp, tp, pp, chunks in itertools.product(sizes, sizes, sizes, (1, 2, 3, 4, 6, 8, 12)):
        plan = BackbonePlan(dp=dp, tp=tp, pp=pp, chunks=chunks)
        if w.plan is not None:
            if plan != w.plan:
                continue
        elif dp * tp * pp != n or tp > min(widest, 8) or (w.global_batch is None and dp > 1):
            continue
        step = TrainingStep(problem, plan)
        towers = (step.backbone, *step.encoders)
        count = w.microbatches or (w.global_batch or 0) // (dp * w.microbatch)
        enough = step.backbone.layers >= pp * chunks
        lanes = all(t.heads % tp == 0 and t.kv_heads % tp == 0 and t.ffn % tp == 0 for t in towers)
        interleaves = chunks == 1 or (
            pp > 1 and w.schedule == "interleaved-1f1b" and count % pp == 0
        )
        if enough and lanes and interleaves:
            for order in _orders(problem, plan):
                yield plan.model_copy(update={"device_order": order}), count


def _orders(problem: Problem[BubblesWorkload], plan: BackbonePlan) -> Iterator[tuple[int, ...]]:
    """Orders of the blocks of devices that a pipeline's ranks take, one of each that are alike."""
    width, seen = plan.dp * plan.tp, set()
    ranks = problem.cluster.ranks()
    blocks = [
        tuple((str(r.name), r.memory_bytes) for r in ranks[at * width : (at + 1) * width])
        for at in range(plan.pp)
    ]
    many = plan.pp > _ALL_ORDERS
    every = itertools.permutations(range(plan.pp))
    for order in device_orders(problem.cluster, plan) if many else every:
        if (found := tuple(blocks[at] for at in order)) not in seen:
            seen.add(found)
            yield tuple(order)


def _layout_feasible(problem: Problem[BubblesWorkload], plan: BackbonePlan, count: int) -> bool:
    step = TrainingStep(problem, plan)
    pp, layers = plan.pp, step.backbone.layers
    modes = [_together(step, k) for k in range(1, pp + 1) if _may_share(step, k, count)]
    modes.append(_on_the_first(step))
    chains = {1, plan.chunks} if len(step.encoders) == 1 else set()
    for mode in modes:
        if _cut(problem, step, 0, layers, plan.chunks, count, mode):
            return True
    return any(
        _cut(problem, step, -step.encoders[0].layers, layers, chunks, count, lambda rank: None)
        for chunks in chains
    )


def _may_share(step: TrainingStep, stages: int, count: int) -> bool:
    pp = step.plan.pp
    enough = pp % stages == 0 and all(t.layers >= stages for t in step.encoders)
    return enough and pp // stages <= count


class _Beside(NamedTuple):
    """What encoders hold on a rank: always, for a micro-batch, and of which pipeline."""

    always: float
    kept: float
    pipeline: int


def _together(step: TrainingStep, stages: int) -> Callable[[int], _Beside | None]:
    """Encoders in ``stages`` stages on all ranks."""

    def held(rank: int) -> _Beside:
        pipeline, at = divmod(rank, stages)
        sizes = [
            _encoder(step, e, range(-(-at * tower.layers // stages),
                                    -(-(at + 1) * tower.layers // stages)),
                     step.plan.pp // stages)
            for e, tower in enumerate(step.encoders)
        ]  # fmt: skip
        return _Beside(*map(sum, zip(*sizes, strict=True)), pipeline)

    return held


def _on_the_first(step: TrainingStep) -> Callable[[int], _Beside | None]:
    sizes = [_encoder(step, e, range(t.layers), 1) for e, t in enumerate(step.encoders)]
    whole = _Beside(*map(sum, zip(*sizes, strict=True)), 0)
    return lambda rank: whole if rank == 0 else None


def _encoder(step: TrainingStep, e: int, layers: range, holders: int) -> tuple[float, float]:
    """Bytes of some layers of an encoder on one device: states, and those of one micro-batch."""
    tower, plan = step.encoders[e], step.plan
    own = sum(tower.range_parameters(layer, layer + 1) for layer in layers) / plan.tp
    if step.encoder(e).frozen:
        return step.arithmetic.element_bytes * own, 0.0
    if step.encoder(e).recompute:  # the input of a unit, which may be the whole stage
        kept = step.unit_bytes(e, plan.tp, 0, 2) * 1.0
    else:
        kept = sum(step.unit_bytes(e, plan.tp, 2 * layer, 2 * layer + 2) for layer in layers)
    return own * _each(step, plan.dp * holders), kept


def _each(step: TrainingStep, replicas: int) -> float:
    """Bytes of a trained parameter."""
    states = step.arithmetic.optimizer_bytes / (replicas if step.workload.sharded_optimizer else 1)
    return step.arithmetic.element_bytes + GRADIENT_BYTES + states


def _flying(step: TrainingStep, rank: int, chunks: int, count: int) -> int:
    """Micro-batches of a rank before its first backward pass, at least."""
    if step.workload.schedule == "gpipe":
        return count
    return min(count, step.plan.pp - rank) if chunks == 1 else 1


def _cut(
    problem: Problem[BubblesWorkload], step: TrainingStep, first: int, last: int, chunks: int,
    count: int, beside: Callable[[int], _Beside | None],
) -> bool:  # fmt: skip
    """Whether layers ``[first, last)``, those below 0 of the encoder, can be cut into stages."""
    plan, p, w = step.plan, _Programme(), step.workload
    spans, stages = range(first, last), range(plan.pp * chunks)
    if len(spans) < len(stages):
        return False
    at = {(layer, s): p.column() for layer in spans for s in stages}
    for layer in spans:
        p.row(1.0, {at[layer, s]: 1.0 for s in stages}, 1.0)
        if layer > first:  # stages follow each other
            for s in stages:
                later = {at[layer, t]: 1.0 for t in range(s + 1)}
                p.row(-math.inf, later | {at[layer - 1, t]: -1.0 for t in range(s + 1)}, 0.0)
    for s in stages:
        p.row(1.0, {at[layer, s]: 1.0 for layer in spans}, math.inf)
    inside = sum(
        half_activation_bytes(
            step.backbone, half, rows=w.microbatch * w.sequence_length, tokens=w.sequence_length,
            tp=plan.tp, recompute="selective", element_bytes=step.arithmetic.element_bytes,
        )
        for half in (0, 1)
    )  # fmt: skip
    others = [beside(rank) for rank in range(plan.pp)]
    pipelines = {other.pipeline for other in others if other is not None}
    live = {j: p.column(low=1.0, high=float(count)) for j in pipelines}
    if live:  # what the first rank has run forwards is live in the encoders
        p.row(_flying(step, 0, chunks, count), dict.fromkeys(live.values(), 1.0), math.inf)
    for rank, other in enumerate(others):
        flying = _flying(step, rank, chunks, count)
        need: dict[int, float] = {}
        for layer, s in itertools.product(spans, stages):
            if s % plan.pp != rank:
                continue
            if layer < 0:
                states, each = _encoder(step, 0, range(layer - first, layer - first + 1), 1)
                if step.encoder(0).recompute:  # the inputs of at least four units of a stage
                    each *= min(1.0, 4 / -first)
                need[at[layer, s]] = states + flying * each
                continue
            own = step.backbone.range_parameters(layer, layer + 1) / plan.tp
            kept = step.activation_bytes(layer, layer + 1)
            need[at[layer, s]] = own * _each(step, plan.dp) + flying * kept
        room = capacity_bytes(problem, step, rank) + _ROUNDING - inside
        if other is not None:
            room -= other.always
            need[live[other.pipeline]] = other.kept
        p.below(need, room)
    return p.point() is not None
