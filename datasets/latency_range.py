"""Which measured latencies of operators and programs can be one at all, in seconds.

Beyond lies a damaged file or another unit, and one such label makes a mean error meaningless.
"""

from __future__ import annotations

#: Theory: half a cycle of a clock of 5 GHz. A call of an empty function takes 5e-9 s
#: (measured: ``datasets/measured/epyc_programs_synthetic``).
LEAST_S = 1e-10
#: No program is measured for longer: 11 days.
MOST_S = 1e6


def expected(per_s: float, unit: str) -> str:
    """The range for an error message, in a unit of which so many are a second."""
    return f"a latency of {LEAST_S * per_s:g} to {MOST_S * per_s:g} {unit}"
