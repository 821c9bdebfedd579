"""The same steps on ranks that are real processes, through the runtime and gloo.

Processes are started once for two ranks and once for four, and walk all cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import bubble_cases as cases
import pytest

from foreplan.planner.base import Agreement
from foreplan.planner.bubbles.execution.entry import compare_steps, reference_step

VIT, AUDIO = cases.encoder(), cases.encoder("audio", frozen=True)
#: Eight layers, so that four ranks can have two chunks; lanes need a divisible number of heads.
DEEP = {"backbone": cases.BACKBONE | {"layers": 8}}
REDUCED = DEEP | {"sharded_optimizer": False}


@dataclass
class Case:
    """A decision to be run, by torch's own pipeline where ``stock`` names its schedule.

    Where it is ``recorded``, passes are replayed as on a GPU, from logs of operators.
    """

    schedule: str
    ranks: int
    rows: list[Any]
    encoders: list[Any] = field(default_factory=lambda: [VIT])
    fields: dict[str, Any] = field(default_factory=lambda: DEEP)
    options: dict[str, Any] = field(default_factory=dict)
    stock: str = ""
    recorded: bool = False

    @property
    def processes(self) -> int:
        return self.ranks * int(self.options.get("tp", 1))

    @cached_property
    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        return [self.processes, self.encoders], {"microbatches": 2 * self.ranks} | self.fields

    @cached_property
    def problem(self) -> Any:
        return cases.problem(*self.arguments[0], **self.arguments[1])

    @cached_property
    def decision(self) -> Any:
        return cases.decision(
            self.problem, self.schedule, ranks=self.ranks, encoder_ranks=self.rows, **self.options
        )

    def document(self) -> dict[str, Any]:
        found = {"problem": self.arguments, "decision": self.decision.model_dump(mode="json")}
        found |= {"recorded": True} if self.recorded else {}
        return found | ({"stock": self.stock} if self.stock else {})

    def agreement(self, parts: list[dict[str, Any]]) -> Agreement:
        merged: dict[str, Any] = {}
        for part in parts:
            for key, value in part.items():
                assert merged.setdefault(key, value) == value, f"ranks disagree about {key}"
        reference = reference_step(self.problem, self.decision, mode="reference")
        return compare_steps(merged, reference)


CASES = {
    "1f1b on two": Case("1f1b", 2, [[[0], [1]]]),
    "gpipe on two": Case("gpipe", 2, [[[1, 0]]]),
    "interleaved on two": Case(
        "interleaved-1f1b", 2, [[[0], [1]], [[1]]], [VIT, AUDIO], options={"chunks": 2}
    ),
    "zero bubble on two": Case("zb-h1", 2, [[[0], [1]]]),
    "three phases on two": Case("1f1b", 2, [[[0], [1]]], options={"fill": "three-phase"}),
    "unfilled on two": Case("1f1b", 2, [[[0]]]),
    "all-reduced on two": Case("1f1b", 2, [[[0], [1]]], fields=REDUCED),
    "two lanes": Case("1f1b", 1, [[[0]]], fields=REDUCED, options={"tp": 2}),
    "recorded on two": Case(
        "interleaved-1f1b", 2, [[[0], [1]], [[1]]], [VIT, AUDIO], options={"chunks": 2},
        recorded=True,
    ),
    "recorded lanes in pieces": Case(
        "1f1b", 1, [[[0]]], fields=REDUCED, options={"tp": 2, "pieces": 1}, recorded=True
    ),
    "torch's 1f1b": Case("1f1b", 2, [[[0]]], stock="1f1b"),
    "torch's gpipe": Case("gpipe", 2, [[[0]]], stock="gpipe"),
    "1f1b on four": Case("1f1b", 4, [[[0], [1], [2], [3]]]),
    "gpipe on four": Case("gpipe", 4, [[[0, 1], [2, 3]], [[2], [3]]], [VIT, AUDIO]),
    "interleaved on four": Case(
        "interleaved-1f1b", 4, [[[0, 1], [2, 3]]], options={"chunks": 2}
    ),
    "two ranks of two lanes": Case(
        "1f1b", 2, [[[0], [1]]], fields=REDUCED, options={"tp": 2}
    ),
    "two ranks of two lanes in pieces": Case(
        "1f1b", 2, [[[0], [1]]], fields=REDUCED, options={"tp": 2, "pieces": 1}
    ),
    "recorded ranks of lanes in pieces": Case(
        "1f1b", 2, [[[0], [1]]], fields=REDUCED, options={"tp": 2, "pieces": 2}, recorded=True
    ),
}  # fmt: skip
#: Sums whose order is gloo's (four replicas), the lanes' or torch's: close, not equal.
CLOSE = {
    "recorded lanes in pieces", "recorded ranks of lanes in pieces",
    "1f1b on four", "two lanes", "two ranks of two lanes", "two ranks of two lanes in pieces",
    "torch's 1f1b", "torch's gpipe",
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for processes in (2, 4):
        mine = {name: case for name, case in CASES.items() if case.processes == processes}
        jobs = {"ranks": processes, "cases": [case.document() for case in mine.values()]}
        folder = tmp_path_factory.mktemp("run")
        parts = cases.run_ranks(jobs, folder)
        found |= {name: [part[k] for part in parts] for k, name in enumerate(mine)}
    return found


@pytest.mark.parametrize("name", CASES)
def test_processes_agree_with_one_process(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    agreed = CASES[name].agreement(results[name])
    assert agreed.passed, agreed.details
    assert agreed.exact or name in CLOSE, agreed.details
    assert agreed.details["largest_gradient_difference"] < 1e-5
    assert agreed.details["losses"] == CASES[name].decision.microbatches
    assert agreed.details["gradient_elements"] > 10_000
