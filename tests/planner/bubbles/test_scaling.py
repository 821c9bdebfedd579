"""The strong-scaling replay: its published rows, and one row simulated."""

import pytest

from foreplan.planner.bubbles.scaling import PUBLISHED, Prediction, limits, predict, table


def test_published_rows_have_the_papers_gains():
    gains = [row.balanced_s / row.optimus_s for row in PUBLISHED]
    assert gains == pytest.approx([1.064, 1.106, 1.205], abs=1e-3)
    assert [row.devices * row.microbatches for row in PUBLISHED] == [49152] * 3


def test_a_row_is_simulated_and_written():
    found = predict(PUBLISHED[2], 1, 6.25e-3, 1.0)
    assert found.fine_s <= found.coarse_s * (1 + 1e-9)
    assert found.coarse_s < found.balanced_s
    assert 0.5 < found.coarse <= found.fine <= 1.0
    # Near what was published, with the two numbers that the report fits (rounded here).
    assert found.balanced_s == pytest.approx(5.87, rel=0.10)
    text = table(1, 6.25e-3, 1.0, [found, found, found])
    assert isinstance(found, Prediction)
    assert text.count("| 3072 (16) |") == 3
    assert text.count("fitted") == 2


def test_what_the_published_rows_rule_out():
    text = limits()
    assert "5.69 s for the third, -3.1%" in text
    assert "11.0, 11.0, 11.0" in text
    # Filled is not saved: the slower the step, the more of it is lost.
    lost = [float(line.split("|")[-2].split()[0]) for line in text.splitlines() if "ms |" in line]
    assert lost == sorted(lost, reverse=True)
    assert len(lost) == 3
