"""Words of orders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step, parse_order, write_order

small = st.integers(0, 12)
passes = st.builds(
    Step, st.sampled_from("FBIW"), small, small, st.just(-1), st.just(-1), st.integers(-1, 5)
)
units = st.builds(
    Step, st.sampled_from("FBfb"), small, st.just(-1), st.integers(0, 2), small, st.just(-1)
)


@given(st.lists(passes | units))
def test_what_is_written_reads_back(steps):
    assert parse_order(write_order(steps)) == steps


def test_runs_of_units_become_one_word():
    text = "2F0 e0.0-7F5 1B3:1 e0.7-0B5 1I3 1W3 e1.3f1 e1.3F1 e1.-1b2"
    steps = parse_order(text)
    assert write_order(steps) == text
    assert [s.unit for s in steps if s.op == "F" and s.encoder == 0] == list(range(8))
    assert [s.unit for s in steps if s.op == "B" and s.encoder == 0] == list(range(7, -1, -1))


@pytest.mark.parametrize("word", ["2X0", "F0", "e0F1", "2F", "e0.1W2", "2F0:", "e0.1F2:3", "2F0,"])
def test_other_words_are_refused(word):
    with pytest.raises(SpecError, match="words such as"):
        parse_order(f"0F0 {word}")
