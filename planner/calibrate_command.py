"""What ``foreplan calibrate`` does: measured passes of a user's server against today's prices.

A row of the measurements is one pass of a model, or of some of its layers, on one device::

    device,phase,batch,tokens,bits,layers,latency_ms
    cpu:threads=1,prefill,4,128,16,0:12,812
    cpu:threads=1,decode,4,160,16,0:12,95.1

``tokens`` is the prompt's length in prefill and the context's in decode; ``bits`` (16) and
``layers`` (all of them, with embedding and head) may be left out; the time is ``latency_s`` or
``latency_ms``. JSON is a list of such records.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from foreplan.cost_models.book import CostChoice, Profiles, cost_book
from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.roofline import compute_share
from foreplan.cost_models.sources.calibration import (
    LEAST_ROWS,
    Calibration,
    MeasuredPass,
    calibration_path,
    fit_factors,
)
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.device import Device
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import StrictModel, nearest, validate
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner.api import load_cluster
from foreplan.planner.serving.kept_programs import Parts
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing
from foreplan.planner.serving.spec import Count, ServingWorkload

#: Longest file of measurements that is read.
MOST_BYTES = 16 << 20
#: A measured time further than this factor from its price is a mistake of units, not of prices.
FAR = 1e4


class MeasuredRow(StrictModel):
    """One line of the measurements; see the module."""

    device: str
    phase: Literal["prefill", "decode"]
    batch: Count
    tokens: Count
    bits: int = 16
    layers: str | None = None
    latency_s: float | None = Field(default=None, gt=0, lt=1e6)
    latency_ms: float | None = Field(default=None, gt=0, lt=1e9)

    @model_validator(mode="after")
    def _one_time(self) -> MeasuredRow:
        if (self.latency_s is None) == (self.latency_ms is None):
            raise ValueError("one of latency_s and latency_ms")
        return self

    @property
    def seconds(self) -> float:
        """The measured time."""
        return self.latency_s if self.latency_s is not None else (self.latency_ms or 0.0) / 1e3

    def span(self, model: Model, where: str) -> tuple[int, int]:
        """First layer and one past the last.

        Raises:
            SpecError: not ``START:END`` within the model.
        """
        if self.layers is None:
            return 0, model.layers
        first, colon, last = self.layers.partition(":")
        if colon and first.isdigit() and last.isdigit():
            start, end = int(first), int(last)
            if start < end <= model.layers:
                return start, end
        raise SpecError(
            f"{where}: layers", got=self.layers, expected=f"START:END within 0:{model.layers}"
        )


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was written for one device.

    Attributes:
        path: where.
        calibration: what.
    """

    path: Path
    calibration: Calibration


def calibrate(
    cluster: str | Path, model: str | Path | Model, measured: Path, *,
    costs: CostChoice = "measured",
) -> tuple[Calibrated, ...]:  # fmt: skip
    """Fit factors to every device that was measured and write them beside its profile.

    Args:
        cluster: file of a cluster whose devices have profiles.
        model: that the server runs.
        measured: CSV or JSON file of rows.
        costs: the prices to correct.

    Returns:
        One entry a device, in the order of the rows. Nothing is written unless all can be.

    Raises:
        SpecError: a file or row that is wrong, an unknown device, fewer than `LEAST_ROWS` rows.
        MissingDataError: a device without a profile, or a program without a price.
    """
    described = model if isinstance(model, Model) else load_model(model)
    where, folder = load_cluster(cluster)
    profiles = Profiles.of(where, folder)
    plain = Profiles(profiles.by_label, profiles.digest, profiles.fits)
    where = profiles.completed(where)
    book = cost_book(where, plain, costs)
    text = _read(measured)
    by_rank: dict[str, tuple[Rank, list[MeasuredPass]]] = {}
    known = {word: rank for rank in reversed(where.ranks()) for word in _words(rank)}
    for at, row in _rows(text, measured):
        rank = known.get(row.device)
        if rank is None:
            guess = nearest(row.device, known)
            raise SpecError(
                f"{at}: device", got=row.device, expected=f"one of {', '.join(sorted(known))}",
                fix=f"did you mean {guess}?" if guess else None,
            )  # fmt: skip
        if rank.profile is None:
            raise MissingDataError(
                f"{rank.label} has no profile to correct", fix="measure it with 'foreplan profile'"
            )
        key = f"{rank.name} {rank.profile}"
        figures = profiles.by_label[rank.label].device
        found = _pass(described, row, rank, figures, book, at)
        by_rank.setdefault(key, (rank, []))[1].append(found)
    made = []
    digest = hashlib.sha256(text.encode()).hexdigest()
    for rank, passes in by_rank.values():
        if len(passes) < LEAST_ROWS:
            raise SpecError(
                f"{measured.name}: rows of {rank.name}", got=len(passes),
                expected=f"at least {LEAST_ROWS}",
            )  # fmt: skip
        f = fit_factors(passes)
        calibration = Calibration(
            device=str(rank.name), costs=costs, form=f.form, compute=f.compute, memory=f.memory,
            launch_s=f.launch_s, rows=len(passes), error_before=f.error_before,
            error_after=f.error_after, measured_digest=digest,
        )  # fmt: skip
        made.append(Calibrated(calibration_path(folder / (rank.profile or "")), calibration))
    for item in made:
        item.calibration.save(item.path)
    return tuple(made)


def _words(rank: Rank) -> tuple[str, ...]:
    return rank.label, f"{rank.host}/{rank.name}", str(rank.name)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SpecError(str(path), got=path.stat().st_size, expected=f"at most {MOST_BYTES}")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError(
            str(path), got=error.strerror, expected="a CSV or JSON file of times"
        ) from None
    except UnicodeDecodeError as error:
        raise SpecError(
            str(path), got=f"bytes that are not UTF-8 (at byte {error.start})",
            expected="a CSV or JSON file of times",
        ) from None  # fmt: skip


def _rows(text: str, path: Path) -> Iterable[tuple[str, MeasuredRow]]:
    """(where it stands, row) of a file.

    Raises:
        SpecError: a row that cannot be read; says which and why.
    """
    records: list[Any]
    if path.suffix.lower() == ".json":
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(path.name, got=error, expected="a JSON list of rows") from None
        if not isinstance(records, list):
            raise SpecError(path.name, got=type(records).__name__, expected="a list of rows")
        places = [f"{path.name}: row {k + 1}" for k in range(len(records))]
    else:
        try:
            reader = csv.DictReader(io.StringIO(text), strict=True)
            numbered = [(reader.line_num, _numbers(record)) for record in reader]
        except csv.Error as error:
            raise SpecError(path.name, got=error, expected="CSV with a head line") from None
        records = [record for _, record in numbered]
        places = [f"{path.name}: line {line}" for line, _ in numbered]
    if not records:
        raise SpecError(path.name, got="no rows", expected="device,phase,batch,tokens,latency_ms")
    found = []
    for at, record in zip(places, records, strict=True):
        if not isinstance(record, Mapping):
            raise SpecError(at, got=record, expected="a row of named values")
        found.append((at, validate(MeasuredRow, dict(record), at)))
    return found


def _numbers(record: Mapping[Any, Any]) -> dict[str, Any]:
    """CSV words as numbers where they are some; empty cells are left out."""
    found: dict[str, Any] = {}
    for name, word in record.items():
        if name is None or isinstance(word, list):
            found["more cells than names"] = word
            continue
        if word is None or not word.strip():
            continue
        value: Any = word.strip()
        for read in (int, float):
            try:
                value = read(value)
                break
            except ValueError:
                continue
        text = name.strip() in ("device", "phase", "layers")
        found[name.strip()] = word.strip() if text else value
    return found


def _pass(
    model: Model, row: MeasuredRow, rank: Rank, figures: Device, book: CostBook, at: str
) -> MeasuredPass:
    """A row's pass taken apart by the prices of its programs."""
    start, end = row.span(model, at)
    prefill = row.phase == PREFILL
    tokens = row.tokens if prefill else max(row.tokens - 1, 1)
    asked = {
        "batch": row.batch, "prompt_tokens": tokens, "new_tokens": 2, "bits": [row.bits],
        "prefill_microbatch": row.batch, "decode_microbatch": row.batch,
    }  # fmt: skip
    workload = validate(ServingWorkload, asked, at)
    sizes = MicroBatches(row.batch, row.batch)
    pricing = Pricing(model, workload, book)
    kernels = pricing.kernels(rank, sizes)
    if f"{row.phase}/linear/{row.bits}" not in kernels.table:
        raise MissingDataError(f"{at}: no kernel of {row.bits} bits has a price on {rank.label}")
    phase = PREFILL if prefill else DECODE
    parts: list[tuple[Parts, int]] = [
        (pricing.layers(kernels, start, (row.bits,) * (end - start), phase, sizes,
                        None if prefill else row.tokens), 1)
    ]  # fmt: skip
    if start == 0:
        parts.append((pricing.embedding(phase, sizes), 1))
    if end == model.layers:
        parts.append((pricing.head(kernels, phase, sizes), 1))
    compute = memory = 0.0
    programs = 0
    for several, times in parts:
        for item, count in several:
            seconds = book.cost(item, rank.label).mean_s * count * times
            share = compute_share(item, figures)
            compute += share * seconds
            memory += (1 - share) * seconds
            programs += count * times
    priced = compute + memory
    if not priced / FAR < row.seconds < priced * FAR:
        raise SpecError(
            f"{at}: latency", got=f"{row.seconds:.3g} s", expected=f"about {priced:.3g} s",
            fix="check the unit: latency_s is in seconds, latency_ms in milliseconds",
        )  # fmt: skip
    name = f"{row.phase} {row.batch} {row.tokens} {row.bits} {start}:{end}"
    return MeasuredPass(name, compute, memory, float(programs), row.seconds)
