"""A workload from what is written on a command line."""

from __future__ import annotations

import pytest

from foreplan.errors import SpecError
from foreplan.planner.load_workload import load_workload
from foreplan.planner.serving.spec import ServingWorkload


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch=8,batch=4", "batch twice"), ("batch=8,bits=[16,8]", r"bits=16\+8"),
        ("batch=8,prompt_tokens=8,new_tokens=2,bits=16/8", r"a list; .*bits=16\+8"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_read_says_how_to_write_it(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_workload("serving", text)


@pytest.mark.parametrize(("text", "bits"), [("8", (8,)), ("8+4", (8, 4))])
def test_one_number_of_bits_needs_no_list(text: str, bits: tuple[int, ...]) -> None:
    workload = load_workload("serving", f"batch=8,prompt_tokens=16,new_tokens=4,bits={text}")
    assert isinstance(workload, ServingWorkload)
    assert workload.bits == bits
