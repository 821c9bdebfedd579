"""`step_pace`: how much longer a measured step lasted because of its ranks' paces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.cost_models.timeline import Timeline


def step_pace(timeline: Timeline, paces: Sequence[float]) -> float:
    """Pace of a step: where all ranks' are equal theirs, else between them.

    What computes on the critical path of the measured step would have taken its time over its
    rank's pace; the step is taken to last by as much longer as that path. At the profiles' speeds
    another path may be the longest, so that unequal paces say this to first order.

    Args:
        timeline: the measured step.
        paces: of each rank, time now over time by its profile.

    Returns:
        Time measured over time at the profiles' speeds.
    """
    schedule, path = timeline.schedule, np.array(timeline.critical_path(), dtype=np.int64)
    path = path[timeline.is_compute[path]]
    seconds = np.bincount(
        schedule.rank[path], weights=timeline.end_s[path] - timeline.start_s[path],
        minlength=schedule.ranks,
    )  # fmt: skip
    # Where nothing on the path computes, no rank counts more than another.
    weights = seconds if seconds.any() else np.ones(schedule.ranks)
    return float(weights.sum() / (weights / np.asarray(paces)).sum())
