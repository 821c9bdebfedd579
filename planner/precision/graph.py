"""`TrainingGraph`: the operators of a training step, what each hands to whom, and their depth.

Captured from the task's module and one batch; the loss stands at the end. Operators are in the
order of the forward pass; the backward pass runs them the other way round, as autograd does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.module_check import check_module
from foreplan.datasets.graphs.operator_graph import OperatorGraph, OperatorNode
from foreplan.datasets.kernels.training_programs import optimizer_program
from foreplan.datasets.program import Program
from foreplan.errors import SpecError
from foreplan.planner.precision.task import TrainingTask, fingerprint, module_bytes

if TYPE_CHECKING:
    import torch

_FLOATS = ("fp32", "fp16", "bf16", "fp64")
#: Kinds of operators that multiply by weights.
_PRODUCTS = frozenset({"linear", "convolution"})
#: Kinds of operators that no plan is made for.
_UNPLANNED = frozenset({"recurrent", "experts", "bilinear", "fft"})


@dataclass(frozen=True, slots=True)
class TrainingOperator:
    """One operator of the step.

    Attributes:
        node: what it computes; fp32 as captured.
        module: path of the module that a plan chooses for, ``""`` where none does.
        family: ``linear``, ``conv2d`` or ``embedding`` of such a module.
        producers: operators whose float results it reads.
        trained: whether a gradient flows through it.
        input_trained: whether its input needs one.
        position: key shared by operators at the same place of repeated blocks, ``""`` if none.
    """

    node: OperatorNode
    module: str
    family: str
    producers: tuple[int, ...]
    trained: bool
    input_trained: bool
    position: str = ""

    @property
    def adjustable(self) -> bool:
        """Whether a plan chooses how it is computed."""
        return bool(self.module)

    @property
    def input_elements(self) -> int:
        """Elements of its first input."""
        return math.prod(self.node.inputs[0]) if self.node.inputs else 0

    @property
    def output_elements(self) -> int:
        """Elements of its first output."""
        return math.prod(self.node.outputs[0])

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of an adjustable operator's weight."""
        return self.node.inputs[0] if self.family == "embedding" else self.node.inputs[1]


class TrainingGraph:
    """Operators of one training step of one worker.

    Args:
        name: of the network.
        operators: in the order of the forward pass, the loss of each output last.
        parameters: elements by name, in the order of registration; a shared one once.
        digest: of names and shapes; see `task.fingerprint`.
        held_bytes: of all parameters, frozen ones too, and of the buffers.
    """

    def __init__(
        self,
        name: str,
        operators: tuple[TrainingOperator, ...],
        parameters: dict[str, int],
        digest: str,
        held_bytes: int,
    ) -> None:
        self.name, self.operators, self.parameters = name, operators, parameters
        self.digest, self.held_bytes = digest, held_bytes
        self.adjustable = tuple(i for i, o in enumerate(operators) if o.adjustable)

    def __len__(self) -> int:
        return len(self.operators)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths that a plan chooses for, in the order of the forward pass."""
        return tuple(dict.fromkeys(self.operators[i].module for i in self.adjustable))

    def kept(self) -> list[OperatorNode]:
        """Operators with weights to multiply by that no plan chooses for."""
        return [
            o.node for o in self.operators
            if o.node.op in _PRODUCTS and o.node.parameters and not o.adjustable
        ]  # fmt: skip

    def update(self, optimizer: str) -> Program:
        """The step of ``sgd`` or ``adamw`` over all parameters."""
        return optimizer_program(optimizer, sum(self.parameters.values()), len(self.parameters))

    def depth(self) -> tuple[int, ...]:
        """Fewest steps from the first operator that a plan chooses for, as QSync's depth maps.

        Operators that cannot be reached from it (a second embedding) have depth 0.
        """
        successors: list[list[int]] = [[] for _ in self.operators]
        for i, operator in enumerate(self.operators):
            for producer in operator.producers:
                successors[producer].append(i)
        found = [0] * len(self.operators)
        if not self.adjustable:
            return tuple(found)
        start = self.adjustable[0]
        seen, queue = {start}, deque([start])
        while queue:
            u = queue.popleft()
            for i in successors[u]:
                if i not in seen:
                    seen.add(i)
                    found[i] = found[u] + 1
                    queue.append(i)
        return tuple(found)

    def reaches(self) -> list[set[int]]:
        """For every operator the operators that read its result, directly or not."""
        after: list[set[int]] = [set() for _ in self.operators]
        for i in reversed(range(len(self))):
            for producer in self.operators[i].producers:
                after[producer] |= {i} | after[i]
        return after

    @classmethod
    def of(cls, task: TrainingTask, samples: int | None = None) -> TrainingGraph:
        """Capture a task.

        Args:
            task: what is trained.
            samples: of a worker's step, as the workload has it, which the batch is held against.

        Raises:
            SpecError: a module that cannot be traced, or without a weight that a plan could lower;
                a batch that is not ``((inputs, ...), target)``, or of another number of samples.
        """
        with _where_captured(task):
            module = task.module()
        check_module(module)
        batch = task.batch(0, 0)
        pair = isinstance(batch, tuple) and len(batch) == 2
        if not (pair and isinstance(batch[0], tuple)):
            got = ", ".join(type(part).__name__ for part in batch) if pair else type(batch).__name__
            raise SpecError(
                f"network {task.name}: batch", got=f"({got})" if pair else got,
                expected="((inputs, ...), target): a tuple of inputs, and the target",
                fix="a module that takes its inputs by name needs one around it that does not",
            )  # fmt: skip
        _check_dense(task.name, module)
        _check_weights(task, module)
        inputs, _ = batch
        if samples is not None:
            _check_samples(task.name, inputs, samples)
        graph = capture(module, inputs, name=task.name)
        return cls.from_capture(graph, module)

    @classmethod
    def from_capture(cls, graph: OperatorGraph, module: torch.nn.Module) -> TrainingGraph:
        """A captured module's step, with a cross-entropy over each output's last dimension.

        Raises:
            SpecError: nothing that a plan could lower, or an operator that none is made for.
        """
        nodes = [_by_kernel(node, module) for node in graph.operators()]
        _check_planned(graph.name, nodes)
        index = {node.name: i for i, node in enumerate(nodes)}
        families = _families(module)
        operators: list[TrainingOperator] = []
        constant: list[bool] = []
        for node in nodes:
            producers = tuple(sorted(index[p] for p in graph.graph.predecessors(node.name)))
            floats = tuple(p for p in producers if nodes[p].dtype in _FLOATS)
            alive = [p for p in floats if not constant[p]]
            constant.append(
                not node.parameters and not alive and (node.op != "input" or not _is_float(node))
            )
            if node.op == "attention":  # a mask takes the dtype of what it masks
                floats = tuple(alive)
            # A single number does not promote what it meets.
            floats = tuple(p for p in floats if math.prod(nodes[p].outputs[0]) > 1)
            known = families.get(node.module, "")
            family = known if _computes(node, known) else ""
            input_trained = any(operators[p].trained for p in floats)
            operators.append(
                TrainingOperator(
                    node, node.module if family else "", family, floats,
                    _is_float(node) and (bool(node.parameters) or input_trained), input_trained,
                    _position(node, family),
                )
            )  # fmt: skip
        # A trace that several results leave says of each that nothing inside reads it.
        unread = [not any(graph.graph.successors(node.name)) for node in nodes]
        results = [i for i, o in enumerate(operators) if o.trained and unread[i]]
        for i in results or [len(operators) - 1]:
            out = nodes[i].outputs[0]
            loss = OperatorNode(
                "loss" if i == max(results, default=i) else f"loss of {nodes[i].name}", "loss",
                "cross_entropy", (out,), ((1,),), "fp32", 0.0, 4.0 * math.prod(out),
            )  # fmt: skip
            operators.append(TrainingOperator(loss, "", "", (i,), True, operators[i].trained))
        made = cls(
            graph.name, tuple(operators),
            {name: p.numel() for name, p in module.named_parameters() if p.requires_grad},
            fingerprint(module.named_parameters()), module_bytes(module),
        )  # fmt: skip
        if not made.adjustable:
            raise SpecError(
                f"network {graph.name}", got="no operator whose precision can be chosen",
                expected="torch.nn.Linear, Conv2d or Embedding modules inside of it",
            )  # fmt: skip
        return made._renamed(module)

    def _renamed(self, module: torch.nn.Module) -> TrainingGraph:
        """Shared parameters under the name that ``named_parameters`` gives them."""
        first: dict[int, str] = {}
        alias = {
            name: first.setdefault(id(p), name)
            for name, p in module.named_parameters(remove_duplicate=False)
        }
        operators = tuple(
            replace(
                o,
                node=replace(o.node, parameters=tuple(alias.get(n, n) for n in o.node.parameters)),
            )
            for o in self.operators
        )
        return TrainingGraph(self.name, operators, self.parameters, self.digest, self.held_bytes)


def _where_captured(task: TrainingTask) -> AbstractContextManager[Any]:
    """Torch's default device while a task's module is made only to be captured.

    Decoders need no weights for that, which take most of the time; networks of one's own may ask
    for values while they are made.
    """
    import torch

    from foreplan.planner.precision.decoder_task import DecoderTask

    return torch.device("meta") if isinstance(task, DecoderTask) else nullcontext()


def _check_dense(name: str, module: torch.nn.Module) -> None:
    """Refuse tables with sparse gradients, which buckets and fused optimizers do not take.

    Raises:
        SpecError: there is such a table.
    """
    for path, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise SpecError(
                f"network {name}: {path}.sparse", got=True, expected="False",
                fix="steps are planned with dense gradients, which DDP sums",
            )  # fmt: skip


def _check_weights(task: TrainingTask, module: torch.nn.Module) -> None:
    """Refuse weights that a plan's run would refuse, and those without values.

    Raises:
        SpecError: trained parameters in another type than fp32, or on the ``meta`` device.
    """
    import torch

    from foreplan.planner.precision.decoder_task import DecoderTask

    for path, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise SpecError(
                f"network {task.name}: {path}", got=str(parameter.dtype), expected="torch.float32",
                fix="a plan keeps parameters in fp32 and lowers what computes with them",
            )  # fmt: skip
        if parameter.is_meta and not isinstance(task, DecoderTask):
            raise SpecError(
                f"network {task.name}: {path}", got="the meta device",
                expected="a module with weights, from which sensitivities are measured",
            )  # fmt: skip


def _check_planned(name: str, nodes: Iterable[OperatorNode]) -> None:
    """Refuse operators whose passes no profile times and no rule of precision knows.

    Raises:
        SpecError: there is one.
    """
    for node in nodes:
        if node.op in _UNPLANNED:
            raise SpecError(
                f"network {name}: {node.module or node.name}", got=node.target,
                expected="no recurrent layer, grouped product of experts, bilinear form or Fourier "
                "transform",
                fix="foreplan.predict_latency prices a training step that has one",
            )  # fmt: skip


def _check_samples(name: str, inputs: tuple[Any, ...], samples: int) -> None:
    """Hold a batch against the workload's, by which throughput counts; positions may be flattened.

    Raises:
        SpecError: no tensor has a multiple of ``samples`` along its first dimension.
    """
    import torch

    parts = [part for given in inputs for part in _values(given) if isinstance(part, torch.Tensor)]
    found = list(dict.fromkeys(part.shape[0] for part in parts if part.dim()))
    if found and all(count % samples for count in found):
        raise SpecError(
            "workload.batch", got=samples,
            expected=f"the samples of a batch of {name}: {' or '.join(map(str, found))}",
        )  # fmt: skip


def _values(given: object) -> Iterable[object]:
    return given.values() if isinstance(given, Mapping) else [given]


def _by_kernel(node: OperatorNode, module: torch.nn.Module) -> OperatorNode:
    """The node, its target told apart where one operator has kernels of unlike speed.

    On a processor GELU by tanh takes about five times as long as by erf (measured, AVX-512).
    """
    if node.target.endswith("gelu") and node.module:
        part = dict(module.named_modules()).get(node.module)
        if getattr(part, "approximate", "none") == "tanh":
            return replace(node, target=f"{node.target}_tanh")
    return node


def _is_float(node: OperatorNode) -> bool:
    return node.dtype in _FLOATS


def _computes(node: OperatorNode, family: str) -> bool:
    return {"linear": "linear", "conv2d": "convolution", "embedding": "embedding"}.get(
        family
    ) == node.op


def _families(module: torch.nn.Module) -> dict[str, str]:
    """Modules that a plan may choose for, by path: torch's own classes, not their subclasses."""
    import torch

    words = {
        torch.nn.Linear: "linear", torch.nn.Conv2d: "conv2d", torch.nn.Embedding: "embedding"
    }  # fmt: skip
    return {
        path: words[type(part)]
        for path, part in module.named_modules()
        if type(part) in words and not _unusual(part)
    }


def _unusual(part: torch.nn.Module) -> bool:
    """Convolutions whose programs say too little of them: dilated, or of another padding mode."""
    return getattr(part, "dilation", (1, 1)) not in ((1, 1), 1) or (
        getattr(part, "padding_mode", "zeros") != "zeros"
    )


def _position(node: OperatorNode, family: str) -> str:
    """Where in its repeated block an adjustable operator stands."""
    if not family or not node.block:
        return ""
    return f"{node.block}:{node.module.removeprefix(node.instance)}"
