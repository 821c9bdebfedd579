"""Limits on the law's two terms, for a search over a problem whose times are weighed by them.

With prefill times multiplied by ``1 + u`` and decode times by ``1 + w / (n - 1)``
(``chain_limits``) an answer within the limits weighs at most ``T + u first + w step``. Counted as
just that, and what is beyond a limit as nothing at all, answers stay above every bound of the
weighed search, which then ends with the best of those within, boxes settled by labels as they are
under budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreplan.solvers.chain_problem import RELATIVE_TOLERANCE, ChainProblem, FloatArray
from foreplan.solvers.chain_score import ChainScore


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """Limits and the weights of the problem that they belong to.

    Attributes:
        prefill: what prefill times were multiplied by, at least 1.
        decode: what decode times were multiplied by, at least 1.
        first_s: limit on the prefill term, before weighing; ``inf`` for none.
        step_s: limit on a decode step, likewise.
        added_s: what is added to an answer's objective: ``u first + w step``.
    """

    prefill: float
    decode: float
    first_s: float
    step_s: float
    added_s: float

    def objective(self, problem: ChainProblem, score: ChainScore) -> float:
        """What an answer counts as, seconds; ``inf`` beyond a limit.

        Args:
            problem: the weighed problem.
            score: of the answer to it.
        """
        first = score.prefill_sum_s + (problem.prefill_microbatches - 1) * score.prefill_max_s
        first /= self.prefill
        step = 0.0
        if problem.new_tokens > 1:
            step = max(score.decode_sum_s, problem.decode_microbatches * score.decode_max_s)
            step /= self.decode
        if not (first <= self._limits[0] and step <= self._limits[1]):
            return math.inf
        quality = problem.theta * score.omega
        return first + (problem.new_tokens - 1) * step + quality + self.added_s

    @property
    def law(self) -> FloatArray:
        """``[5]`` as ``_chain_labels.best_chain`` takes it."""
        return np.array([1 / self.prefill, 1 / self.decode, *self._limits, self.added_s])

    @property
    def _limits(self) -> tuple[float, float]:
        return self.first_s * (1 + RELATIVE_TOLERANCE), self.step_s * (1 + RELATIVE_TOLERANCE)


#: No limits, as `Within.law`.
FREE = np.array([1.0, 1.0, math.inf, math.inf, 0.0])
