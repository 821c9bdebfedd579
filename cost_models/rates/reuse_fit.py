"""Fits `reuse`'s law to operators that were timed behind more and more other data.

``python -m foreplan.cost_models.rates.reuse_fit PROFILE TIMES`` takes a processor's profile, whose
rates say how much of an operator waits for memory, and what `foreplan.datasets.sweeps.reuse_sweep`
timed there: for each operator and distance the time over that at twice the cache, which profiles
call cold, against the law's. Fitted to every other operator; errors are of the others.

Shape legend: ``M`` operators, ``D`` distances.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

from foreplan.cost_models.rates.onboarding_curve import read_rows
from foreplan.cost_models.rates.rate_law import RateLaw, Waits
from foreplan.cost_models.rates.rate_model import RateModel
from foreplan.cost_models.rates.reuse import share_of
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.reuse_sweep import ReuseTimes
from foreplan.errors import SpecError, told

Floats = NDArray[np.float64]

#: What profiles call cold, in caches.
_COLD = 2.0


class ReuseLaw(NamedTuple):
    """The fitted numbers, see `reuse.share_of`."""

    near: float
    held: float
    lost: float

    def shares(self, distances: Sequence[float]) -> Floats:
        """Share of the waiting at each distance (D,)."""
        return np.array([share_of(filled, *self) for filled in distances])


def log_ratios(law: RateLaw, device: Device, times: ReuseTimes, shares: Floats) -> Floats:
    """Logarithm of predicted over cold time by shares of the waiting (D,): (M, D)."""
    programs = [row.program() for row in times.rows]
    cold = law.seconds(programs, device)
    found = [law.seconds(programs, device, waits=Waits(float(share))) for share in shares]
    return np.asarray(np.log(np.stack(found, axis=1) / cold[:, None]))


def measured_ratios(times: ReuseTimes) -> Floats:
    """Logarithm of measured over cold time (M, D).

    Raises:
        SpecError: nothing was timed at the distance that profiles call cold.
    """
    if _COLD not in times.distances:
        raise SpecError("distances", got=list(times.distances), expected=f"{_COLD} among them")
    seconds = np.array([row.median_s for row in times.rows])
    return np.asarray(np.log(seconds / seconds[:, [times.distances.index(_COLD)]]))


def fit(law: RateLaw, device: Device, times: ReuseTimes, rows: NDArray[np.int64]) -> ReuseLaw:
    """Least squares over the logarithms of the ratios of some rows, up to the cold distance."""
    kept = times.model_copy(update={"rows": tuple(times.rows[i] for i in rows)})
    upto = np.array([filled <= _COLD for filled in times.distances])
    target = measured_ratios(kept)[:, upto]
    distances = [filled for filled in times.distances if filled <= _COLD]

    def off(parameters: Floats) -> Floats:
        near, held, wider = parameters
        shares = ReuseLaw(near, held, held * wider).shares(distances)
        return np.asarray(log_ratios(law, device, kept, shares) - target).ravel()

    # Times differ by noise of a few per cent and a few by far more.
    found = least_squares(
        off, (0.5, 0.5, 3.0), bounds=((0.0, 0.05, 1.1), (1.0, 2.0, 20.0)), loss="soft_l1",
        f_scale=0.1,
    )  # fmt: skip
    near, held, wider = found.x
    return ReuseLaw(float(near), float(held), float(held * wider))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the fit, and its errors by operator and distance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("times", type=Path)
    asked = parser.parse_args(arguments)
    device, programs, seconds = read_rows(asked.profile)
    law = RateModel(device).fit(programs, seconds).law_
    times = ReuseTimes.load(asked.times)
    count = np.arange(len(times.rows))
    half = fit(law, device, times, count[::2])
    whole = fit(law, device, times, count)
    print(f"fitted to all: near {whole.near:.2f}, held {whole.held:.2f}, lost {whole.lost:.2f}")
    print(f"to every other: near {half.near:.2f}, held {half.held:.2f}, lost {half.lost:.2f}; rms "
          "of ln(predicted / measured) of the others, and of the cold price:\n")  # fmt: skip
    truth = measured_ratios(times)
    off = log_ratios(law, device, times, half.shares(times.distances)) - truth
    print("| operator | " + " | ".join(f"{filled:g}" for filled in times.distances) + " |")
    print("|---" * (1 + len(times.distances)) + "|")
    for op in dict.fromkeys(row.op for row in times.rows):
        mine = [i for i in count[1::2] if times.rows[i].op == op]
        cells = (f"{_rms(off[mine, k]):.2f} / {_rms(truth[mine, k]):.2f}"
                 for k in range(len(times.distances)))  # fmt: skip
        print(f"| {op} ({len(mine)}) | " + " | ".join(cells) + " |")


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


if __name__ == "__main__":
    with told():
        main()
