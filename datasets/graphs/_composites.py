"""Takes calls apart that torch itself only composes of others.

Eager execution never runs a *composite implicit* operator as such: dispatch calls its parts, and
autograd sees these. A trace keeps some of them whole (`torch.export` keeps what its caller wrote).
Those that no rule of `_aten_rules` knows become their parts here, so that a module may use them;
the others stay, because their work is known as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs import _fused_layers
from foreplan.datasets.graphs._aten_rules import IGNORED, rule

if TYPE_CHECKING:
    import torch

#: Under this a part's ``meta`` names the call that makes it, where the host issues that alone.
WITHIN = "foreplan_within"


def expand_composites(program: torch.export.ExportedProgram) -> None:
    """Replace calls in place by those that eager execution makes for them.

    Args:
        program: traced; its inputs and results stay.
    """
    module = program.graph_module
    # With the calls that each came out of: some, of sizes that values decide, become themselves.
    left: list[tuple[torch.fx.Node, frozenset[Any]]]
    left = [(node, frozenset()) for node in module.graph.nodes]
    while left:
        node, made_by = left.pop()
        if node.op != "call_function" or not node.all_input_nodes or node.target in made_by:
            continue
        if _is_composite(node.target):
            left += [(part, made_by | {node.target}) for part in _expand(module, node)]
            module.graph.erase_node(node)


def _euclidean_dist(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """As torch computes distances by one product (``Distance.cpp``)."""
    import torch

    squares = [x.pow(2).sum(-1, True) for x in (first, second)]
    ones = [torch.ones_like(x) for x in squares]
    left = torch.cat([first.mul(-2), squares[0], ones[0]], -1)
    right = torch.cat([second, ones[1], squares[1]], -1)
    return left.matmul(right.mT).clamp_min(0).sqrt()


#: Operators that dispatch runs as a whole and whose kernels call others.
_WRITTEN_OUT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"_euclidean_dist": _euclidean_dist, **_fused_layers.WRITTEN_OUT}
)


def aten_name(target: Any) -> str:
    """An operator's name: in-place forms (`relu_`) do the same work; `__and__` is `and`."""
    name: str = target._schema.name.rpartition("::")[2]
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


def _is_composite(target: Any) -> bool:
    """Whether torch composes an operator of others, and no rule knows it as a whole."""
    import torch

    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    # Views and calls in place say in their schema what they share with an operand.
    if any(result.alias_info is not None for result in target._schema.returns):
        return False
    name = aten_name(target)
    if name in _WRITTEN_OUT:
        return True
    tags = (str(tag).rpartition(".")[2] for tag in target.tags)
    known = name in IGNORED or rule(name, tags) is not None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not known and bool(has(str(target._name), "CompositeImplicitAutograd"))


def _expand(module: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.Node]:
    """Put a call's parts before it, and have its readers read theirs; the parts."""
    import torch
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import make_fx

    sources = [each for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)]
    target: Any = _WRITTEN_OUT.get(aten_name(node.target), node.target)

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(sources, tensors, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return target(*args, **kwargs)

    values = [each.meta["val"] for each in sources]
    mode = detect_fake_mode(values)
    assert mode is not None  # a trace's values have no data
    fused = aten_name(node.target) in _fused_layers.WRITTEN_OUT
    with mode:
        traced = make_fx(call, pre_dispatch=fused)(*values)
    made = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    with module.graph.inserting_before(node):
        for part in traced.graph.nodes:
            if part.op == "get_attr":  # a constant
                name = f"{node.name}_{part.target}"
                module.register_buffer(name, getattr(traced, part.target))
                made[part] = module.graph.get_attr(name)
            elif part.op == "call_function":
                made[part] = module.graph.node_copy(part, made.__getitem__)
                made[part].meta |= {
                    key: node.meta[key] for key in ("nn_module_stack", "custom") if key in node.meta
                }
                if fused or WITHIN in node.meta:
                    made[part].meta[WITHIN] = node.meta.get(WITHIN, node.name)
    parts = [made[part] for part in traced.graph.nodes if part.op == "call_function"]
    result: Any = traced.graph.output_node().args[0]
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(made[result])
        return parts
    for user in list(node.users):  # members of a tuple
        assert user.target is operator.getitem
        if result[user.args[1]] is not None:  # which nobody reads
            user.replace_all_uses_with(made[result[user.args[1]]])
        module.graph.erase_node(user)
    return parts
