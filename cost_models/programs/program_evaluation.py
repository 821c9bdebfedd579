"""Errors of a predictor on measured programs, by device and network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.evaluation import Errors, errors_of, summary
from foreplan.cost_models.programs.program_data import Unsupported
from foreplan.cost_models.programs.program_table import BETWEEN_NETWORKS, ProgramTable

Floats = NDArray[np.float64]

_NOTHING = Errors(np.zeros(0, dtype=np.bool_), np.zeros(0), None)


class ProgramModel(Protocol):
    """What `evaluate_programs` asks of a model."""

    def predict(self, table: ProgramTable) -> Floats:
        """Seconds (N,), NaN for a program that the model cannot predict."""
        ...


def evaluate_programs(
    model: ProgramModel,
    table: ProgramTable,
    unsupported: Sequence[Unsupported] = (),
    *,
    names: Sequence[str] | None = None,
) -> dict[str, object]:
    """Compare predictions with a table's latencies.

    Args:
        model: any predictor; one with ``predict_interval`` also gets its coverage (`errors_of`).
        table: measured programs.
        unsupported: programs that are in no table, counted as not predicted.
        names: what devices are called in the result, in the order of ``table.devices``.

    Returns:
        As `evaluation.evaluate`, with networks in the place of operators; a program counts for
        each network that calls it. ``noise_floor`` is the mean and median of half the relative
        spread of repetitions: no predictor can be expected below it.
    """
    known, error, interval = errors_of(model, table) if len(table) else _NOTHING
    called = names or [device.name for device in table.devices]
    device = np.array(called, dtype=np.str_)[table.device]
    callers = {joined: joined.split(BETWEEN_NETWORKS) for joined in set(table.network.tolist())}
    network = [callers[joined] for joined in table.network.tolist()]
    lost = Counter(
        (str(device[row]), name) for row in np.flatnonzero(~known) for name in network[row]
    )
    for item in unsupported:
        lost.update((item.device, name) for name in item.network.split(BETWEEN_NETWORKS))
    document: dict[str, object] = {
        "overall": summary(error),
        "by_device": {name: summary(error[device == name]) for name in sorted(set(called))},
        "by_op": _by_network(error, network),
        "by_device_op": {
            name: _by_network(
                error[device == name], [network[row] for row in np.flatnonzero(device == name)]
            )
            for name in sorted(set(called))
        },
        "unsupported": int((~known).sum()) + len(unsupported),
        "unsupported_by": {f"{where}/{name}": lost[where, name] for where, name in sorted(lost)},
        "unsupported_reasons": dict(Counter(item.reason for item in unsupported)),
        "noise_floor": noise_floor(table),
    }
    if interval is not None:
        document["interval_90"] = interval
    return document


def noise_floor(table: ProgramTable) -> dict[str, float | None]:
    """Mean and median of half the spread of a program's repetitions, as fractions."""
    spread = table.spread[np.isfinite(table.spread)] / 2
    if not len(spread):
        return {"mean": None, "median": None}
    return {"mean": float(spread.mean()), "median": float(np.median(spread))}


def _by_network(
    error: Floats, network: Sequence[Sequence[str]]
) -> dict[str, dict[str, float | int | None]]:
    rows: dict[str, list[int]] = {}
    for row, names in enumerate(network):
        for name in names:
            rows.setdefault(name, []).append(row)
    return {name: summary(error[np.array(rows[name])]) for name in sorted(rows)}
