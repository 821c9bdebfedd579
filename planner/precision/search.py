"""Finds a precision plan: target, exact solver for each kind of device, replay, tighter limits.

How it chooses: the *starting plan* runs every device at the uniform precision that is fastest on it
(within memory); its simulated iteration time is the target unless the workload gives one. Precision
is then given back: for each kind of device the solver finds the least omega whose rows meet target
and memory, warm-started by QSync's heap. The simulator, which also knows contention between ranks
and counts memory exactly, replays the joint plan; where it objects, the limit it objects to is
lowered by what was missed, each time by more, and the solver runs again. What lowered limits leave
unused is then given back operator by operator, the largest fall of omega first, as long as the
replay agrees. The first round's bounds hold for the problem as the rows state it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.schedule import IntArray
from foreplan.datasets.quantity import format_bound
from foreplan.errors import InfeasibleError
from foreplan.planner.precision.allocation import MEMORY, Omega
from foreplan.planner.precision.replay import Replayed
from foreplan.planner.precision.situation import Situation, least_seconds
from foreplan.solvers.choice_problem import ChoiceProblem
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.multiple_choice import solve
from foreplan.solvers.solution import Solution, SolutionStatus

#: Rounds of tightening, and relative gap at which the solver stops.
ROUNDS, GAP = 8, 1e-4
#: A round tightens by this many times what the replay objects to, to the power of the round: the
#: solver's next best plan may be further off than that (measured: rounds of one excess, 3e-6 of the
#: target, found the same plan eight times).
_FURTHER = 4.0
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

    Raises:
        InfeasibleError: memory does not hold the step on some device, or nothing meets the target.
    """

    def __init__(self, situation: Situation, omega: Omega) -> None:
        self.situation, self.omega = situation, omega
        self.allocations = situation.allocations(omega)
        self.start = [self._start(k) for k in range(len(situation.kinds))]
        self.target_s = self._target()

    # -------------------------------------------------------------------------------- target

    def _start(self, kind: int) -> IntArray:
        """Fastest uniform precision that fits; else the fastest mixture that does.

        Raises:
            InfeasibleError: nothing fits.
        """
        s = self.situation
        device, limit = s.devices[kind], s.saved_limit(kind)
        uniform = [s.uniform(kind, precision) for precision in s.workload.precisions]
        fitting = [c for c in uniform if device.saved.held_bytes(c).sum() <= limit]
        if fitting:
            return least_seconds(fitting, device)
        room = float(limit)
        for _ in range(ROUNDS):
            solution = self._solve(self.problem(kind, math.inf, room, fastest=True))
            if solution.value is None:
                break
            choice = np.array(solution.value)
            excess = float(device.saved.held_bytes(choice).sum()) - limit
            if excess <= 0:
                return choice
            room -= excess
        s.check_memory(kind, self._least_saved(kind))
        raise InfeasibleError(
            f"no plan was found that fits {s.ranks[s.kinds[kind][0]].label}",
            fix="lower the batch a little, or give more memory",
        )

    def _least_saved(self, kind: int) -> float:
        """Fewest saved bytes of any plan: by the solver, else of the uniform plans."""
        s = self.situation
        problem = self.problem(kind, math.inf, math.inf)
        row = problem.row(MEMORY)
        by_memory = dataclasses.replace(
            problem,
            items=tuple(dataclasses.replace(i, values=i.weights[:, row]) for i in problem.items),
            pairs=tuple(dataclasses.replace(p, values=p.weights[..., row]) for p in problem.pairs),
        )
        solution = self._solve(by_memory)
        saved = s.devices[kind].saved
        found = [s.uniform(kind, precision) for precision in s.workload.precisions]
        if solution.value is not None:
            found.append(np.array(solution.value))
        return float(min(saved.held_bytes(choice).sum() for choice in found))

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
        if start_s <= limit:
            return limit
        quickest = []
        for k, start in enumerate(self.start):
            solution = self._solve(self.problem(k, math.inf, s.saved_limit(k), fastest=True))
            found = start if solution.value is None else np.array(solution.value)
            held = s.devices[k].saved.held_bytes(found).sum()
            quickest.append(found if held <= s.saved_limit(k) else start)
        quickest_s = s.replay.run(s.each(quickest)).iteration_s
        if min(quickest_s, start_s) > limit:
            raise InfeasibleError(
                f"no plan for {s.graph.name} was found that takes {limit:.6g} s a step; the "
                f"quickest takes {min(quickest_s, start_s):.6g} s",
                fix="allow a target of "
                f"{format_bound(min(quickest_s, start_s), 6, above=True)} s, a smaller batch, or "
                "more precisions",
            )
        if quickest_s < start_s:
            self.start = quickest
        return limit

    # ------------------------------------------------------------------------------ solution

    def run(self) -> Found:
        """The best plan found."""
        s = self.situation
        count = len(s.kinds)
        targets = [self.target_s] * count
        rooms = [float(s.saved_limit(k)) for k in range(count)]
        solutions: list[Solution[tuple[int, ...]] | None] = [None] * count
        lower, evaluations, proven = 0.0, 0, True
        changed = list(range(count))
        for turn in range(ROUNDS):
            for k in changed:
                solution = solutions[k] = self._solve(self.problem(k, targets[k], rooms[k]), k)
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
            changed = self._tighten(replayed, targets, rooms, _FURTHER**turn)
            if not changed:
                if turn == 0:
                    status = "optimal" if proven else "feasible"
                    return self._found(choices, replayed, lower, status, evaluations)
                return self._found(*self._filled(choices), lower, "feasible", evaluations)
        return self._found(*self._filled(self.start), lower, "heuristic", evaluations)

    def _filled(self, choices: Sequence[IntArray]) -> tuple[list[IntArray], Replayed]:
        """A plan that meets the limits, raised one operator (or shared position) at a time."""
        s, plan = self.situation, list(choices)
        replayed = s.replay.run(s.each(plan))
        raised = True
        while raised:
            raised = False
            for _, k, modules, text in self._raises(plan):
                tables = s.devices[k].tables
                names = tables.names(plan[k])
                if self.omega[modules[0]][text] >= self.omega[modules[0]][names[modules[0]]]:
                    continue  # another raise of this turn was better
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
        self, kind: int, target_s: float, room: float | None = None, *, fastest: bool = False
    ) -> ChoiceProblem:
        """The solver's problem for a kind of device; ``room`` in bytes for saved tensors."""
        s = self.situation
        optimizer_s = float(s.replay.optimizer_s[s.kinds[kind][0]])
        limit = float(s.saved_limit(kind)) if room is None else room
        return self.allocations[kind].problem(target_s, optimizer_s, limit, fastest=fastest)

    def _solve(self, problem: ChoiceProblem, kind: int | None = None) -> Solution[tuple[int, ...]]:
        """Solve, from the starting plan where it is feasible."""
        start = None
        if kind is not None:
            given = tuple(int(c) for c in self.start[kind])
            start = given if evaluate(problem, given).feasible else None
        return solve(problem, start=start, gap=GAP, max_nodes=self.situation.workload.max_nodes)
