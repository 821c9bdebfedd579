"""`StepTables`: what every operator of a training step can be on one device, and what that costs.

One table serves all: the solver's problem, the replay and the schedule read the same works and the
same seconds. Casts stand on edges: an edge's cost depends on how both of its ends are computed, so
that a change of one operator renews the casts to its successors and from its predecessors alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.costs import CostBook, Estimate, HostLaunch, HostWait, Work
from foreplan.cost_models.schedule import FloatArray, IntArray
from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.kernels.training_programs import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    cast_program,
    conv2d_program,
    dependent_program,
    embedding_program,
    linear_program,
    loss_program,
)
from foreplan.datasets.kernels.training_variant import training_variant, variants_of
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.precision.graph import TrainingGraph, TrainingOperator
from foreplan.planner.precision.rules import rule_for

#: What operators hand on; the index is the state of `ChoiceItem.emits`.
STATES = ("fp32", "bf16")
Works = tuple[Work, ...]


class Unpriced:
    """Answers every work with one second: for the works themselves, where times do not matter."""

    def estimate(self, work: Work, device: str) -> Estimate:
        """One second."""
        return Estimate.exact(1.0)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to compute an operator on a device.

    Attributes:
        name: text of the variant, or the dtype of an operator that no plan chooses for.
        state: index in `STATES` of what it hands on.
        forward: works of the forward pass, cast of the weight included.
        backward: works of the backward pass.
        forward_s: their price.
        backward_s: likewise.
    """

    name: str
    state: int
    forward: Works
    backward: Works
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Casts between two operators, by (option of the producer, option of the consumer).

    Attributes:
        producer: index of the operator that hands on.
        consumer: index of the one that reads.
        forward: works of the cast of the activation.
        backward: works of the cast of its gradient.
        forward_s: ``[a, b]`` price.
        backward_s: likewise.
    """

    producer: int
    consumer: int
    forward: tuple[tuple[Works, ...], ...]
    backward: tuple[tuple[Works, ...], ...]
    forward_s: FloatArray
    backward_s: FloatArray


class StepTables:
    """Options and casts of one graph on one device.

    Args:
        graph: the training step.
        costs: prices; a variant without a price is no option.
        device: rank label that ``costs`` knows.
        device_kind: ``cpu`` or ``cuda``, whose rules hold.
        precisions: precisions that a plan may choose.

    Raises:
        MissingDataError: an operator that has no price in fp32.
        InfeasibleError: an operator without a kernel.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        costs: CostBook,
        device: str,
        device_kind: str,
        precisions: Sequence[str],
    ) -> None:
        self.graph, self.device, self.device_kind = graph, device, device_kind
        self._costs = costs
        self.rules = tuple(rule_for(o.node, device_kind) for o in graph.operators)
        self.options: tuple[tuple[Option, ...], ...] = tuple(
            self._options(o, precisions) for o in graph.operators
        )
        self.edges = tuple(
            self._edge(producer, consumer)
            for consumer, o in enumerate(graph.operators)
            for producer in o.producers
        )
        self._index = [
            {option.name: c for c, option in enumerate(options)} for options in self.options
        ]

    def issue_s(self, part: str, works: Works, share: float) -> float | None:
        """Seconds that a GPU's host takes to issue works of a part of the step; see `HostWait`.

        ``None`` on a processor, which is its own host, and of a GPU whose host nobody timed.
        """
        if self.device_kind != "cuda":
            return None
        wait = HostWait(part, tuple((work, 1) for work in works), share)
        found = self._costs.issuing(wait, self.device)
        return None if found is None else found.mean_s

    @property
    def follows(self) -> tuple[bool, ...]:
        """Whether an operator takes its dtype from what it reads."""
        return tuple(
            len(options) > 1 and not o.adjustable
            for o, options in zip(self.graph.operators, self.options, strict=True)
        )

    def choice(self, operators: dict[str, str]) -> IntArray:
        """Option of every operator when modules have the given variants: the cascade.

        Raises:
            SpecError: a module without variant, a variant that the device does not have, or a
                module of another network.
        """
        unknown = sorted(set(operators) - set(self.graph.modules))
        if unknown:
            raise SpecError(
                "decision.operators", got=unknown[0],
                expected=f"modules of {self.graph.name}, for which the plan was not made",
            )  # fmt: skip
        chosen = np.zeros(len(self.graph), dtype=np.int64)
        state = np.zeros(len(self.graph), dtype=np.int64)
        for i, o in enumerate(self.graph.operators):
            if o.adjustable:
                text = operators.get(o.module)
                option = self._index[i].get(text or "")
                if option is None:
                    raise SpecError(
                        f"decision.operators[{o.module}]", got=text,
                        expected=f"one of {', '.join(self._index[i])} on {self.device}",
                    )  # fmt: skip
                chosen[i] = option
            elif len(self.options[i]) > 1:
                chosen[i] = int(bool(o.producers) and all(state[p] == 1 for p in o.producers))
            state[i] = self.options[i][chosen[i]].state
        return chosen

    def names(self, choice: Sequence[int] | IntArray) -> dict[str, str]:
        """Variant of every module under a choice."""
        return {
            self.graph.operators[i].module: self.options[i][choice[i]].name
            for i in self.graph.adjustable
        }

    # ------------------------------------------------------------------------------- options

    def _options(self, o: TrainingOperator, precisions: Sequence[str]) -> tuple[Option, ...]:
        if not o.adjustable:
            return self._fixed_options(o)
        n, k = (o.weight_shape[0], o.weight_shape[1]) if o.family == "linear" else (0, 0)
        found: list[Option] = []
        missing: MissingDataError | None = None
        for text in variants_of(o.family, n=n, k=k, kind=self.device_kind):
            variant = training_variant(text)
            if variant.precision not in precisions:
                continue
            forward, backward = self._variant_works(o, text)
            try:
                option = self._priced(text, STATES.index(variant.output), forward, backward)
            except MissingDataError as error:
                missing = missing or error
                continue
            found.append(option)
        if found and found[0].name.startswith("fp32/fp32/"):
            return tuple(found)
        if missing is not None:
            raise MissingDataError(f"{o.module}: {missing}") from missing
        raise InfeasibleError(
            f"no kernel for {o.family} {o.module} on {self.device} at "
            f"{', '.join(precisions)}", fix="allow fp32",
        )  # fmt: skip

    def _fixed_options(self, o: TrainingOperator) -> tuple[Option, ...]:
        rule, node = self.rules[self.graph.operators.index(o)], o.node
        if node.op == "input":
            return (Option("fp32", 0, (), (), 0.0, 0.0),)
        if node.op == "loss":
            rows, classes = _matrix(node.inputs[0])
            works = (
                (loss_program(FORWARD, rows, classes),), (loss_program(BACKWARD, rows, classes),)
            )  # fmt: skip
            return (self._priced("fp32", 0, *works),)
        if not o.trained:
            # Masks and position tables: too small to measure, but each is issued by the host.
            return (self._priced("fp32", 0, (HostLaunch(1),), ()),)
        dtypes = STATES if rule.role == "dependent" and o.producers else STATES[:1]
        back = BACKWARD if o.input_trained or node.op != "convolution" else WEIGHT_GRADIENT
        return tuple(
            self._priced(
                dtype, STATES.index(dtype), (dependent_program(FORWARD, node, dtype),),
                (dependent_program(back, node, dtype),),
            )
            for dtype in dtypes
        )  # fmt: skip

    def _variant_works(self, o: TrainingOperator, text: str) -> tuple[Works, Works]:
        """Works of both passes of a module's operator."""
        variant, node = training_variant(text), o.node
        back = BACKWARD if o.input_trained else WEIGHT_GRADIENT
        if o.family == "embedding":
            rows, (vocab, cols) = _elements(node.inputs[1]), o.weight_shape
            return (
                (embedding_program(FORWARD, rows, vocab, cols, text),),
                (embedding_program(BACKWARD, rows, vocab, cols, text),),
            )
        size = _elements(o.weight_shape)
        cast: Works = ()
        if variant.operand != "fp32":
            row = o.weight_shape[-1]
            along = variant.along
            cast = (cast_program(size, row, "fp32", variant.operand, cold=True, along=along),)
        if o.family == "conv2d":
            return (
                (*cast, conv2d_program(FORWARD, node, text)), (conv2d_program(back, node, text),)
            )  # fmt: skip
        n, k = o.weight_shape
        rows = o.input_elements // k
        return (
            (*cast, linear_program(FORWARD, rows, n, k, text)),
            (linear_program(back, rows, n, k, text),),
        )

    def _priced(self, name: str, state: int, forward: Works, backward: Works) -> Option:
        return Option(name, state, forward, backward, self._sum(forward), self._sum(backward))

    def _sum(self, works: Works) -> float:
        return sum(self._costs.cost(work, self.device).mean_s for work in works)

    # --------------------------------------------------------------------------------- casts

    def _edge(self, producer: int, consumer: int) -> Edge:
        a, b = self.options[producer], self.options[consumer]
        forward = tuple(tuple(self._cast(producer, consumer, x, y) for y in b) for x in a)
        backward = tuple(tuple(self._cast_back(producer, consumer, x, y) for y in b) for x in a)
        return Edge(
            producer, consumer, forward, backward,
            np.array([[self._sum(works) for works in row] for row in forward]),
            np.array([[self._sum(works) for works in row] for row in backward]),
        )  # fmt: skip

    def _cast(self, producer: int, consumer: int, x: Option, y: Option) -> Works:
        o = self.graph.operators[consumer]
        given, along = STATES[x.state], "row"
        if o.adjustable:
            variant = training_variant(y.name)
            wanted, along = variant.operand, variant.along
            elements, row = o.input_elements, o.node.inputs[0][-1]
        elif self.rules[consumer].casts:
            wanted = y.name
            elements = row = self.graph.operators[producer].output_elements
        else:
            return ()  # the kernel reads both dtypes
        return () if given == wanted else (cast_program(elements, row, given, wanted, along=along),)

    def _cast_back(self, producer: int, consumer: int, x: Option, y: Option) -> Works:
        o, source = self.graph.operators[consumer], self.graph.operators[producer]
        if not source.trained:
            return ()
        made = training_variant(y.name).returned if o.adjustable else y.name
        wanted = STATES[x.state]
        if made == wanted:
            return ()
        elements = o.input_elements if o.adjustable else source.output_elements
        return (cast_program(elements, elements, made, wanted),)


def _elements(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(samples, classes) of an output."""
    return max(1, _elements(shape[:-1])), shape[-1]


def node_bytes(node: OperatorNode, state: int) -> int:
    """Bytes of an operator's first output in one of `STATES`."""
    return _elements(node.outputs[0]) * (4 if state == 0 else 2)
