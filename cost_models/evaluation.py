"""Errors of a predictor on measured operators, by device and operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import PRECISIONS
from foreplan.datasets.sweeps.operator_table import UNKNOWN, OperatorTable, Texts

Floats = NDArray[np.float64]


class OperatorModel(Protocol):
    """What `evaluate` asks of a model."""

    def predict(self, table: OperatorTable) -> Floats:
        """Seconds (N,), NaN for a row that the model cannot predict."""
        ...


class Measured(Protocol):
    """What `errors_of` asks of a table: seconds (N,)."""

    @property
    def latency_s(self) -> Floats: ...  # noqa: D102 - see the class
    def __len__(self) -> int: ...


class Errors(NamedTuple):
    """Predictions beside measured latencies.

    Attributes:
        known: rows that were predicted, bool (N,).
        error: absolute relative errors (N,), NaN where a row was not predicted.
        interval: as `interval_summary`; None for a model that gives no intervals.
    """

    known: NDArray[np.bool_]
    error: Floats
    interval: dict[str, float | None] | None


def evaluate(model: OperatorModel, table: OperatorTable) -> dict[str, object]:
    """Compare predictions with a table's latencies.

    Args:
        model: any predictor; one with ``predict_interval`` also gets its coverage (`errors_of`).
        table: measured rows.

    Returns:
        ``overall``, ``by_device``, ``by_op`` and ``by_device_op`` (device, then operator), each
        with ``mape``, ``median_ape``, ``p90_ape`` and ``within_10pct`` as fractions and ``count``;
        ``unsupported`` counts the rows that were not predicted, with ``unsupported_by`` and
        ``unsupported_why`` (a reason to the rows that it explains). ``taught`` counts, by device,
        rows of a kind, chip, library and data type that rows taught the model: their errors are
        those of a fit, as far as the very rows were among them. A group without a predicted row
        has ``count`` 0 and ``None`` errors.
    """
    known, error, interval = errors_of(model, table)
    lost = [int(row) for row in np.flatnonzero(~known)]
    document: dict[str, object] = {
        "overall": summary(error),
        "by_device": _grouped(error, table.device),
        "by_op": _grouped(error, table.op),
        "by_device_op": {
            str(name): _grouped(error[rows], table.op[rows]) for name, rows in _groups(table.device)
        },
        "unsupported": int((~known).sum()),
        "unsupported_by": {
            f"{device}/{op}": int(((table.device == device) & (table.op == op) & ~known).sum())
            for device, op in sorted(set(zip(table.device[~known], table.op[~known], strict=True)))
        },
        "unsupported_why": dict(Counter(why_not(table, row) for row in lost)),
        "taught": _taught(model, table, known),
    }
    if interval is not None:
        document["interval_90"] = interval
    return document


def _taught(model: OperatorModel, table: OperatorTable, known: NDArray[np.bool_]) -> dict[str, int]:
    """Predicted rows by device that rows of the same sort taught the model; see `evaluate`."""
    if not hasattr(model, "timed"):
        return {}
    sorts = {
        (timed.device.chip, timed.library, timed.dtype, kind)
        for timed in model.timed()
        for kind in timed.kinds
    }
    rows = zip(table.chips, table.library, table.dtype, table.kind, strict=True)
    taught = known & np.fromiter((row in sorts for row in rows), bool, len(table))
    return {str(name): int(n) for name, n in Counter(table.device[taught]).items()}


def why_not(table: OperatorTable, row: int) -> str:
    """What keeps a row from being predicted."""
    device, dtype = str(table.device[row]), str(table.dtype[row])
    if table.kind[row] == UNKNOWN:
        return f"operator {table.op[row]} is not known"
    if table.device_of(device) is None:
        return f"device {device} is not in the zoo; --device-file takes its figures"
    if dtype not in PRECISIONS:
        return f"data type {dtype} is not known"
    return f"the model has no price for {table.kind[row]} of {dtype} on {device}"


def errors_of(model: Any, table: Measured) -> Errors:
    """Errors of a model on a table of operators or of programs.

    Args:
        model: has ``predict(table)``, seconds (N,) and NaN for what it cannot predict, or
            ``predict_interval(table)``, which adds the low and high end of the 90 % interval.
        table: measured rows.
    """
    low = high = None
    if hasattr(model, "predict_interval"):
        predicted, low, high = model.predict_interval(table)
    else:
        predicted = model.predict(table)
    known = np.isfinite(predicted) & (predicted > 0)
    error = np.full(len(table), np.nan)
    error[known] = np.abs(predicted[known] / table.latency_s[known] - 1)
    if low is None or high is None:
        return Errors(known, error, None)
    measured = table.latency_s[known]
    return Errors(
        known, error, interval_summary(measured, predicted[known], low[known], high[known])
    )


def interval_summary(
    latency_s: Floats, predicted_s: Floats, low_s: Floats, high_s: Floats
) -> dict[str, float | None]:
    """Coverage and median width, relative to the prediction, of intervals of rows (N,)."""
    if not len(latency_s):
        return {"coverage": None, "median_relative_width": None}
    inside = (latency_s >= low_s) & (latency_s <= high_s)
    return {
        "coverage": float(inside.mean()),
        "median_relative_width": float(np.median((high_s - low_s) / predicted_s)),
    }


def summary(error: Floats) -> dict[str, float | int | None]:
    """Error statistics of absolute relative errors (N,), NaN = not predicted, left out."""
    values = error[~np.isnan(error)]
    if not len(values):
        return {
            "mape": None, "median_ape": None, "p90_ape": None, "within_10pct": None, "count": 0,
        }  # fmt: skip
    return {
        "mape": float(values.mean()),
        "median_ape": float(np.median(values)),
        "p90_ape": float(np.quantile(values, 0.9)),
        "within_10pct": float((values <= 0.1).mean()),
        "count": len(values),
    }


def _groups(names: Texts) -> Iterable[tuple[str, NDArray[np.bool_]]]:
    for name in sorted(set(names)):
        yield str(name), names == name


def _grouped(error: Floats, names: Texts) -> dict[str, dict[str, float | int | None]]:
    return {name: summary(error[rows]) for name, rows in _groups(names)}
