"""The price that is known best, of several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import Estimate, HostLaunch, Work
from foreplan.cost_models.sources.narrowest import NarrowestSource

WORK = HostLaunch(1)


class Says:
    def __init__(self, answer: Estimate | None) -> None:
        self.answer = answer
        self.prepared = 0

    def estimate(self, work: Work, device: str) -> Estimate | None:
        return self.answer

    def prepare(self, programs: object, device: str) -> None:
        self.prepared += 1


def of(mean: float, factor: float, source: str) -> Estimate:
    return Estimate(mean, mean / factor, mean * factor, source)


@given(st.lists(st.none() | st.floats(1.0, 9.0), max_size=5))
def test_the_narrowest_answers_and_the_first_of_equals(factors: list[float | None]) -> None:
    sources = [
        Says(None if factor is None else of(1.0 + place, factor, "predicted"))
        for place, factor in enumerate(factors)
    ]
    source = NarrowestSource(sources)
    found = source.estimate(WORK, "cpu")
    answers = [s.answer for s in sources if s.answer is not None]
    if not answers:
        assert found is None
        return
    widths = [a.high_s / a.low_s for a in answers]
    assert found is answers[widths.index(min(widths))]
    source.prepare([], "cpu")
    assert all(s.prepared == 1 for s in sources)


def test_what_is_extrapolated_far_comes_behind_a_fit() -> None:
    far, fit = of(5.0, 6.0, "extrapolated"), of(1.0, 1.5, "predicted")
    assert NarrowestSource([Says(far), Says(fit)]).estimate(WORK, "cpu") is fit
    boundless = Estimate(1.0, 0.0, 9.0, "extrapolated")
    assert NarrowestSource([Says(boundless), Says(fit)]).estimate(WORK, "cpu") is fit
    near = of(1.2, 1.1, "interpolated")
    assert NarrowestSource([Says(near), Says(fit)]).estimate(WORK, "cpu") is near
