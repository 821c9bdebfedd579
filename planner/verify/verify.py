"""`verify`: run a plan and what it was preferred to for real, and compare with what was predicted.

It works for any planner: decisions become schedules, schedules become processes, and nothing here
knows what they compute. A plan names its planner by kind only, so a stranger's plan can make this
run nothing but installed planners.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.base import Planner
from foreplan.planner.plan import Plan, load_plan
from foreplan.planner.plan_paths import check_there, folder_of
from foreplan.planner.planned_for import check_actions, check_planned_for
from foreplan.planner.registry import planner as find_planner
from foreplan.planner.times import Times
from foreplan.planner.verify.agreement import Say, agreement_of, quality_of
from foreplan.planner.verify.candidates import Candidate, candidates_of
from foreplan.planner.verify.follow import follow
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.pacer import Pacer
from foreplan.planner.verify.paths import check_paths
from foreplan.planner.verify.rounds import Measured, Rounds
from foreplan.planner.verify.scores import median_round, verification_of
from foreplan.planner.verify.session import problem_of
from foreplan.planner.verify.sketch import ProcessSketch, process_sketches
from foreplan.planner.verify.verification import Machine, Verification
from foreplan.planner.verify.wire import parse_endpoint

#: Load average of the last minute beyond which a machine was not idle before the run.
BUSY = 0.5


@dataclass(frozen=True)
class VerificationRun:
    """What `verify` hands back.

    Attributes:
        document: what to save; ``None`` for a dry run.
        timeline: measured timeline of the chosen plan's median round, ``None`` for a dry run.
        timelines: measured timelines of every round, by candidate; empty on a host that followed.
        processes: what a dry run would have started.
        refused: of a dry run, the decisions that cannot run from this host, with the reason.
    """

    document: Verification | None
    timeline: Timeline | None = None
    timelines: Mapping[str, tuple[Timeline, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    processes: tuple[ProcessSketch, ...] = ()
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __repr__(self) -> str:
        """One line, as a notebook's last line or ``print`` shows it."""
        found = f"a dry run of {len(self.processes)} processes"
        return f"<VerificationRun: {found if self.document is None else self.document.summary}>"

    def _repr_html_(self) -> str | None:
        return None if self.document is None else self.document._repr_html_()


def verify(
    plan: Plan | str | os.PathLike[str],
    *,
    rounds: int = 5,
    thorough: bool = False,
    tolerance: float | None = None,
    only: Collection[str] | None = None,
    rdzv_endpoint: str | None = None,
    host: str | None = None,
    dry_run: bool = False,
    progress: Say | None = None,
    costs: CostBook | None = None,
    timeout_s: float | None = None,
    load_timeout_s: float = 900.0,
    folder: str | Path | None = None,
    trust_paths: bool = False,
    started_by_torchrun: tuple[str, Callable[[int], None]] | None = None,
) -> VerificationRun:
    """Run a plan and its alternatives, and compare with the plan's predictions.

    Args:
        plan: what to verify, or its file; predictions are taken from it.
        rounds: timed rounds, at least 1; candidates are interleaved in them.
        thorough: also run the planner's rivals.
        tolerance: largest error of the total that passes; the plan's own if left out.
        only: names of alternatives to run beside the chosen plan; all if left out.
        rdzv_endpoint: ``HOST:PORT`` where several hosts meet; an address of rank 0's host.
        host: which host of the cluster this one is; needed with ``rdzv_endpoint``.
        dry_run: say what would be started, and start nothing.
        progress: hears one line at a time about what is going on.
        costs: prices of the rivals that ``thorough`` adds; from where the plan's come if left out.
        timeout_s: limit of one run of one candidate; from the prediction if left out.
        load_timeout_s: limit of loading a candidate, and of the reference.
        folder: where the plan's file lies, which is the working directory where no file was given;
            the text or table that it names has to lie there too. Other hosts find what the plan
            names from the folder of their own copy.
        trust_paths: read what the plan names anywhere, not only in ``folder``.
        started_by_torchrun: address to listen at and who wants to know the port; for `torchrun`.

    Returns:
        The run. Its ``document`` is the `Verification`, with ``passed`` false where the error is
        beyond the tolerance or a result is wrong. An alternative that cannot be run is in it with
        the reason. Interrupted after the timed rounds (Ctrl-C), it has the times and says that
        results were not compared.

    Raises:
        SpecError: an unknown name or host, a device that is not here, a schedule that deadlocks, a
            file of the plan outside of ``folder``, a plan that was edited after its prediction.
        VerificationError: the chosen plan could not be run; names rank, device and reason.
    """
    say = progress or (lambda text: None)
    if not isinstance(plan, (Plan, str, os.PathLike)):  # from a notebook, unseen by a type checker
        raise SpecError("plan", got=plan, expected="a Plan, or its file")
    if not isinstance(rounds, int) or rounds < 1:
        raise SpecError("rounds", got=rounds, expected="a whole number, at least 1")
    if tolerance is not None and not (
        isinstance(tolerance, int | float) and 0 <= tolerance < math.inf
    ):
        raise SpecError("--tolerance", got=tolerance, expected="a share of at least 0, as 0.1")
    if isinstance(only, str):
        only = (only,)
    if not isinstance(plan, Plan):
        folder = folder_of(plan) if folder is None else folder
        plan = load_plan(plan)
    if not trust_paths:
        # Of its profiles the caller has made the costs.
        check_paths(plan, Path(folder or "."), profiles=False)
    planner = find_planner(plan.kind)
    problem = problem_of(plan, planner)
    candidates = candidates_of(plan, planner, problem, only=only, thorough=thorough, costs=costs)
    check_planned_for(plan)
    if not dry_run:  # of a plan whose model, too, may be elsewhere
        check_there(plan)
    leader = candidates[0].ranks[0].host
    here = _this_host(candidates, rdzv_endpoint, host)
    if started_by_torchrun is not None:
        here = leader
    if dry_run:
        candidates[0].check_order(plan.verify.backend)  # devices may well be elsewhere
        check_actions(plan)
        refusals = zip(
            candidates, _refusals(candidates, plan.verify.backend, here, None), strict=True
        )
        return VerificationRun(
            None, processes=process_sketches(candidates, here),
            refused=MappingProxyType({c.name: str(why) for c, why in refusals if why is not None}),
        )  # fmt: skip
    endpoint = None if rdzv_endpoint is None else parse_endpoint(rdzv_endpoint)
    if endpoint is not None and here != leader:
        return _follow(plan, candidates, here, endpoint, folder or "", say)

    known = plan_ranks(plan) if started_by_torchrun is not None else None
    able, failed = _able(candidates, plan.verify.backend, here, known)
    check_actions(plan)
    ranks = _union(able)
    own = [rank.index for rank in ranks if rank.host == here]
    load_before = os.getloadavg()[0]
    listen = ("127.0.0.1", 0)
    token = plan.digest
    if endpoint is not None:
        listen = endpoint
    elif started_by_torchrun is not None:
        listen, own = (started_by_torchrun[0], 0), []
    else:
        token = secrets.token_hex(16)  # nobody else has to know it
    fleet = Fleet(
        plan, ranks, own, token, listen=listen, say=say, folder=folder or "",
        listening=started_by_torchrun[1] if started_by_torchrun else lambda port: None,
    )  # fmt: skip
    with fleet:
        pacer = Pacer(
            fleet, able[0].ranks, plan.verify.pace, timeout_s=load_timeout_s, say=say
        )  # fmt: skip
        runner = Rounds(
            fleet, plan.verify.backend, here, rounds=rounds, timeout_s=timeout_s,
            load_timeout_s=load_timeout_s, say=say, pacer=pacer,
        )  # fmt: skip
        compared = type(planner).reference is not Planner.reference
        pacer.start()
        measured = runner.run(able, results=compared and "fast" in planner.compared(problem))
        pacer.stop()
        agreement = agreement_of(planner, problem, runner, measured[0], say)
        quality, unjudged = quality_of(planner, problem, runner, able, say)
        document = verification_of(
            plan, [*measured, *failed], agreement,
            machine=Machine(
                cpu=cpu_model(), cores=len(os.sched_getaffinity(0)), load_before=load_before,
                load_after=os.getloadavg()[0],
            ),
            rounds=rounds,
            tolerance=plan.verify.tolerance if tolerance is None else tolerance,
            notes=[*run_notes(plan, ranks, load_before), *pacer.notes, *unjudged],
        )  # fmt: skip
        document = document.model_copy(
            update={
                "candidates": tuple(
                    c.model_copy(update={"quality": quality.get(c.name, {})})
                    for c in document.candidates
                )
            }
        )
        fleet.tell_followers({"done": document.model_dump(mode="json", by_alias=True)})
    timelines = {item.candidate.name: tuple(item.timelines) for item in measured}
    chosen = measured[0].timelines
    return VerificationRun(
        document, chosen[median_round(chosen)] if chosen else None, MappingProxyType(timelines)
    )


def plan_ranks(plan: Plan) -> tuple[Rank, ...]:
    """The cluster's rank of each rank of the chosen decision.

    Raises:
        SpecError: a decision that its planner does not accept.
    """
    planner = find_planner(plan.kind)
    return candidates_of(plan, planner, problem_of(plan, planner), only=())[0].ranks


# ----------------------------------------------------------------------------------------- hosts


def _this_host(candidates: Sequence[Candidate], endpoint: str | None, host: str | None) -> str:
    """Name of this host in the cluster."""
    hosts = sorted({rank.host for candidate in candidates for rank in candidate.ranks})
    if host is not None and host not in hosts:
        raise SpecError("--host", got=host, expected=f"one of {', '.join(hosts)}")
    if endpoint is not None and host is None and len(hosts) > 1:
        raise SpecError("--host", got=None, expected=f"which of {', '.join(hosts)} this host is")
    if endpoint is None and len({rank.host for rank in candidates[0].ranks}) > 1:
        raise SpecError(
            "--rdzv-endpoint", got=None, expected="HOST:PORT where the plan's hosts meet",
            fix=f"give the same on each of {', '.join(hosts)}, with its --host",
        )  # fmt: skip
    return host or candidates[0].ranks[0].host


def _able(
    candidates: Sequence[Candidate],
    backend: Literal["gloo", "nccl"],
    here: str,
    started: Sequence[Rank] | None,
) -> tuple[list[Candidate], list[Measured]]:
    """Candidates that can be started, and the others with the reason.

    Raises:
        SpecError: the chosen one cannot.
    """
    able: list[Candidate] = []
    failed: list[Measured] = []
    for candidate, why in zip(
        candidates, _refusals(candidates, backend, here, started), strict=True
    ):
        if why is None:
            able.append(candidate)
        elif candidate is candidates[0]:
            raise why
        else:
            failed.append(Measured(candidate, failure=why))
    return able, failed


def _refusals(
    candidates: Sequence[Candidate],
    backend: Literal["gloo", "nccl"],
    here: str,
    started: Sequence[Rank] | None,
) -> list[SpecError | None]:
    """Why each candidate cannot be started, ``None`` for those that can."""
    found: list[SpecError | None] = []
    several = len({rank.host for rank in candidates[0].ranks}) > 1
    for candidate in candidates:
        try:
            candidate.check(backend, here)
            away = [r for r in candidate.ranks if r.host != here]
            if started is not None:
                lacking = [r for r in candidate.ranks if r not in started]
            else:
                lacking = away if not several else []
            if lacking:
                raise SpecError(
                    f"candidate {candidate.name}", got=lacking[0].label,
                    expected="only devices that the chosen plan uses or this host has",
                )  # fmt: skip
            found.append(None)
        except SpecError as error:
            found.append(error)
    return found


def _union(candidates: Sequence[Candidate]) -> list[Rank]:
    found = {rank.index: rank for candidate in candidates for rank in candidate.ranks}
    return [found[index] for index in sorted(found)]


def _follow(
    plan: Plan, candidates: Sequence[Candidate], here: str, endpoint: tuple[str, int],
    folder: str | Path, say: Say,
) -> VerificationRun:  # fmt: skip
    able, _ = _able(candidates, plan.verify.backend, here, None)
    ranks = [rank for rank in _union(able) if rank.host == here]
    told = follow(ranks, here, endpoint, plan.digest, folder=folder, say=say)
    document = validate(Verification, told["done"], "the leader's result")
    times: Times | None = document.times
    timeline = None if times is None else times.timeline(candidates[0].schedule, "measured")
    return VerificationRun(document, timeline)


# ----------------------------------------------------------------------------------- what is said


def run_notes(plan: Plan, ranks: Sequence[Rank], load: float) -> tuple[str, ...]:
    """What no reader of the numbers may miss.

    Args:
        plan: what ran.
        ranks: on which devices.
        load: of the machine before.
    """
    notes = []
    if load > BUSY:
        notes.append(f"other work disturbed the times: the load was {load:.1f} before the run")
    slices = {rank.label for rank in ranks if rank.name.is_slice}
    for label in sorted(slices):
        notes.append(f"{label} is a slice of its chip, not a device of its own")
    notes += [f"the link {tier.label} is emulated" for tier in plan.cluster.tiers if tier.emulated]
    if plan.model is not None and plan.model.weights == "random":
        notes.append("random weights: times are real, the computed results mean nothing")
    return tuple(notes)


def cpu_model() -> str:
    """Name of this machine's processor."""
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
