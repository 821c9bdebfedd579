"""What the predictor makes of operators that were timed inside CUDA graphs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.cost_models.operator_rows import synthetic
from torch import Tensor, nn

from foreplan.cost_models.commands import train_operators
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.lowering.kernel_words import batch_norm_words
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.program_table import program_table, recorded_libraries
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_call import TENSOR
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.sweeps.operator_cases import graph_cases
from foreplan.datasets.sweeps.operator_table import (
    DIMS,
    UNKNOWN,
    OperatorTable,
    includes_launch,
    operator_table,
    texts,
    write_operators,
)


def recorded(device: str = "h200", count: int = 4000) -> OperatorTable:
    """Torch's operators inside graphs, each 1.5 us and twice its roofline; depthwise 10 times."""
    cases = list(itertools.islice(graph_cases(0), count))
    table = operator_table(
        op=texts(c.op for c in cases), kind=texts(c.kind for c in cases),
        dtype=texts(c.dtype for c in cases), library=texts(["torch_graph-2.11-cuda"] * count),
        device=texts([device] * count),
        dims={name: np.array([c.dims.get(name, 0) for c in cases], dtype=np.float64)
              for name in DIMS},
        latency_s=np.ones(count),
    )  # fmt: skip
    factor = np.where(table.dims["groups"] > 1, 10.0, 2.0)
    return replace(table, latency_s=1.5e-6 + factor * operator_work(table).roofline_s)


def conv(kernel: str = "torch.conv2d", groups: int = 1, dtype: str = "bf16") -> Program:
    return program("conv", Variant(dtype, dtype, kernel), batch=32, groups=groups, cin=128,
                   cout=128, taps=9, inputs=784, outputs=784)  # fmt: skip


BF = Variant("bf16", "bf16", "torch.any")
#: Programs that no published table has in 16 bits, and small ones, which launches hide there.
ASKED = {
    "conv": conv(),
    "channels last": conv("torch.conv2d_channels_last"),
    "input gradient": conv("torch.conv2d_input_gradient"),
    "weight gradient": conv("torch.conv2d_weight_gradient"),
    "depthwise": conv(groups=128),
    "reduction": program("reduction", BF, rows=4096, cols=512),
    "embedding": program("embedding", BF, rows=512, cols=2048),
    "norm": program("norm", Variant("bf16", "bf16", "torch.batch_norm"), rows=64, cols=3136),
    "copy": program("elementwise", Variant("bf16", "bf16", "torch.clone"), rows=64, cols=256,
                    inputs=1),
    "update": program("adamw", BF, parameters=10_000_000, kernels=1, longest=65_536),
    "product": program("linear", Variant("bf16", "bf16", "torch.linear"), rows=8, n=256, k=256),
}  # fmt: skip


def test_operators_of_graphs_price_graphs(tmp_path: Path) -> None:
    both = OperatorTable.concat([synthetic(("a100_sxm_80gb", "h100_sxm"), 60), recorded()])
    path = tmp_path / "ops.parquet"
    write_operators(both, path)
    train_operators([path], ["foreplan"], tmp_path / "model")
    predictor = Predictor.load(str(tmp_path / "model"))
    h200 = device_zoo.device("h200")
    book = replay_book(h200, predictor=predictor)
    steps = [Step(name, name, "forward", work) for name, work in ASKED.items()]
    found = replay_steps(steps, book, h200, execution="graph", gap_s=0.0)
    assert {price.source for price in found.prices} == {"predicted"}
    for (name, work), price in zip(ASKED.items(), found.prices, strict=True):
        roofline = max(work.flops / 9.89e14, work.bytes / 4.8e12)
        factor = 10.0 if name == "depthwise" else 2.0
        assert price.mean_s == pytest.approx(1.5e-6 + factor * roofline, rel=0.5), name
    # Nothing that is small costs what a launch does.
    assert found.prices[-1].mean_s < 3e-6


def test_published_rows_answer_where_no_graph_was_recorded() -> None:
    model = OperatorPredictor(trees=20).fit(
        OperatorTable.concat([synthetic(("h100_sxm", "a100_sxm_80gb"), 60), recorded(count=1500)])
    )
    libraries = recorded_libraries(model, device_zoo.device("h200"))
    assert libraries["conv_weight_gradient", "bfloat16"] == "torch_graph-2.11-cuda"
    # Of the same chip, before the board's own products of another library.
    assert recorded_libraries(model, device_zoo.device("h100_sxm")) == libraries
    assert recorded_libraries(model, device_zoo.device("a100_sxm_80gb")) == {}
    found = program_table([*ASKED.values()], device_zoo.device("a100_sxm_80gb"))
    kinds = dict(zip(ASKED, found.kind, strict=True))
    assert kinds["input gradient"] == "conv"
    assert kinds["norm"] == "elementwise"  # a map by channels: no row has threads of its own
    assert {kinds[name] for name in ("depthwise", "reduction", "embedding")} == {UNKNOWN}
    assert not found.dims["channels_last"].any()


def test_a_product_alone_is_asked_for_as_a_layers() -> None:
    """Libraries split a long sum of one product, not those of a batch."""
    products = [program("matmul", BF, batch=b, m=1, n=128, k=65536) for b in (1, 2)]
    table = program_table(products, device_zoo.device("h200"))
    assert list(table.kind) == ["linear", "bmm"]
    one, two = (found.mean_s for found in Predictor.load().predict(products, "h200"))
    assert one < two / 4


def test_launches_are_of_eager_calls_alone() -> None:
    names = ("torch-2.11-cuda", "torch_graph-2.11-cuda", "trtllm", "sglang")
    assert [includes_launch(name) for name in names] == [True, False, False, False]
    model = OperatorPredictor(trees=5).fit(recorded(count=1500))
    assert not any(expert.overhead_s for expert in model.experts_)


def test_programs_are_asked_for_in_the_words_of_the_sweep() -> None:
    """How products' operands lie, what a map broadcasts and converts, which norm goes back."""
    h200 = device_zoo.device("h200")

    def asked(op: str, kernel: str, **dims: int) -> dict[str, Any]:
        item = program(op, Variant("bf16", "bf16", f"torch.{kernel}"), **dims)
        kinds = (
            "linear",
            "bmm",
            "elementwise",
            "layernorm_gradient",
            "batchnorm_gradient",
            "reduction",
            "conv",
            "embedding",
        )
        known = {(kind, "bfloat16"): "torch_graph-2.11-cuda" for kind in kinds}
        table = program_table([item], h200, known)
        assert set(table.library) == {"torch_graph-2.11-cuda"}
        return {"kind": table.kind[0]} | {n: float(sizes[0]) for n, sizes in table.dims.items()}

    for kernel, turned in (
        ("linear", 0), ("linear_input_gradient", 1), ("linear_weight_gradient", 2),
        ("addmm", 1), ("addmm_input_gradient", 0), ("addmm_weight_gradient", 2),
    ):  # fmt: skip
        found = asked("linear", kernel, rows=197, n=64, k=64)
        assert (found["turned"], found["m"]) == (turned, 197), kernel
    for kernel, turned in (
        ("matmul", 1), ("matmul_input_gradient", 0), ("matmul_weight_gradient", 2),
        ("matmul_transposed", 0), ("matmul_transposed_input_gradient", 1),
    ):  # fmt: skip
        assert asked("matmul", kernel, batch=3, m=64, n=64, k=64)["turned"] == turned, kernel
    size = {"rows": 64, "cols": 256}
    sizes = {"batch": 2, "groups": 1, "cin": 16, "cout": 32, "taps": 9}
    square = asked("conv", "conv2d", **sizes, inputs=256, outputs=64)
    names = ("size", "window", "stride", "padding", "line")
    assert [square[name] for name in names] == [16, 3, 2, 1, 0]
    line = asked("conv", "conv1d", **sizes, inputs=100, outputs=50)
    assert [line[name] for name in names] == [100, 9, 2, 4, 1]
    assert asked("embedding", "embedding", **size)["strided"] == 0
    assert asked("embedding", "index", **size)["strided"] == 1
    rolled = asked("roll", "roll", **size, times=2)
    assert (rolled["kind"], rolled["strided"], rolled["cols"]) == ("elementwise", 2, 256)
    for kernel, lies in (("mul", 0), ("mul_by_row", 1), ("add_by_column", 2), ("mul_by_block", 3)):
        assert asked("elementwise", kernel, **size, inputs=1)["broadcast"] == lies
    assert asked("elementwise", "to", **size, inputs=2)["converts"] == 1
    assert asked("reduction", "backward", **size)["strided"] == 1
    assert asked("reduction", "sum", **size)["strided"] == 0
    assert asked("reduction", "backward_by_channel", **size)["strided"] == 2
    zeros = asked("fill", "backward", **size)
    assert (zeros["cols"], zeros["inputs"]) == (128, 1)  # as many bytes
    rows, channels = (
        asked("norm_gradient", "backward", **size, channels=c, results=2) for c in (1, 32)
    )
    assert (rows["kind"], channels["kind"]) == ("layernorm_gradient", "batchnorm_gradient")
    assert (rows["channels"], channels["channels"]) == (0, 32)
    # Published tables know no index: a copy.
    index = program("embedding", Variant("bf16", "bf16", "torch.index"), **size)
    assert list(program_table([index], h200).kind) == ["elementwise"]
    # Published tables have no gradients: a map of two tensors, as large.
    (old,) = program_table([program("norm_gradient", BF, **size, channels=1, results=2)], h200).kind
    assert old == "elementwise"


def test_a_roll_takes_as_many_copies_as_dimensions() -> None:
    one, two = (program("roll", BF, rows=64, cols=50_176, times=times) for times in (1, 2))
    for device in ("h200", "a100_sxm_80gb"):
        once, twice = Predictor.load().predict([one, two], device)
        assert twice.mean_s == pytest.approx(2 * once.mean_s)
        assert twice.high_s == pytest.approx(2 * once.high_s)
        assert once.mean_s > one.bytes / 4.8e12


def test_types_of_sixteen_bits_teach_each_other() -> None:
    table = recorded(count=1200)
    slow = replace(table, latency_s=np.where(
        np.char.startswith(table.dtype.astype(str), "float16"), 3.0, 1.0) * table.latency_s,
    )  # fmt: skip
    one, two = (OperatorPredictor(trees=20).fit(each).experts_ for each in (table, slow))
    changed = {
        (a.family, a.dtype) for a, b in zip(one, two, strict=True)
        if not np.array_equal(a.trees.value, b.trees.value)
    }  # fmt: skip
    assert {("product", "bfloat16"), ("product", "float16")} <= changed
    assert not any(dtype == "fp32" for _, dtype in changed)
    counts = {(e.family, e.dtype): e.rows for e in one}
    assert counts["product", "bfloat16"] == counts["product", "float16"]


def test_shared_caches_are_asked_of_published_tables() -> None:
    kind = ("generation_attention", "bfloat16/bfloat16")
    asked = [
        program("attention", BF, batch=4, queries=1, keys=512, heads=32, kv_heads=heads,
                head_dim=128)
        for heads in (8, 32)
    ]  # fmt: skip
    found = program_table(asked, device_zoo.device("h200"), {kind: "torch_graph-2.11-cuda"})
    assert list(found.library) == ["trtllm", "torch_graph-2.11-cuda"]


def test_a_sweep_does_not_speak_over_a_published_table() -> None:
    """A board of the same chip has a table of its own under another library's name."""
    own = synthetic(("h100_sxm", "a100_sxm_80gb"))
    alone = OperatorPredictor(trees=20).fit(own)
    both = OperatorPredictor(trees=20).fit(OperatorTable.concat([own, recorded(count=600)]))
    asked = own.take(own.device == "h100_sxm")
    asked = replace(asked, library=texts(["sglang"] * len(asked)))
    np.testing.assert_array_equal(alone.predict(asked), both.predict(asked))


def test_gradients_of_attention_are_asked_of_their_sweep_or_are_three_forward_passes() -> None:
    a100 = device_zoo.device("a100_sxm_80gb")
    sizes = {"batch": 4, "queries": 512, "keys": 512, "heads": 32, "kv_heads": 8, "head_dim": 128}
    forward, back = (
        program(op, BF, **sizes) for op in ("full_attention", "full_attention_gradient")
    )
    kind = ("context_attention_gradient", "bfloat16/bfloat16")
    found = program_table([back], a100, {kind: "torch_graph-2.11-cuda"})
    assert (found.kind[0], found.library[0]) == (kind[0], "torch_graph-2.11-cuda")
    assert found.dims["kv_heads"][0] == 8
    one, three = Predictor.load().predict([forward, back], a100)
    assert three.mean_s == pytest.approx(3 * one.mean_s)
    assert three.high_s == pytest.approx(3 * one.high_s)


class Images(nn.Module):
    """Convolutions and norms of images, padded at one side or not at all."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16)
        self.last = last

    def forward(self, image: Tensor) -> Tensor:
        x = image.contiguous(memory_format=torch.channels_last) if self.last else image
        x = F.pad(x, (0, 1, 0, 1))
        return F.pad(self.norm(self.conv(x)), (0, 0, 0, 0))


@pytest.mark.parametrize("last", [False, True])
def test_a_norm_by_channels_says_how_many_and_how_they_lie(last: bool) -> None:
    steps = lower(capture(Images(last=last), [torch.rand(2, 4, 8, 8)], eager=True), "training")
    norms = [step.work for step in steps if step.kind == "norm"]
    words = "_channels_last" * last
    sizes = {"rows": 32, "cols": 49, "channels": 16}
    assert norms == [
        program("batch_norm", Variant("fp32", "fp32", f"torch.batch_norm{words}"), **sizes),
        program("norm_gradient", Variant("fp32", "fp32", f"torch.backward{words}"), **sizes,
                results=2),
    ]  # fmt: skip
    found = program_table([work for work in norms if isinstance(work, Program)],
                          device_zoo.device("h200"), {("batchnorm", "fp32"): "torch_graph-x",
                          ("batchnorm_gradient", "fp32"): "torch_graph-x"})  # fmt: skip
    assert found.kind.tolist() == ["batchnorm", "batchnorm_gradient"]
    for name, value in (("channels", 16), ("training", 0), ("channels_last", last)):
        assert (found.dims[name] == float(value)).all(), name


def test_a_norm_of_a_batchs_own_statistics_is_another_kernel() -> None:
    plain = {TENSOR: [[2, 16, 7, 7], [784, 49, 7, 1], "float32"]}
    own = {TENSOR: [[16], [1], "float32"]}
    found = [
        batch_norm_words(json.dumps([[plain, own, own, own, own, of_batch, 0.1, 1e-5, True], {}]))
        for of_batch in (False, True)
    ]
    assert found == ["", "_of_batch"]
    work = program("batch_norm", Variant("bf16", "bf16", f"torch.batch_norm{found[1]}"), rows=32,
                   cols=49, channels=16)  # fmt: skip
    recorded = {("batchnorm", "bfloat16"): "torch_graph-x"}
    table = program_table([work], device_zoo.device("h200"), recorded)
    assert table.dims["training"].tolist() == [1.0]


def test_a_pad_by_nothing_is_a_copy() -> None:
    steps = lower(capture(Images(last=False).eval(), [torch.rand(2, 4, 8, 8)], eager=True))
    pads = [step.work for step in steps if "pad" in step.target]
    assert [work.dims["inputs"] for work in pads if isinstance(work, Program)] == [2, 1]


@pytest.mark.parametrize(
    ("shape", "strides", "words"),
    [
        ([64, 32], [32, 1], "_channels_last"),  # rows of features
        ([8, 32, 1, 1], [32, 1, 1, 1], "_channels_last"),  # one pixel an image
        ([8, 32, 4, 4], [512, 16, 4, 1], ""),
        ([8, 32, 4, 4], [512, 1, 128, 32], "_channels_last"),
    ],
)
def test_batch_norms_without_pixels_have_channels_last(
    shape: list[int], strides: list[int], words: str
) -> None:
    own = {"$tensor": [[32], [1], "float32"]}
    given = [{"$tensor": [shape, strides, "float32"]}, own, own, own, own, False, 0.1, 1e-5, True]
    assert batch_norm_words(json.dumps([given, {}])) == words
