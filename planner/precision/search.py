"""Finds a precision plan: target, exact solver for each kind of device, replay, tighter limits.

How it chooses: the *starting plan* runs every device at the uniform precision that is fastest on it
(within memory); its simulated iteration time is the target unless the workload gives one. Precision
is then given back: for each kind of device the solver finds the least omega whose rows meet target
and memory, warm-started by QSync's heap. The simulator, which also knows contention between ranks
and counts memory exactly, replays the joint plan. Where it objects, rows are taken that kinds of
devices can meet each by itself (`PrecisionSearch._sufficient`); where it still does, the limit that
it objects to is lowered by what was missed, each time by more; and the solver runs again. What
lowered limits, or the gap at which the solver stops, leave unused is then given back operator by
operator, the largest fall of omega first, as long as the replay agrees. The first round's bounds
hold for the problem as the rows state it, which no plan that the replay agrees to misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.schedule import IntArray
from foreplan.datasets.quantity import format_bound, format_seconds
from foreplan.errors import InfeasibleError
from foreplan.planner.precision.allocation import Omega
from foreplan.planner.precision.replay import Replayed
from foreplan.planner.precision.situation import Situation
from foreplan.planner.precision.starting import GAP, ROUNDS, fastest_plan, starting_plans
from foreplan.solvers.choice_problem import ChoiceProblem
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.multiple_choice import solve
from foreplan.solvers.solution import Solution, SolutionStatus

#: A round tightens by this many times what the replay objects to, to the power of the round: the
#: solver's next best plan may be further off than that (measured: rounds of one excess, 3e-6 of the
#: target, found the same plan eight times).
_FURTHER = 4.0
#: Plans that are replayed at most while what limits leave unused is given back.
FLIPS = 4096
#: Share by which a replayed time may exceed its target: rounding of sums.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """A plan by kinds of devices.

    Attributes:
        choices: options of every operator, one array a kind.
        replayed: by the simulator.
        omega: summed over all ranks.
        lower: no plan that meets the rows has less; ``-inf`` if unknown.
        status: ``optimal``, ``feasible`` or ``heuristic`` (raised from the starting plan).
        evaluations: nodes searched.
    """

    choices: list[IntArray]
    replayed: Replayed
    omega: float
    lower: float
    status: str
    evaluations: int

    @property
    def gap(self) -> float | None:
        """(omega - lower) / omega."""
        if not math.isfinite(self.lower):
            return None
        return 0.0 if self.omega <= self.lower else (self.omega - self.lower) / self.omega


class PrecisionSearch:
    """One search; see the module.

    Args:
        situation: what plans are judged by.
        omega: by module and variant.
        start: the starting plans, where they are known.

    Raises:
        InfeasibleError: memory does not hold the step on some device, or nothing meets the target.
    """

    def __init__(
        self, situation: Situation, omega: Omega, start: Sequence[IntArray] | None = None
    ) -> None:
        self.situation, self.omega = situation, omega
        self.allocations = situation.allocations(omega)
        self.start = starting_plans(situation) if start is None else list(start)
        self.target_s = self._target()

    # -------------------------------------------------------------------------------- target

    def _target(self) -> float:
        """Seconds that an iteration may take.

        Raises:
            InfeasibleError: the workload's target is out of reach; says what is not.
        """
        s = self.situation
        start_s = s.replay.run(s.each(self.start)).iteration_s
        wanted = s.workload.target_s
        if wanted is None:
            return start_s * (1.0 + s.workload.slack)
        limit = wanted * (1.0 + s.workload.slack)
        for quicker in (self._quickest, lambda: self._by_rows(limit)):
            if start_s <= limit:
                break
            trial = quicker()
            found = s.replay.run(s.each(trial))
            if found.iteration_s < start_s:
                self.start, start_s = trial, found.iteration_s
        if start_s > limit:
            least_s = start_s / (1.0 + s.workload.slack)
            raise InfeasibleError(
                f"no plan for {s.graph.name} was found that takes {format_seconds(limit)} a step; "
                f"the quickest takes {format_seconds(start_s)}",
                fix=f"allow target_s={format_bound(least_s, 6, above=True)}, a smaller batch, or "
                "more precisions",
            )
        return limit

    def _quickest(self) -> list[IntArray]:
        """The plan whose passes take least on every device, or the starting plan there."""
        s, found = self.situation, list[IntArray]()
        for k, start in enumerate(self.start):
            plan = fastest_plan(s, k, self.allocations[k], float(s.saved_limit(k)))
            found.append(start if plan is None or not self._held(k, plan) else plan)
        return found

    def _by_rows(self, limit: float) -> list[IntArray]:
        """The plan that meets the solver's rows of a target, or the starting plan there."""
        found = []
        for k, start in enumerate(self.start):
            value = self._solve(self.problem(k, limit)).value
            plan = start if value is None else np.array(value)
            found.append(plan if self._held(k, plan) else start)
        return found

    def _held(self, kind: int, plan: IntArray) -> bool:
        """Whether devices of a kind hold what a plan saves."""
        s = self.situation
        return bool(s.devices[kind].saved.held_bytes(plan).sum() <= s.saved_limit(kind))

    # ------------------------------------------------------------------------------ solution

    def run(self) -> Found:
        """The best plan found."""
        s = self.situation
        count = len(s.kinds)
        targets = [self.target_s] * count
        rooms = [float(s.saved_limit(k)) for k in range(count)]
        updates = [float(s.replay.update_s[members[0]]) for members in s.kinds]
        solutions: list[Solution[tuple[int, ...]] | None] = [None] * count
        lower, evaluations, proven = 0.0, 0, True
        changed = list(range(count))
        for turn in range(ROUNDS):
            for k in changed:
                posed = self.problem(k, targets[k], rooms[k], updates[k])
                solution = solutions[k] = self._solve(posed, k)
                evaluations += solution.evaluations
                if turn == 0:
                    lower += len(s.kinds[k]) * solution.lower_bound
                    proven = proven and solution.status is SolutionStatus.OPTIMAL
            choices = [
                self.start[k] if solution is None or solution.value is None
                else np.array(solution.value)
                for k, solution in enumerate(solutions)
            ]  # fmt: skip
            replayed = s.replay.run(s.each(choices))
            if turn == 0 and replayed.iteration_s > self.target_s * (1.0 + TOLERANCE):
                updates = self._sufficient(choices)
                changed = [
                    k for k, choice in enumerate(choices)
                    if not evaluate(
                        self.problem(k, targets[k], rooms[k], updates[k]), choice.tolist()
                    ).feasible
                ]  # fmt: skip
                if changed:
                    continue
            changed = self._tighten(replayed, targets, rooms, _FURTHER**turn)
            if not changed:
                status = "optimal" if proven and turn == 0 else "feasible"
                found = self._found(choices, replayed, lower, status, evaluations)
                if found.gap == 0.0:
                    return found
                return self._found(*self._filled(choices), lower, status, evaluations)
        return self._found(*self._filled(self.start), lower, "heuristic", evaluations)

    def _filled(self, choices: Sequence[IntArray]) -> tuple[list[IntArray], Replayed]:
        """A plan that meets the limits, raised one operator (or shared position) at a time."""
        s, plan = self.situation, list(choices)
        replayed = s.replay.run(s.each(plan))
        raised, left = True, FLIPS
        while raised and left > 0:
            raised = False
            for _, k, modules, text in self._raises(plan):
                tables = s.devices[k].tables
                names = tables.names(plan[k])
                if self.omega[modules[0]][text] >= self.omega[modules[0]][names[modules[0]]]:
                    continue  # another raise of this turn was better
                if left <= 0:
                    break
                left -= 1
                trial = [*plan]
                trial[k] = tables.choice({**names, **dict.fromkeys(modules, text)})
                found = s.replay.run(s.each(trial))
                if self.meets(found):
                    plan, replayed, raised = trial, found, True
        return plan, replayed

    def _raises(self, plan: Sequence[IntArray]) -> list[tuple[float, int, list[str], str]]:
        """(fall of omega, kind, modules, variant) of everything that lowers omega, best first."""
        found = []
        for k, choice in enumerate(plan):
            tables = self.situation.devices[k].tables
            names, together = tables.names(choice), dict[str, list[str]]()
            options: dict[str, list[str]] = {}
            for i in tables.graph.adjustable:
                o = tables.graph.operators[i]
                shared = o.position if self.situation.workload.share_layers else ""
                key = shared or o.module
                options[key] = [option.name for option in tables.options[i]]
                if o.module not in together.setdefault(key, []):
                    together[key].append(o.module)
            for key, modules in together.items():
                for text in options[key]:
                    fall = sum(self.omega[m][names[m]] - self.omega[m][text] for m in modules)
                    if fall > 0.0:
                        found.append((fall * len(self.situation.kinds[k]), k, modules, text))
        return sorted(found, key=lambda one: -one[0])

    def _sufficient(self, choices: Sequence[IntArray]) -> list[float]:
        """What updates add to the steps of each kind, so that no plan that meets the rows is late.

        Several steps take ``A + (n - 1) P + U``: ``A`` the longest passes with their all-reduces,
        ``P`` the longest passes and update of one rank, ``U`` the longest update. Rows of each kind
        by itself allow ``A`` and ``P`` of unlike kinds. Of the kind whose plan has most omega they
        stay; the others may exceed neither its passes nor its passes and update.
        """
        s = self.situation
        own = [float(s.replay.optimizer_s[members[0]]) for members in s.kinds]
        most = max(
            range(len(choices)),
            key=lambda k: len(s.kinds[k]) * self.allocations[k].omega(choices[k]),
        )
        kept = float(s.replay.update_s[s.kinds[most][0]])
        return [kept + max(0.0, each - own[most]) for each in own]

    def _tighten(
        self, replayed: Replayed, targets: list[float], rooms: list[float], further: float
    ) -> list[int]:
        """Lower the limits that the replay found broken; the kinds concerned."""
        s = self.situation
        late = replayed.iteration_s / self.target_s
        changed = set()
        for k in range(len(targets)):
            if late > 1.0 + TOLERANCE:
                targets[k] /= 1.0 + further * (late - 1.0 + TOLERANCE)
                changed.add(k)
            held = max(replayed.saved_bytes[r] for r in s.kinds[k])
            if held > s.saved_limit(k):
                rooms[k] -= further * (held - s.saved_limit(k))
                changed.add(k)
        return sorted(changed)

    def _found(
        self, choices: Sequence[IntArray], replayed: Replayed, lower: float, status: str, nodes: int
    ) -> Found:
        s = self.situation
        omega = sum(
            len(s.kinds[k]) * self.allocations[k].omega(choice) for k, choice in enumerate(choices)
        )
        return Found(list(choices), replayed, omega, min(lower, omega), status, nodes)

    def meets(self, replayed: Replayed) -> bool:
        """Whether a replayed plan meets target and memory."""
        in_time = replayed.iteration_s <= self.target_s * (1.0 + TOLERANCE)
        return in_time and self.situation.fits(replayed)

    def problem(
        self, kind: int, target_s: float, room: float | None = None, update_s: float | None = None
    ) -> ChoiceProblem:
        """The solver's problem for a kind of device.

        Args:
            kind: which.
            target_s: seconds of a step.
            room: bytes for saved tensors, all that there are if left out.
            update_s: of a step, what no plan of this kind takes less than if left out.
        """
        s = self.situation
        if update_s is None:
            update_s = float(s.replay.update_s[s.kinds[kind][0]])
        limit = float(s.saved_limit(kind)) if room is None else room
        return self.allocations[kind].problem(target_s, update_s, limit)

    def _solve(self, problem: ChoiceProblem, kind: int | None = None) -> Solution[tuple[int, ...]]:
        """Solve, from the starting plan where it is feasible."""
        start = None
        if kind is not None:
            given = tuple(int(c) for c in self.start[kind])
            start = given if evaluate(problem, given).feasible else None
        return solve(problem, start=start, gap=GAP, max_nodes=self.situation.workload.max_nodes)
