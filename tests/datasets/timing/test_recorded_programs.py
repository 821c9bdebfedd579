"""How programs share the time of a recorded pass; times are given."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foreplan.datasets.timing import recorded_programs
from foreplan.datasets.timing.graph_timer import uncollected
from foreplan.datasets.timing.recorded_programs import recorded_seconds


def _long() -> None:
    """Takes 3 s alone."""


def _short() -> None:
    """Takes 1 s alone."""


def _broken() -> None:
    """Cannot be recorded."""


ALONE: dict[Callable[[], None], float] = {_long: 3.0, _short: 1.0}


class Gpu:
    """A pass of 2 x 3 + 4 x 1 s takes 16 s from rest and 25 s without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[Any]] = []
        monkeypatch.setattr(recorded_programs, "call_seconds", self._alone)
        monkeypatch.setattr(recorded_programs, "graph_seconds", self._whole)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    def _alone(self, turns: Sequence[Any], *, rested: bool, **_: Any) -> float:
        assert rested
        if turns[0] not in ALONE:
            raise RuntimeError("waits for the device")
        return ALONE[turns[0]]

    def _whole(self, calls: Sequence[Any], *, rested: bool, **_: Any) -> float:
        self.passes.append(list(calls))
        return 16.0 if rested else 25.0


def seconds(*calls: tuple[Sequence[Any], int]) -> list[float | None]:
    stream: Any = object()
    return recorded_seconds(calls, stream)


def test_programs_share_what_a_pass_takes_half_way_between_rest_and_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    assert seconds(([_long], 2), ([_short, _short], 4)) == pytest.approx([6.0, 2.0])
    assert gpu.passes == [[_long, _short, _long, _short, _short, _short]] * 2


def test_what_cannot_be_recorded_is_no_part_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    found = seconds(([_broken], 5), ([], 1), ([_short], 2))
    assert found[:2] == [None, None]
    assert found[2] == pytest.approx(10.0)
    assert gpu.passes[0] == [_short, _short]
    assert seconds(([_broken], 1)) == [None]


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_a_graph_is_recorded(on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
