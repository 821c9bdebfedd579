"""Chooses which operators of a device to time, so that few of them say most of the others.

KMeans over the features in which `rate_model` tells operators apart: the share of each term of the
roofline, spread over the groups that a program belongs to, each as wide as its prior, so that
two programs are as near as what one says of the other. Of each cluster the program nearest to the
centre is taken (CDMPP, arXiv 2311.09690, section on sampling, does so over its programs' features).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.rates.operator_rates import groups, rate_terms
from foreplan.cost_models.rates.rate_law import WIDTHS
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

Floats = NDArray[np.float64]

#: Weight of the logarithm of a program's size beside the groups; assumed.
_SIZE = 0.05


def choose_tasks(
    programs: Sequence[Program],
    device: Device,
    count: int,
    *,
    weights: Floats | None = None,
    known: Sequence[Program] = (),
    seed: int = 0,
) -> NDArray[np.int64]:
    """Indices of at most ``count`` programs (all, where there are no more), ascending.

    Args:
        programs: candidates (N,).
        device: its figures.
        count: how many to choose, at least 1.
        weights: how much each candidate matters (N,), positive; all alike if left out.
        known: what was timed already; a cluster that holds one of these needs no other.
        seed: of the clusters' starts.
    """
    from sklearn.cluster import KMeans  # type: ignore[import-untyped, unused-ignore]

    if count >= len(programs):
        return np.arange(len(programs))
    everything = task_features([*programs, *known], device)
    features, timed = everything[: len(programs)], everything[len(programs) :]
    clusters = KMeans(count, n_init=2, random_state=seed).fit(features, sample_weight=weights)
    free = np.ones(len(programs), dtype=bool)
    for k, centre in enumerate(clusters.cluster_centers_):
        radius = ((features[clusters.labels_ == k] - centre) ** 2).sum(axis=1).max()
        if (((timed - centre) ** 2).sum(axis=1) <= radius).any():
            continue
        away = np.where(free, ((features - centre) ** 2).sum(axis=1), np.inf)
        free[int(np.argmin(away))] = False
    return np.flatnonzero(~free)


def task_features(programs: Sequence[Program], device: Device) -> Floats:
    """Features of programs (N, F); see the module."""
    terms = rate_terms(programs, device)
    shares = terms / terms.sum(axis=1, keepdims=True)
    columns = [_SIZE * np.log(terms.sum(axis=1))[:, None]]
    named = np.array([groups(program) for program in programs], dtype=object)
    for level, width in enumerate(WIDTHS.values()):
        for name in sorted(set(named[:, level])):
            columns.append(width * shares * (named[:, level] == name)[:, None])
    return np.concatenate(columns, axis=1)


def choose_telling(
    covariance: Floats, noise: Floats, stakes: Floats, count: int, *, least: float
) -> list[int]:
    """Indices of at most ``count`` programs whose times say most about sums that matter.

    One by one the program is taken that lowers the variances of the sums most, once its time is
    known: ``sum over q of (stakes_q . covariance_p)^2 / (covariance_pp + noise_p)``. For a Gaussian
    the times themselves do not matter to that, so that several are chosen before any is timed
    (Krause & Guestrin, Near-optimal nonmyopic value of information in graphical models, 2005). Here
    the logarithms of the times are Gaussian, and what counts are the times: stakes grow with how
    far a time may lie above its median (`widened`).

    Args:
        covariance: of the logarithms of the programs' times (M, M).
        noise: variance of a time around what it tells (M,).
        stakes: the sums (Q, M): seconds of each program in them, over what they are compared with.
        count: how many to choose.
        least: variance; a program that lowers the sums by less in all is not worth being timed.
    """
    left = np.array(covariance, dtype=np.float64)
    free = np.ones(len(left), dtype=bool)
    chosen: list[int] = []
    while len(chosen) < count and free.any():
        variance = np.diag(left).clip(min=0.0) + noise
        gain = (((stakes * widened(variance)) @ left) ** 2).sum(axis=0) / variance
        best = int(np.argmax(np.where(free, gain, -np.inf)))
        if gain[best] < least:
            break
        chosen.append(best)
        free[best] = False
        left -= np.outer(left[best], left[best]) / variance[best]
    return chosen


def widened(variance: Floats) -> Floats:
    """Standard deviation of log-normal times of median 1 over that of their logarithms (M,).

    ``sqrt(exp(v) (exp(v) - 1) / v)``: near 1 where little is open, and larger than 3 for a time of
    which only the order of magnitude is known.
    """
    v = np.maximum(variance, 1e-9)
    return np.asarray(np.sqrt(np.exp(v) * np.expm1(v) / v))
