"""`Verification`: the document of a real run: what was predicted, what was measured, how far off.

It belongs to one plan (by digest) and one machine. Times are medians over the rounds; an *error* is
|predicted - measured| / measured.
"""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.storage import write_atomically
from foreplan.planner.document import document_json, read_document
from foreplan.planner.times import Times

SCHEMA: Literal["foreplan.verification/1"] = "foreplan.verification/1"


class Device(StrictModel):
    """What a rank's process turned out to be.

    Attributes:
        label: device in the cluster.
        torch: version.
        threads: torch's threads.
        cores: cores it kept to.
        cpu_capability: instruction set that torch's kernels used.
        gpu: name of the GPU, if it is one.
        messages: what carried those between two ranks, ``gloo``, ``nccl`` or ``copy engines``;
            absent from runs of earlier versions.
    """

    label: str
    torch: str
    threads: int
    cores: tuple[int, ...]
    cpu_capability: str
    gpu: str | None = None
    messages: str | None = None


class Machine(StrictModel):
    """The host that led the run.

    Attributes:
        cpu: model of its processor.
        cores: how many this process could use.
        load_before, load_after: load average of the last minute; other work disturbs the times.
        devices: the processes of the chosen plan.
    """

    cpu: str
    cores: int
    load_before: float
    load_after: float
    devices: tuple[Device, ...] = ()


class Phase(StrictModel):
    """Busy seconds of one kind of action (``prefill``, ``F``) on one rank.

    Attributes:
        op: the action.
        predicted_s: by the plan, ``None`` where it says nothing.
        measured_s: median over the rounds; ``None`` of what only plans have as an action: what
            collectives take from computation beside them, which lasts longer by it in a run.
        error: see the module.
    """

    op: str
    predicted_s: float | None
    measured_s: float | None
    error: float | None


class Item(StrictModel):
    """Bytes of one line of a rank's memory ledger; ``None`` where a side has no such line."""

    item: str
    predicted_bytes: int | None
    held_bytes: int | None


class RankResult(StrictModel):
    """One rank of a candidate.

    Attributes:
        device: label in the cluster.
        predicted_s, measured_s, error: busy seconds of its compute.
        pace: what programs of its profile took between the rounds over what the profile says, the
            median over the rounds; ``None`` where they were not timed.
        phases: the same by action.
        memory: the kernels' own account against the ledger.
        held_bytes: what the process took for the kernels in all (CPU: private memory after the
            last round, GPU: highest allocation).
    """

    device: str
    predicted_s: float | None
    measured_s: float
    error: float | None
    phases: tuple[Phase, ...] = ()
    memory: tuple[Item, ...] = ()
    held_bytes: int | None = None
    pace: float | None = None


class CandidateResult(StrictModel):
    """One decision that was run.

    Attributes:
        name: ``chosen``, or the alternative's.
        role: why it was run.
        limits_met: whether it meets the workload's limits; if not it does not count for regret.
        predicted_s: predicted total, ``None`` where it was not.
        measured_s: median total over the rounds, ``None`` if it failed.
        p10_s, p90_s: spread of the totals.
        rounds_s: every total, in the order of the rounds.
        error: see the module.
        failure: why it could not be run.
        ranks: rank by rank.
        quality: how good its results are, by the planner's own figures (perplexity).
        pace: how much longer its steps lasted because of the machine's speed (`step_pace`), the
            median over the rounds: 1.3 says that its profile's programs took 1.3 times as long;
            ``None`` where not all ranks were timed.
        pace_p10, pace_p90: spread of that over the rounds.
        error_at_pace: the error of ``predicted_s`` times ``pace``: what is not the machine's.
    """

    name: str
    role: Literal["chosen", "alternative", "rival"]
    limits_met: bool = True
    predicted_s: float | None
    measured_s: float | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    rounds_s: tuple[float, ...] = ()
    error: float | None = None
    failure: str | None = None
    ranks: tuple[RankResult, ...] = ()
    quality: dict[str, float] = Field(default_factory=dict)
    pace: float | None = None
    pace_p10: float | None = None
    pace_p90: float | None = None
    error_at_pace: float | None = None


class AgreementResult(StrictModel):
    """Whether the distributed run computed what one process computes.

    Attributes:
        mode: ``reference``: both in the exact way; ``fast``: both as planned; others are the
            planner's own.
        passed, exact, details: see `foreplan.planner.base.Agreement`; a detail ``failure`` says why
            nothing was compared.
    """

    mode: str
    passed: bool
    exact: bool
    details: dict[str, float | str] = Field(default_factory=dict)

    @property
    def said(self) -> str:
        """In a word or two."""
        if self.passed:
            return "exact" if self.exact else "agrees"
        return "NOT COMPARED" if "failure" in self.details else "DIFFERS"


class Verification(StrictModel):
    """The document of a real run: what was predicted, what was measured, and how far off.

    Attributes:
        schema_: format and version of the document.
        plan_digest: of the plan.
        kind: the planner.
        backend: ``gloo`` or ``nccl``.
        machine: where it ran.
        rounds: timed rounds, interleaved after one warm-up round.
        tolerance: largest error of the chosen plan's total that passes.
        candidates: the chosen plan first.
        agreement: empty where the planner has no reference.
        regret: chosen over the best measured candidate that meets the limits, minus 1; ``None``
            where no other was measured.
        rank_correlation: Spearman's, predicted against measured over the candidates; ``None`` for
            fewer than three.
        speedup: each alternative's measured time over the chosen plan's.
        passed: error within the tolerance, and every agreement passed.
        notes: what a reader of the numbers has to know (slices, emulated links, random weights).
        times: measured timeline of the chosen plan's median round.
        error_cause: whether the chosen plan's error is waiting or work, in a line; ``None`` where
            it is small, and absent from runs of earlier versions.
        machine_share: what of that error is the machine's speed, in a line; ``None`` where it is
            small, or the machine was not timed.
    """

    schema_: Literal["foreplan.verification/1"] = Field(default=SCHEMA, alias="schema")
    plan_digest: str
    kind: str
    backend: Literal["gloo", "nccl"]
    machine: Machine
    rounds: int
    tolerance: float
    candidates: tuple[CandidateResult, ...]
    agreement: tuple[AgreementResult, ...] = ()
    regret: float | None = None
    rank_correlation: float | None = None
    speedup: dict[str, float] = Field(default_factory=dict)
    passed: bool
    notes: tuple[str, ...] = ()
    times: Times | None = None
    error_cause: str | None = None
    machine_share: str | None = None

    @property
    def chosen(self) -> CandidateResult:
        """The plan's own decision."""
        return self.candidates[0]

    @property
    def summary(self) -> str:
        """One line for people."""
        chosen = self.chosen
        if chosen.measured_s is None or chosen.error is None or chosen.predicted_s is None:
            return f"{self.kind}: failed: {chosen.failure}"
        parts = [
            f"{self.kind}: {'passed' if self.passed else 'NOT passed'}",
            f"predicted {chosen.predicted_s * 1e3:.4g} ms, measured "
            f"{chosen.measured_s * 1e3:.4g} ms (error {chosen.error:.1%}, allowed "
            f"{self.tolerance:.1%})",
        ]
        if self.machine_share is not None:
            parts.append(self.machine_share)
        if self.regret is not None:
            parts.append(f"regret {self.regret:.1%}")
        parts += [f"{a.mode} result {a.said}" for a in self.agreement]
        return ", ".join(parts)

    def to_json(self) -> str:
        """The document, keys in the fields' order, with a final newline."""
        return document_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document; never half of it.

        Raises:
            SpecError: the path cannot be written.
        """
        write_atomically(path, self.to_json())

    def __repr__(self) -> str:
        """One line, as a notebook's last line or ``print`` shows it; `to_json` is the whole."""
        return f"<Verification: {self.summary}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(c.name)}</td><td>{_ms(c.predicted_s)}</td>"
            f"<td>{_ms(c.measured_s)}</td><td>{_ms(c.p10_s)}-{_ms(c.p90_s)}</td>"
            f"<td>{'' if c.error is None else f'{c.error:.1%}'}</td>"
            f"<td>{html.escape(c.failure or '')}</td></tr>"
            for c in self.candidates
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return (
            f"<p><b>{html.escape(self.summary)}</b></p><table><tr><th>candidate</th>"
            "<th>predicted ms</th><th>measured ms</th><th>10-90 %</th><th>error</th><th></th></tr>"
            f"{rows}</table><ul>{notes}</ul>"
        )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.4g}"


def load_verification(path: str | os.PathLike[str]) -> Verification:
    """Read a verification and check it.

    Raises:
        SpecError: no such file, a truncated or hand-edited document, another schema version.
    """
    where = Path(path).name
    return validate(Verification, read_document(path, SCHEMA, "verify"), where)
