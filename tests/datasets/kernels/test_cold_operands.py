"""Sets are taken in turn and outgrow the cache; results live as long as sets last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foreplan.datasets.kernels import cold_operands
from foreplan.datasets.kernels.cold_operands import held_cache, in_turn, last_level_cache
from foreplan.datasets.kernels.training_programs import optimizer_program
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.program import Variant, program

MIB = 1 << 20


def test_sets_outgrow_the_cache_and_come_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_operands, "last_level_cache", lambda device: 4 * MIB)
    monkeypatch.setattr(cold_operands, "_SETS_S", 60.0)
    used: list[int] = []

    def run(x: Tensor) -> Tensor:
        used.append(x.data_ptr())
        return x + 1

    call = in_turn(run, lambda: [torch.zeros(MIB // 4)])
    sets = set(used)
    assert len(used) == len(sets) == 8, "1 MiB in and 1 MiB out fill four caches in 8 sets"
    used.clear()
    for _ in range(16):
        call()
    assert set(used) == sets
    assert used[:8] == used[8:]


def test_slow_sets_stop_at_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_operands, "_SETS_S", 0.0)
    made: list[int] = []
    in_turn(lambda x: x, lambda: [made.append(1), torch.zeros(8)][1:])
    assert len(made) == 2


def test_results_stay_for_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_operands, "last_level_cache", lambda device: 2 * MIB)
    monkeypatch.setattr(cold_operands, "_SETS_S", 60.0)
    places: list[int] = []

    def run(x: Tensor) -> Tensor:
        out = torch.empty(MIB // 4)
        places.append(out.data_ptr())
        return out

    call = in_turn(run, lambda: [torch.zeros(MIB // 4)])
    for _ in range(40):
        call()
    assert all(len(set(places[i : i + 4])) == 4 for i in range(len(places) - 4))


def test_of_results_that_no_step_keeps_a_pass_holds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_operands, "last_level_cache", lambda device: 2 * MIB)
    monkeypatch.setattr(cold_operands, "_SETS_S", 60.0)
    for kept, held in ((True, 2), (False, 1)):
        call = in_turn(lambda x: x + 1, lambda: [torch.zeros(MIB // 4)], kept=kept)
        assert len(call.results) == 4, "a profile holds as many as there are sets"
        assert len(call.limited(2).results) == held
        assert len(call.limited(2).limited(2).results) == held


@pytest.mark.parametrize(
    ("op", "variant", "sizes", "written"),
    [
        ("activation_forward", "fp32/fp32/torch.gelu", {"rows": 4, "cols": 8}, [(4, 8)]),
        ("activation_backward", "fp32/fp32/torch.gelu", {"rows": 4, "cols": 8}, [(4, 8)]),
        ("linear_forward", "fp32/fp32/torch.linear", {"rows": 4, "n": 8, "k": 16}, [(4, 16)]),
        ("linear_forward", "bf16/bf16/torch.linear", {"rows": 4, "n": 8, "k": 16},
         [(4, 16), (8, 16)]),
        ("linear_backward", "fp32/fp32/torch.linear", {"rows": 4, "n": 8, "k": 16}, [(4, 8)]),
        ("embedding_forward", "fp32/fp32/torch.embedding", {"rows": 4, "vocab": 9, "cols": 8},
         [(4,)]),
    ],
)  # fmt: skip
def test_warm_is_what_the_operator_before_has_written_and_stays_as_it_is(
    op: str, variant: str, sizes: dict[str, int], written: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    call = training_call(program(op, Variant.parse(variant), **sizes), "cpu")
    call()
    shapes: list[tuple[int, ...]] = []
    plain = Tensor.add_

    def add(self: Tensor, other: int) -> Tensor:
        before = self.clone()
        plain(self, other)
        shapes.append(tuple(self.shape))
        assert torch.equal(self, before)
        return self

    monkeypatch.setattr(Tensor, "add_", add)
    call.warm_up()
    assert shapes == written
    monkeypatch.undo()
    call()  # autograd has not noticed


def test_this_machine_has_a_cache() -> None:
    assert last_level_cache("cpu") >= 1 << 18


@pytest.mark.parametrize("saved", ["fp32", "bf16", "int8"])
def test_backward_pass_adds_gradients_to_fp32_buffers(
    saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[torch.dtype] = []
    plain = Tensor.add_

    def add(self: Tensor, other: Tensor) -> Tensor:
        added.append(self.dtype)
        return plain(self, other)

    monkeypatch.setattr(Tensor, "add_", add)
    backward = "fp32" if saved == "fp32" else "bf16"
    item = program("linear_backward", Variant(saved, backward, "torch.linear"), rows=16, n=32, k=64)
    call = training_call(item, "cpu")
    added.clear()
    call()
    assert added == [torch.float32] * 2, "of the weight and of the bias"


def test_attention_is_timed_on_heads_that_lie_inside_of_positions() -> None:
    variant = Variant("fp32", "fp32", "torch.sdpa_causal")
    item = program(
        "attention_forward", variant, batch=2, queries=8, keys=8, heads=4, head_dim=16
    )  # fmt: skip
    call = training_call(item, "cpu")
    call()
    out = call.results[-1]
    assert out.shape == (2, 8, 4, 16)
    assert out.is_contiguous()
    assert out.requires_grad, "a forward pass is recorded for the backward pass"


def test_an_update_steps_on_as_many_tensors_as_it_says() -> None:
    call = training_call(optimizer_program("sgd", 1000, 3), "cpu")
    before = call.sets[0][0].param_groups[0]["params"][0].detach().clone()
    for _ in call.sets:
        call()
    held = call.sets[0][0].param_groups[0]["params"]
    assert [p.numel() for p in held] == [334, 333, 333]
    assert not torch.equal(held[0], before)
    call.displace()


@pytest.mark.parametrize(("named", "held"), [(32 * MIB, 32 * MIB), (480 * MIB, 128 * MIB)])
def test_a_core_keeps_no_more_than_its_part_of_a_large_cache(
    named: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_operands, "last_level_cache", lambda device: named)
    assert held_cache("cpu") == held
