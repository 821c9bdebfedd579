"""`Replay` as a notebook shows it: a row for each operator, bars, a table by kind."""

import matplotlib as mpl
import pytest
import torch
from torch import nn

from foreplan.cost_models.ranking import rank_devices
from foreplan.cost_models.replay import predict_latency


class Two(nn.Module):
    """Dictionaries in and out, keyword arguments, integers."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 10)

    def forward(self, *, ids, mask):
        found = self.head(self.table(ids)).masked_fill(mask, 0.0)
        return {"logits": found, "size": found.abs().sum()}


INPUTS = {"ids": torch.zeros(4, 7, dtype=torch.int64), "mask": torch.zeros(4, 7, 1).bool()}


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("phase", ["inference", "training"])
def test_frame_has_a_row_for_each_operator_as_they_run(phase, execution):
    pass_ = predict_latency(Two(), "l4", inputs=INPUTS, phase=phase, execution=execution)
    frame = pass_.to_frame()
    assert len(frame) == len(pass_.steps)
    assert frame["latency_s"].sum() == pytest.approx(pass_.device_s)
    assert (frame["low_s"] <= frame["latency_s"]).all()
    assert (frame["latency_s"] <= frame["high_s"]).all()
    assert frame["start_s"].is_monotonic_increasing
    last = frame.iloc[-1]
    assert last["start_s"] + last["latency_s"] == pytest.approx(pass_.latency_s)
    linear = frame[(frame["operator"] == "aten.linear") & (frame["part"] == "forward")]
    assert list(linear["program"]) == ["linear(rows=28,n=10,k=64)@fp32/fp32/torch.linear"]
    assert set(frame["part"]) == (
        {"forward"} if phase == "inference" else {"forward", "backward", "optimizer"}
    )


def test_a_processor_has_its_launches_between_operators():
    frame = predict_latency(Two(), "epyc_9654", inputs=INPUTS).to_frame()
    ends = frame["start_s"] + frame["latency_s"]
    assert (frame["start_s"].iloc[1:].to_numpy() >= ends.iloc[:-1].to_numpy()).all()


def test_plots_and_tables():
    mpl.use("Agg")
    pass_ = predict_latency(Two(), "l4", inputs=INPUTS)
    assert [bar.get_width() for bar in pass_.plot().patches] == pytest.approx(
        [seconds * 1e3 for seconds in pass_.by("kind").values()]
    )
    assert "l4" in pass_._repr_html_()
    ranking = rank_devices("tiny-llama-random", "l4,t4,h200", costs="roofline")
    axes = ranking.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        found.device for found in ranking.replays
    ]


@pytest.mark.parametrize("device", ["t4", "epyc_9654"])
@pytest.mark.parametrize("phase", ["inference", "training"])
def test_a_pass_that_runs_nothing_takes_no_time(device, phase):
    """A flatten is a view: no operator, and a table of the usual columns without rows."""
    pass_ = predict_latency(torch.nn.Flatten(), device, inputs=(torch.zeros(2, 3, 4),), phase=phase)
    assert pass_.latency_s == pass_.device_s == 0.0
    usual = predict_latency(Two(), device, inputs=INPUTS).to_frame()
    assert list(pass_.to_frame().columns) == list(usual.columns)
    assert len(pass_.to_frame()) == 0
    assert "0 s" in pass_._repr_html_()
