"""What every action of a bubble schedule costs, as `Work` for the cost book.

A layer is two *halves*, the attention block and the MLP block. With tensor parallelism of ``t``
devices and sequence parallelism each half gathers its input and scatters its output (Korthikanti et
al. 2022): two all-gathers and two reduce-scatters a layer and pass, of ``batch x tokens x hidden``
elements in bf16. Norms, residuals and transfers work on ``1 / t`` of the tokens.

Passes in terms of forward programs (``theory``): the gradient of a product for its input and for
its weights are products of the same FLOP; attention's backward pass is two forward passes, three
where its inside is computed again (fused kernels always do); what moves memory alone costs twice in
the backward pass.

Times that a workload gives replace the programs: a *given* work is a nameless segment that only
`given_prices` can price.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from foreplan.cost_models.costs import Collective, Copy, HostLaunch, Segment, Work
from foreplan.datasets.program import Variant, program
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.towers import Tower

Parts = tuple[tuple[Work, int], ...]

#: Bytes a parameter's optimizer step moves: fp32 weight and two moments in and out, the gradient
#: in, the bf16 weight out (theory); a copy of ``b`` bytes moves ``2 b``.
_OPTIMIZER_BYTES = (4 * 3 * 2 + 4 + 2) // 2

_BF16 = Variant("bf16", "bf16", "torch.linear")
_ATTENTION = Variant("bf16", "bf16", "torch.sdpa")


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


@dataclass(frozen=True)
class Shape:
    """What a micro-batch looks like inside one tower.

    Attributes:
        tower: the tower.
        sequences: sequences of a micro-batch.
        tokens: positions of each.
        tp: devices that share a layer.
        recompute: ``none``, ``selective`` (attention's inside) or ``full`` (the forward pass
            again).
    """

    tower: Tower
    sequences: int
    tokens: int
    tp: int
    recompute: str

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.tokens

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch between two layers, bf16, over all devices of the layer."""
        return 2 * self.rows * self.tower.hidden


class TowerWorks:
    """Works of one tower's passes.

    Args:
        shape: of its micro-batches.
        group: cluster ranks that share a layer.
        tensor_s: seconds of one collective inside a layer, where given.
        kind: what the workload calls those, before ``tensor_collective_s``.
    """

    def __init__(
        self, shape: Shape, group: tuple[int, ...], tensor_s: float | None, kind: str = ""
    ) -> None:
        self.shape = shape
        self._tensor_name = f"{kind}tensor_collective_s"
        self._group = group
        self._tensor_s = tensor_s

    @functools.cache  # noqa: B019 - lives as long as one decision's schedule
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
        if direction == "B":
            return _joined(self.half(half, "I"), self.half(half, "W"))
        forward = self._attention() if half % 2 == 0 else self._mlp()
        if direction == "F":
            return forward
        products = self._transposed(half, weights=direction == "W")
        if direction == "W":
            return products
        again = forward if self.shape.recompute == "full" else ()
        scores = 2 if self.shape.recompute == "none" else 3
        rest = tuple(
            (work, count * (scores if _is(work, "attention") else 2))
            for work, count in forward
            if not _is(work, "linear")
        )
        return _joined(again, products, rest)

    def ends(self, direction: str, *, first: bool, last: bool) -> Parts:
        """What a pass computes in front of the first layer and behind the last one."""
        tower, shape = self.shape.tower, self.shape
        parts: list[tuple[Work, int]] = []
        backward = direction != "F"
        if first and tower.vocab and direction != "I":
            rows = max(1, shape.rows // shape.tp)
            parts.append((program("embedding", _named("torch.embedding"), rows=rows,
                                  cols=tower.hidden), 1))  # fmt: skip
        matrices = [tower.entry] if first and tower.entry else []
        matrices += list(tower.exits) if last else []
        for n, k in matrices:
            if backward and direction != "W" and (n, k) != tower.entry:
                parts.append((_linear(shape.rows, k, max(1, n // shape.tp)), 1))
            if direction != "I":
                parts.append((_linear(shape.rows, max(1, n // shape.tp), k), 1))
        if last and tower.vocab and direction != "W":  # the loss
            cols = max(1, tower.vocab // shape.tp)
            work = program("argmax", _named("torch.argmax"), rows=shape.rows, cols=cols)
            parts.append((work, 2 if backward else 1))
        return _joined(tuple(parts))

    @property
    def collectives(self) -> int:
        """Collectives of a half: one in front, one behind."""
        return 2 if self.shape.tp > 1 else 0

    @functools.cache  # noqa: B019
    def tensor(self, count: int) -> Parts:
        """Parts of ``count`` collectives, gathering and scattering in turn."""
        if self.shape.tp == 1 or not count:
            return ()
        if self._tensor_s is not None:
            return ((given(self._tensor_name, self._tensor_s), count),)
        size = self.shape.hidden_bytes
        gather = Collective("all_gather", size, self._group)
        scatter = Collective("reduce_scatter", size, self._group)
        return ((gather, (count + 1) // 2), (scatter, count // 2)) if count > 1 else ((gather, 1),)

    def _attention(self) -> Parts:
        t, shape = self.shape.tower, self.shape
        (_, qkv, hidden), (_, out, inner) = t.attention_linears
        rows, tp = shape.rows, shape.tp
        attention = program(
            "attention", _ATTENTION, batch=shape.sequences, queries=shape.tokens,
            keys=shape.tokens, heads=max(1, t.heads // tp), kv_heads=max(1, t.kv_heads // tp),
            head_dim=t.head_dim,
        )  # fmt: skip
        return _joined(
            self._pointwise("norm", "torch.rms_norm"),
            ((_linear(rows, max(1, qkv // tp), hidden), 1),),
            # A causal mask leaves half of the pairs: full attention is two causal ones.
            ((attention, 1 if t.causal else 2),),
            ((_linear(rows, out, max(1, inner // tp)), 1),),
            self._pointwise("add", "torch.add"),
        )

    def _mlp(self) -> Parts:
        t, shape = self.shape.tower, self.shape
        (_, up, hidden), (_, down, ffn) = t.mlp_linears
        rows, tp = shape.rows, shape.tp
        kernel = "torch.silu_mul" if t.gated else "torch.gelu_tanh"
        activation = program("activation", _named(kernel), rows=rows, cols=max(1, ffn // tp))
        return _joined(
            self._pointwise("norm", "torch.rms_norm"),
            ((_linear(rows, max(1, up // tp), hidden), 1),),
            ((activation, 1),),
            ((_linear(rows, down, max(1, ffn // tp)), 1),),
            self._pointwise("add", "torch.add"),
        )

    def _pointwise(self, op: str, kernel: str) -> Parts:
        rows = max(1, self.shape.rows // self.shape.tp)
        return ((program(op, _named(kernel), rows=rows, cols=self.shape.tower.hidden), 1),)

    def _transposed(self, half: int, *, weights: bool) -> Parts:
        """Products of the backward pass, as linears of the same FLOP."""
        t, rows, tp = self.shape.tower, self.shape.rows, self.shape.tp
        (_, n1, k1), (_, n2, k2) = t.attention_linears if half % 2 == 0 else t.mlp_linears
        found = []
        for n, k in ((max(1, n1 // tp), k1), (n2, max(1, k2 // tp))):
            found.append((_linear(n, k, rows) if weights else _linear(rows, k, n), 1))
        return _joined(tuple(found))


class StepWorks:
    """Works between the passes: transfers, parameters and gradients, the optimizer.

    Args:
        workload: knows what is given.
    """

    def __init__(self, workload: BubblesWorkload) -> None:
        self._times = workload.times

    def transfer(self, size: int, source: int, target: int) -> Work:
        """Activations or gradients from one cluster rank to another."""
        if self._times.transfer_s is not None:
            return given("transfer_s", self._times.transfer_s)
        return Collective("p2p", max(1, size), (source, target))

    def gather(self, parameters: int, group: tuple[int, ...], *, encoder: bool) -> Work:
        """bf16 parameters of one rank to every rank of a group."""
        name = "encoder_all_gather_s" if encoder else "all_gather_s"
        seconds = getattr(self._times, name)
        return given(name, seconds) if seconds is not None else Collective(
            "all_gather", 2 * parameters, group
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

    def optimizer(self, parameters: int) -> Work:
        """The step of a rank's own share of parameters."""
        if self._times.optimizer_s is not None:
            return given("optimizer_s", self._times.optimizer_s)
        if not parameters:
            return HostLaunch(0)
        return Segment("optimizer", ((Copy(_OPTIMIZER_BYTES * parameters), 1),))


def _named(kernel: str) -> Variant:
    return Variant("bf16", "bf16", kernel)


def _linear(rows: int, n: int, k: int) -> Work:
    return program("linear", _BF16, rows=max(1, rows), n=n, k=k)


def _is(work: Work, op: str) -> bool:
    return getattr(work, "op", None) == op


def _joined(*several: Parts) -> Parts:
    """Parts one after another, equal works counted together."""
    counts: dict[Work, int] = {}
    for parts in several:
        for work, count in parts:
            counts[work] = counts.get(work, 0) + count
    return tuple(counts.items())


def times(parts: Parts, count: int) -> Parts:
    """Every part ``count`` times as often."""
    return tuple((work, n * count) for work, n in parts)


def segment(name: str, *several: Parts) -> Work:
    """One work that consists of several parts; nothing at all is free."""
    parts = _joined(*several)
    return Segment(name, parts) if parts else HostLaunch(0)
