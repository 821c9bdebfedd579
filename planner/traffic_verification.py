"""`TrafficVerification`: the document of traffic that was served for real: measured and simulated.

It belongs to one plan (by digest) and one machine. Measured figures are medians over the rounds; an
*error* is (simulated - measured) / measured.
"""

from __future__ import annotations

import json
import os
from typing import Literal

from pydantic import Field

from foreplan.datasets.specs import StrictModel
from foreplan.datasets.storage import write_atomically
from foreplan.planner.verify.verification import AgreementResult, Machine

SCHEMA: Literal["foreplan.traffic/1"] = "foreplan.traffic/1"


class TrafficFigure(StrictModel):
    """One figure of a run, as of `foreplan simulate traffic`.

    Attributes:
        name: with its unit.
        simulated: by the plan's costs.
        at_pace: the same where passes take longer by the machine's pace; ``None`` where that was
            not timed.
        measured: median over the rounds.
        low, high: least and most of a round.
        error, error_at_pace: see the module; ``None`` where 0 was measured.
    """

    name: str
    simulated: float
    at_pace: float | None
    measured: float
    low: float
    high: float
    error: float | None
    error_at_pace: float | None


class TrafficPhase(StrictModel):
    """Passes of one kind on one device, over all rounds.

    Attributes:
        device: label in the cluster.
        op: ``prefill`` or ``decode``.
        passes: how many ran.
        priced_s: mean seconds that the passes that ran cost.
        measured_s: mean seconds that they took.
        error: see the module.
    """

    device: str
    op: str
    passes: int
    priced_s: float
    measured_s: float
    error: float


class TrafficVerification(StrictModel):
    """Traffic on a plan, served for real.

    Attributes:
        schema_: format and version of the document.
        plan_digest: of the plan.
        kind: the planner.
        machine: where it ran.
        rounds: runs of the same requests, after one warm-up.
        requests: how many.
        rate_per_s: mean rate of arrivals; ``None`` where all come at once.
        largest_rate_per_s: at which the plan saturates, simulated.
        tolerance: largest error of the judged figures that passes.
        judged: names of the figures that are judged.
        figures: all of them.
        phases: what passes cost and took.
        pace: how many times as long programs of the profile took between the rounds, the median
            over ranks and rounds; ``None`` where they were not timed.
        agreement: whether requests got the tokens that each gets alone.
        passed: judged figures within the tolerance, and tokens agree.
        notes: what a reader of the numbers has to know.
    """

    schema_: Literal["foreplan.traffic/1"] = Field(default=SCHEMA, alias="schema")
    plan_digest: str
    kind: str
    machine: Machine
    rounds: int
    requests: int
    rate_per_s: float | None
    largest_rate_per_s: float
    tolerance: float
    judged: tuple[str, ...]
    figures: tuple[TrafficFigure, ...]
    phases: tuple[TrafficPhase, ...]
    pace: float | None
    agreement: AgreementResult
    passed: bool
    notes: tuple[str, ...] = ()

    def figure(self, name: str) -> TrafficFigure | None:
        """A figure by its name; ``None`` where there is none (one token has no later ones)."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def to_json(self) -> str:
        """The document, keys in the fields' order, with a final newline."""
        data = self.model_dump(mode="json", by_alias=True)
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document; never half of it.

        Raises:
            SpecError: the path cannot be written.
        """
        write_atomically(path, self.to_json())
