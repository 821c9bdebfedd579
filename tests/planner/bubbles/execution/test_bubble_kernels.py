from __future__ import annotations

from dataclasses import replace
from typing import Any

import bubble_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.planner.base import Agreement
from foreplan.planner.bubbles.execution.entry import rank_kernels, reference_step
from foreplan.planner.bubbles.execution.flat_parameters import LEARNING_RATE
from foreplan.planner.bubbles.execution.kernels import BubbleKernels
from foreplan.planner.bubbles.execution.one_process import OneProcess
from foreplan.planner.bubbles.execution.reference import single_process_step
from foreplan.planner.bubbles.execution.report import compare_steps
from foreplan.planner.bubbles.execution.step_sizes import StepSizes

VIT, AUDIO = cases.encoder(), cases.encoder("audio", images=2, projected_tokens=2)


def agreement(problem: Any, decision: Any) -> Agreement:
    kernels = cases.kernels_of(problem, decision)
    process = OneProcess(cases.schedule_of(problem, decision), kernels)
    process.step()
    found = process.result()
    assert not any(one.live for one in kernels)
    process.step()
    assert process.result() == found
    return compare_steps(found, reference_step(problem, decision, mode="reference"))


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"),
    [("1f1b", 2, 1), ("gpipe", 3, 1), ("interleaved-1f1b", 2, 2), ("1f1b", 4, 1), ("zb-h1", 2, 1)],
)
@pytest.mark.parametrize("fill", ["fine", "three-phase"])
def test_every_order_gives_the_gradients_of_one_process_bit_for_bit(
    schedule: str, ranks: int, chunks: int, fill: str
) -> None:
    problem = cases.problem(ranks, [VIT], microbatches=2 * ranks)
    decision = cases.decision(
        problem, schedule, ranks=ranks, chunks=chunks, encoder_ranks=[[[0], [ranks - 1]]], fill=fill
    )
    found = agreement(problem, decision)
    assert found.exact, found.details
    assert found.details["gradient_elements"] > 10_000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("encoders", [[VIT], [VIT | {"frozen": True}, AUDIO]])
def test_passes_in_pieces_give_the_same_gradients(encoders: list[Any], seed: int) -> None:
    problem = cases.problem(2, encoders)
    decision = cases.decision(
        problem, "interleaved-1f1b", ranks=2, chunks=2, pieces=seed,
        encoder_ranks=[[[0, 1]], [[0], [1]]][: len(encoders)],
    )  # fmt: skip
    words = [word for order in decision.orders for word in order.split()]
    assert any(":" in word for word in words)
    assert any("f" in word for word in words)
    found = agreement(problem, decision)
    assert found.exact, found.details


@pytest.mark.parametrize(
    ("encoders", "rows", "fields"),
    [
        ([VIT], [[[0, 1], [2, 3]]], {}),
        ([VIT], [[[1, 0], [2, 3]]], {"sharded_optimizer": False}),
        ([VIT | {"recompute": True, "projector": "mlp"}], [[[0, 1]]], {"recompute": "full"}),
        ([VIT | {"frozen": True}], [[[3], [2], [1]]], {}),
        ([AUDIO | {"pool": "concatenate", "projector": "merger"}], [[[0], [1]]], {}),
        ([VIT, AUDIO], [[[0], [2]], [[1]]], {}),
        ([AUDIO | {"frozen": True}, VIT], [[[0], [1], [2]], [[3, 2]]], {}),
        ([VIT | {"dims": cases.VIT | {"gated": True, "kv_heads": 1}}], [[[2, 2]]], {}),
    ],
)
@pytest.mark.parametrize("halves", [1, 3])
def test_encoders_of_every_kind(
    encoders: list[Any], rows: list[Any], fields: dict[str, Any], halves: int
) -> None:
    problem = cases.problem(4, encoders, **fields)
    decision = cases.decision(problem, "1f1b", ranks=4, encoder_ranks=rows, halves=halves)
    found = agreement(problem, decision)
    assert found.exact, found.details


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), schedule=st.sampled_from(["1f1b", "interleaved-1f1b", "zb-h2"]))
def test_any_order_that_can_run_gives_the_same_gradients(seed: int, schedule: str) -> None:
    problem = cases.problem(2, [VIT, AUDIO])
    decision = cases.decision(
        problem, schedule, ranks=2, chunks=2 if schedule.startswith("inter") else 1,
        encoder_ranks=[[[0], [1]], [[1], [0]]], shuffle=seed,
    )  # fmt: skip
    found = agreement(problem, decision)
    assert found.passed, found.details
    assert found.details["largest_gradient_difference"] < 1e-5


def test_a_wrong_gradient_is_seen() -> None:
    problem = cases.problem(2, [VIT])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]])
    sizes = StepSizes.of(problem, decision)
    reference = single_process_step(sizes, decision)
    key = next(k for k in reference if "layers.1.mlp.up" in k)
    wrong = reference | {key: [1.1 * x for x in reference[key]]}
    found = compare_steps(wrong, reference)
    assert not found.passed
    assert found.details["largest_at"] in key
    assert compare_steps(reference, reference).exact
    lost = {k: v for k, v in reference.items() if k != key}
    assert not compare_steps(lost, reference).passed
    assert not compare_steps(reference | {"loss 0": float("nan")}, reference).passed


def test_optimizer_steps_as_torch_does_and_reset_undoes_it() -> None:
    problem = cases.problem(1, [VIT])
    decision = cases.decision(problem, "1f1b", ranks=1, encoder_ranks=[[[0]]])
    (kernels,) = cases.kernels_of(problem, decision)
    schedule = cases.schedule_of(problem, decision)
    whole = replace(schedule[0], op="all_gather", stage=0, step=-1)
    before = kernels.payload(whole).clone()
    OneProcess(schedule, [kernels]).step()
    after = kernels.payload(whole)
    parameter = torch.nn.Parameter(before.clone())
    parameter.grad = kernels.payload(replace(whole, op="all_reduce")).clone()
    torch.optim.AdamW([parameter], lr=LEARNING_RATE).step()
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, parameter.detach(), rtol=1e-6, atol=1e-7)
    kernels.reset()
    assert torch.equal(after, before)
    assert kernels.memory_bytes()["optimizer"] >= 8 * before.numel()


def weights(kernels: BubbleKernels) -> int:
    held = kernels.memory_bytes()
    return held["weights"] + held.get("encoder_weights", 0)


def test_every_rank_builds_its_own_share() -> None:
    problem = cases.problem(2, [VIT])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]]])
    sizes = StepSizes.of(problem, decision)
    shares = [weights(BubbleKernels(sizes, decision, r)) for r in (0, 1)]
    alone = cases.decision(cases.problem(1, [VIT]), "1f1b", ranks=1, encoder_ranks=[[[0]]])
    assert sum(shares) == weights(BubbleKernels(sizes, alone, 0))
    assert min(shares) > 0


def test_what_cannot_run_is_refused() -> None:
    problem = cases.problem(2, [VIT])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]]])
    sizes = StepSizes.of(problem, decision)
    with pytest.raises(SpecError, match="rank: got 2"):
        BubbleKernels(sizes, decision, 2)
    again = cases.problem(2, [VIT], recompute="full")
    split = cases.decision(again, "1f1b", ranks=2, encoder_ranks=[[[0]]], pieces=0)
    with pytest.raises(SpecError, match="passes in pieces"):
        BubbleKernels(StepSizes.of(again, split), split, 1)
    large = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]]], halves=2, pieces=0)
    with pytest.raises(SpecError, match="units of encoder vit"):
        BubbleKernels(sizes, large, 0)
    odd = cases.problem(2, [cases.encoder(projected_tokens=3)])
    with pytest.raises(SpecError, match="projected_tokens: got 3, expected a divisor"):
        StepSizes.of(odd, decision)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    problem = cases.problem(2, [VIT])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]])
    sizes = StepSizes.of(problem, decision)
    fresh, rehearsed = (BubbleKernels(sizes, decision, 0) for _ in range(2))
    weights = replace(cases.schedule_of(problem, decision)[0], op="all_gather", stage=0, step=-1)
    rehearsed.rehearse()
    assert torch.equal(fresh.payload(weights), rehearsed.payload(weights))
    assert rehearsed.live == 0
    assert all(set(v) == {0.0} for k, v in rehearsed.result().items() if k.startswith("gradient"))
    # Everything that will arrive has its memory now.
    assert rehearsed.memory_bytes()["buffers"] > fresh.memory_bytes()["buffers"] == 0


class Watched:
    """Kernels that note how many micro-batches live at once."""

    def __init__(self, inner: BubbleKernels) -> None:
        self._inner, self.peak = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, action: Any) -> None:
        self._inner.run(action)
        self.peak = max(self.peak, self._inner.live)


@pytest.mark.parametrize(("schedule", "peaks"), [("1f1b", [3, 2, 1]), ("gpipe", [6, 6, 6])])
def test_activations_live_as_long_as_the_schedule_needs_them(
    schedule: str, peaks: list[int]
) -> None:
    problem = cases.problem(3, [VIT | {"frozen": True}], microbatches=6)
    decision = cases.decision(problem, schedule, ranks=3, encoder_ranks=[[[0], [1], [2]]])
    watched: list[Any] = [Watched(one) for one in cases.kernels_of(problem, decision)]
    OneProcess(cases.schedule_of(problem, decision), watched).step()
    assert [one.peak for one in watched] == peaks  # a frozen encoder keeps nothing


def test_layouts_that_no_real_run_has_are_refused() -> None:
    problem = cases.problem(4, [VIT])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]]])
    replicated = decision.model_copy(update={"plan": decision.plan.model_copy(update={"dp": 2})})
    with pytest.raises(SpecError, match=r"plan\.dp: got 2"):
        rank_kernels(problem, replicated, 0, mode="fast")
    lanes = decision.model_copy(update={"plan": decision.plan.model_copy(update={"tp": 2})})
    with pytest.raises(SpecError, match="encoder vit: tp: got 1, expected 2"):
        rank_kernels(problem, lanes, 0, mode="fast")
    shared = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]]], tp=2)
    with pytest.raises(SpecError, match="connected"):
        rank_kernels(problem, shared, 0, mode="fast")
    both = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]], tp=2)
    with pytest.raises(SpecError, match="sharded_optimizer: got True, expected False"):
        rank_kernels(problem, both, 0, mode="fast")
    with pytest.raises(SpecError, match="mode: got 'quick'"):
        rank_kernels(problem, decision, 0, mode="quick")
