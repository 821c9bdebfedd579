"""`PerplexityCurve`: what a sum of quality losses costs in perplexity, fitted on measured plans.

``ln(PPL / PPL16) = c Omega^g`` with ``c, g > 0``: monotone, 0 for a lossless plan, two free
parameters (``fitted``, on random mixed plans). Residuals are weighed by ``1 / sqrt(Omega)``: the
mean log ratio of two close predictions has variance ``2 KL / tokens`` (theory), so that small sums
carry little. For a model that predicts as often right as it says, the expected rise of the
cross-entropy *is* the divergence, so that ``c`` and ``g`` are near 1 for an indicator in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreplan.datasets.specs import StrictModel
from foreplan.errors import SpecError

FloatArray = npt.NDArray[np.float64]

#: Fewest plans that a curve may rest on.
LEAST_PLANS = 4
#: An exponent far from 1 has no meaning; the bounds keep few, noisy plans from one.
_EXPONENTS = (0.25, 4.0)
#: Nats a token at which every model knows nothing; keeps what is far beyond the plans finite.
_LOST = 100.0


class PerplexityCurve(StrictModel):
    """A fitted curve and how far off it is.

    Attributes:
        perplexity: at 16 bits, on the text that the plans were measured on.
        coefficient, exponent: of the curve.
        largest_omega: of the plans it was fitted on; beyond it the curve extrapolates.
        plans: how many.
        error: mean of ``|fitted - measured|`` over the mean rise in perplexity, each plan predicted
            by a curve that did not see it.
    """

    perplexity: float = Field(ge=1, le=1e9)
    coefficient: float = Field(gt=0, le=1e9)
    exponent: float = Field(ge=0.25, le=4)
    largest_omega: float = Field(gt=0, le=1e9)
    plans: int = Field(ge=LEAST_PLANS)
    error: float = Field(ge=0)

    @classmethod
    def fit(
        cls, omega: Sequence[float], rise_nats: Sequence[float], nats: float
    ) -> PerplexityCurve:
        """Fit measured plans.

        Args:
            omega: sum of quality losses of each plan; those of 0 say nothing and are left out.
            rise_nats: cross-entropy of each plan minus that at 16 bits, nats a token.
            nats: cross-entropy at 16 bits.

        Raises:
            SpecError: fewer than `LEAST_PLANS` plans with a loss, or none that costs anything.
        """
        x, y = np.asarray(omega, float), np.asarray(rise_nats, float)
        x, y = x[x > 0], y[x > 0]
        if len(x) < LEAST_PLANS or (y <= 0).all():
            raise SpecError(
                "plans", got=f"{int((y > 0).sum())} of {len(x)} that cost perplexity",
                expected=f"at least {LEAST_PLANS} that lose something",
            )  # fmt: skip
        coefficient, exponent = _fit(x, y)
        left_out = np.array([_fit(np.delete(x, i), np.delete(y, i)) for i in range(len(x))])
        fitted = np.expm1(left_out[:, 0] * x ** left_out[:, 1])
        measured = np.expm1(y)
        error = float(np.abs(fitted - measured).mean() / np.abs(measured).mean())
        return cls(
            perplexity=math.exp(nats), coefficient=coefficient, exponent=exponent,
            largest_omega=float(x.max()), plans=len(x), error=error,
        )  # fmt: skip

    def increase(self, omega: float) -> float:
        """Perplexity that a sum of losses adds."""
        rise = self.coefficient * omega**self.exponent
        return self.perplexity * math.expm1(min(rise, _LOST))

    def omega(self, increase: float) -> float:
        """Largest sum of losses that adds no more than ``increase`` perplexity."""
        rise = math.log1p(increase / self.perplexity)
        found: float = (rise / self.coefficient) ** (1 / self.exponent)
        return found


def _fit(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Coefficient and exponent by weighted least squares."""
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    def coefficient(exponent: float) -> float:
        powers = x**exponent
        # The least-squares answer; noise alone can make it negative, which no curve may be.
        return max(float((powers * y / x).sum() / (powers * powers / x).sum()), 1e-9)

    def off(exponent: float) -> float:
        residuals = (coefficient(exponent) * x**exponent - y) / np.abs(y).max()
        return float((residuals * residuals / x).sum() * x.max())

    found = minimize_scalar(off, bounds=_EXPONENTS, method="bounded", options={"xatol": 1e-8})
    exponent = float(found.x)
    return coefficient(exponent), exponent
