"""`serve_traffic`: serve requests for real by the processes of a plan, and compare.

Processes are started, capped and told as those of every verification; what they do is decided while
they run (`LiveStage`), by the policy that the simulation has (`Batching`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.cost_models.memory import show_bytes
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.plan import decision_of
from foreplan.planner.plan_paths import check_there
from foreplan.planner.planned_for import check_planned_for
from foreplan.planner.registry import planner as find_planner
from foreplan.planner.serving.batching import BatchLimits
from foreplan.planner.serving.cache_rows import cache_rows
from foreplan.planner.serving.live_replay import live_replay
from foreplan.planner.serving.live_traffic import LiveRecord, LiveTraffic
from foreplan.planner.serving.planner import serving_model
from foreplan.planner.serving.traffic import Request
from foreplan.planner.serving.traffic_problem import TrafficProblem
from foreplan.planner.serving.traffic_replay import (
    Replay,
    check_rate,
    deal,
    largest_rate,
    replay,
    servers_of,
)
from foreplan.planner.traffic_scores import compare, phases_of
from foreplan.planner.traffic_verification import TrafficVerification
from foreplan.planner.verify.answers import device_of
from foreplan.planner.verify.candidates import Candidate, candidates_of
from foreplan.planner.verify.group import Group
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.pacer import Pacer, between
from foreplan.planner.verify.session import Job
from foreplan.planner.verify.verification import AgreementResult, Device, Machine
from foreplan.planner.verify.verify import cpu_model, run_notes
from foreplan.planner.verify.wire import WireGarbled

#: Requests whose tokens are compared with those of each alone.
COMPARED = 16
#: What is judged by the tolerance: the rest of the times has fewer requests behind it.
JUDGED = ("throughput_tokens_per_s", "latency_p50_s")
#: What oneDNN may keep on each processor, beside the plan's memory, for the numbers of rows that
#: traffic brings; see `foreplan.planner.serving.batching.BUCKET`.
KERNELS_BYTES = 512 << 20
_LOAD_S = 900.0


@dataclass(frozen=True)
class TrafficRun:
    """What `serve_traffic` hands back.

    Attributes:
        document: what to save.
        simulated: timeline of the simulation.
        measured: timelines of the rounds.
    """

    document: TrafficVerification
    simulated: Timeline
    measured: tuple[Timeline, ...]


def serve_traffic(
    asked: TrafficProblem, *, rounds: int = 3, tolerance: float | None = None,
    folder: Path = Path(), say: Callable[[str], None] = lambda text: None,
) -> TrafficRun:  # fmt: skip
    """Serve requests for real.

    Args:
        asked: plan and requests.
        rounds: runs of the same requests, after one warm-up.
        tolerance: largest error of the judged figures that passes; the plan's own if left out.
        folder: where the plan's file lies.
        say: hears what is going on.

    Raises:
        SpecError: stages that cannot serve so, devices that are not here, requests longer than the
            plan is for.
        InfeasibleError: requests come faster than the plan serves them, or caches do not fit.
        VerificationError: a process failed; names rank, device and reason.
        MissingDataError: a pass has no price.
    """
    if rounds < 1:
        raise SpecError("rounds", got=rounds, expected="a whole number, at least 1")
    plan, problem, requests = asked.plan, asked.problem, asked.requests
    candidate = _candidate(asked)
    check_planned_for(plan)
    check_there(plan)
    most = largest_rate(problem, asked.replicas, requests)
    check_rate(requests, most)
    simulated = replay(problem, asked.replicas, requests)
    traffic = _traffic(asked, requests)
    load_before = os.getloadavg()[0]
    own = [rank.index for rank in candidate.ranks]
    with Fleet(plan, candidate.ranks, own, secrets.token_hex(16), say=say, folder=folder) as fleet:
        pacer = Pacer(fleet, candidate.ranks, plan.verify.pace, timeout_s=_LOAD_S, say=say)
        pacer.start()
        run = _Served(fleet, candidate, simulated.timeline.makespan_s, say)
        found, paces, devices = _rounds(run, asked, traffic, rounds, pacer, say)
        pacer.stop()
        agreement = _agreement(run, asked, say)
    pace = _medians(candidate, paces)
    at_pace = None
    if pace is not None:
        at_pace = replay(problem, asked.replicas, requests, pace).figures()
    figures = compare(simulated.figures(), at_pace, [m.figures() for m, _ in found])
    judged = [figure for figure in figures if figure.name in JUDGED]
    allowed = plan.verify.tolerance if tolerance is None else tolerance
    document = TrafficVerification(
        plan_digest=plan.digest, kind=plan.kind,
        machine=Machine(
            cpu=cpu_model(), cores=len(os.sched_getaffinity(0)), load_before=load_before,
            load_after=os.getloadavg()[0], devices=devices,
        ),
        rounds=rounds, requests=len(requests), rate_per_s=asked.rate_per_s,
        largest_rate_per_s=most, tolerance=allowed, judged=tuple(f.name for f in judged),
        figures=figures, phases=phases_of(found),
        pace=None if pace is None else float(np.median(pace)), agreement=agreement,
        passed=agreement.passed and all(abs(f.error or 0.0) <= allowed for f in judged),
        notes=(*run_notes(plan, candidate.ranks, load_before), *pacer.notes),
    )  # fmt: skip
    return TrafficRun(document, simulated.timeline, tuple(m.timeline for m, _ in found))


# ------------------------------------------------------------------------------------ before a run


def _candidate(asked: TrafficProblem) -> Candidate:
    """The plan's decision made ready, if this host can serve so.

    Raises:
        SpecError, InfeasibleError: it cannot; says why.
    """
    plan, model = asked.plan, serving_model(asked.problem)
    planner = find_planner(plan.kind)
    stages = [stage for decision, _ in asked.replicas for stage in decision.stages]
    shared = next((stage for stage in stages if stage.degree > 1), None)
    if shared is not None:
        raise SpecError(
            "--traffic", got=f"a stage of {shared.degree} devices",
            expected="stages of one device each; such plans are only simulated",
        )  # fmt: skip
    ranks = plan.cluster.ranks()
    used = [ranks[stage.rank] for stage in stages]
    other = next((rank for rank in used if rank.name.kind != "cpu"), None)
    if other is not None:
        raise SpecError(
            "--traffic", got=other.label,
            expected="processors of this host; on others traffic is only simulated "
            "(foreplan simulate traffic)",
        )  # fmt: skip
    hosts = sorted({rank.host for rank in used})
    if len(hosts) > 1:
        raise SpecError(
            "--traffic", got=", ".join(hosts),
            expected="devices of one host; between hosts traffic is only simulated",
        )  # fmt: skip
    if model.latent is not None:
        raise SpecError(
            "--traffic", got=f"{model.name}, which attends to latents",
            expected="attention to keys and values; such plans are only simulated",
        )  # fmt: skip
    for index, request in enumerate(asked.requests):
        total = request.prompt_tokens + request.new_tokens
        if total > asked.longest:
            raise SpecError(
                request.source or f"request {index + 1}", got=f"{total} tokens",
                expected=f"at most the {asked.longest} that the plan is for",
                fix="shorter requests, or plan with larger prompt_tokens or new_tokens",
            )  # fmt: skip
    candidate = candidates_of(plan, planner, asked.problem, only=())[0]
    if len(candidate.ranks) != len(stages):
        raise SpecError(
            "--traffic", got=f"{len(stages)} stages", expected="fewer: of so many, a run draws some"
        )
    candidate.check("gloo", hosts[0])
    check_rows(asked)
    return candidate


def check_rows(asked: TrafficProblem) -> None:
    """Refuse where a stage has no room for the rows of its cache.

    Of more than two slots each has rows of its own for as many requests as it may ever hold, which
    may be more in all than are held at once.

    Raises:
        InfeasibleError: says how much is lacking.
    """
    planner = find_planner(asked.plan.kind)
    ledgers = iter(planner.memory(asked.problem, decision_of(asked.plan)))
    for number, (replica, batch) in enumerate(asked.replicas):
        limits = BatchLimits.of(replica, batch, 1)
        for stage in replica.stages:
            ledger = next(ledgers)
            cache = ledger.items.get("kv_cache", 0)
            more = cache * (cache_rows(limits)[0] - batch) / batch
            if ledger.free_bytes is not None and more > ledger.free_bytes:
                raise InfeasibleError(
                    f"replica {number}: the cache of {stage.device} needs {show_bytes(int(more))} "
                    f"more for {limits.slots} batches of up to {limits.share} requests, and "
                    f"{show_bytes(ledger.free_bytes)} are free",
                    fix="plan with a smaller batch, or with smaller decode_microbatch",
                )


def _traffic(asked: TrafficProblem, requests: Sequence[Request]) -> LiveTraffic:
    """Requests as ranks are told of them."""
    _, servers = servers_of(asked.problem, asked.replicas)
    return LiveTraffic(
        requests=tuple((r.arrival_s, r.prompt_tokens, r.new_tokens) for r in requests),
        queues=tuple(map(tuple, deal(servers, requests))),
        batches=tuple(batch for _, batch in asked.replicas),
        cache_tokens=tuple(server.limits.cache_tokens for server in servers),
    )


# ------------------------------------------------------------------------------------------ a run


class _Served:
    """Starts the processes of a plan and has them serve."""

    def __init__(
        self, fleet: Fleet, candidate: Candidate, expected_s: float, say: Callable[[str], None]
    ) -> None:
        self._fleet, self._candidate, self._say = fleet, candidate, say
        # A rank without work waits for as long as nothing comes.
        self._timeout_s = 60.0 + 10.0 * expected_s

    def start(self, mode: str) -> tuple[Group, tuple[Device, ...]]:
        """Load every rank.

        Raises:
            RankFailed: one could not.
        """
        self._say(f"loading the plan's {len(self._candidate.ranks)} ranks")
        ranks = self._candidate.ranks
        jobs = [
            job.model_copy(update={"kind": "live", "capacity_bytes": _capped(job)})
            for job in self._candidate.jobs("gloo", mode, self._timeout_s)
        ]
        group = self._fleet.start(jobs, [rank.index for rank in ranks], _LOAD_S)
        try:
            answers = group.gather("ready", _LOAD_S)
            devices = tuple(
                group.checked(k, partial(device_of, answer, rank.label))
                for k, (answer, rank) in enumerate(zip(answers, ranks, strict=True))
            )
        except BaseException:
            group.stop()
            raise
        return group, devices

    def serve(self, group: Group, traffic: LiveTraffic, number: int) -> list[LiveRecord]:
        """One run.

        Raises:
            RankFailed: a rank failed, or says something else.
        """
        group.rest(False)
        group.say({"serve": number, "given": traffic.model_dump(mode="json")})
        answers = group.gather("served", self._timeout_s + 5.0)
        group.rest(True)
        return [group.checked(k, partial(_record_of, answer)) for k, answer in enumerate(answers)]

    def alone(self, traffic: LiveTraffic) -> Mapping[str, Any]:
        """Tokens of each request by itself, in one process on the first rank's device.

        Raises:
            RankFailed: the process failed.
        """
        first = self._candidate.ranks[0]
        job = Job(
            kind="reference", decision=self._candidate.decision, mode="reference",
            devices=(first.name,), label=f"{first.label}, reference", timeout_s=_LOAD_S,
            given=traffic.model_dump(mode="json"),
        )  # fmt: skip
        group = self._fleet.start([job], [first.index], _LOAD_S)
        try:
            found = group.gather("reference", _LOAD_S)[0]["reference"]
        finally:
            group.stop()
        return found if isinstance(found, dict) else {}


def _capped(job: Job) -> int | None:
    """A rank's memory: what its device has, and what kernels of so many sizes take beside it."""
    return None if job.capacity_bytes is None else job.capacity_bytes + KERNELS_BYTES


def _record_of(answer: Mapping[str, Any]) -> LiveRecord:
    try:
        return validate(LiveRecord, answer.get("record"), "record")
    except SpecError as error:
        raise WireGarbled(f"a report of a run that is none ({error})") from error


def _rounds(
    run: _Served, asked: TrafficProblem, traffic: LiveTraffic, rounds: int, pacer: Pacer,
    say: Callable[[str], None],
) -> tuple[list[tuple[Replay, Replay]], list[dict[str, float]], tuple[Device, ...]]:  # fmt: skip
    """Measured and priced of every round, the ranks' paces in it, and what ranks are."""
    group, devices = run.start("fast")
    found, paces = [], []
    try:
        say("warm-up")  # of the same passes: each new number of rows costs a processor a kernel
        run.serve(group, traffic, -1)
        before = pacer.take()
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            records = run.serve(group, traffic, number)
            after = pacer.take()
            paces.append(between(before, after))
            before = after
            found.append(
                group.checked(
                    0, partial(live_replay, asked.problem, asked.replicas, asked.requests, records)
                )
            )
    finally:
        group.stop()
    return found, paces, devices


def _agreement(run: _Served, asked: TrafficProblem, say: Callable[[str], None]) -> AgreementResult:
    """Whether requests that are served together get the tokens that each gets alone, in fp32."""
    requests = asked.requests[:COMPARED]
    first = requests[0].arrival_s
    traffic = _traffic(asked, [replace(r, arrival_s=r.arrival_s - first) for r in requests])
    say("each of a few requests alone")
    expected = run.alone(traffic)
    say("the same together")
    group, _ = run.start("reference")
    try:
        records = run.serve(group, traffic, 0)
    finally:
        group.stop()
    made = {str(i): list(tokens) for record in records for i, tokens in record.tokens.items()}
    equal = sum(made.get(str(i)) == expected.get(str(i)) for i in range(len(requests)))
    share = equal / len(requests)
    return AgreementResult(
        mode="reference", passed=equal == len(requests), exact=equal == len(requests),
        details={"requests": float(len(requests)), "equal_requests": share},
    )  # fmt: skip


def _medians(candidate: Candidate, paces: Sequence[Mapping[str, float]]) -> list[float] | None:
    """Each rank's pace over the rounds; ``None`` where not all were timed."""
    labels = [rank.label for rank in candidate.ranks]
    if not paces or not all(label in pace for pace in paces for label in labels):
        return None
    return [float(np.median([pace[label] for pace in paces])) for label in labels]
