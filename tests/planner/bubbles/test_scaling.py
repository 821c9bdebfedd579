"""The strong-scaling replay: its published rows, one row simulated, and the fit."""

import pytest

from foreplan.planner.bubbles.scaling import limits, readings, table
from foreplan.planner.bubbles.scaling_model import PUBLISHED, Row, baseline_s, calibrate, predict


def test_published_rows_have_the_papers_gains():
    gains = [row.balanced_s / row.optimus_s for row in PUBLISHED]
    assert gains == pytest.approx([1.064, 1.106, 1.205], abs=1e-3)
    gains = [row.megatron_s / row.optimus_s for row in PUBLISHED]
    assert gains == pytest.approx([1.087, 1.133, 1.214], abs=1e-3)
    assert [row.devices * row.microbatches for row in PUBLISHED] == [49152] * 3


def test_a_row_is_simulated_and_written():
    fitted = 5.1e-3, 1.3  # what the report fits, rounded
    found = predict(PUBLISHED[2], 4, *fitted)
    assert found.alone_s < found.fine_s <= found.coarse_s * (1 + 1e-9)
    assert found.coarse_s < found.baseline_s
    assert 0.5 < found.coarse < found.fine <= 1.0
    assert 0.5 < found.hidden(found.coarse_s) < found.hidden(found.fine_s) < 1.0
    # The protocol's tolerances, for a row that is not fitted.
    assert found.baseline_s == pytest.approx(5.91, rel=0.03)
    assert found.fine_s == pytest.approx(4.87, rel=0.05)
    text = table(4, "Megatron-LM", fitted, [found, found, found])
    assert text.count("| 3072 (16) |") == 3
    assert text.count("fitted |") == 2
    assert "gain, as micro-batches get fewer, rises: no" in text  # three equal rows
    assert "more inside than coarse: yes" in text
    assert readings([(4, "balanced", fitted, [found] * 3)]).count("| balanced |") == 1


def test_the_fit_finds_what_rows_were_made_of():
    wanted = 6e-3, 0.8
    rows = []
    for devices, microbatches in ((3072, 16), (6144, 8)):
        size = Row(devices, microbatches, 1.0, 1.0, 1.0, 0.5, 0.5)
        made = baseline_s(size, 2, *wanted)
        rows.append(Row(devices, microbatches, made, 1.0, 1.0, 0.5, 0.5))
    assert calibrate((rows[0], rows[1]), 2, "Megatron-LM") == pytest.approx(wanted, rel=1e-3)


def test_what_the_published_rows_rule_out():
    text = limits()
    assert "5.87 s for the third row of Megatron-LM, -0.7%" in text
    assert "5.69 s for the third row of balanced, -3.1%" in text
    assert "11.0, 11.0, 11.0" in text
    # Filled is not saved: the slower the step, the more of it is lost.
    lost = [float(line.split("|")[-2].split()[0]) for line in text.splitlines() if "ms |" in line]
    assert lost == sorted(lost, reverse=True)
    assert len(lost) == 3
