"""Errors as other processes and copies see them."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest

from foreplan.errors import (
    FailedProgramError,
    ForeplanError,
    InfeasibleError,
    MissingDataError,
    SpecError,
    VerificationError,
)

WRONG = SpecError("cluster.yaml: devices[0].count", got=0, expected="above 0", fix="count them")
ERRORS = [
    WRONG,
    SpecError("workload", got=None, expected="fields"),
    *(
        kind("one thing\tis wrong\x07", fix="mend it")
        for kind in (
            ForeplanError,
            InfeasibleError,
            MissingDataError,
            FailedProgramError,
            VerificationError,
        )
    ),
]


def refuse(_: int) -> None:
    raise WRONG


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_copies_are_the_same_error(error: ForeplanError) -> None:
    sent = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just written
    for again in (sent, copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_a_pool_hands_on_an_error_of_its_worker() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        waiting = pool.map_async(refuse, [0])
        with pytest.raises(SpecError, match=r"got 0, expected above 0; count them") as caught:
            waiting.get(timeout=60)  # it once waited for ever
    assert caught.value.where == "cluster.yaml: devices[0].count"
