"""`Summary`: what a plan says in a few lines, the same in the terminal and on the page.

Generic over planners. Limits are found by name: a workload's ``max_omega`` limits the decision's or
the metrics' ``omega`` from above, its ``min_average_bits`` limits ``average_bits`` from below.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TypeGuard

from foreplan.datasets import device_zoo
from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import MissingDataError
from foreplan.planner.plan import Plan, decision_of
from foreplan.planner.registry import kinds, planner
from foreplan.planner.report.decision import DecisionView, StageView
from foreplan.planner.report.text import bytes_of, figure, percent, plain, seconds, words
from foreplan.planner.verify.session import problem_of

#: Sources of prices that no measurement of these devices stands behind, by what they are.
_UNMEASURED = {"a predictor": ("predicted",), "published figures": ("roofline", "theory")}


@dataclass(frozen=True, slots=True)
class Label:
    """Something every reader of a number must know.

    Attributes:
        word: two or three words.
        sentence: what it means.
    """

    word: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the plan and how much of it is used.

    Attributes:
        what: ``memory of t4#0``.
        used, limit, free: for readers.
        share: part of the limit that is used; at most 1 where it is met.
        eased: what relaxing it would bring, "" where that was not asked for.
    """

    what: str
    used: str
    limit: str
    free: str
    share: float
    eased: str = ""

    @property
    def verdict(self) -> str:
        """``exceeded``, ``tight`` (2 % free or less), ``close`` (10 % or less) or ``room``."""
        if self.share > 1 + 1e-9:
            return "exceeded"
        return "tight" if self.share >= 0.98 else "close" if self.share >= 0.9 else "room"


@dataclass(frozen=True)
class Summary:
    """A plan for readers.

    Attributes:
        title: ``llama-2-7b on 2 × t4, a100``.
        headline: the decision in a sentence.
        labels: slices, emulated links, random weights, numbers that nobody measured.
        limits: tightest first.
        devices: short name of each rank of the plan.
        unused: ``2 × l4`` of the cluster's devices that the plan leaves idle, or "".
        decision: what was decided.
    """

    title: str
    headline: str
    labels: tuple[Label, ...]
    limits: tuple[Limit, ...]
    devices: tuple[str, ...]
    unused: str
    decision: DecisionView

    def device_of(self, stage: int) -> str:
        """Short name of the device of a stage, by its number; "" where the plan does not say it."""
        stages = self.decision.stages
        rank = stages[stage].rank
        if rank is None and len(self.devices) == len(stages):
            rank = stage
        if rank is None or rank >= len(self.devices):
            return stages[stage].device
        return self.devices[rank]

    def by_rank(self) -> tuple[StageView, ...]:
        """The stage of each rank, where every rank holds one; else nothing."""
        stages = self.decision.stages
        holders = [k if stage.rank is None else stage.rank for k, stage in enumerate(stages)]
        if sorted(holders) != list(range(len(self.devices))):
            return ()
        return tuple(stages[holders.index(rank)] for rank in range(len(holders)))

    @classmethod
    def of(cls, plan: Plan) -> Summary:
        """Summarise a plan."""
        devices = short_labels([rank.device for rank in plan.predicted.ranks])
        decision = DecisionView.of(plan.decision, short_labels)
        limits = sorted([*_memory(plan, devices), *_named(plan)], key=lambda item: -item.share)
        return cls(
            title=_title(plan),
            headline=_headline(plan, decision),
            labels=tuple(_labels(plan)),
            limits=tuple(limits),
            devices=devices,
            unused=_unused(plan),
            decision=decision,
        )


def short_labels(labels: list[str]) -> tuple[str, ...]:
    """Rank labels without the host where all are of one host."""
    hosts = {label.partition("/")[0] for label in labels}
    if len(hosts) == 1 and all("/" in label for label in labels):
        return tuple(plain(label.partition("/")[2]) for label in labels)
    return tuple(plain(label) for label in labels)


def used_ranks(plan: Plan) -> list[Rank]:
    """The cluster's devices that the plan uses: of its ranks in their order, then the others.

    Others are those that do the same as one of the schedule's ranks.
    """
    ranks = plan.cluster.ranks()
    by_label = {rank.label: rank for rank in ranks}
    found = [by_label[rank.device] for rank in plan.predicted.ranks if rank.device in by_label]
    if len(found) < len(ranks) and plan.kind in kinds():
        chosen = planner(plan.kind)
        occupied = chosen.occupied(problem_of(plan, chosen), decision_of(plan))
        found += [ranks[index] for index in occupied]
    return list(dict.fromkeys(found))


def _kinds(ranks: list[Rank]) -> str:
    """``2 × t4, a100`` of some devices."""
    kinds = Counter(plain(rank.name) for rank in ranks)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in kinds.items())


def _unused(plan: Plan) -> str:
    used = set(used_ranks(plan))
    return _kinds([rank for rank in plan.cluster.ranks() if rank not in used])


def _title(plan: Plan) -> str:
    count = len(plan.predicted.ranks)
    where = _kinds(used_ranks(plan)) or f"{count} rank{'' if count == 1 else 's'}"
    return where if plan.model is None else f"{plain(plan.model.name)} on {where}"


def _headline(plan: Plan, decision: DecisionView) -> str:
    if decision.stages:
        count = len(decision.stages)
        what = f"{count} stage{'' if count == 1 else 's'}"
        if decision.replicas:
            what = f"{decision.replicas} replica{'' if decision.replicas == 1 else 's'}, {what}"
        held = [stage.layers for stage in decision.stages]
        if all(held) and count <= 6 and decision.replicas < 2:
            what += f" (layers {' · '.join(held)})"
        if decision.sentence:
            what += f", {decision.sentence}"
    else:
        what = decision.sentence or words(plan.kind)
    # A target is of one iteration, of which a verification runs several.
    iteration = plan.predicted.metrics.get("iteration_s")
    of = f"{seconds(iteration)} an iteration, " if iteration else ""
    text = f"{what}: {of}{seconds(plan.predicted.total_s)} {'in all ' if of else ''}predicted"
    rivals = [a for a in plan.alternatives if a.limits_met]
    if rivals:
        best = min(rivals, key=lambda a: a.predicted.total_s)
        ahead = 1 - plan.predicted.total_s / best.predicted.total_s if best.predicted.total_s else 0
        how, rank = f"{percent(ahead)} less than", "next best"
        if ahead <= -5e-4:  # of a planner that minimises something else, within a time
            how, rank = f"{percent(-ahead)} more than", "fastest other"
        elif ahead < 5e-4:
            how = "as long as"
        text += f", {how} {plain(best.name, 60)}, the {rank}"
    return text + "."


# ------------------------------------------------------------------------------------------ labels


def _labels(plan: Plan) -> list[Label]:
    labels = []
    if plan.model is not None and plan.model.weights == "random":
        labels.append(
            Label(
                "random weights",
                f"{plain(plan.model.name)} has random weights: times do not depend on them, "
                "tokens and quality mean nothing.",
            )
        )
    ranks = used_ranks(plan)
    slices = [str(r.name) for r in ranks if r.name.is_slice]
    slices += [
        f"{rank.name} ({published.slice})"
        for rank in ranks
        if rank.name.zoo and (published := device_zoo.device(rank.name.zoo)).slice
    ]
    if slices:
        shown = ", ".join(dict.fromkeys(plain(s) for s in slices))
        labels.append(Label("slice of a chip", f"Slices, not whole devices: {shown}."))
    emulated = _emulated(plan, ranks)
    if emulated:
        shown = ", ".join(plain(link) for link in emulated)
        labels.append(
            Label("emulated link", f"Slow links made from fast ones, no real network: {shown}.")
        )
    share = plan.provenance.source_share
    unmeasured = {
        what: part
        for what, sources in _UNMEASURED.items()
        if (part := sum(share.get(source, 0.0) for source in sources)) >= 0.01
    }
    if unmeasured:
        parts = [f"{percent(part)} comes from {what}" for what, part in unmeasured.items()]
        labels.append(
            Label(
                "not measured",
                f"Of the predicted compute time, {' and '.join(parts)}, not from these programs "
                "measured on these devices.",
            )
        )
    if not plan.decision.get("limits_met", True):
        labels.append(Label("limit missed", "The decision does not meet every limit."))
    return labels


def _emulated(plan: Plan, ranks: list[Rank]) -> list[str]:
    if not any(tier.emulated for tier in plan.cluster.tiers):
        return []
    found = []
    for a, b in itertools.combinations(ranks, 2):
        try:
            tier = plan.cluster.link(a, b)
        except MissingDataError:
            continue
        if tier.emulated:
            found.append(tier.label)
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------ limits


def _memory(plan: Plan, devices: tuple[str, ...]) -> list[Limit]:
    limits = []
    for name, rank in zip(devices, plan.predicted.ranks, strict=True):
        total = sum(rank.memory_bytes.values())
        if rank.capacity_bytes:
            free = rank.capacity_bytes - total
            limits.append(
                Limit(
                    what=f"memory of {name}",
                    used=bytes_of(total),
                    limit=bytes_of(rank.capacity_bytes),
                    free=bytes_of(free),
                    share=total / rank.capacity_bytes,
                    eased=_eased(plan, f"memory of {_device_name(plan, rank.device)}"),
                )
            )
    return limits


def _named(plan: Plan) -> list[Limit]:
    """Limits of the workload that the decision or the metrics answer by name."""
    limits = []
    known = {**plan.predicted.metrics, **plan.decision}
    for field, limit in plan.workload.items():
        bound, _, name = field.partition("_")
        value = known.get(name)
        if bound not in ("min", "max") or not (_is_number(limit) and _is_number(value)):
            continue
        at_most = bound == "max"
        small, large = (value, limit) if at_most else (limit, value)
        limits.append(
            Limit(
                what=figure(name, value)[0],
                used=figure(name, value)[1],
                limit=f"at {'most' if at_most else 'least'} {figure(name, limit)[1]}",
                free=figure(name, large - small)[1],
                share=small / large if large > 0 else 1.0,
                eased=_eased(plan, field),
            )
        )
    return limits


def _device_name(plan: Plan, label: str) -> str:
    return next((str(r.name) for r in plan.cluster.ranks() if r.label == label), label)


def _eased(plan: Plan, limit: str) -> str:
    """``10 % more: 3.1 % better (712 ms)``."""
    found = next((item for item in plan.what_if or () if item.limit == limit), None)
    if found is None:
        return ""
    by = f"{percent(found.relaxed)} {'less' if limit.startswith('min_') else 'more'}"
    if found.gain < 5e-4:
        return f"{by}: nothing gained"
    return f"{by}: {percent(found.gain)} better ({seconds(found.total_s)})"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
