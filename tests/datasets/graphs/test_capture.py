"""Capture: work and wiring of the operators, repeated blocks, and modules it must refuse."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.decoder_module import config_fields
from foreplan.datasets.graphs.operator_graph import OperatorGraph
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError

LLAMA = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied-bias": LLAMA
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 12, "tie_word_embeddings": True},
    "mistral": LLAMA,
    "opt": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 100,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64},
}
BATCH, TOKENS = 2, 16


def only(graph: OperatorGraph, op: str) -> Any:
    (node,) = graph.operators(op)
    return node


@pytest.mark.parametrize("case", CASES)
def test_decoder_families(case: str, tmp_path: Path) -> None:
    family = case.split("-")[0]
    transformers.AutoConfig.for_model(family, **CASES[case]).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    graph = capture(tmp_path, batch=BATCH, tokens=TOKENS)
    weights = model.layers * sum(linear.n * linear.k for linear in model.linears)
    weights += model.vocab * model.hidden
    linear = sum(node.flops for node in graph.operators("linear"))
    assert linear == 2.0 * weights * BATCH * TOKENS
    assert graph.parameter_bytes == 4 * model.parameters
    # The layers are one block, three times.
    ((key, instances),) = graph.blocks.items()
    assert len(instances) == model.layers
    marked = {node.instance for node in graph.operators() if node.block == key}
    assert marked == set(instances)
    attention = list(graph.operators("attention"))
    assert len(attention) == model.layers
    assert attention[0].inputs[0] == (BATCH, model.heads, TOKENS, model.head_dim)
    expected_norms = 2 * model.layers + 1 + (2 * model.layers if model.qk_norm else 0)
    assert sum(1 for _ in graph.operators("norm")) == expected_norms


@pytest.mark.parametrize("name", ["gpt2", "opt-125m", "llama-3.2-1b"])
def test_zoo_models_need_no_weights(name: str) -> None:
    model = load_model(name)
    graph = capture(name, tokens=8)
    size = 4 if model.dtype == "fp32" else 2
    assert graph.parameter_bytes == size * model.parameters
    assert [len(instances) for instances in graph.blocks.values()] == [model.layers]
    # Work per operator is done once a block, not once a layer.
    assert len(graph.distinct()) < len(graph) / 6
    total = sum(count * node.flops for node, count in graph.distinct())
    assert total == pytest.approx(graph.flops)


@pytest.mark.parametrize("name", ["gemma-2-2b", "gpt-oss-20b"])
def test_a_window_that_is_taken_away_is_in_no_layer(name: str, tmp_path: Path) -> None:
    changes = {"sliding_window": None, "window_layers": (), "layers": 2, "dtype": "fp32"}
    model = load_model(name).model_copy(update=changes)
    fields = {"model_type": model.family, **config_fields(model), "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert len(capture(model, tokens=8)) == len(capture(tmp_path, tokens=8))


def test_order_and_edges() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 12, bias=False)
            self.second = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.first(x)
            left, right = wide.chunk(2, dim=-1)
            return self.second(F.relu(left) * right.reshape(5, 6))

    graph = capture(Net(), [torch.zeros(5, 8)])
    # Splitting and reshaping are no operators.
    kinds = [node.op for node in graph.operators()]
    assert kinds == ["input", "linear", "activation", "elementwise", "linear"]
    first, second = graph.operators("linear")
    relu, mul = only(graph, "activation"), only(graph, "elementwise")
    edges = {(a, b): data["bytes"] for a, b, data in graph.graph.edges(data=True)}
    assert edges == {
        ("values_0", first.name): 5 * 8 * 4,
        (first.name, relu.name): 5 * 6 * 4,
        (first.name, mul.name): 5 * 6 * 4,
        (relu.name, mul.name): 5 * 6 * 4,
        (mul.name, second.name): 5 * 6 * 4,
    }
    assert nx.is_directed_acyclic_graph(graph.graph)
    assert first.flops == 2 * 5 * 8 * 12
    assert first.bytes == 4 * (5 * 8 + 8 * 12 + 5 * 12)
    assert first.parameters == ("first.weight",)
    assert second.parameters == ("second.weight", "second.bias")
    assert second.parameter_bytes == 4 * (6 * 4 + 4)
    assert second.module == "second"


@pytest.mark.parametrize(
    ("run", "shapes", "op", "flops"),
    [
        (lambda a, b: a @ b, [(3, 4, 5), (3, 5, 6)], "matmul", 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(3, 4, 5), (3, 6, 5)], "matmul", 720),
        (lambda a, b: torch.einsum("...ij, ...kj", a, b), [(3, 4, 5), (3, 6, 5)], "matmul", 720),
        (lambda a, b: torch.einsum("...ij,kj->...ik", a, b), [(3, 4, 5), (6, 5)], "matmul", 720),
        (lambda a, b: torch.einsum("...ij,...kj->...ik", a, b), [(3, 4, 5), (1, 6, 5)], "matmul",
         720),
        (lambda a, b: F.conv2d(a, b, padding=1), [(2, 4, 8, 8), (6, 4, 3, 3)], "convolution",
         2 * 2 * 6 * 64 * 36),
        (lambda a, b: F.conv2d(a, b, groups=4), [(2, 4, 8, 8), (8, 1, 1, 1)], "convolution",
         2 * 2 * 8 * 64),
        (lambda a, b: F.conv_transpose2d(a, b, stride=2), [(2, 4, 8, 8), (4, 6, 2, 2)],
         "convolution", 2 * 2 * 4 * 64 * 6 * 4),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b), [(2, 3, 4, 8), (2, 3, 6, 8)],
         "attention", 4 * 2 * 3 * 4 * 6 * 8),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b, is_causal=True),
         [(2, 3, 4, 8), (2, 3, 4, 8)], "attention", 4 * 2 * 3 * 10 * 8),
        (lambda a, b: F.softmax(a * b, -1), [(4, 5), (4, 5)], "softmax", 100),
        (lambda a, b: torch.cat([a, b]), [(4, 5), (4, 5)], "copy", 0),
        (lambda a, b: (a + b).sum(), [(4, 5), (4, 5)], "reduction", 20),
        # A window for each output, overlapping or not; an adaptive pool reads each element once.
        (lambda a, b: F.max_pool2d(a + b, 3, 2, 1), [(2, 4, 8, 8)] * 2, "pool", 2 * 4 * 16 * 9),
        (lambda a, b: F.avg_pool2d(a + b, (3, 1), 1), [(2, 4, 8, 8)] * 2, "pool", 2 * 4 * 48 * 3),
        (lambda a, b: F.adaptive_avg_pool2d(a + b, 1), [(2, 4, 8, 8)] * 2, "pool", 2 * 4 * 64),
        # A window larger than the image holds what there is of it.
        (lambda a, b: F.avg_pool2d(a + b, 16, 1, 4), [(2, 4, 8, 8)] * 2, "pool", 2 * 4 * 64),
    ],
)  # fmt: skip
def test_flops(run: Callable[..., Tensor], shapes: list[Any], op: str, flops: float) -> None:
    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return run(a, b)

    graph = capture(Net(), [torch.zeros(shape) for shape in shapes])
    assert only(graph, op).flops == flops


def test_a_tensor_is_not_taken_for_a_list_of_arguments() -> None:
    with pytest.raises(SpecError, match=r"capture\.inputs: .*a tuple, as in \(x,\)"):
        capture(nn.Linear(4, 4), torch.zeros(2, 4))  # type: ignore[arg-type]


def test_an_expanded_tensor_is_read_once() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(100, 10) + 1

    node = only(capture(Net(), [torch.zeros(1, 10)]), "elementwise")
    assert node.bytes == 4 * (10 + 1000)


def test_embedding_reads_rows_not_the_table() -> None:
    graph = capture(nn.Embedding(1000, 16), [torch.zeros(7, dtype=torch.int64)])
    node = only(graph, "embedding")
    assert node.bytes == 7 * 8 + 2 * 7 * 16 * 4
    assert node.parameter_bytes == 1000 * 16 * 4


def test_the_outermost_repeated_block_wins() -> None:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

    net = nn.Sequential(block(16), block(16), block(24), block(16))
    graph = capture(net, [torch.zeros(2, 8)])
    assert sorted(len(instances) for instances in graph.blocks.values()) == [3]
    ((_, instances),) = graph.blocks.items()
    assert instances == ("0", "1", "3")
    assert len(graph) == 1 + 12
    assert sum(count for _, count in graph.distinct()) == 12


def test_wiring_tells_blocks_apart() -> None:
    class Block(nn.Module):
        def __init__(self, residual: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.residual = residual

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y + (x if self.residual else y)

    net = nn.Sequential(Block(True), Block(False), Block(True))
    graph = capture(net, [torch.zeros(2, 8)])
    assert list(graph.blocks.values()) == [("0", "2")]


def test_convolutional_network_of_transformers() -> None:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    with torch.device("meta"):
        module = transformers.ResNetForImageClassification(config)
    graph = capture(module, {"pixel_values": torch.zeros(1, 3, 32, 32)}, name="resnet")
    assert graph.name == "resnet"
    assert sum(1 for _ in graph.operators("convolution")) == 10
    parameters = sum(p.numel() for p in module.parameters())
    assert graph.parameter_bytes == 4 * parameters
    assert module.training  # left as it was


# What cannot be captured -------------------------------------------------------------------------


class _Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


class _Eigenvalues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(torch.outer(x, x)).real


ROW = torch.zeros(2, 8)


class _Derivative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (y * y).sum())(x)


class _Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class _ConditionalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: self.linear(x), lambda x: x - 1, (x,)
        )  # a function


class _Counted(nn.Module):
    """Computes with numbers that values of tensors decide."""

    def forward(self, x: Tensor) -> Tensor:
        count = (x > 0).sum().item()
        torch._check(count <= 4)  # type: ignore[no-untyped-call]
        assert 2 * count <= 8
        return x**count * count + 2 * x.sum().item()


def test_numbers_that_values_decide_are_the_hosts_own() -> None:
    graph = capture(_Counted(), [torch.zeros(4)], eager=True)
    assert [node.target.removeprefix("aten.") for node in graph.operators()] == [
        "input", "gt", "sum", "_local_scalar_dense", "pow", "mul", "sum", "_local_scalar_dense",
        "add",
    ]  # fmt: skip
    powers = [json.loads(call.arguments)[0] for call in graph.calls if ".pow." in call.target]
    assert [math.isnan(exponent) for _, exponent in powers] == [True]


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (_ConditionalLayer(), "; control flow that depends on values of tensors cannot be capt"),
        (_Branches(), "module _Branches: got .* expected a module that torch.export can trace"),
        (_Eigenvalues(), "got 'aten.*eig.* expected an operator whose work is known"),
        (
            _Conditional(),
            "module _Conditional: got 'cond', expected operators, without control flow",
        ),
        (_Derivative(), "module _Derivative: got '_unwrap_for_grad', expected operators, without"),
    ],
)
def test_what_cannot_be_captured_is_one_line(module: nn.Module, match: str) -> None:
    # Eager, an operator that nothing is known of has a price by its tensors.
    eager = not isinstance(module, _Eigenvalues)
    with pytest.raises(SpecError, match=match) as caught:
        capture(module, [torch.zeros(4)], eager=eager)
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


def test_what_is_mapped_over_a_batch_is_an_operator_of_it() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: self.linear(row).T @ row)(x)

    graph = capture(Mapped(), [torch.zeros(3, 8, 8)], eager=True, training=True)
    products = [node for node in graph.operators() if node.op in ("linear", "matmul")]
    assert [node.outputs for node in products] == [((3, 8, 4),), ((3, 4, 8),)]
    assert sum(node.flops for node in products) == 2 * 3 * (8 * 4 * 8 + 4 * 8 * 8)
    assert graph.parameter_bytes == 4 * (8 * 4 + 4)


@pytest.mark.parametrize("training", [False, True])
def test_a_module_that_torch_export_gave_back_is_captured_as_it_was(training: bool) -> None:
    net, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.zeros(3, 8)
    program = torch.export.export(net, (x,))
    again = capture(program.module(), [x], eager=True, training=training)
    found = [(node.op, node.outputs, node.flops) for node in again.operators()]
    own = capture(net, [x], eager=True, training=training)
    assert found == [(node.op, node.outputs, node.flops) for node in own.operators()]
    with pytest.raises(SpecError, match=r"got 'ExportedProgram', .* give program\.module\(\)"):
        capture(program, [x])  # type: ignore[arg-type]


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda m: torch.jit.trace(m, ROW)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torch_jit_made_is_refused_by_name(scripted: Any) -> None:
    with pytest.raises(SpecError, match=r"a scripted or traced module.* give the module that"):
        capture(scripted(nn.Linear(8, 4)), [ROW])


@pytest.mark.parametrize(("shape", "causal"), [((6, 6), True), ((6, 6, 6), False)])
def test_a_square_mask_of_a_transformer_is_taken_to_be_causal(
    shape: tuple[int, ...], causal: bool
) -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerDecoder(layer, 2)

        def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
            return self.layers(x, memory, tgt_mask=mask)  # type: ignore[no-any-return]

    # One mask of all, or one of each of two heads of each of three rows.
    given = [torch.zeros(3, 6, 8), torch.zeros(3, 5, 8), torch.zeros(*shape)]
    graph = capture(Decoder(), given, eager=True)
    own, _ = list(graph.operators("attention"))[:2]
    pairs = 6 * 7 / 2 if causal else 36
    assert own.flops == 2 * 3 * 2 * pairs * (4 + 4)


def test_inputs_without_data_are_refused_where_memory_lacks_for_them() -> None:
    with pytest.raises(
        SpecError, match=r'8 PiB beside weights with data.* with torch\.device\("meta"\)'
    ):
        capture(nn.Linear(8, 8), [torch.empty(1 << 48, 8, device="meta")])


def test_wrong_calls() -> None:
    with pytest.raises(SpecError, match="example inputs"):
        capture(nn.Linear(2, 2))
    with pytest.raises(SpecError, match="at most 1024 positions"):
        capture("gpt2", tokens=2000)
    with pytest.raises(SpecError, match="name of the zoo"):
        capture("no-such-model")
    with pytest.raises(SpecError, match="module Linear"):
        capture(nn.Linear(2, 2), [torch.zeros(4, 3)])


def test_importing_capture_imports_no_torch() -> None:
    code = (
        "import sys, foreplan.datasets.graphs.capture; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.filterwarnings("error")
def test_a_recurrent_layer_is_one_operator() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(8, 8, batch_first=True)
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.recurrent(x)[0])
            return found

    graph = capture(Recurrent(), [torch.rand(2, 4, 8)], eager=True)
    assert only(graph, "recurrent").target == "aten.gru"
    assert only(graph, "recurrent").flops == 2 * 2 * 4 * 2 * (3 * 8 * 8)
    assert only(graph, "linear").flops == 2 * 2 * 4 * 8 * 4


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "lstm": (nn.LSTM(8, 16, 2, bidirectional=True), (7, 3, 8)),
    "projected": (nn.LSTM(8, 16, proj_size=4), (7, 3, 8)),
    "gru, batch first": (nn.GRU(8, 16, batch_first=True), (3, 7, 8)),
    "rnn of one sequence": (nn.RNN(8, 16, bidirectional=True), (7, 8)),
    "rectified": (nn.RNN(8, 16, nonlinearity="relu", batch_first=True), (3, 7, 8)),
}


class Doubled(nn.Module):
    """All that a layer returns, twice, so that a trace has an operator for each."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t * 2.0 for t in returned(self.layer(x)))


def returned(found: Any) -> list[Tensor]:
    """Tensors in tuples of tuples."""
    return [found] if isinstance(found, Tensor) else [t for part in found for t in returned(part)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_recurrent_layer_returns_what_torch_says(name: str) -> None:
    layer, shape = LAYERS[name]
    given = torch.rand(shape)
    operators = capture(Doubled(layer), [given], eager=True).operators("elementwise")
    with torch.no_grad():
        real = [tuple(t.shape) for t in returned(layer(given))]
    assert [node.outputs[0] for node in operators] == real


def test_a_long_recurrent_layer_is_traced_at_once() -> None:
    """Step by step these 400,000 would take 40 minutes; torch's own rules stand again after."""
    before = dict(torch.ops.aten.gru.input.py_kernels)
    graph = capture(nn.GRU(4, 4, 2, bidirectional=True), [torch.rand(100_000, 1, 4)], eager=True)
    assert only(graph, "recurrent").outputs[0] == (100_000, 1, 8)
    assert torch.ops.aten.gru.input.py_kernels == before


class Routed(nn.Module):
    """Two experts, each given its own tokens: how many depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)
            made[rows] += expert(x[rows])
        return made


@pytest.mark.parametrize("eager", [False, True])
def test_sizes_that_depend_on_values_are_refused(eager: bool) -> None:
    with pytest.raises(SpecError, match="sizes do not depend on values"):
        capture(Routed(), (torch.zeros(4, 8),), eager=eager)


def test_a_class_is_no_module() -> None:
    with pytest.raises(SpecError, match=r"make one: Routed\("):
        capture(Routed, (torch.zeros(4, 8),))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="got 'function', expected a module"):
        capture(lambda x: x, (torch.zeros(4, 8),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ((torch.zeros(4, 100),), r"body\.0: got 'RuntimeError: .* \(x\), .*float32\[4, 100"),
        ((torch.zeros(4, 512), 3), r"Mistaken: got 'TypeError: .* \(float32\[4, 512\], 3\)"),
        ({"y": torch.zeros(4, 512)}, r"forward takes \(x\), the inputs are \(y=float32"),
    ],
)
def test_inputs_of_another_shape_are_told_in_a_line(
    inputs: Any, told: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Mistaken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(512, 256), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    module = Mistaken()
    with pytest.raises(SpecError, match=told) as raised:
        capture(module, inputs)
    assert isinstance(raised.value.__cause__, (RuntimeError, TypeError))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert not module._forward_pre_hooks  # nothing is left on it
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


@pytest.mark.parametrize(
    ("module", "shape", "wrong"),
    [
        (nn.Linear(4, 2), (3, 4), torch.int64),
        (nn.Linear(4, 2, bias=False), (3, 4), torch.bfloat16),
        (nn.Linear(4, 2), (2, 3, 4), torch.float16),
    ],
)
def test_products_that_torch_would_not_run_are_told_in_a_line(
    module: nn.Module, shape: tuple[int, ...], wrong: torch.dtype
) -> None:
    inner = nn.Sequential(nn.Identity(), module)
    with pytest.raises(RuntimeError, match="type"):
        inner(torch.zeros(shape, dtype=wrong))
    told = r"module Sequential: 1: got '\w+ of \w+ and fp32', expected operands of one dtype"
    with pytest.raises(SpecError, match=told) as caught:
        capture(inner, (torch.zeros(shape, dtype=wrong),))
    assert "\n" not in str(caught.value)
    assert capture(inner, (torch.zeros(shape),)).operators()


def test_control_flow_on_values_is_told_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(SpecError, match="control flow that depends on values"):
        capture(Branch(), (torch.zeros(4, 4),))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.Softmax(-1)])
def test_inputs_without_data_are_taken_by_modules_with_and_without_parameters(
    module: nn.Module,
) -> None:
    graph = capture(module, [torch.empty(4, 8, device="meta")], eager=True)
    (node,) = [node for node in graph.operators() if node.op != "input"]
    assert node.outputs == ((4, 8),)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: Any, scale: float = 1.0) -> Tensor:
        tensors = list(given.values()) if isinstance(given, dict) else given
        return sum(self.linear(x) for x in tensors if x is not None) * scale


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_tensors_inside_an_argument_are_inputs_by_position_and_by_name(
    kind: type, where: str, observe: bool
) -> None:
    x = torch.zeros(4, 8)
    given = {"x": x, "none": None, "y": x} if kind is dict else kind([x, None, x])
    module = _Nested().to(where)
    graphs = [
        capture(module, inputs, observe=observe)
        for inputs in ((given, 2.0), {"given": given, "scale": 2.0})
    ]
    for graph in graphs:
        inputs = [node.outputs for node in graph.operators() if node.op == "input"]
        assert inputs == [((4, 8),), ((4, 8),)]
        assert graph.flops == graphs[0].flops > 2 * 2 * 4 * 8 * 8


def test_arguments_by_name_need_no_tensor() -> None:
    class Made(nn.Module):
        def forward(self, size: int) -> Tensor:
            return torch.ones(size, 2) + 1

    graph = capture(Made(), {"size": 3})
    assert list(graph.operators())[-1].outputs == ((3, 2),)


def test_tensors_beyond_what_torch_counts_are_told_in_a_line() -> None:
    told = r"0: got 'a tensor of the sizes \[1125899906842624, 4096\]', expected fewer than 2"
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(8, 4096)), torch.empty(2**50, 8)
    with pytest.raises(SpecError, match=told):
        capture(module, (x,))


def test_nested_inputs_are_told_by_their_shapes() -> None:
    inputs = {
        "pair": (torch.zeros(4, 3), {"x": torch.zeros(2)}), "ids": list(range(999)),
        "text": "a" * 999,
    }  # fmt: skip
    shown = r"\(pair=\(float32\[4, 3\], {'x': float32\[2\]}\), ids=\[0, 1, .*\.\.\.\], text='a"
    with pytest.raises(SpecError, match=shown) as raised:
        capture(_Nested(), inputs)
    assert len(str(raised.value)) < 400


def test_a_parameter_made_on_the_cpu_does_not_hide_the_meta_device() -> None:
    """wav2vec 2.0's first parameter, which stands for masked pieces, is made so."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.Tensor(8).uniform_())
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    with torch.device("meta"):
        module = Masked()
    assert not module.mask.is_meta
    assert capture(module, (torch.zeros(4, 8),)).flops > 0


def test_a_model_that_asks_for_its_attention_by_name_keeps_the_name() -> None:
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    module = transformers.FalconForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    graph = capture(module, {"input_ids": ids, "use_cache": False}, eager=True)
    assert sum(node.op == "attention" for node in graph.operators()) == 1
    assert module.config._attn_implementation == "sdpa"
