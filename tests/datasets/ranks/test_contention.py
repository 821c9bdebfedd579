from __future__ import annotations

import os

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.ranks.contention import measure_contention
from foreplan.errors import SpecError

CPU = DeviceName.parse("cpu:threads=1")


def test_two_ranks_slow_each_other_or_not_but_never_help() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    found = {
        item.kind: item
        for item in measure_contention(CPU, ranks=(2, 64), repeats=1, measure_s=0.1, host="here")
    }
    assert set(found) == {"memory", "compute"}
    for item in found.values():
        assert item.host == "here"
        assert set(item.factors) == {2}
        assert 0.3 < item.factors[2] < 10  # other work on the machine moves both measurements
        assert str(CPU) in str(item.source)


def test_no_cores_no_factors() -> None:
    assert measure_contention(CPU, cores=[[0]]) == ()
    with pytest.raises(SpecError, match="CPU"):
        measure_contention(DeviceName.parse("cuda:0"))
