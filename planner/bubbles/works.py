"""What every action of a bubble schedule costs, as `Work` for the cost book.

A layer is two *halves*, the attention block and the MLP block. With tensor parallelism of ``t``
devices and sequence parallelism each half gathers its input and scatters its output (Korthikanti et
al. 2022): two all-gathers and two reduce-scatters a layer and pass, of ``batch x tokens x hidden``
elements. A real run has no sequence parallelism (`execution/lanes.py`): there a half sums its
output and, backwards, its input's gradient, one all-reduce in place of a gather and a scatter; on
processors it goes through shared memory where nothing is computed beside it.
What a half computes is said by `TrainingPasses` or `TheoryPasses`, see `Arithmetic`.

Times that a workload gives replace the programs: a *given* work is a nameless segment that only
`given_prices` can price.
"""

from __future__ import annotations

from foreplan.cost_models.costs import Collective, Copy, HostLaunch, Segment, Work
from foreplan.datasets.kernels.training_programs import optimizer_program
from foreplan.planner.bubbles.arithmetic import Arithmetic
from foreplan.planner.bubbles.pass_shape import PassShape
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.theory_passes import TheoryPasses
from foreplan.planner.bubbles.training_passes import TrainingPasses
from foreplan.planner.bubbles.work_parts import Parts
from foreplan.planner.cached_method import cached_method

#: Bytes a parameter's optimizer step moves: fp32 weight and two moments in and out, the gradient
#: in, the bf16 weight out (theory); a copy of ``b`` bytes moves ``2 b``.
_OPTIMIZER_BYTES = (4 * 3 * 2 + 4 + 2) // 2


def given(name: str, seconds: float) -> Segment:
    """A work whose price the workload states."""
    return Segment(f"{name} given as {seconds!r} s")


def given_prices(workload: BubblesWorkload) -> dict[Work, float]:
    """Seconds of every `given` work that a workload leads to."""
    prices: dict[Work, float] = {}
    for name, seconds in workload.times.model_dump().items():
        if seconds is not None:
            prices[given(name, seconds)] = seconds
    sizes = [workload.backbone, *(encoder.dims for encoder in workload.encoders)]
    for dims in sizes:
        if dims is None or dims.layer_forward_s is None or dims.layer_backward_s is None:
            continue
        forward, backward = dims.layer_forward_s / 2, dims.layer_backward_s / 2
        for name, seconds in (("half", forward), ("half", backward), ("half", backward / 2)):
            prices[given(name, seconds)] = seconds
    return prices


class TowerWorks:
    """Works of one tower's passes.

    Args:
        shape: of its micro-batches.
        arithmetic: of the devices.
        group: cluster ranks that share a layer.
        tensor_s: seconds of one collective inside a layer, where given.
        kind: what the workload calls those, before ``tensor_collective_s``.
    """

    def __init__(
        self, shape: PassShape, arithmetic: Arithmetic, group: tuple[int, ...],
        tensor_s: float | None, kind: str = "",
    ) -> None:  # fmt: skip
        self.shape = shape
        # A workload's own times are those of gathers and scatters.
        self._sums = arithmetic.measurable and tensor_s is None
        self._dtype = arithmetic.dtype
        self._passes: TrainingPasses | TheoryPasses = (
            TrainingPasses(shape, arithmetic.dtype) if arithmetic.measurable
            else TheoryPasses(shape)
        )  # fmt: skip
        self._tensor_name = f"{kind}tensor_collective_s"
        self._group = group
        self._tensor_s = tensor_s

    @cached_method
    def half(self, half: int, direction: str) -> Parts:
        """Computation of an attention block (even) or an MLP block (odd).

        Args:
            half: its number.
            direction: ``F``, ``I`` (backward for the input), ``W`` (for the weights) or ``B`` (both
                and what is computed again).
        """
        tower = self.shape.tower
        if tower.forward_s is not None and tower.backward_s is not None:
            # A given backward time holds whatever is computed again; its halves are equal.
            seconds = {"F": tower.forward_s, "B": tower.backward_s}.get(direction)
            seconds = tower.backward_s / 2 if seconds is None else seconds
            return ((given("half", seconds / 2), 1),)
        return self._passes.half(half, direction)

    def ends(self, direction: str, *, first: bool, last: bool) -> Parts:
        """What a pass computes in front of the first layer and behind the last one."""
        return self._passes.ends(direction, first=first, last=last)

    @property
    def collectives(self) -> int:
        """Collectives of a half: one in front and one behind; of a real run one sum, behind."""
        if self.shape.tp == 1:
            return 0
        return 1 if self._sums else 2

    def edge(self, *, behind: bool) -> int:
        """Those of them in front of a first half, or behind a last one."""
        return min(1, self.collectives) if behind else self.collectives // 2

    @cached_method
    def tensor(self, count: int, *, waited: bool = False) -> Parts:
        """Parts of ``count`` collectives, gathering and scattering in turn, or of sums.

        Args:
            count: how many.
            waited: nothing is computed beside them.
        """
        if self.shape.tp == 1 or not count:
            return ()
        if self._tensor_s is not None:
            return ((given(self._tensor_name, self._tensor_s), count),)
        size = self.shape.hidden_bytes
        if self._sums:
            summed = Collective("all_reduce", size, self._group, self._dtype, waited=waited)
            return ((summed, count),)
        gather = Collective("all_gather", size, self._group, self._dtype)
        scatter = Collective("reduce_scatter", size, self._group, self._dtype)
        return ((gather, (count + 1) // 2), (scatter, count // 2)) if count > 1 else ((gather, 1),)


class StepWorks:
    """Works between the passes: transfers, parameters and gradients, the optimizer.

    Args:
        workload: knows what is given.
        arithmetic: of the devices.
    """

    def __init__(self, workload: BubblesWorkload, arithmetic: Arithmetic) -> None:
        self._times = workload.times
        self._arithmetic = arithmetic

    def transfer(self, size: int, source: int, target: int) -> Work:
        """Activations or gradients from one cluster rank to another."""
        if self._times.transfer_s is not None:
            return given("transfer_s", self._times.transfer_s)
        return Collective("p2p", max(1, size), (source, target), self._arithmetic.dtype)

    def gather(self, parameters: int, group: tuple[int, ...], *, encoder: bool) -> Work:
        """Parameters of one rank to every rank of a group."""
        name = "encoder_all_gather_s" if encoder else "all_gather_s"
        seconds = getattr(self._times, name)
        return given(name, seconds) if seconds is not None else Collective(
            "all_gather", self._arithmetic.element_bytes * parameters, group, self._arithmetic.dtype
        )  # fmt: skip

    def scatter(self, parameters: int, group: tuple[int, ...], *, encoder: bool) -> Work:
        """fp32 gradients, summed over a group."""
        name = "encoder_reduce_scatter_s" if encoder else "reduce_scatter_s"
        seconds = getattr(self._times, name)
        return given(name, seconds) if seconds is not None else Collective(
            "reduce_scatter", 4 * parameters, group, "fp32"
        )  # fmt: skip

    def reduce(self, parameters: int, group: tuple[int, ...]) -> Work:
        """fp32 gradients, summed on every rank of a group."""
        return Collective("all_reduce", 4 * parameters, group, "fp32")

    def optimizer(self, parameters: int, tensors: int = 1) -> Work:
        """The step of a rank's own share of parameters, which lie in so many flat tensors."""
        if self._times.optimizer_s is not None:
            return given("optimizer_s", self._times.optimizer_s)
        if not parameters:
            return HostLaunch(0)
        if not self._arithmetic.measurable:
            return Segment("optimizer", ((Copy(_OPTIMIZER_BYTES * parameters), 1),))
        parts: list[tuple[Work, int]] = [(optimizer_program("adamw", parameters, tensors), 1)]
        if self._arithmetic.dtype != "fp32":  # weights are rounded from the master copy
            parts.append((Copy(3 * parameters), 1))
        return Segment("optimizer", tuple(parts))
