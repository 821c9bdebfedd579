"""Times and bytes of decoder stages on the devices of a cluster, as the solver's arrays.

For every device type, number of bits and phase the fastest kernel is chosen; kernels of both phases
must share one packed copy of the weights, so that the choice is made layout by layout for the
workload's mix of prefill and decode. Baselines use the same choices.

Decode is integrated over its growing context: the time of a step at context c is priced at a few
contexts between the first and the last and averaged by the trapezoid rule (attention is close to
linear in c, so five points are within 0.1 % of the sum).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.costs import Collective, CostBook, Estimate
from foreplan.cost_models.tensor_parallel import shard_model, stage_collectives
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.kernels.registry import kernels_for, layout_of, quantises_activations
from foreplan.datasets.models.attention_window import LayerKind, layer_kinds, only_kind, spans
from foreplan.datasets.models.decoder_programs import embedding_programs, head_programs
from foreplan.datasets.models.latent_programs import attention_call
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import MissingDataError
from foreplan.planner.serving.kept_programs import (
    Parts,
    Shapes,
    in_variant,
    layer_parts,
    products,
)
from foreplan.planner.serving.spec import CACHE_STORAGE, STORAGE, ServingWorkload

PREFILL, DECODE = "prefill", "decode"
#: Contexts at which a decode step is priced.
CONTEXT_POINTS = 5


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Requests of a prefill and of a decode micro-batch.

    Attributes:
        prefill, decode: requests.
        lean: linears by the kernels that take least memory, instead of the fastest.
    """

    prefill: int
    decode: int
    lean: bool = False


#: How far a price is to be trusted (`_trust`), seconds, and whose it is.
_Priced = tuple[int, float, Variant]


@dataclass(frozen=True)
class StageKernels:
    """The variants one device uses; `variant` is what `layer_programs` asks.

    Attributes:
        table: variant by ``phase/attention``, ``phase/head`` and ``phase/linear/bits``, as in a
            decision.
    """

    table: Mapping[str, Variant]

    def variant(self, phase: str, op: str, bits: int | None = None) -> Variant:
        """The variant of ``attention``, of the ``head``, or of the linears of ``bits`` bits."""
        return self.table[f"{phase}/{op}" if bits is None else f"{phase}/{op}/{bits}"]

    def texts(self, used_bits: set[int]) -> dict[str, str]:
        """The table as a decision writes it, without the bits that its layers do not use."""
        kept = {}
        for key, variant in sorted(self.table.items()):
            words = key.split("/")
            if len(words) < 3 or int(words[2]) in used_bits:
                kept[key] = str(variant)
        return kept


class Pricing:
    """Prices of one model and workload on one cluster.

    Args:
        model: the language model.
        workload: traffic and limits.
        costs: the cost book; devices are asked for by rank label.
        degree: devices that share each layer; programs are those of one of them.
    """

    def __init__(
        self, model: Model, workload: ServingWorkload, costs: CostBook, degree: int = 1
    ) -> None:
        self.whole = model
        self.degree = degree
        self.model = shard_model(model, degree)
        self.workload = workload
        self.costs = costs
        self._kinds = layer_kinds(self.model, workload.prompt_tokens + workload.new_tokens)
        # Of a phase they depend on its own micro-batch size: many pairs of sizes share them.
        self._linears: dict[tuple[str, int, tuple[Variant, ...]], list[_Priced]] = {}
        self._fastest: dict[tuple[object, ...], Variant] = {}
        self._variants: dict[tuple[str, int], list[list[Variant]]] = {}
        self._asked: set[tuple[str, str, int]] = set()

    # ------------------------------------------------------------------------------- kernels

    def kernels(self, rank: Rank, sizes: MicroBatches) -> StageKernels:
        """Fastest variants of a device for micro-batches of these sizes.

        Bits for which the device has no kernel are left out, and so are kernels that failed there.

        Raises:
            FailedProgramError: an operator whose every kernel failed.
            MissingDataError: an operator has no price at all on the device.
        """
        table: dict[str, Variant] = {}
        for phase in (PREFILL, DECODE):
            batch, queries, keys = self._pass(phase, sizes)
            attends, dims = attention_call(self.model, batch, queries, keys)
            contexts = self._contexts().tolist() if phase == DECODE else [keys]
            run = [
                seen for context in contexts for seen, _ in self._seen({**dims, "keys": context})
            ]
            asked = self._seen(dims)
            cache = CACHE_STORAGE[self.workload.cache_bits]
            head = {"rows": batch, "n": self.model.vocab, "k": self.model.hidden}
            if (rank.label, phase, batch) not in self._asked:
                self._asked.add((rank.label, phase, batch))
                self.costs.prepare(
                    self._candidates(
                        rank, cache, (attends, [*(seen for seen, _ in asked), *run]), head,
                        batch * queries,
                    ),
                    rank.label,
                )  # fmt: skip
            table[f"{phase}/attention"] = self._best(rank, attends, asked, run, cache)
            table[f"{phase}/head"] = self._best(rank, "linear", [(head, 1)], [head])
        for bits in self.workload.bits:
            for _, *fastest in self.linears(rank, bits, sizes)[:1]:
                for phase, variant in zip((PREFILL, DECODE), fastest, strict=True):
                    table[f"{phase}/linear/{bits}"] = variant
        return StageKernels(table)

    def _seen(self, dims: dict[str, int]) -> list[tuple[dict[str, int], int]]:
        """Dimensions of the attention programs of all layers of a pass, and how often each runs.

        Once where layers are alike, whose number decides nothing.
        """
        if self.model.latent is not None:  # one query of it has no window
            return [(dims, 1)]
        kinds = Counter(of.window for of in self._kinds)
        found = [
            ({**dims, "queries": span.queries, "keys": span.keys}, layers)
            for window, layers in kinds.items()
            for span in spans(dims["queries"], dims["keys"], window)
        ]
        return found if len(found) > 1 else [(dims, 1) for dims, _ in found]

    def _candidates(
        self, rank: Rank, cache: str, attention: tuple[str, Sequence[dict[str, int]]],
        head: dict[str, int], rows: int,
    ) -> Iterator[Program]:  # fmt: skip
        """All that the choice of a phase's kernels may ask the price of."""
        attends, sizes = attention
        for variant in kernels_for(attends, rank.kernel_kind):
            if variant.storage == cache:
                yield from (program(attends, variant, **dims) for dims in sizes)
        for variant in kernels_for("linear", rank.kernel_kind, n=head["n"], k=head["k"]):
            if variant.storage == "bf16":
                yield program("linear", variant, **head)
        for bits in self.workload.bits:
            for variants in self._linear_variants(rank.kernel_kind, bits):
                for variant in variants:
                    yield from (work for work, _ in products(self.model, rows, variant))

    def linears(
        self, rank: Rank, bits: int, sizes: MicroBatches
    ) -> list[tuple[float, Variant, Variant]]:
        """Variants of both phases on one layout with their time over the run, fastest first."""
        w = self.workload
        rows = {PREFILL: sizes.prefill * w.prompt_tokens, DECODE: sizes.decode}
        calls = {
            PREFILL: w.batch // sizes.prefill,
            DECODE: (w.new_tokens - 1) * (w.batch // sizes.decode),
        }
        pairs: list[tuple[float, Variant, Variant]] = []
        for variants in self._linear_variants(rank.kernel_kind, bits):
            phases = []
            for phase in (PREFILL, DECODE):
                key = (rank.label, rows[phase], tuple(variants))
                if key not in self._linears:
                    self._linears[key] = self._priced(
                        rank, variants, functools.partial(products, self.model, rows[phase])
                    )
                # A measured price is never beaten by one that nobody measured, see `_cheapest`.
                found = self._linears[key]
                known = min((trust for trust, _, _ in found), default=0)
                phases.append([(s * calls[phase], v) for trust, s, v in found if trust == known])
            pairs += [(a + b, one, other) for (a, one), (b, other) in itertools.product(*phases)]
        return sorted(pairs, key=lambda pair: pair[0])

    def without_linears(self, rank: Rank, sizes: MicroBatches) -> MissingDataError | None:
        """Why no linear of a layer has a price, whatever its bits; ``None`` if there is another."""
        rows = sizes.prefill * self.workload.prompt_tokens
        for bits in self.workload.bits:
            for variants in self._linear_variants(rank.kernel_kind, bits):
                for work, _ in products(self.model, rows, variants[0]):
                    try:
                        self.costs.cost(work, rank.label)
                    except MissingDataError as reason:
                        return reason
        return None

    def _linear_variants(self, kind: str, bits: int) -> list[list[Variant]]:
        """Variants of a layer's linears on a kind of device, those of one layout together."""
        if (kind, bits) in self._variants:
            return self._variants[kind, bits]
        by_layout: dict[str, list[Variant]] = {}
        for variant in kernels_for("linear", kind):
            fits = all(
                variant in kernels_for("linear", kind, n=s.n, k=s.k)
                for s in self.model.every_linear
            )
            allowed = self.workload.quantise_activations or not quantises_activations(variant)
            if variant.storage in STORAGE[bits] and fits and allowed:
                by_layout.setdefault(layout_of(variant), []).append(variant)
        found = self._variants[kind, bits] = list(by_layout.values())
        return found

    def _best(
        self, rank: Rank, op: str, asked: Shapes, run: Sequence[dict[str, int]],
        storage: str = "bf16",
    ) -> Variant:  # fmt: skip
        """Fastest variant of ``asked`` with this storage among those that can all of ``run``."""
        weighed = tuple((count, *dims.items()) for dims, count in asked)
        key = (rank.label, op, storage, weighed, *(tuple(each.items()) for each in run))
        if key not in self._fastest:
            self._fastest[key] = self._first_of(rank, op, asked, run, storage)
        return self._fastest[key]

    def _first_of(
        self, rank: Rank, op: str, asked: Shapes, run: Sequence[dict[str, int]], storage: str
    ) -> Variant:
        """As `_best`, asking the cost book."""
        shape = {"n": run[0]["n"], "k": run[0]["k"]} if op == "linear" else {}
        every = [v for v in kernels_for(op, rank.kernel_kind, **shape) if v.storage == storage]
        left = list(every)
        while found := self._cheapest(rank, left, lambda v: in_variant(op, v, asked)):
            works = [program(op, found[1], **each) for each in run]
            if all(self.costs.can_price(work, rank.label) for work in works):
                return found[1]
            left.remove(found[1])
        for each in run:  # ask once more without the guard: the reason is the cost book's own
            self.costs.cost(program(op, every[0], **each), rank.label)
        raise MissingDataError(f"no cost for {op} on {rank.label}")

    def _cheapest(
        self,
        rank: Rank,
        variants: list[Variant],
        programs: Callable[[Variant], Sequence[tuple[Program, int]]],
    ) -> tuple[float, Variant] | None:
        """Fastest variant; a measured price is never beaten by one that nobody measured.

        A roofline is always faster than a kernel, so that comparing the two would choose exactly
        the kernels that nothing is known about.
        """
        found = self._priced(rank, variants, programs)
        return min(found, key=lambda each: each[:2])[1:] if found else None

    def _priced(
        self,
        rank: Rank,
        variants: list[Variant],
        programs: Callable[[Variant], Sequence[tuple[Program, int]]],
    ) -> list[_Priced]:
        """Every variant that has a price, with how far that is to be trusted and seconds."""
        found = []
        for variant in variants:
            works = programs(variant)
            if not all(self.costs.can_price(work, rank.label) for work, _ in works):
                continue
            total = Estimate.total(self.costs.cost(work, rank.label).times(n) for work, n in works)
            found.append((_trust(total), total.mean_s, variant))
        return found

    # ------------------------------------------------------------------------------- programs

    def layer(self, kernels: StageKernels, bits: int, phase: str, sizes: MicroBatches,
              keys: int | None = None, kind: LayerKind | None = None) -> Parts:  # fmt: skip
        """Programs of one layer's pass over a micro-batch.

        Args:
            kernels: of the device.
            bits: of the layer.
            phase: `PREFILL` or `DECODE`.
            sizes: of the micro-batches.
            keys: context of a decode step.
            kind: of the layer; ``None`` where the model has only one.
        """
        linear = kernels.variant(phase, "linear", bits)
        attention = kernels.variant(phase, "attention")
        kind = kind or only_kind(self._kinds)
        return layer_parts(self.model, *self._pass(phase, sizes, keys), linear, attention, kind)

    def layers(
        self, kernels: StageKernels, start: int, bits: Sequence[int], phase: str,
        sizes: MicroBatches, keys: int | None = None,
    ) -> Parts:  # fmt: skip
        """Programs of consecutive layers from ``start`` on, with the bits of each; see `layer`."""
        counts: dict[Program, int] = {}
        for (count, kind), times in self.layer_counts(start, bits):
            for item, each in self.layer(kernels, count, phase, sizes, keys, kind):
                counts[item] = counts.get(item, 0) + each * times
        return tuple(counts.items())

    def layer_counts(
        self, start: int, bits: Sequence[int]
    ) -> tuple[tuple[tuple[int, LayerKind], int], ...]:
        """Bits and kind of consecutive layers from ``start`` on, and how many layers have them."""
        kinds = self._kinds[start : start + len(bits)]
        return tuple(Counter(zip(bits, kinds, strict=True)).items())

    def embedding(self, phase: str, sizes: MicroBatches) -> Parts:
        """Programs before the first layer."""
        batch, queries, _ = self._pass(phase, sizes)
        return tuple(embedding_programs(self.model, batch, queries))

    def head(self, kernels: StageKernels, phase: str, sizes: MicroBatches) -> Parts:
        """Programs after the last layer: norm, head and argmax of one position a request."""
        batch, _, _ = self._pass(phase, sizes)
        return tuple(head_programs(self.model, batch, lambda op, _: kernels.variant(phase, "head")))

    def exchanges(
        self, phase: str, sizes: MicroBatches, group: tuple[int, ...], layers: int, *,
        first: bool = False, last: bool = False,
    ) -> tuple[tuple[Collective, int], ...]:  # fmt: skip
        """Collectives of a stage's pass; see `stage_collectives`."""
        batch, queries, _ = self._pass(phase, sizes)
        return stage_collectives(self.whole, group, layers, batch, queries, first=first, last=last)

    def seconds(self, rank: Rank, parts: Parts) -> float:
        """Summed price of programs on a device."""
        self.costs.prepare((item for item, _ in parts), rank.label)
        return sum(self.costs.cost(p, rank.label).mean_s * count for p, count in parts)

    def decode_layer_s(
        self, rank: Rank, kernels: StageKernels, bits: int, sizes: MicroBatches,
        kind: LayerKind | None = None,
    ) -> float:  # fmt: skip
        """Mean time of one layer over all decode steps of a micro-batch."""
        contexts = self._contexts()
        passes = [self.layer(kernels, bits, DECODE, sizes, int(c), kind) for c in contexts]
        self.costs.prepare((item for parts in passes for item, _ in parts), rank.label)
        times = [self.seconds(rank, parts) for parts in passes]
        if len(contexts) == 1:
            return times[0]
        # Every step counts once: average the interpolant over the integers first..last.
        steps = np.arange(contexts[0], contexts[-1] + 1)
        return float(np.interp(steps, contexts, times).mean())

    def _contexts(self) -> npt.NDArray[np.int64]:
        """Contexts at which a decode step is priced: first, last and where windows are full."""
        first = self.workload.prompt_tokens + 1
        last = self.workload.prompt_tokens + max(self.workload.new_tokens - 1, 1)
        full = {of.window for of in self._kinds if first < (of.window or 0) < last}
        points = np.linspace(first, last, CONTEXT_POINTS).round()
        return np.unique([*points, *full]).astype(np.int64)

    def hop_s(self, source: Rank, target: Rank, payload_bytes: int, dtype: str = "bf16") -> float:
        """Time of one message between two devices."""
        work = Collective("p2p", payload_bytes, (source.index, target.index), dtype)
        return self.costs.cost(work, source.label).mean_s

    def hidden_bytes(self, phase: str, sizes: MicroBatches) -> int:
        """Bytes of the activations that go from stage to stage, always bf16."""
        batch, queries, _ = self._pass(phase, sizes)
        return batch * queries * self.model.hidden * 2

    def _pass(
        self, phase: str, sizes: MicroBatches, keys: int | None = None
    ) -> tuple[int, int, int]:
        """(batch, queries, keys) of a pass."""
        prompt = self.workload.prompt_tokens
        if phase == PREFILL:
            return sizes.prefill, prompt, prompt
        return sizes.decode, 1, keys or prompt + max(self.workload.new_tokens // 2, 1)


def _trust(estimate: Estimate) -> int:
    """0 for prices that rest on measurements of the device, 1 for predicted ones, 2 for theory."""
    return {"predicted": 1, "theory": 2, "roofline": 2}.get(estimate.source, 0)
