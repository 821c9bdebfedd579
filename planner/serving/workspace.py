"""`StageWorkspace`: the most that a stage holds beside weights, cache and tables, moment by moment.

A pass frees as it goes, so that what counts is the fullest moment: the tensors that the runtime
(`planner/verify/decoder.py`, `_decoder_layer.py`) has not let go of by then, and what the kernel at
work takes. Beside every moment lie the buffers that last: messages, tokens, a library's own.
Loading is a moment of its own, before there is a cache. That is a GPU's; a processor's heap keeps
the holes that freed tensors leave, and there everything is added up (`heap_bytes`).

Legend: rows = requests x tokens of a pass, H = heads, G = key/value heads, D = head_dim. Sizes are
of bf16 tensors (2 bytes) where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt

from foreplan.datasets.dtypes import GROUP_SIZE
from foreplan.datasets.kernels.registry import kernels_for, writes_weight
from foreplan.datasets.kernels.token_shapes import attends_at_once, takes_rows, token_sums_bytes
from foreplan.datasets.models.attention_window import LayerKind, layer_kinds
from foreplan.datasets.models.decoder_memory import slice_rows
from foreplan.datasets.models.linear_shape import LinearShape
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Variant
from foreplan.planner.serving.expert_workspace import expert_bytes
from foreplan.planner.serving.heap_workspace import heap_bytes
from foreplan.planner.serving.latent_workspace import latent_moments
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches
from foreplan.planner.serving.scored_workspace import scored_bytes
from foreplan.planner.serving.spec import CACHE_STORAGE, STORAGE, ServingWorkload
from foreplan.planner.serving.stage_pass import StagePass
from foreplan.planner.serving.window_workspace import window_bytes

IntArray = npt.NDArray[np.int64]

#: Layers that are recorded as CUDA graphs, over all passes: at 1.5 ms for ten of them and a few KiB
#: a kernel, more would cost more than they save. Later passes are issued kernel by kernel.
MOST_RECORDED_LAYERS = 1 << 14
#: What cuBLAS keeps for a stream of a Hopper GPU (torch, CUBLAS_WORKSPACE_CONFIG); others less.
_CUBLAS_BYTES = 32 << 20
#: Bytes for each weight while a GPU's `torch.dequant_linear` unpacks it, before it multiplies: the
#: codes of a byte each, their copies and the bf16 result (`_kernel_layouts`).
_UNPACKING = {"int8": 2, "int4": 4, "int3": 4}
#: Codes that a row of a weight is padded by at most where words hold ten of them.
_WORD_PADDING = 9
#: Bytes for each element of a slice while it is packed (``measured``: what tensors of `pack` hold).
_PACKING = {16: 8, 8: 16, 4: 24, 3: 24}
#: What torch's allocator on a GPU may leave free between a pass's tensors, of what they hold: best
#: fit in a growing segment stays below it but for 100 MiB, in 99 % of simulated passes
#: (`tests/planner/serving/test_workspace.py`).
_BETWEEN = 1 / 3


class StageWorkspace:
    """See the module.

    Args:
        model: the model, or what one of a stage's devices holds of it.
        workload: batch, lengths and the cache's bits.
        sizes: of the micro-batches.
        kind: ``cpu`` or ``cuda``.
        kernels: variants as in a decision; whatever is missing may be any that there is.
        degree: devices that share the stage.
        compute_capability: of a GPU, ``None`` = unknown: some keep no weight in bf16 of an input of
            tens of rows.
    """

    def __init__(
        self, model: Model, workload: ServingWorkload, sizes: MicroBatches, kind: str,
        kernels: Mapping[str, Variant] | None = None, *, degree: int = 1,
        compute_capability: str | None = None,
    ) -> None:  # fmt: skip
        self._model, self._workload, self._sizes, self._kind = model, workload, sizes, kind
        self._kernels = kernels or {}
        self._shared, self._compute_capability = degree > 1, compute_capability
        # Maps of rows are one launch each there, without tensors in between.
        self._maps_at_once = kind == "cuda" and takes_rows(compute_capability)
        prompt, new = workload.prompt_tokens, workload.new_tokens
        self._kinds = layer_kinds(model, prompt + new)
        self._passes = (
            StagePass(PREFILL, sizes.prefill, prompt, prompt),
            StagePass(DECODE, sizes.decode, 1, prompt + new),
        )

    def stage_bytes(self, start: int, end: int, bits: Sequence[int], cache_bytes: int = 0) -> int:
        """Most that tensors of the stage of layers ``[start, end)`` with these bits hold.

        Args:
            start: first layer.
            end: one past the last.
            bits: of each.
            cache_bytes: of the stage's cache, which is not there yet while weights are packed.
        """
        if self._kind == "cpu":
            return heap_bytes(self._model, self._workload, self._sizes)
        first, last = start == 0, end == self._model.layers
        every = zip(self._kinds[start:end], bits, strict=True)
        layers = {(of, b, i == 0 and not first) for i, (of, b) in enumerate(every)}
        fullest = max(self.moments(layers, last=last).values())
        messages = self.message_bytes * (int(not first) + int(not last))
        passing = int(self._lasting_bytes(np.array(end - start))) + fullest
        return messages + max(passing, self._loading_bytes(bits) - cache_bytes)

    def room_bytes(self, of: LayerKind, bits: int, cache_bytes: int) -> IntArray:
        """What the search leaves for a stage for having a layer of this kind at these bits.

        A stage needs the most over its layers: its `stage_bytes`, on a GPU with what torch's
        allocator leaves free between tensors, and as if its first layer kept its input.

        Args:
            of: kind of the layer.
            bits: of it.
            cache_bytes: of a layer's cache.

        Returns:
            ``[4, L]`` by place (0 between others, 1 first, 2 last, 3 alone) and number of layers
            less one, as in ``ChainProblem.workspace_bytes``.
        """
        layers = self._model.layers
        if self._kind == "cpu":
            heap = heap_bytes(self._model, self._workload, self._sizes)
            return np.full((4, layers), heap, dtype=np.int64)
        count = np.arange(1, layers + 1)
        loading = self._loading_bytes((bits,)) - cache_bytes * count
        moments = self.moments({(of, bits, False)}, last=True)
        with_head = max(moments.values())
        without = max(held for name, held in moments.items() if name != "head")
        found = np.empty((4, layers), dtype=np.int64)
        for place, fullest in enumerate((without, without, with_head, with_head)):
            passing = self._lasting_bytes(count) + fullest + round(_BETWEEN * fullest)
            messages = self.message_bytes * (2, 1, 1, 0)[place]
            found[place] = messages + np.maximum(passing, loading)
        return found

    @property
    def message_bytes(self) -> int:
        """Hidden states of every token of a batch: what a stage receives, or what it sends.

        0 of a processor, whose `heap_bytes` count them once wherever a stage lies.
        """
        w = self._workload
        if self._kind == "cpu":
            return 0
        return 2 * w.batch * (w.prompt_tokens + 1) * self._model.hidden

    def moments(self, layers: set[tuple[LayerKind, int, bool]], *, last: bool) -> dict[str, int]:
        """A GPU's temporary bytes at each moment, the most over phases and layers.

        Args:
            layers: kind and bits of each layer, and whether it is the first of a stage that
                receives: what it takes is a message's buffer, which lasts anyway.
            last: the stage has the head.
        """
        found: dict[str, int] = {}
        for now, (of, bits, entry) in product(self._passes, layers):
            for name, held in self._layer(now, of, bits, entry=entry):
                found[name] = max(found.get(name, 0), held)
        if last:
            found["head"] = max(map(self._head, self._passes))
        return found

    # One layer ----------------------------------------------------------------------------------

    def _layer(
        self, now: StagePass, of: LayerKind, bits: int, *, entry: bool
    ) -> Iterator[tuple[str, int]]:
        """Moments of a layer, in order, with the residual stream that it keeps.

        Who calls a layer keeps its input until it has the output, behind the attention too; a shard
        of a layer keeps its last part of a sum instead.
        """
        stream = 2 * now.rows * self._model.hidden
        before = 0 if entry else stream * (2 if self._shared else 1)
        behind = stream * (1 if entry and not self._shared else 2)
        if self._shared and self._model.parallel:  # and its input, which the MLP takes
            behind += stream
        for name, held in self._attention(now, bits, of.window):
            yield name, before + held
        yield "add", behind + 2 * stream
        if self._model.norms_behind:
            # The MLP's, which holds as much as its addition and what a norm keeps.
            yield "norm behind", behind + stream + self._norm(now.rows)
        mlp = self._experts if of.mlp == "moe" else self._mlp
        for name, held in mlp(now, bits):
            yield name, behind + held

    def _attention(
        self, now: StagePass, bits: int, window: int | None
    ) -> Iterator[tuple[str, int]]:
        model, rows = self._model, now.rows
        if model.latent is not None:
            attend = self._kernels.get(f"{now.phase}/attention")
            products = [self._linear(now, s, bits) for s in model.attention_linears]
            yield from latent_moments(
                model, model.latent, now, products,
                (self._norm(rows), self._entry(rows)),
                casts=attend is None or attend.compute == "fp32",
            )  # fmt: skip
            return
        qkv, out = model.attention_linears
        q, k = (2 * rows * heads * model.head_dim for heads in (model.heads, model.kv_heads))
        yield "norm", self._norm(rows)
        yield "qkv", self._entry(rows) + self._linear(now, qkv, bits)
        # From here on the projection is kept, because the values are a view of it.
        fused, turned = q + 2 * k, 0
        if model.qk_norm:
            turned = q + k
            copied = turned if model.qk_norm_whole else 0
            yield "head norms", fused + copied + turned
        if model.position == "rope":
            # The turned halves, two products and their sum (`_rope`); of both at once, or in turn.
            made = turned + max(4 * q, q + 4 * k) if turned else 4 * (q + k)
            if self._maps_at_once and model.head_dim % 16 == 0:
                made = turned + q + k
            yield "rotation", fused + made
            turned = q + k
        kept = fused + turned
        yield "cache", kept + self._cache_write(now)
        yield "attention", kept + self._attend(now, window)
        yield "out", kept + q + self._linear(now, out, bits)

    def _mlp(self, now: StagePass, bits: int, prefix: str = "") -> Iterator[tuple[str, int]]:
        model, rows = self._model, now.rows
        shapes = {shape.name: shape for shape in model.every_linear}
        up, down = shapes[f"{prefix}up"], shapes[f"{prefix}down"]
        wide, inner = 2 * rows * up.n, 2 * rows * down.k
        yield f"{prefix}up", self._entry(rows) + self._linear(now, up, bits)
        # A gated MLP computes the gate's activation and then the product, and its halves are kept.
        between = model.gated and not (self._maps_at_once and down.k % 8 == 0)
        yield f"{prefix}activation", wide + (2 if between else 1) * inner
        kept = wide if model.gated else 0
        yield f"{prefix}down", kept + inner + self._linear(now, down, bits)

    def _experts(self, now: StagePass, bits: int) -> Iterator[tuple[str, int]]:
        model, key = self._model, f"{now.phase}/linear/{bits}"
        experts = model.experts
        assert experts is not None  # only such models have layers of this class
        products = max(
            self._linear(now, shape, bits) - 2 * now.rows * shape.n
            for shape in model.expert_linears
        )
        variants = self._variants(key, STORAGE[bits])
        yield "experts", expert_bytes(model, experts, now.rows, products, variants)
        if experts.shared_ffn:
            for name, held in self._mlp(now, bits, "shared_"):
                yield name, 4 * now.rows * model.hidden + held

    # Kernels ------------------------------------------------------------------------------------

    def _linear(self, now: StagePass, shape: LinearShape, bits: int) -> int:
        return max(
            self._product(variant, now.rows, shape.n, shape.k)
            for variant in self._variants(f"{now.phase}/linear/{bits}", STORAGE[bits])
        )

    def _variants(self, key: str, storages: Sequence[str]) -> list[Variant]:
        if key in self._kernels:
            return [self._kernels[key]]
        op = key.split("/")[1].replace("head", "linear")
        return [v for v in kernels_for(op, self._kind) if v.storage in storages]

    def _product(self, variant: Variant, rows: int, n: int, k: int) -> int:
        """Most that a linear holds beside its input, the output included."""
        out = 2 * rows * n
        if variant.kernel == "foreplan.fragment_linear":
            return out + (2 * n * k if writes_weight(rows, self._compute_capability) else 0)
        if variant.kernel == "torch.dequant_linear":
            whole = n * -(-k // GROUP_SIZE["int4"]) * GROUP_SIZE["int4"]
            unpacking = _UNPACKING[variant.storage] * whole + _WORD_PADDING * n
            return max(unpacking, 2 * whole + out)
        if variant.kernel == "torch.scaled_mm":  # x in fp8
            return rows * k + out
        return out

    def _attend(self, now: StagePass, window: int | None) -> int:
        cache = (CACHE_STORAGE[self._workload.cache_bits],)
        variants = self._variants(f"{now.phase}/attention", cache)
        return window_bytes(
            self._model, now.batch, now.tokens, now.keys, window,
            lambda q, k: max(self._attend_by(v, replace(now, tokens=q, keys=k)) for v in variants),
        )  # fmt: skip

    def _attend_by(self, variant: Variant, now: StagePass) -> int:
        """Output and sums of exponentials; keys and values where they are cast or unpacked."""
        model = self._model
        sizes = (now.batch, model.heads, model.kv_heads, model.head_dim, now.keys)
        if self._kind == "cuda" and attends_at_once(
            now.tokens, model.head_dim, variant.compute, self._compute_capability
        ):
            return 2 * now.rows * model.heads * model.head_dim + token_sums_bytes(*sizes)
        width = 4 if variant.compute == "fp32" else 2
        queries = now.rows * model.heads * model.head_dim
        each = width * now.batch * now.keys * model.kv_heads * model.head_dim
        casts = width * queries * 2 if width == 4 else 0
        # One query of a head is computed twice on a processor (`_attention`).
        made = 2 * queries * (2 if now.tokens == 1 else 1) + 4 * now.rows * model.heads + casts
        made += scored_bytes(model, self._kind, width, now.batch, now.tokens, now.keys)
        if variant.storage == "int8":  # keys, values, and the codes on their way
            return max(3 * each, 2 * each + made)
        return made + (2 * each if width == 4 else 0)

    def _cache_write(self, now: StagePass) -> int:
        """New keys are quantised in fp32: themselves and their codes, with a scale a head."""
        if self._workload.cache_bits == 16 or self._maps_at_once:
            return 0
        return 8 * now.rows * self._model.kv_heads * (self._model.head_dim + 2)

    def _norm(self, rows: int) -> int:
        """Output, mean and deviation."""
        return 2 * rows * self._model.hidden + 8 * rows

    def _entry(self, rows: int) -> int:
        """What attention and MLP take beside the residual stream: its norm, where there is one."""
        return 2 * rows * self._model.hidden if self._model.norms_before else 0

    def _head(self, now: StagePass) -> int:
        """Logits of each request's last token, the residual stream of all of them behind it."""
        model, rows = self._model, now.batch
        product_bytes = max(
            self._product(variant, rows, model.vocab, model.hidden)
            for variant in self._variants(f"{now.phase}/head", STORAGE[16])
        )
        return 2 * now.rows * model.hidden + 2 * self._norm(rows) + product_bytes

    # What lasts ---------------------------------------------------------------------------------

    def _lasting_bytes(self, layers: IntArray) -> IntArray:
        """Tokens and the last logits, and what libraries keep, by number of layers."""
        model, w, sizes = self._model, self._workload, self._sizes
        tokens = 8 * w.batch * (w.prompt_tokens + 2 * w.new_tokens + 3)
        logits = 2 * max(sizes.prefill, sizes.decode) * model.vocab
        passes = w.batch // sizes.prefill + (w.new_tokens - 1) * (w.batch // sizes.decode)
        # Passes that are recorded have a stream of their own.
        streams = np.where(passes * layers > MOST_RECORDED_LAYERS, 2, 1)
        return np.asarray(tokens + logits + _CUBLAS_BYTES * streams)

    def _loading_bytes(self, bits: Sequence[int]) -> int:
        """Most that packing the last slice of a weight takes."""
        slices = (min(s.n, slice_rows(s.k, "cuda")) * s.k for s in self._model.every_linear)
        return max(_PACKING[b] for b in bits) * max(slices)
