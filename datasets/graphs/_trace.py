"""`TraceReader`: an exported program of ``torch.export`` as operators and edges."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs._aten_rules import IGNORED, Call, TensorInfo, classify, rule
from foreplan.datasets.graphs._checkpoints import recomputations
from foreplan.datasets.graphs._composites import WITHIN, aten_name
from foreplan.datasets.graphs._differentiation import differentiated
from foreplan.datasets.graphs._views import is_view
from foreplan.datasets.graphs.operator_call import (
    OperatorCall,
    arguments_text,
    dtype_name,
    result_text,
)
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: Attribute under which `capture` wraps the user's module; taken off module paths.
WRAPPER = "wrapped"

#: Modules whose primitive operators are one operator to us.
_FUSED_NORM = re.compile(r"RMSNorm$")


#: Products whose kernels want operands of one dtype, which the trace's own rules don't ask for.
_PRODUCTS = {"linear", "addmm", "mm", "bmm", "baddbmm", "matmul"}


class TraceReader:
    """Turns an exported program into operators and edges.

    Each node of the trace is a source (parameter, buffer, input), a view, part of a fused norm, or
    an operator of its own. Views are followed back to whatever wrote the data.

    Args:
        program: the exported program.
        name: of the graph.
        eager: keep what eager execution launches: a norm that is written out in primitive operators
            stays several operators, and an operator that nothing is known of becomes one of kind
            ``unknown`` (its bytes counted, its FLOP not) instead of an error.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, name: str, *, eager: bool = False
    ) -> None:
        self.name = name
        self.program = program
        self.eager = eager
        # Views that no operator has read yet, and how many views each stands on. The host makes
        # them just before the operator that reads them first.
        self.views: dict[Any, int] = {}
        self.calls: Counter[Any] = Counter()
        self.begun: set[str | None] = set()  # calls of several operators
        signature = program.graph_signature
        shared = _first_names(program.state_dict)
        self.parameter_of = {
            placeholder: shared[target].removeprefix(f"{WRAPPER}.")
            for placeholder, target in signature.inputs_to_parameters.items()
        }
        trained = {
            placeholder for placeholder, target in signature.inputs_to_parameters.items()
            if program.state_dict[target].requires_grad
        }  # fmt: skip
        # Where all are frozen, the module was made for inference; a training step trains them all.
        self.trained = trained or set(self.parameter_of)
        self.inputs = set(signature.user_inputs)
        self.root: dict[Any, Any] = {}  # node -> the node that wrote its data, None for a constant
        self.group: dict[Any, str] = {}  # operator node -> name of the operator it is part of
        self.members: dict[str, list[Any]] = {}

    def graph(self, evaluated: Sequence[str] = ()) -> OperatorGraph:
        """The operators, with their edges.

        Args:
            evaluated: as of `OperatorGraph`.
        """
        nodes = list(self.program.graph.nodes)
        for node in nodes:
            self._place(node)
        operators = [self._operator(name, members) for name, members in self.members.items()]
        edges: dict[tuple[str, str], int] = {}
        for consumer, members in self.members.items():
            for argument in self._external(members):
                producer = self.group.get(self.root[argument])
                if producer is not None:
                    size = sum(info.bytes for info in _infos(argument))
                    edges[producer, consumer] = edges.get((producer, consumer), 0) + size
        sizes = {
            self.parameter_of[node.name]: _infos(node)[0].bytes
            for node in nodes
            if node.op == "placeholder" and node.name in self.parameter_of
        }
        calls = self._calls(nodes)
        return OperatorGraph(self.name, operators, edges, sizes, calls, evaluated)

    def _calls(self, nodes: Sequence[Any]) -> list[OperatorCall]:
        """Every call of the trace that is one in eager execution, views included."""
        requires, reached = differentiated(nodes, self.trained, _differentiable, _cuts)
        wanted = {node: requires[node] and reached[node] for node in nodes}
        # A member of a tuple is its call's result.
        source = {node: _made_by(node) for node in nodes}
        calls = [
            node for node in nodes
            if node.op == "call_function" and source[node] is node
            and hasattr(node.target, "_schema") and _aten_name(node) not in IGNORED
        ]  # fmt: skip
        # An operand that stands twice (``x * x``) gets two gradients.
        readers = Counter(
            part for node in calls if wanted[node]
            for part in _flat((node.args, node.kwargs))[: _given_back(node)] if _infos(part)
        )  # fmt: skip
        # Members of one tuple do not share a gradient.
        most: dict[Any, int] = {}
        for node, count in readers.items():
            most[source[node]] = most.get(source[node], 0) + count - (node is not source[node])
        found = []
        for node in calls:
            tensors = [part for part in _flat((node.args, node.kwargs)) if _infos(part)]
            made = self.root[node] is node
            found.append(OperatorCall(
                node.name, self.group.get(node, "") if made else "", str(node.target),
                arguments_text(node.args, node.kwargs),
                tuple(self.parameter_of.get(part.name, source[part].name) for part in tensors),
                tuple(bool(wanted[node] and wanted[part]) for part in tensors),
                tuple(part.name in self.parameter_of for part in tensors),
                most.get(node, 0) if node in readers else most.get(node, 0) + 1,
                sum(info.bytes for info in _infos(node)) if made else 0, result_text(node),
            ))  # fmt: skip
        return found

    def _place(self, node: Any) -> None:
        """Say what a node of the trace is."""
        if node.op == "placeholder":
            self.root[node] = node if self._is_source(node) else None
            if node.name in self.inputs and _infos(node):
                self._join(node.name, node)
        elif node.op == "get_attr":
            self.root[node] = None
        elif node.op == "call_function":
            if node.target is operator.getitem:
                self.root[node] = self.root[node.args[0]]
            elif not hasattr(node.target, "_schema") and _is_number(node):
                self.root[node] = None  # the host's own arithmetic
            elif not hasattr(node.target, "_schema"):
                path = _module_path(node)
                raise SpecError(
                    f"module {self.name}" + (f": {path}" if path else ""),
                    got=getattr(node.target, "__name__", str(node.target)),
                    expected="operators, without control flow or transforms (torch.func)",
                )
            elif _aten_name(node) in IGNORED:
                self.root[node] = None
            elif is_view(node):
                source = _tensor_arguments(node)[0]
                self.root[node] = self.root[source]
                # The host makes no view by itself that a call of several operators makes.
                self.views[node] = (WITHIN not in node.meta) + self.views.pop(source, 0)
            else:
                _check_dtypes(self.name, node)
                self.root[node] = node
                self.calls[node] = (
                    1
                    + self._begins(node)
                    + sum(self.views.pop(argument, 0) for argument in _tensor_arguments(node))
                )
                self._join(self._fused_name(node) or node.name, node)

    def _begins(self, node: Any) -> bool:
        """Whether a node is the first operator of a call of several, which launches nothing."""
        within = node.meta.get(WITHIN)
        first = within is not None and within not in self.begun
        self.begun.add(within)
        return first

    def _fused_name(self, node: Any) -> str | None:
        return None if self.eager else _fused_name(node)

    def _is_source(self, node: Any) -> bool:
        return node.name in self.inputs or node.name in self.parameter_of

    def _join(self, name: str, node: Any) -> None:
        self.group[node] = name
        self.members.setdefault(name, []).append(node)

    def _external(self, members: Sequence[Any]) -> list[Any]:
        """Tensors that a group reads from elsewhere, each once, in order."""
        inside = set(members)
        found: dict[Any, None] = {}
        for node in members:
            for argument in _tensor_arguments(node):
                if self.root.get(argument) not in inside:
                    found[argument] = None
        return list(found)

    def _operator(self, name: str, members: Sequence[Any]) -> OperatorNode:
        last = members[-1]
        outputs = _infos(last)
        if last.op == "placeholder":
            info = outputs[0]
            return OperatorNode(name, "input", "input", (), (info.shape,), info.dtype, 0.0, 0.0)
        arguments = self._external(members)
        infos = [info for argument in arguments for info in _infos(argument)]
        names = {
            self.parameter_of[root.name]: _infos(root)[0].bytes
            for root in (self.root[argument] for argument in arguments)
            if root is not None and root.name in self.parameter_of
        }
        path, fused = _module_path(last), self._fused_name(last)
        if fused:
            kind, flops, target = "norm", 5.0 * outputs[0].elements, _module_class(last)
        else:
            call = self._call(last)
            found = classify(call)
            if found is None and self.eager:
                found = ("unknown", 0.0)
            if found is None:
                raise SpecError(
                    f"module {self.name}: {path}",
                    got=str(last.target),
                    expected="an operator whose work is known",
                    fix="express it by other operators, or report it",
                )
            kind, flops = found
            target = f"{last.target.namespace}.{call.name}"
            if kind == "matmul" and names:
                kind = "linear"
        moved = sum(info.bytes for info in infos) + sum(info.bytes for info in outputs)
        if kind == "embedding":
            # Only the rows that are looked up are read, not the table.
            table, indices = infos[:2]
            looked_up = indices.elements * table.bytes // table.shape[0]
            moved = indices.bytes + looked_up + outputs[0].bytes
        return OperatorNode(
            name,
            kind,
            target,
            tuple(info.shape for info in infos),
            tuple(info.shape for info in outputs),
            outputs[0].dtype if outputs else "none",
            flops,
            float(moved),
            tuple(names),
            sum(names.values()),
            path,
            calls=sum(self.calls[member] for member in members),
            within=last.meta.get(WITHIN, ""),
            recomputations=recomputations(last),
        )

    def _call(self, node: Any) -> Call:
        schema = node.target._schema
        named = {argument.name: value for argument, value in zip(schema.arguments, node.args)}  # noqa: B905  # trailing defaults are left out
        named |= node.kwargs
        return Call(
            _aten_name(node),
            # A tensor given twice (`mm(a, a)`) stands here twice, unlike in `_tensor_arguments`.
            [info for argument in _flat((node.args, node.kwargs)) for info in _infos(argument)],
            _infos(node),
            named,
            frozenset(str(tag).rpartition(".")[2] for tag in node.target.tags),
        )


def _made_by(node: Any) -> Any:
    """The call whose result a node is, where that is a tuple."""
    while node.op == "call_function" and node.target is operator.getitem:
        node = node.args[0]
    return node


def _first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """For each parameter's name the first name of the same tensor: tied ones become one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def _flat(value: Any) -> list[Any]:
    """Nodes of the trace inside nested arguments, in order."""
    if isinstance(value, (tuple, list)):
        return [node for item in value for node in _flat(item)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value] if hasattr(value, "meta") else []


def _check_dtypes(name: str, node: Any) -> None:
    """Refuse a product that torch would not run.

    Raises:
        SpecError: its operands are of several dtypes.
    """
    if _aten_name(node) not in _PRODUCTS:
        return
    found = [info.dtype for argument in _tensor_arguments(node) for info in _infos(argument)]
    if len(set(found)) > 1:
        path = _module_path(node)
        raise SpecError(
            f"module {name}" + (f": {path}" if path else ""),
            got=f"{_aten_name(node)} of {' and '.join(dict.fromkeys(found))}",
            expected="operands of one dtype, which torch's kernels ask for",
            fix="give inputs in the dtype of the weights, or convert them in the module",
        )


def _tensor_arguments(node: Any) -> list[Any]:
    return [argument for argument in node.all_input_nodes if _infos(argument)]


def _infos(node: Any) -> list[TensorInfo]:
    """The tensor or tensors that a node of the trace stands for."""
    import torch

    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [item for item in values if isinstance(item, torch.Tensor)]
    if any(not isinstance(extent, int) for tensor in tensors for extent in tensor.shape):
        # A symbol that no input decides, as export makes one for nonzero's rows.
        raise SpecError(
            f"module: {_module_path(node) or node.name}", got=f"{_made_by(node).target}",
            expected="tensors whose sizes do not depend on values",
            fix="mask what is left out, as by giving every expert all tokens",
        )  # fmt: skip
    return [_info(item) for item in tensors]


def _info(tensor: torch.Tensor) -> TensorInfo:
    shape = tuple(int(extent) for extent in tensor.shape)
    distinct = 1
    for extent, stride in zip(shape, tensor.stride(), strict=True):
        distinct *= extent if stride else 1
    empty = 0 in shape
    return TensorInfo(
        shape,
        dtype_name(str(tensor.dtype).removeprefix("torch.")),
        0 if empty else distinct * tensor.element_size(),
    )


def _aten_name(node: Any) -> str:
    return aten_name(node.target)


def _differentiable(node: Any) -> bool:
    """Whether a node's value is of real or complex numbers, which alone have gradients."""
    return any(info.dtype.startswith(("fp", "bf", "complex")) for info in _infos(node))


def _cuts(node: Any) -> bool:
    """Whether no gradient goes back through a call: a tensor like another one is not made of it."""
    if not hasattr(node.target, "_schema"):
        return False
    name = _aten_name(node)
    return name == "detach" or (rule(name, ()) or ("",))[0] == "create"


def _given_back(node: Any) -> int | None:
    """How many operands of a call may get a gradient: of ``expand_as`` one, not the shape's."""
    return 1 if _aten_name(node).endswith("_as") else None


def _stack(node: Any) -> list[tuple[str, str]]:
    """Keys and class names of the modules a node is nested in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(path, str(kind)) for path, kind in stack.values()]


def _is_number(node: Any) -> bool:
    """Whether a node's value is one of Python's numbers, which torch traces as symbols."""
    import torch

    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("val"), (*symbols, int, float))


def _module_path(node: Any) -> str:
    stack = _stack(node)
    path = stack[-1][0] if stack else ""
    return path.removeprefix(WRAPPER).removeprefix(".")


def _module_class(node: Any) -> str:
    return _stack(node)[-1][1].rpartition(".")[2]


def _fused_name(node: Any) -> str | None:
    """Name of the norm that a node is part of; each call of the module is its own."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack or node.op != "call_function":
        return None
    key, (_, kind) = list(stack.items())[-1]
    # Torch's own RMSNorm is one operator already.
    if not _FUSED_NORM.search(str(kind)) or str(kind).startswith("torch.nn."):
        return None
    return f"norm:{key}"
