"""In which order the leader loads candidates, seen by a fleet without processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from foreplan.errors import VerificationError
from foreplan.planner.verify.candidates import Candidate
from foreplan.planner.verify.group import RankFailed
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.rounds import Measured, Rounds

Backend = Literal["gloo", "nccl"]


class Told:
    """Hears what the leader does; a group fails when it is asked for what is in ``fails``.

    That is by key the errors of the first such questions; the next ones are answered.
    """

    def __init__(self, fails: dict[str, list[str]]) -> None:
        self.log: list[tuple[str, int]] = []
        self.free_bytes = {"host": 1 << 40}
        self._fails = fails

    def start(self, jobs: Sequence[Any], members: Collection[int], timeout_s: float) -> Any:
        number = sum(word == "start" for word, _ in self.log)
        self.log.append(("start", number))

        def gather(key: str, timeout_s: float) -> list[dict[str, int]]:
            self.log.append((key, number))
            if self._fails.get(key):
                raise RankFailed(0, "a", f"no {key}", self._fails[key].pop(0))
            return []

        return SimpleNamespace(
            gather=gather,
            offsets_ns=lambda away: {},
            say=lambda word: self.log.extend((key, number) for key in word),
            stop=lambda: self.log.append(("stop", number)),
            rest=lambda resting: self.log.append(("rest" if resting else "wake", number)),
        )


def load(backend: Backend, fails: str, missed: dict[str, list[str]] | None = None) -> Told:
    """Load two candidates of which the first ends at ``fails``."""
    fleet = Told({fails: ["VerificationError"], **(missed or {})})
    made = [
        SimpleNamespace(
            name=name, role=name, run=name, ranks=[], memory_bytes=[], capacities=[],
            predicted=None, jobs=lambda *words: [],
        )
        for name in ("chosen", "alternative")
    ]  # fmt: skip
    rounds = Rounds(
        cast(Fleet, fleet), backend, "host", rounds=1, timeout_s=None, load_timeout_s=1.0,
        say=lambda text: None,
    )  # fmt: skip
    with pytest.raises(VerificationError, match=f"no {fails}"):
        rounds.run([cast(Candidate, candidate) for candidate in made], results=False)
    return fleet


def test_over_gloo_candidates_load_side_by_side() -> None:
    assert load("gloo", "ready").log[:3] == [("start", 0), ("start", 1), ("ready", 0)]


def test_over_nccl_candidates_prepare_side_by_side_and_connect_in_turn() -> None:
    assert load("nccl", "ready").log[:9] == [
        ("start", 0), ("start", 1),
        ("prepared", 0), ("turn", 0), ("connected", 0),
        ("prepared", 1), ("turn", 1), ("connected", 1),
        ("ready", 0),
    ]  # fmt: skip


def test_candidates_stand_still_but_for_their_runs() -> None:
    log = load("gloo", "ran").log
    assert log[log.index(("rest", 0)) :] == [
        ("rest", 0), ("rest", 1), ("wake", 0), ("run", 0), ("result", 0), ("ran", 0),
        ("stop", 0), ("stop", 1),
    ]  # fmt: skip
    assert not {"rest", "wake"} & {word for word, _ in load("nccl", "ran").log}


def test_ranks_that_do_not_connect_are_ended() -> None:
    assert load("nccl", "connected").log[-3:] == [("connected", 0), ("stop", 0), ("stop", 1)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_that_missed_each_other_are_loaded_once_more(backend: Backend) -> None:
    key = "ready" if backend == "gloo" else "connected"
    log = load(backend, "ran", {key: ["ConnectionLost"]}).log
    assert [number for word, number in log if word == "start"] == [0, 1, 2]
    assert ("stop", 0) in log
    assert [number for word, number in log if word == "ready"][-2:] == [2, 1], "each once"


def test_ranks_that_miss_each_other_again_are_given_up() -> None:
    log = load("gloo", "ready", {"ready": ["ConnectionLost"] * 2}).log
    assert [number for word, number in log if word == "start"] == [0, 1, 2]
    assert [number for word, number in log if word == "stop"] == [0, 2, 1]


def test_candidates_that_run_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        SimpleNamespace(name=name, run=run)
        for name, run in [("chosen", "a"), ("x", "b"), ("y", "a")]
    ]
    said: list[str] = []
    waves: list[list[str]] = []

    def wave(self: Rounds, items: list[Measured], *, collect: bool) -> None:
        waves.append([item.candidate.name for item in items])
        for item in items:
            item.held = [len(item.candidate.name)]

    monkeypatch.setattr(Rounds, "_waves", lambda self, candidates: [range(len(candidates))])
    monkeypatch.setattr(Rounds, "_wave", wave)
    rounds = Rounds(
        cast(Fleet, None), "gloo", "host", rounds=1, timeout_s=None, load_timeout_s=1.0,
        say=said.append,
    )  # fmt: skip
    found = rounds.run([cast(Candidate, candidate) for candidate in made], results=False)
    assert waves == [["chosen", "x"]]
    assert [(m.candidate.name, m.held) for m in found] == [("chosen", [6]), ("x", [1]), ("y", [6])]
    assert said == ["y runs as chosen does"]
