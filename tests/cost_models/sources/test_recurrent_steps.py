"""Steps of recurrent layers as cuDNN runs them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.sources.recurrent_steps import steps_s
from foreplan.datasets import device_zoo
from foreplan.datasets.program import Program, Variant, program

H200, T4 = device_zoo.device("h200"), device_zoo.device("t4")
MEASURED = Path(__file__).parents[3] / "datasets/measured/h200_recurrent.json"
KERNELS = {"lstm": ("torch.lstm", 4), "gru": ("torch.gru", 3), "rnn": ("torch.rnn_tanh", 1)}


def layer(
    kind: str = "lstm", dtype: str = "bf16", op: str = "recurrent", outputs: int | None = None,
    **sizes: int,
) -> Program:  # fmt: skip
    kernel, gates = KERNELS[kind]
    d = {"steps": 32, "rows": 8, "inputs": 64, "hidden": 64, "layers": 1, "directions": 1} | sizes
    return program(op, Variant(dtype, dtype, kernel), gates=gates,
                   outputs=outputs or d["hidden"], **d)  # fmt: skip


@given(
    steps=st.integers(1, 256), hidden=st.integers(8, 200), layers=st.integers(1, 3),
    directions=st.integers(1, 2), dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    op=st.sampled_from(["recurrent", "recurrent_gradient"]),
)  # fmt: skip
def test_more_of_anything_takes_longer(
    steps: int, hidden: int, layers: int, directions: int, dtype: str, op: str
) -> None:
    sizes = {"steps": steps, "hidden": hidden, "layers": layers, "directions": directions}
    one = steps_s(layer("rnn", dtype, op, **sizes), H200)
    assert one is not None
    assert one > 0
    for name in sizes:
        more = steps_s(layer("rnn", dtype, op, **(sizes | {name: sizes[name] + 1})), H200)
        # Layers of one direction overlap, those of two do not, and two take the same weights.
        assert more is not None
        assert more >= one * 0.99 or (name == "directions" and layers > 1)


def test_a_slower_board_takes_longer() -> None:
    large, small = (steps_s(layer(hidden=512), device) for device in (H200, T4))
    assert large is not None
    assert small is not None
    assert small > large


@pytest.mark.parametrize("item", [
    layer(dtype="fp32", hidden=256),  # a MiB of weights
    layer(hidden=64, outputs=32),  # a projection
])  # fmt: skip
def test_what_products_say_is_left_to_them(item: Program) -> None:
    assert steps_s(item, H200) is None


def test_measured_layers_take_no_less_than_their_steps() -> None:
    """Every second layer of the file is fitted; steps alone are at most a third too long."""
    ratios = [found / row["inference"] for row in json.loads(MEASURED.read_text())[1::2]
              if (found := steps_s(_of(row), H200)) is not None]  # fmt: skip
    assert len(ratios) > 50
    assert max(ratios) < 1.34
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) > 0.7


def _of(row: dict[str, Any]) -> Program:
    return layer(
        row["kind"], "fp32" if row["dtype"] == "float32" else "bf16", steps=row["steps"],
        rows=row["batch"], inputs=row["cin"], hidden=row["hidden"], layers=row["layers"],
        directions=1 + row["bi"],
    )  # fmt: skip
