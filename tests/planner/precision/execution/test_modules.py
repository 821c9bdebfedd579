from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.errors import SpecError
from foreplan.planner.precision.execution.decisions import uniform_decision, uniform_variants
from foreplan.planner.precision.execution.modules import (
    apply_precision,
    apply_variants,
    remove_precision,
)
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task

Make = Callable[..., PrecisionWorkload]


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def test_a_plan_changes_precision_and_nothing_that_is_saved(workload: Make) -> None:
    work = workload()
    task = training_task(None, work, 0)
    model = task.module()
    (ids,), target = task.batch(0, 0)
    exact = model(ids).detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decision = uniform_decision(task, work, ["bf16", "int8"])
    parts = list(model.modules())

    assert apply_precision(model, decision, 1) is model
    rough = model(ids)
    assert rough.dtype is torch.float32
    assert 0 < apart(rough, exact) < 0.05
    task.loss(rough, target).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert list(model.modules()) == parts
    assert isinstance(model.get_submodule("blocks.0.qkv"), nn.Linear)

    apply_precision(model, decision, 1)  # again: nothing is wrapped twice
    assert torch.equal(model(ids), rough)
    apply_precision(model, decision, 0)
    assert not torch.equal(model(ids), rough)
    remove_precision(model)
    assert torch.equal(model(ids), exact)
    assert [type(part) for part in model.modules()] == [type(p) for p in task.module().modules()]


@pytest.mark.parametrize("rank", ["0", None, 2, -1, 0.0])
def test_a_rank_is_a_number_of_the_plan(workload: Make, rank: Any) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["bf16", "int8"])
    with pytest.raises(SpecError, match=r"rank: got .*, expected 0\.\.1 of this plan"):
        apply_precision(task.module(), decision, rank)
    other: Any = "a model"
    with pytest.raises(SpecError, match=r"model: got 'str', expected a torch\.nn\.Module"):
        apply_precision(other, decision, 0)
    with pytest.raises(SpecError, match=r"model: got 'str', expected a torch\.nn\.Module"):
        remove_precision(other)


def test_copies_compute_by_themselves(workload: Make) -> None:
    task = training_task(None, workload("digits_mlp"), 0)
    model = apply_variants(task.module(), {"1": "fp32/bf16/torch.linear"})
    twin = copy.deepcopy(model)
    (x,), _ = task.batch(0, 0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not model(x).eq(0).all()
    assert twin(x).eq(0).all()


def test_autocast_around_a_planned_model_does_not_matter(workload: Make) -> None:
    task = training_task(None, workload("digits_mlp"), 0)
    model = apply_variants(task.module(), uniform_variants(task.module(), "fp32"))
    (x,), _ = task.batch(0, 0)
    plain = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), plain)


def test_a_convolutional_network_in_bf16(workload: Make) -> None:
    task = training_task(None, workload("digits_cnn"), 0)
    exact, rough = task.module(), task.module()
    variants = uniform_variants(rough, "bf16")
    assert set(variants) == {"0", "3", "8", "10"}
    apply_variants(rough, variants)
    (x,), target = task.batch(0, 0)
    losses = [task.loss(m(x), target) for m in (exact, rough)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    a, b = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (exact, rough))  # type: ignore[union-attr]
    assert 0 < apart(b, a) < 0.1


class Mixed(nn.Module):
    """Products of unlike operands, which torch refuses, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        score = (q @ k.transpose(-1, -2)).softmax(-1)
        attended = F.scaled_dot_product_attention(q, k, v)
        made = torch.einsum("bij,bjk->bik", score, v) + attended
        return {"logits": F.linear(self.norm(made), self.embed.weight), "ids": ids}


def test_unlike_operands_are_promoted() -> None:
    torch.manual_seed(0)
    model, ids = Mixed(), torch.arange(6).view(1, 6)
    exact = model(ids)["logits"]
    apply_variants(
        model, {"q": "fp32/bf16/torch.linear", "v": "fp32/int8/torch.int_mm+bf16",
                "k": "fp32/fp32/torch.linear", "embed": "fp32/bf16/torch.embedding"},
    )  # fmt: skip
    made = model(ids)
    assert made["logits"].dtype is torch.float32
    assert made["ids"].dtype is torch.int64
    assert apart(made["logits"], exact) < 0.05


class Attended(nn.Module):
    """An attention of torch's, whose weights no plan chooses for, behind a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return made


class Written(nn.Module):
    """Rows that are added into an fp32 tensor, as experts' are, and set in a bf16 one."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tensor([0, 2, 1])
        total = torch.zeros(x.shape[1:]).index_add_(0, rows, x[0])
        later = x.clone()
        later[:, rows] = total
        return torch.tensordot(total, later[1], ([1], [1]))


@pytest.mark.parametrize(
    "behind",
    [
        Attended(), Written(), nn.PReLU(3), nn.ConvTranspose1d(3, 4, 2),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_what_stands_behind_16_bits_runs(behind: nn.Module) -> None:
    """Products with weights of their own, writes into tensors: torch refuses unlike operands."""
    model = nn.Sequential(nn.Linear(8, 8), behind)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    exact = model(x)
    apply_variants(model, {"0": "fp32/bf16/torch.linear"})
    made = model(x)
    torch.autograd.backward(made.square().sum())
    assert made.dtype is torch.float32
    assert 0 < apart(made, exact) < 0.05
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(8, 8, batch_first=True),
        nn.GELU(),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ],
)
def test_any_module_runs_in_16_bits(module: nn.Module) -> None:
    outer = nn.Sequential(module)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    exact = outer(x)
    apply_variants(outer, {"0": "fp32/bf16/torch.module"})
    made = outer(x)
    pairs = zip(exact, made, strict=True) if isinstance(exact, tuple) else [(exact, made)]
    for a, b in list(pairs)[:1]:
        assert b.dtype is torch.float32
        assert 0 < apart(b, a) < 0.05


def test_a_plan_of_another_model_is_refused(workload: Make) -> None:
    work = workload()
    task = training_task(None, work, 0)
    decision = uniform_decision(task, work, ["bf16"])
    small = training_task(None, workload(network_options={"width": 16, "heads": 2}), 0).module()
    with pytest.raises(SpecError, match=r"model: got '.*blocks\.2.*does not know'"):
        apply_precision(small, decision, 0)
    narrow = training_task(
        None, workload(network_options={"width": 16, "layers": 2, "heads": 2, "context": 16}), 0
    ).module()
    with pytest.raises(SpecError, match=r"parameters of other shapes \(here embed.weight"):
        apply_precision(narrow, decision, 0)
    with pytest.raises(SpecError, match=r"rank: got 1, expected 0\.\.0"):
        apply_precision(task.module(), decision, 1)
    with pytest.raises(SpecError, match="do not convert the model"):
        apply_precision(task.module().bfloat16(), decision, 0)


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ({"nowhere": "fp32/bf16/torch.linear"}, "operator nowhere: got 'no such module'"),
        ({"0": "fp32/bf16/torch.conv2d"}, "got 'Linear as fp32/bf16/torch.conv2d'"),
        ({"1": "fp32/int8/torch.int_mm+bf16"}, "8 x 10 features', expected multiples of 8"),
        ({"0": "fp32/fp8/torch.scaled_mm+fp8"}, "multiples of 16"),
        ({"0": "fp32/tf32/torch.linear"}, "torch.linear on cpu', expected cuda"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_as_a_whole(
    variants: dict[str, str], message: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10))
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        apply_variants(model, {"0": "fp32/bf16/torch.linear", **variants})
    assert type(model[0]) is nn.Linear
    assert type(model) is nn.Sequential


def test_a_hugging_face_model_with_a_mixed_plan() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(32).view(2, 16)
    exact = model(input_ids=ids).logits
    variants = uniform_variants(model, "int8-all")
    assert {name.rsplit(".", 1)[-1] for name in variants} == {
        "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "lm_head",
    }  # fmt: skip
    # Unlike operands in attention, in the gate's product and in residual sums.
    mixed = {n: "fp32/fp32/torch.linear" if n.endswith(("k_proj", "up_proj")) else t
             for n, t in variants.items()}  # fmt: skip
    apply_variants(model, mixed)
    made = model(input_ids=ids).logits
    assert 0 < apart(made, exact) < 0.05
    made.square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
