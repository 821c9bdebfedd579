"""Experts all at once: the weighted sum of their MLPs, however rows fall."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels import _grouped_experts
from foreplan.datasets.kernels._expert_routes import by_expert
from foreplan.datasets.kernels.expert_kernels import expert_mlps, grouped_experts, runs_grouped
from foreplan.datasets.kernels.registry import FEW_ROWS, Packed, kernels_for, linear_kernel
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.program import Variant, program

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = Variant.parse("bf16/bf16/torch.linear")
FUSED = [Variant.parse(f"int{bits}/bf16/foreplan.fragment_linear") for bits in (4, 8)]
FP8 = Variant.parse("fp8/fp8/torch.scaled_mm")
ACTIVE, FFN, HIDDEN = 2, 128, 192
#: Sizes that torch's own grouped product takes at any number of rows.
UNEVEN = (40, 72)


def activate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Layer:
    """Random experts of a layer, one by one and below one another."""

    def __init__(
        self, variant: Variant, count: int, device: str, sizes: tuple[int, int] = (FFN, HIDDEN)
    ) -> None:
        ffn, hidden = sizes
        kernel = linear_kernel(variant, "cuda")
        self.count, self.device, self.run = count, device, kernel.run
        self.generator = torch.Generator().manual_seed(0)
        self.ups, self.downs = (
            [kernel.pack(self.drawn(n, k) * k**-0.5) for _ in range(count)]
            for n, k in ((2 * ffn, hidden), (hidden, ffn))
        )
        self.exact = [
            [kernel.dequantise(each) for each in packed] for packed in (self.ups, self.downs)
        ]
        self.all = [
            Packed(
                each[0].layout, count * each[0].n, each[0].k,
                {role: torch.cat([p.tensors[role] for p in each]) for role in each[0].tensors},
            )
            for each in (self.ups, self.downs)
        ]  # fmt: skip

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def biases(self) -> tuple[Tensor, Tensor]:
        up, down = (self.drawn(self.count, p[0].n).bfloat16() for p in (self.ups, self.downs))
        return up, down

    def reference(
        self, x: Tensor, chosen: Tensor, share: Tensor, biases: Sequence[Tensor] = ()
    ) -> Tensor:
        out = torch.zeros(x.shape, device=x.device)
        for expert, (up, down) in enumerate(zip(*self.exact, strict=True)):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            up_bias, down_bias = (each[expert].float() for each in biases) if biases else (0, 0)
            made = activate(*(x[rows].float() @ up.T + up_bias).chunk(2, 1)) @ down.T + down_bias
            out[rows] += made * share[rows, place].unsqueeze(1)
        return out


def routes(rows: int, count: int, alike: bool, device: str) -> tuple[Tensor, Tensor]:
    """Experts of each row and their shares; all rows the same two experts, or drawn."""
    scores = torch.rand(rows, count, generator=torch.Generator().manual_seed(rows))
    share, chosen = scores.topk(ACTIVE)
    if alike:
        chosen = torch.tensor([count - 1, 1]).expand(rows, 2).contiguous()
    return chosen.to(device), share.to(device)


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 60])
def test_all_at_once_is_one_by_one(rows: int, alike: bool) -> None:
    layer = Layer(BF16, 5, "cpu", UNEVEN)
    x, (chosen, share) = layer.drawn(rows, UNEVEN[1]).bfloat16(), routes(rows, 5, alike, "cpu")
    out = _grouped_experts.grouped_experts(x, chosen, share, *layer.all, activate)
    one_by_one = expert_mlps()(x, chosen, share, layer.ups, layer.downs, layer.run, activate)
    assert out.dtype == torch.bfloat16
    exact = layer.reference(x, chosen, share)
    assert error(out, exact) < 0.01
    assert error(out, one_by_one.float()) < 0.01
    biases = layer.biases()
    out = _grouped_experts.grouped_experts(x, chosen, share, *layer.all, activate, biases)
    assert error(out, layer.reference(x, chosen, share, biases)) < 0.01


def test_processors_and_kernels_of_one_weight_have_no_such_kernel() -> None:
    assert grouped_experts(BF16, "cpu", HIDDEN, FFN) is None
    there = {v for v in kernels_for("experts", "cuda") if runs_grouped(v, 9.0)}
    assert there == {BF16, *FUSED, FP8}
    assert not runs_grouped(FP8, 10.0)
    assert not any(runs_grouped(v, capability) for v in there for capability in (8.0, 8.9, 12.0))


def test_features_have_to_begin_at_sixteen_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert grouped_experts(BF16, "cuda", HIDDEN, FFN) is _grouped_experts.grouped_experts
    assert grouped_experts(BF16, "cuda", HIDDEN + 4, FFN) is None
    assert grouped_experts(BF16, "cuda", HIDDEN, FFN + 2) is None


@CUDA
@pytest.mark.parametrize(("count", "active"), [(3, 1), (60, 4), (400, 8), (512, 8), (600, 2)])
@pytest.mark.parametrize("rows", [1, 100, 130, 1000, 1024, 2000])
def test_choices_are_sorted_on_a_gpu_as_on_a_processor(rows: int, count: int, active: int) -> None:
    chosen = torch.rand(rows, count).topk(active).indices
    for here, there in zip(by_expert(chosen, count), by_expert(chosen.cuda(), count), strict=True):
        assert torch.equal(here, there.cpu())


@CUDA
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("count", [3, 40, 100])
@pytest.mark.parametrize("rows", [1, 5, 33, 200, 900, 2500, FEW_ROWS * 40])
@pytest.mark.parametrize("variant", [BF16, *FUSED])
def test_on_a_gpu(variant: Variant, rows: int, count: int, alike: bool) -> None:
    run = grouped_experts(variant, "cuda", HIDDEN, FFN)
    if run is None:
        pytest.skip("needs compute capability 9 or 10")
    layer = Layer(variant, count, "cuda")
    x, (chosen, share) = layer.drawn(rows, HIDDEN).bfloat16(), routes(rows, count, alike, "cuda")
    exact, biases = layer.reference(x, chosen, share), layer.biases()
    out = run(x, chosen, share, *layer.all, activate)
    assert error(out, exact) < 0.01
    out = run(x, chosen, share, *layer.all, activate, biases)
    assert error(out, layer.reference(x, chosen, share, biases)) < 0.01
    # Recorded once, it takes other rows and other experts.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, chosen, share, *layer.all, activate)
    x.copy_(layer.drawn(rows, HIDDEN))
    chosen.copy_((chosen + 1) % count)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert torch.equal(first, out)
    assert error(out, layer.reference(x, chosen, share)) < 0.01


@CUDA
@pytest.mark.parametrize(
    "sizes", [(128, 256), (144, 160)]
)  # by either kernel, and by torch's alone
@pytest.mark.parametrize("rows", [1, 33, 200, 400, 2500])
def test_of_fp8_on_a_gpu(rows: int, sizes: tuple[int, int]) -> None:
    ffn, hidden = sizes
    run = grouped_experts(FP8, "cuda", hidden, ffn)
    if run is None:
        pytest.skip("needs compute capability 9")
    layer = Layer(FP8, 40, "cuda", sizes)
    x, (chosen, share) = layer.drawn(rows, hidden).bfloat16(), routes(rows, 40, False, "cuda")
    biases = layer.biases()
    one_by_one = expert_mlps()(x, chosen, share, layer.ups, layer.downs, layer.run, activate)
    out = run(x, chosen, share, *layer.all, activate)
    # Half a unit of bf16 decides where fp8 rounds to, whose units are 16 times as wide.
    assert error(out, one_by_one.float()) < 0.03
    assert error(out, layer.reference(x, chosen, share)) < 0.05
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, chosen, share, *layer.all, activate, biases)
    chosen.copy_((chosen + 1) % 40)
    graph.replay()
    assert error(out, layer.reference(x, chosen, share, biases)) < 0.05


@CUDA
@pytest.mark.parametrize("variant", [BF16, *FUSED])
def test_a_profile_records_them(variant: Variant) -> None:
    work = program("experts", variant, rows=16, experts=8, active=2, ffn=FFN, hidden=HIDDEN)
    made = Inputs("cuda").runnable(work)
    assert made.turns is not None
    assert made.call().shape == (16, HIDDEN)  # type: ignore[attr-defined]
