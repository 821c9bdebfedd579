"""Kernels that a compiler makes: which operators are one, in which order, and their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreplan.cost_models.lowering.fused_kernels import FusedKernel, fused_kernels
from foreplan.cost_models.lowering.fusion_walk import FusionWalk, is_fused
from foreplan.cost_models.passes.end_to_end_networks import build, example
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_graph import OperatorGraph

ROWS, COLS = 512, 256
#: Bytes of a tensor of ROWS x COLS, and of a row of weights, in bf16.
WHOLE, ROW = ROWS * COLS * 2, COLS * 2
_MEASURED = Path(__file__).parents[3] / "datasets/measured/h200_compiled.json"


class _Of(nn.Module):
    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(parts)

    def forward(self, *given: Tensor) -> Any:
        return self.function(self.parts, *given)


def _graph(function: Any, *shapes: tuple[int, ...], training: bool = False,
           **parts: nn.Module) -> OperatorGraph:  # fmt: skip
    module = _Of(function, **parts).to(torch.bfloat16).train(training)
    inputs = [torch.zeros(shape or (ROWS, COLS), dtype=torch.bfloat16) for shape in shapes]
    return capture(module, inputs, eager=True, training=training)


def _kernels(function: Any, *shapes: tuple[int, ...], **given: Any) -> list[FusedKernel]:
    return fused_kernels(_graph(function, *shapes, **given))


def test_a_chain_reads_and_writes_once() -> None:
    (kernel,) = _kernels(lambda _, x, y: torch.tanh(F.gelu(x) * y) + 1.0, (), ())
    assert (kernel.read_bytes, kernel.written_bytes) == (2 * WHOLE, WHOLE)
    assert (kernel.rows, kernel.joined, kernel.drawn) == (0, False, False)


def test_a_product_parts_kernels_and_its_bias_stays_with_it() -> None:
    found = _kernels(lambda p, x: F.gelu(p["last"](F.gelu(p["first"](F.silu(x))))), (),
                     first=nn.Linear(COLS, COLS), last=nn.Linear(COLS, COLS))  # fmt: skip
    assert [(k.read_bytes, k.written_bytes) for k in found] == [(WHOLE, WHOLE)] * 3


def test_a_residual_and_its_norm_are_one_kernel() -> None:
    def block(p: Any, x: Tensor) -> Tensor:
        y = x + p["first"](x)
        return torch.as_tensor(y + p["last"](p["norm"](y)))

    found = _kernels(block, (), first=nn.Linear(COLS, COLS), last=nn.Linear(COLS, COLS),
                     norm=nn.LayerNorm(COLS))  # fmt: skip
    normed, summed = found
    # Reads the input, the product and two rows of weights; writes the sum and what is normed.
    assert (normed.read_bytes, normed.written_bytes) == (2 * WHOLE + 2 * ROW, 2 * WHOLE)
    assert (normed.rows, normed.elements) == (ROWS, ROWS * COLS)
    assert (summed.read_bytes, summed.written_bytes) == (2 * WHOLE, WHOLE)


def test_what_one_other_reads_is_computed_there() -> None:
    """The gate waits for nothing; it is computed where the product of it is."""
    found = _kernels(lambda p, x: F.silu(x) * p["up"](x), (), up=nn.Linear(COLS, COLS))
    assert [(k.read_bytes, k.written_bytes) for k in found] == [(2 * WHOLE, WHOLE)]


@pytest.mark.parametrize("training", [False, True])
def test_statistics_of_a_batch_are_a_kernel_and_known_ones_none(training: bool) -> None:
    found = _kernels(
        lambda p, x: F.relu(p["norm"](x)), (8, 16, 32, 32), training=training,
        norm=nn.BatchNorm2d(16),
    )  # fmt: skip
    images = 8 * 16 * 32 * 32 * 2
    large = [k for k in found if k.read_bytes >= images]
    assert [k.split for k in large] == ([True, False] if training else [False])
    assert large[-1].written_bytes == images
    assert large[0].rows == (16 if training else 0)


def test_dropout_draws_in_training_alone() -> None:
    drops = {
        t: _kernels(
            lambda p, x: p["drop"](F.gelu(x + p["bias"].weight)),
            (),
            training=t,
            drop=nn.Dropout(),
            bias=nn.Embedding(ROWS, COLS),
        )
        for t in (False, True)
    }
    assert [k.drawn for k in drops[True]] == [True]
    assert [k.drawn for k in drops[False]] == [False]


def test_words_of_what_is_put_together_or_padded() -> None:
    (joined,) = _kernels(lambda _, x, y: torch.cat((x, y), -1) * 2.0, (), ())
    assert joined.joined
    assert joined.read_bytes == 2 * WHOLE
    (padded,) = _kernels(lambda _, x: F.pad(x, (1, 1)) * 2.0, ())
    assert (padded.padded, padded.joined) == (True, False)


def test_a_gradient_kernel_reads_every_readers_gradient_and_operands_that_matter() -> None:
    def gated(p: Any, x: Tensor) -> Tensor:
        y = F.gelu(p["first"](x)) * p["second"](x)
        return torch.as_tensor(p["third"](y) + p["fourth"](y))

    parts = {name: nn.Linear(COLS, COLS) for name in ("first", "second", "third", "fourth")}
    product, total = _kernels(gated, (), training=True, **parts)
    assert product.gradient_read_bytes == 4 * WHOLE  # two gradients, two operands
    assert product.gradient_written_bytes == 2 * WHOLE
    assert product.summed_bytes == 0
    assert total.gradient_read_bytes == WHOLE  # a sum needs no operand
    scaled = _kernels(lambda p, x: p["norm"](p["first"](x)), (), training=True,
                      first=parts["first"], norm=nn.LayerNorm(COLS))  # fmt: skip
    assert [k.summed_bytes for k in scaled] == [2 * WHOLE]


def _networks() -> list[tuple[str, str]]:
    return [(name, phase) for name in ("llama", "resnet", "swin", "t5", "segformer", "gpt2")
            for phase in ("inference", "training")]  # fmt: skip


@pytest.mark.parametrize(("name", "phase"), _networks())
def test_no_kernel_waits_for_itself_and_none_moves_more_than_its_operators(
    name: str, phase: str
) -> None:
    training = phase == "training"
    module = build(name, "tiny").to(torch.bfloat16).train(training)
    inputs = example(name, "tiny", None, "cpu", torch.bfloat16)
    graph = capture(module, inputs, eager=True, training=training)
    walk = FusionWalk(graph)
    order: nx.DiGraph[str] = nx.DiGraph()
    makes = {result: f"kernel {at}" for at, k in enumerate(walk.kernels) for result in k.writes}
    for at, kernel in enumerate(walk.kernels):
        order.add_edges_from(
            (makes.get(leaf, leaf), f"kernel {at}") for leaf in kernel.leaves
            if leaf not in kernel.writes
        )  # fmt: skip
    bases: dict[str, str] = {}
    for call in graph.calls:
        if not call.operator and call.reads:
            bases[call.name] = bases.get(call.reads[0], call.reads[0])
    nodes = {node.name: node for node in graph.operators()}
    for call in graph.calls:
        if call.operator and not is_fused(nodes[call.operator]):
            for read in call.reads:
                made = bases.get(read, read)
                order.add_edge(makes.get(made, made), call.name)
    assert nx.is_directed_acyclic_graph(order)
    moved = sum(k.read_bytes + k.written_bytes for k in fused_kernels(graph))
    apart = sum(node.bytes for node in nodes.values() if is_fused(node))
    assert 0 < moved <= apart


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mobilenet_v2"])
def test_as_many_kernels_as_an_h200_ran(name: str) -> None:
    """Of one pass of inference, within a twentieth (seen with torch 2.11)."""
    rows = json.loads(_MEASURED.read_text())["rows"]
    row = next(row for row in rows if (row["network"], row["phase"]) == (name, "inference"))
    with torch.device("meta"):
        module = build(name, "large").to(torch.bfloat16).eval()
    inputs = example(name, "large", row["shape"], "cpu", torch.bfloat16)
    found = len(fused_kernels(capture(module, inputs, eager=True)))
    assert found == pytest.approx(row["fused"]["kernels"], rel=0.05)
