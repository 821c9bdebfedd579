"""Turn a program into something that can be called and timed. Imports torch.

Weights of a model are streamed from memory: between two uses of one layer's weight all other
layers pass through the caches. So a weight (or a cache of keys and values) is held in as many
copies as fill twice the last-level cache, and the calls take them in turn. Activations were just
written by the operator before: one buffer, warm if it fits. On a processor what is no product comes
behind one, whose weight took the place of its code in the caches: in a pass of decoding a norm
takes 44 us and a rotation 47, by themselves 14 and 13, behind weights of 8 MiB that come from
memory 61 and 44 (one core of an EPYC; docs/results/serving_cpu_history.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.dtypes import cache_bytes
from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.kernels.cold_operands import held_cache
from foreplan.datasets.kernels.expert_kernels import expert_mlps, grouped_experts
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import LinearKernel, Packed, function, linear_kernel
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program, Variant

#: Rows of an embedding table: large enough that the rows read are seldom in a cache.
_VOCABULARY = 32_000
#: Operators that come behind a product on a processor, and its rows and fp32 weight, 8.25 MiB:
#: fitted so that those of a layer of 1,024 features take together what they take in its passes
#: (+1.3 and -0.2 % of a pass; 5.5 MiB -2.6 and -3.7;
#: docs/results/serving_cpu_history.md). Its weights come in turn: one alone stays in a large
#: last-level cache, and with it whatever is timed behind it.
_BEHIND = frozenset(
    {
        "norm",
        "rope",
        "activation",
        "add",
        "cache_write",
        "embedding",
        "argmax",
        *ATTENTIONS,
        "expand_heads",
        "latent_attention",
    }
)
_BEHIND_ROWS, _BEHIND_WEIGHT = 4, (2112, 1024)
#: Where scores are capped (Gemma 2); the time does not depend on it.
_CAP = 50.0
#: Values of the activations that programs share which run behind one another.
_SHARED_ELEMENTS = 1 << 20
#: Positions a cache holds beyond the filled ones, as a runtime's static buffer does.
_SPARE_POSITIONS = 64
#: Choices of experts that calls take in turn: as many as draw this many rows, within limits.
_DRAWN_ROWS, _FEWEST_DRAWS, _MOST_DRAWS = 4096, 4, 64


@dataclass(frozen=True, slots=True)
class Runnable:
    """A program with its inputs.

    Attributes:
        call: runs the program once on the next set of inputs.
        cache_state: what was cold and what warm, for the record.
        turns: calls until the same inputs come back; ``None`` where calls have to be issued one by
            one, because the host decides what they run.
        before: runs before each call that is timed, if anything does.
    """

    call: Callable[[], object]
    cache_state: str
    turns: int | None = 1
    before: Callable[[], object] | None = None


class Inputs:
    """Makes programs runnable on one torch device.

    Keeps the weights of the last linear program, because packing takes longer than measuring and
    a grid visits one weight with several row counts and kernels.

    Args:
        device: torch device, as ``cpu`` or ``cuda:0``.
        behind_one_another: programs made here will run in turn, each on what the one before it
            has just written: all activations are parts of one buffer then (bf16, 2 MiB; larger
            ones have their own).
    """

    def __init__(self, device: str, *, behind_one_another: bool = False) -> None:
        self.device = device
        self.kind = torch.device(device).type
        self.cache_bytes = held_cache(device)
        self._random = torch.Generator(device=device).manual_seed(0)
        self._weight_key: tuple[object, ...] = ()
        self._weights: list[Packed] = []
        self._product: Callable[[], object] | None = None
        self._buffer = self._draw(_SHARED_ELEMENTS) if behind_one_another else None

    def runnable(self, program: Program) -> Runnable:
        """Build inputs and bind them.

        Raises:
            SpecError: no such kernel on this kind of device.
        """
        if program.op == "linear":
            return self._linear(program)
        if program.op in EXPERT_OPERATORS:
            return self._experts(program)
        # Weights that fill the caches twice are enough at a time: here are others (`_product`).
        self._weight_key, self._weights = (), []
        if is_training(program):
            call = training_call(program, self.device)
            return Runnable(call, "as in a training step", len(call.sets))
        builder = getattr(self, f"_{program.op}", None)
        run = function(program.op, program.variant)
        built: Runnable = (builder or self._row_wise)(program, run)
        if self.kind != "cpu" or program.op not in _BEHIND:
            return built
        if self._product is None:
            x = self._draw(_BEHIND_ROWS, _BEHIND_WEIGHT[1], dtype=torch.float32)
            copies = self._copies(4 * math.prod(_BEHIND_WEIGHT))
            drawn = self._draw(*_BEHIND_WEIGHT, dtype=torch.float32)
            turn = itertools.cycle([drawn, *(drawn.clone() for _ in range(copies - 1))])
            self._product = lambda: torch.nn.functional.linear(x, next(turn))
        weight_mib = 4 * math.prod(_BEHIND_WEIGHT) / 2**20
        state = f"{built.cache_state}; behind a cold product of {weight_mib:g} MiB"
        return replace(built, cache_state=state, before=self._product)

    def release(self) -> None:
        """Free the kept weights, and those that small programs come behind."""
        self._weight_key, self._weights, self._product = (), [], None

    # ---------------------------------------------------------------------------- operators

    def _linear(self, program: Program) -> Runnable:
        rows, n, k = program.sizes
        kernel = linear_kernel(program.variant, self.kind)
        key = (n, k, kernel.layout)
        if key != self._weight_key:
            self.release()
            first = self._packed(kernel, n, k)
            self._weights = _cloned(first, self._copies(first.bytes))
            self._weight_key = key
        x = self._input(rows, k)
        turn = itertools.cycle(self._weights)
        run = kernel.run
        copies = len(self._weights)
        return Runnable(lambda: run(x, next(turn), None), self._cold("weight", copies), copies)

    def _packed(self, kernel: LinearKernel, n: int, k: int) -> Packed:
        # Few random rows repeated: arithmetic does not depend on the values, drawing does.
        few = self._draw(min(n, 64), k, dtype=torch.float32)
        return kernel.pack(few.repeat(-(-n // few.shape[0]), 1)[:n])

    def _experts(self, program: Program) -> Runnable:
        """All experts of a layer, of which each call touches others, drawn uniformly."""
        d = program.dims
        rows, count, ffn, hidden = d["rows"], d["experts"], d["ffn"], d["hidden"]
        kernel = linear_kernel(program.variant, self.kind)
        grouped = grouped_experts(program.variant, self.device, hidden, ffn)
        key = ("experts", count, ffn, hidden, kernel.layout)
        if key != self._weight_key:
            self.release()
            firsts = [self._packed(kernel, 2 * ffn, hidden), self._packed(kernel, hidden, ffn)]
            layers = self._copies(count * sum(first.bytes for first in firsts))
            if grouped is not None:  # all experts' weights are one then
                firsts = [_repeated(first, count) for first in firsts]
            each = layers if grouped is not None else layers * count
            self._weights = [made for first in firsts for made in _cloned(first, each)]
            self._weight_key = key
        each = len(self._weights) // 2
        ups, downs = self._weights[:each], self._weights[each:]
        x = self._input(rows, hidden)
        draws = [
            torch.rand(rows, count, generator=self._random, device=self.device).topk(d["active"])
            for _ in range(max(_FEWEST_DRAWS, min(_MOST_DRAWS, _DRAWN_ROWS // rows)))
        ]
        routes = itertools.cycle(
            [(chosen, share / share.sum(-1, keepdim=True)) for share, chosen in draws]
        )
        biased = program.op == "biased_experts"
        kernel_of = "torch.clamped_silu_mul" if biased else "torch.silu_mul"
        activate = function("activation", Variant("bf16", "bf16", kernel_of))
        biases = (self._draw(count, 2 * ffn), self._draw(count, hidden)) if biased else (None, None)
        how = f"{len(draws)} uniform draws of experts in turn"
        if grouped is not None:
            all_experts = itertools.cycle(zip(ups, downs, strict=True))
            return Runnable(
                lambda: grouped(x, *next(routes), *next(all_experts), activate, biases),
                f"{self._cold('experts', each)}; {how}",
                max(each, len(draws)),
            )
        turn = itertools.cycle(
            [(ups[i : i + count], downs[i : i + count]) for i in range(0, each, count)]
        )
        run, mlps, copies = kernel.run, expert_mlps(), each // count
        # The host decides which experts run, so that the calls are issued one by one.
        return Runnable(
            lambda: mlps(x, *next(routes), *next(turn), run, activate, biases),
            f"{self._cold('experts', copies)}; {how}",
            None if self.kind == "cuda" else copies,
        )

    def _router(self, program: Program, run: Callable[..., Any]) -> Runnable:
        d = program.dims
        x, weight = self._input(d["rows"], d["hidden"]), self._draw(d["experts"], d["hidden"])
        copies = self._copies(2 * math.prod((d["experts"], d["hidden"])))
        turn = itertools.cycle([weight.clone() for _ in range(copies)])
        kernel, active, groups = program.variant.kernel, d["active"], 1
        sigmoid = "sigmoid" in kernel
        correction = self._draw(d["experts"], dtype=torch.float32) if sigmoid else None
        if "grouped" in kernel:  # as many as may be: their number hardly matters, leaving some does
            groups = next((g for g in (8, 4, 2) if d["experts"] % (2 * g) == 0), 1)
        kept = max(1, groups // 2, -(-active * groups // d["experts"]))
        return Runnable(
            lambda: run(x, next(turn), active, True, correction, groups, kept),
            self._cold("weight", copies),
            copies,
        )

    def _shared_gate(self, program: Program, run: Callable[..., Any]) -> Runnable:
        rows, cols = program.sizes
        x, y, weight = self._input(rows, cols), self._input(rows, cols), self._draw(1, cols)
        return Runnable(lambda: run(x, y, weight), "warm")

    def _attention(self, program: Program, run: Callable[..., Any]) -> Runnable:
        d = program.dims
        shape = (d["batch"], d["kv_heads"], d["keys"] + _SPARE_POSITIONS, d["head_dim"])
        q = self._input(d["batch"], d["queries"], d["heads"], d["head_dim"])
        # In prefill the keys were just written; in decode other layers' caches came between.
        prefill = d["queries"] == d["keys"]
        copies, caches = self._caches(program, shape, 1 if prefill else None)
        turn, keys = itertools.cycle(caches), d["keys"]
        state = "keys and values warm" if prefill else self._cold("keys and values", copies)
        return Runnable(lambda: run(q, *next(turn), keys), state, copies)

    def _sink_attention(self, program: Program, run: Callable[..., Any]) -> Runnable:
        sinks = self._draw(program.dims["heads"], dtype=torch.float32)
        return self._scored_attention(program, functools.partial(run, sinks=sinks))

    def _capped_attention(self, program: Program, run: Callable[..., Any]) -> Runnable:
        return self._scored_attention(program, functools.partial(run, cap=_CAP))

    def _scored_attention(self, program: Program, run: Callable[..., Any]) -> Runnable:
        """Of some queries within a window, which leaves out what none of them sees."""
        d = program.dims
        if 1 < d["queries"] < d["keys"]:  # `attention_window.spans`
            run = functools.partial(run, window=d["keys"] - d["queries"])
        return self._attention(program, run)

    def _matmul(self, program: Program, run: Callable[..., Any]) -> Runnable:
        batch, m, n, k = program.sizes
        turned = program.variant.kernel == "torch.bmm"
        weight = self._draw(batch, *((k, n) if turned else (n, k)))
        copies = self._copies(2 * weight.numel())
        turn = itertools.cycle([weight.clone() for _ in range(copies)])
        x = self._input(batch, m, k)
        return Runnable(lambda: run(x, next(turn)), self._cold("weight", copies), copies)

    def _expand_heads(self, program: Program, run: Callable[..., Any]) -> Runnable:
        rows, heads, plain, turned, value = program.sizes
        q = self._draw(rows, 1, heads, plain + turned)
        wide = self._draw(rows, 1, heads, plain + value)
        turned_q, key = self._draw(rows, 1, heads, turned), self._draw(rows, 1, 1, turned)
        return Runnable(lambda: run(q, turned_q, key, wide), "warm")

    def _latent_attention(self, program: Program, run: Callable[..., Any]) -> Runnable:
        batch, keys, heads, latent, turned = program.sizes
        cache = self._draw(batch, 1, keys + _SPARE_POSITIONS, latent + turned)
        copies = self._copies(2 * cache.numel())
        turn = itertools.cycle([cache.clone() for _ in range(copies)])
        q, turned_q = self._input(heads, batch, latent), self._draw(batch, 1, heads, turned)
        state = self._cold("latents", copies)
        return Runnable(lambda: run(q, turned_q, next(turn), keys, turned**-0.5), state, copies)

    def _cache_write(self, program: Program, run: Callable[..., Any]) -> Runnable:
        d = program.dims
        room = d["tokens"] + _SPARE_POSITIONS
        shape = (d["batch"], d["kv_heads"], room, d["head_dim"])
        k, v = (self._input(d["batch"], d["tokens"], d["kv_heads"], d["head_dim"]) for _ in "kv")
        copies, caches = self._caches(program, shape)
        turn = itertools.cycle(caches)
        state = self._cold("keys and values", copies)
        return Runnable(lambda: run(*next(turn), k, v, 0), state, copies)

    def _caches(
        self, program: Program, shape: tuple[int, ...], copies: int | None = None
    ) -> tuple[int, list[tuple[Any, Any]]]:
        """Filled caches of keys and values ``[B, G, L, D]`` in the program's storage.

        As many as keep them cold unless said otherwise.
        """
        storage = program.variant.storage
        if copies is None:
            each = cache_bytes(shape[-1], storage)
            copies = self._copies(round(2 * math.prod(shape[:-1]) * each))

        def filled() -> Any:
            drawn = self._draw(*shape)
            return QuantisedCache.of(drawn) if storage == "int8" else drawn

        return copies, [(filled(), filled()) for _ in range(copies)]

    def _rope(self, program: Program, run: Callable[..., Any]) -> Runnable:
        rows, heads, head_dim = program.sizes
        x = self._input(rows, heads, head_dim)
        cos, sin = self._input(rows, head_dim), self._input(rows, head_dim)
        return Runnable(lambda: run(x, cos, sin), "warm")

    def _norm(self, program: Program, run: Callable[..., Any]) -> Runnable:
        rows, cols = program.sizes
        x, weight = self._input(rows, cols), self._draw(cols)
        bias = self._draw(cols) if program.variant.kernel == "torch.layer_norm" else None
        return Runnable(lambda: run(x, weight, bias, 1e-5), "warm")

    def _activation(self, program: Program, run: Callable[..., Any]) -> Runnable:
        if not program.variant.kernel.endswith("_mul"):
            return self._row_wise(program, run)
        rows, cols = program.sizes
        # Halves of one tensor, as the fused gate-and-up projection leaves them.
        gate, up = self._input(rows, 2 * cols).chunk(2, dim=1)
        return Runnable(lambda: run(gate, up), "warm")

    def _add(self, program: Program, run: Callable[..., Any]) -> Runnable:
        a, b = self._input(*program.sizes), self._input(*program.sizes)
        return Runnable(lambda: run(a, b), "warm")

    def _embedding(self, program: Program, run: Callable[..., Any]) -> Runnable:
        rows, cols = program.sizes
        table = self._draw(64, cols).repeat(_VOCABULARY // 64, 1)
        ids = torch.randint(0, _VOCABULARY, (64, rows), generator=self._random, device=self.device)
        turn = itertools.cycle(ids)
        return Runnable(lambda: run(table, next(turn)), "table cold; ids warm", len(ids))

    def _row_wise(self, program: Program, run: Callable[..., Any]) -> Runnable:
        dtype = torch.float32 if program.variant.storage == "fp32" else torch.bfloat16
        x = self._draw(*program.sizes, dtype=dtype)
        return Runnable(lambda: run(x), "warm")

    # ------------------------------------------------------------------------------- inputs

    def _input(self, *shape: int) -> Tensor:
        """Activations in bf16, which the operator before has written."""
        count = math.prod(shape)
        if self._buffer is None or count > self._buffer.numel():
            return self._draw(*shape)
        return self._buffer[:count].view(shape)

    def _draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self._random, device=self.device, dtype=dtype)

    def _copies(self, size_bytes: int) -> int:
        return max(1, -(-2 * self.cache_bytes // max(size_bytes, 1 << 14)))

    def _cold(self, what: str, copies: int) -> str:
        cache = f"last-level cache {self.cache_bytes / 2**20:g} MiB"
        return f"{what} cold: {copies} copies in turn, {cache}; rest warm"


def runnable(program: Program, device: str) -> Runnable:
    """Make one program runnable on a torch device; see `Inputs` for many."""
    return Inputs(device).runnable(program)


def _repeated(one: Packed, count: int) -> Packed:
    """A packed weight below itself, of layouts whose tensors begin with output features."""
    tensors = {
        role: tensor.repeat(count, *[1] * (tensor.dim() - 1))
        for role, tensor in one.tensors.items()
    }
    return Packed(one.layout, count * one.n, one.k, tensors)


def _cloned(first: Packed, count: int) -> list[Packed]:
    """A packed weight and copies of it, ``count`` in all."""
    return [first] + [
        Packed(first.layout, first.n, first.k, {k: t.clone() for k, t in first.tensors.items()})
        for _ in range(count - 1)
    ]
