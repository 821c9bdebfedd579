"""Torch's own transformer layers: captured as inference runs them, where torch runs them so."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch.profiler import ProfilerActivity, profile

from foreplan.datasets.graphs._fused_layers import WRITTEN_OUT, fused_layers
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode

#: Batch, tokens, width.
SHAPE = (2, 12, 32)
PADDING = torch.zeros(SHAPE[:2], dtype=torch.bool)
PADDING[:, 9:] = True
CAUSAL = torch.ones(SHAPE[1], SHAPE[1], dtype=torch.bool).triu(1)


def layer(**given: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 48, **{"batch_first": True, **given}).eval()


def encoder(inner: nn.TransformerEncoderLayer, **given: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(inner, 2, enable_nested_tensor=False, **given).eval()


class Attending(nn.Module):
    """Attention of tokens to themselves, or to their neighbours in the batch."""

    def __init__(self, *, itself: bool = True, weights: bool = False, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, **{"batch_first": True, **given})
        self.itself, self.weights = itself, weights

    def forward(self, src: Tensor, **masks: Tensor) -> Any:
        other = src if self.itself else src.flip(0)
        return self.attention(src, other, other, need_weights=self.weights, **masks)


def other_epsilon() -> nn.Module:
    module = layer()
    module.norm2.eps = 1e-3
    return module


def hooked() -> nn.Module:
    module = layer()
    module.linear1.register_forward_hook(lambda *_: None)
    return module


#: Modules, what they get beside their source, and the dtype of all.
MODULES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "layer": (layer(), {}),
    "norms first, gelu": (layer(norm_first=True, activation="gelu"), {}),
    "two layers": (encoder(layer()), {}),
    "a norm behind": (encoder(layer(), norm=nn.LayerNorm(32)), {}),
    "bf16": (layer(dtype=torch.bfloat16), {}),
    "padding": (encoder(layer()), {"src_key_padding_mask": PADDING}),
    "causal": (encoder(layer()), {"mask": CAUSAL, "is_causal": True}),
    "both masks": (layer(), {"src_mask": CAUSAL, "src_key_padding_mask": PADDING}),
    "narrow heads": (nn.TransformerEncoderLayer(32, 16, 48, batch_first=True).eval(), {}),
    "attention": (Attending().eval(), {}),
    "weights": (Attending(weights=True).eval(), {}),
    "weights, padding": (Attending(weights=True).eval(), {"key_padding_mask": PADDING}),
    "of others": (Attending(itself=False).eval(), {}),
    "extra key": (Attending(add_bias_kv=True).eval(), {}),
    "tokens first": (layer(batch_first=False), {}),
    "no bias": (layer(bias=False), {}),
    "tanh": (layer(activation=torch.tanh), {}),
    "odd heads": (nn.TransformerEncoderLayer(32, 1, 48, batch_first=True).eval(), {}),
    "other epsilon": (other_epsilon(), {}),
    "hooked": (hooked(), {}),
    "decoder": (nn.TransformerDecoderLayer(32, 4, 48, batch_first=True).eval(),
                {"memory": torch.zeros(SHAPE)}),
}  # fmt: skip
#: Calls of torch that compute, by the names that parts have.
_AS = {
    "mm": "linear",
    "addmm": "linear",
    "_addmm_activation": "linear",
    "relu_": "relu",
    "_softmax": "softmax",
}
_COMPUTING = frozenset({"linear", "bmm", "softmax", "_masked_softmax", "native_layer_norm"})


def inputs(name: str) -> dict[str, Any]:
    module, given = MODULES[name]
    source = torch.rand(SHAPE, dtype=next(module.parameters()).dtype)
    key = "tgt" if name == "decoder" else "src"
    return {key: source, **given}


def run(name: str, grad: bool = False) -> Counter[str]:
    """What a real pass on this processor calls, by name."""
    module, _ = MODULES[name]
    given = inputs(name)
    with torch.set_grad_enabled(grad), profile(activities=[ProfilerActivity.CPU]) as seen:
        module(**given)
    return Counter(event.name.removeprefix("aten::") for event in seen.events())


def captured(name: str, **given: Any) -> OperatorGraph:
    module, _ = MODULES[name]
    return capture(module, inputs(name), **{"eager": True, **given})


def fused(graph: OperatorGraph) -> set[str]:
    return {node.within for node in graph.operators()} - {""}


@pytest.mark.parametrize("name", MODULES)
def test_layers_are_fused_where_torch_fuses_them(name: str) -> None:
    calls = run(name)
    # A layer's attention is a call of its own inside of the layer's.
    layers = calls["_transformer_encoder_layer_fwd"] or calls["_native_multi_head_attention"]
    assert len(fused(captured(name))) == layers


def test_layers_attention_alone_or_nothing_is_fused() -> None:
    found: dict[str, list[str]] = {"": []}
    for name in MODULES:
        calls = fused(captured(name))
        found.setdefault(min(calls).rstrip("_0123456789") if calls else "", []).append(name)
    assert found == {
        "_transformer_encoder_layer_fwd": list(MODULES)[:9],
        # Of a layer whose other conditions do not hold, too.
        "_native_multi_head_attention": [
            "attention", "weights", "weights, padding", "tanh", "other epsilon", "hooked", "decoder"
        ],
        "": ["of others", "extra key", "tokens first", "no bias", "odd heads"],
    }  # fmt: skip


@pytest.mark.parametrize("name", list(MODULES)[:12])
def test_parts_compute_what_torch_calls(name: str) -> None:
    calls = Counter[str]()
    for call, count in run(name).items():
        if (part := _AS.get(call, call)) in _COMPUTING:
            calls[part] += count
    nodes = [node for node in captured(name).operators() if node.op != "input"]
    assert Counter(filter(None, map(_computed, nodes))) + _written_out(nodes) == calls


def _computed(node: OperatorNode) -> str:
    named = node.target.removeprefix("aten.")
    named = {"layer_norm": "native_layer_norm"}.get(named, named)
    return "linear" if node.op == "linear" else named if named in _COMPUTING else ""


def _written_out(nodes: list[OperatorNode]) -> Counter[str]:
    """What stands for one fused kernel of a GPU."""
    count = sum(node.op == "attention" for node in nodes)
    return Counter({"bmm": 2 * count, "softmax": count}) if count else Counter()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_parts_give_what_the_layer_gives(norm_first: bool, gelu: bool) -> None:
    E, inner = 32, 48
    draw = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / 5

    given = (
        rand(*SHAPE), E, 4, rand(3 * E, E), rand(3 * E), rand(E, E), rand(E), gelu, norm_first,
        1e-5, rand(E), rand(E), rand(E), rand(E), rand(inner, E), rand(inner), rand(E, inner),
        rand(E),
    )  # fmt: skip
    found = WRITTEN_OUT["_transformer_encoder_layer_fwd"](*given)
    with torch.no_grad():
        torch.testing.assert_close(found, torch._transformer_encoder_layer_fwd(*given))


def test_a_module_without_data_is_captured_alike() -> None:
    for name in ("layer", "padding", "weights"):
        before = [node.signature for node in captured(name).operators() if node.op != "attention"]
        module, given = MODULES[name]
        empty = {key: value.to("meta") if isinstance(value, Tensor) else value
                 for key, value in inputs(name).items()}  # fmt: skip
        made = type(module) if isinstance(module, Attending) else None
        meta = (
            made(weights=True).to("meta").eval() if made
            else encoder(layer(device="meta")) if "padding" in name else layer(device="meta")
        )  # fmt: skip
        graph = capture(meta, empty, eager=True)
        assert [n.signature for n in graph.operators() if n.op != "attention"] == before, given


def test_the_host_makes_one_call_and_no_view_of_it() -> None:
    nodes = [node for node in captured("two layers").operators() if node.op != "input"]
    assert [node.calls for node in nodes] == ([2] + [1] * 8) * 2
    # Its operands' views are the host's.
    module = nn.Sequential(nn.Flatten(1, 2), layer())
    graph = capture(module, [torch.rand(2, 4, 3, 32)], eager=True)
    assert next(n for n in graph.operators() if n.op != "input").calls == 3


def test_a_training_step_and_a_plain_graph_are_as_before() -> None:
    for given in ({"training": True}, {"eager": False}):
        assert not fused(captured("two layers", **given))


def test_nothing_is_left_changed() -> None:
    module = nn.TransformerEncoder(layer(), 1).eval()
    with torch.overrides.BaseTorchFunctionMode():
        assert torch.overrides.has_torch_function((torch.rand(1),))
        with fused_layers(module):
            assert not torch.overrides.has_torch_function((torch.rand(1),))
            assert not module.use_nested_tensor
        assert torch.overrides.has_torch_function((torch.rand(1),))
    assert module.use_nested_tensor
    assert run("layer", grad=True)["_transformer_encoder_layer_fwd"] == 0
    assert run("layer")["_transformer_encoder_layer_fwd"] == 1


def test_what_torch_itself_says_of_a_fused_call_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = torch.ops.aten._masked_softmax.default
    own: Any = object()
    monkeypatch.setitem(op_implementations_dict, operator, own)
    with fused_layers(layer()):
        assert op_implementations_dict[operator] is not own
    assert op_implementations_dict[operator] is own


def test_padding_that_torch_would_leave_out_is_computed() -> None:
    module = nn.TransformerEncoder(layer(), 2, mask_check=False).eval()
    graph = capture(module, {"src": torch.rand(SHAPE), "src_key_padding_mask": PADDING}, eager=True)
    assert len(fused(graph)) == 2
    assert next(graph.operators("softmax")).outputs == ((2, 4, 12, 12),)
