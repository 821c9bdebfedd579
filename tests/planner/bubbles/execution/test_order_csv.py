from __future__ import annotations

import bubble_cases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.order_csv import (
    HEADER,
    backbone_csv,
    encoder_csv,
    read_orders,
)


def decision(schedule: str, chunks: int = 1, shuffle: int | None = None) -> BubblesDecision:
    problem = cases.problem(2, [cases.encoder(), cases.encoder("audio")])
    return cases.decision(
        problem, schedule, ranks=2, chunks=chunks, encoder_ranks=[[[0], [1]], [[1]]],
        shuffle=shuffle,
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_what_is_written_is_read_back(seed: int, schedule: str) -> None:
    made = decision(schedule, shuffle=seed)
    assert read_orders(backbone_csv(made), encoder_csv(made)) == made.orders


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved-1f1b", 2), ("gpipe", 1), ("1f1b", 1), ("zb-h1", 1)]
)
def test_torch_reads_checks_and_lowers_the_backbones_order(schedule: str, chunks: int) -> None:
    import torch.distributed.pipelining.schedules as torchs

    lines = backbone_csv(decision(schedule, chunks)).split()
    rows = {
        rank: [torchs._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(lines)
    }
    assert [",".join(map(str, row)) for row in rows.values()] == lines
    torchs._validate_schedule(rows, 2, 2 * chunks, 4)
    lowered = torchs._add_send_recv(rows, lambda stage: stage % 2, 2 * chunks)
    assert sum("SEND" in str(action) for row in lowered.values() for action in row) == 2 * 4 * (
        2 * chunks - 1
    )


def test_a_unit_says_behind_how_many_passes_it_stands() -> None:
    made = decision("1f1b").model_copy(update={"orders": ("e0.0-1F0 0F0 e0.0F2 0F1", "1F0 1F1")})
    assert backbone_csv(made) == "0F0,0F1\n1F0,1F1\n"
    lines = [",".join(HEADER), "0,0,0,0,F,0,0,0", "0,0,0,1,F,0,0,0", "0,1,0,0,F,2,0,0"]
    assert encoder_csv(made).splitlines() == lines


def test_a_unit_inside_a_pass_says_behind_which_piece() -> None:
    """Tensor parallelism: half layers of a pass, units and their collectives between them."""
    order = "e0.0f0 0F0:0 e0.0F0 0F0:1 e0.1f0 0F0:2 0F0:3 e0.1F0 0F1:0 0F1:1 0F1:2 0F1:3 e0.-1b0"
    made = decision("1f1b").model_copy(update={"orders": (order, "1F0 1F1")})
    assert backbone_csv(made) == "0F0,0F1\n1F0,1F1\n"
    assert encoder_csv(made).splitlines()[1:] == [
        "0,0,0,0,f,0,0,0", "0,0,0,0,F,0,1,4", "0,0,0,1,f,0,2,4", "0,1,0,1,F,0,0,0",
        "0,2,0,-1,b,0,0,0",
    ]  # fmt: skip
    # The second pass has nothing inside it, so that it comes back whole.
    back = order.replace("0F1:0 0F1:1 0F1:2 0F1:3", "0F1"), "1F0 1F1"
    assert read_orders(backbone_csv(made), encoder_csv(made)) == back
    again = made.model_copy(update={"orders": back})
    assert read_orders(backbone_csv(again), encoder_csv(again)) == back


def test_what_has_no_words_or_no_place_is_refused() -> None:
    head = ",".join(HEADER)
    for backbone, encoders, where in (
        ("0F0\n", f"{head}\n1,0,0,0,F,0,0,0\n", "encoder line 2"),
        ("0F0\n", f"{head}\n0,2,0,0,F,0,0,0\n", "encoder line 2"),
        ("0F0\n", f"{head}\n0,0,0,0,I,0,0,0\n", "encoder line 2"),
        ("0F0\n", f"{head}\n0,0,0,0,F,0,4,4\n", "encoder line 2"),  # no place inside
        ("0F0\n", f"{head}\n0,0,0,0,F,0,1,99999\n", "encoder line 2"),
        ("0F0\n", f"{head}\n0,1,0,0,F,0,1,4\n", "encoder line 2"),  # nothing behind it
        ("0F0\n", f"{head}\n0,0,0,0,F,0,1,4\n0,0,0,1,F,0,1,6\n", "encoder line 3"),
        ("0F0\n", f"{head}\n0,0,0,-1,F,0,0,0\n", "encoder line 2"),
        ("0F0:1\n", f"{head}\n", "backbone row 0"),
        ("0F0\n", f"{head}\n0,0,0\n", "encoder line 2"),
        ("0F0\n", "rank,after\n", "encoder line 1"),
        ("0F0,e0.0F0\n", f"{head}\n", "backbone row 0"),
        ("0X0\n", f"{head}\n", "backbone row 0"),
    ):
        with pytest.raises(SpecError, match=where):
            read_orders(backbone, encoders)
    assert read_orders("0F0,,0B0\n", f"{head}\n") == ("0F0 0B0",)
