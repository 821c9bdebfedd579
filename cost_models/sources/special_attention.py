"""`special_attention_parts`: attention that is not plain as operators that a predictor has seen.

With a learned score a head in its softmax (``sink_attention``), with scores that are capped
(``capped_attention``) and over latents: the products that it does, and what goes over their results
besides.
"""

from __future__ import annotations

from dataclasses import replace

from foreplan.cost_models.sources.expert_parts import Shares
from foreplan.cost_models.unpacking import reads_as_it_is
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.registry import SCORED_ROWS
from foreplan.datasets.operator_bytes import visible_pairs
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program, Variant, program

#: Small kernels by which a GPU makes the mask of a block: positions of queries and keys, two
#: comparisons, what both say, and its opposite (``theory``: `_attention_mask.seen_keys`).
_MASK_KERNELS = 6.0
#: Maps in fp32 by which sinks enter a softmax that products compute: a cast, two readings for the
#: logarithm of sums, a difference, exponentials and a cast back (``theory``: `_by_products`).
_SINK_MAPS = 6.0
#: Kernels over strides in plain ones (``measured`` on an H200: 0.35e-9 s of one multiprocessor an
#: element, `replayed_kernels`, where a plain map of 4 million takes 3 us).
_STRIDED = 3.0


def special_attention_parts(item: Program, figures: Device) -> Shares | None:
    """The parts of attention with sinks, with capped scores or over latents, and of its heads.

    Args:
        item: any program.
        figures: of the device.

    Returns:
        ``None`` of all else, and where one kernel attends to latents.
    """
    if item.op in ATTENTIONS - {"attention"} and reads_as_it_is(item, figures):
        # One launch knows sinks and caps, which its time does not show.
        plain = "torch.sdpa" if item.variant.storage == "bf16" else "torch.dequant_sdpa"
        return [(program("attention", replace(item.variant, kernel=plain), **item.dims), 1.0)]
    masked = 1 < item.dims.get("queries", 0) < item.dims.get("keys", 0)
    if item.op == "sink_attention" and not (masked and figures.kind == "cuda"):
        return _sink_attention(item, figures.kind)
    if item.op in ("sink_attention", "capped_attention"):  # products compute masked sinks, too
        return _capped_attention(item, figures.kind)
    if item.op == "latent_attention":
        return _latent_attention(item)
    return _expanded_heads(item) if item.op == "expand_heads" else None


def _sink_attention(item: Program, kind: str) -> Shares:
    """Plain attention, whose results are scaled.

    On a GPU a kernel over strides does that, behind three small ones that say how much of each
    query's softmax is not the sink's.
    """
    d, v = item.dims, item.variant
    plain = replace(v, kernel=v.kernel.replace("sink_", ""))
    size = {"rows": d["batch"] * d["queries"] * d["heads"], "cols": d["head_dim"]}
    scaled = program("elementwise", replace(v, kernel="any"), **size, inputs=1)
    found = [(program("attention", plain, **d), 1.0), (scaled, 1.0)]
    if kind != "cpu":
        left = program(
            "elementwise", Variant("fp32", "fp32", "any"), rows=size["rows"], cols=1, inputs=2
        )
        found = [found[0], (scaled, _STRIDED), (left, 3.0)]
    return found


def _capped_attention(item: Program, kind: str) -> Shares:
    """Scores, their cap in three maps and a mask, softmax and sum, block by block of queries.

    Sinks take maps in fp32 besides.

    A processor is priced by the keys that are seen. A GPU computes every score of its large blocks,
    and copies besides: queries and results between tokens and heads, and shares from fp32.
    """
    d, v = item.dims, Variant(item.variant.compute, item.variant.compute, "any")
    gpu = kind != "cpu"
    pairs = (
        _computed_pairs(d["queries"], d["keys"], SCORED_ROWS["cuda"]) if gpu else visible_pairs(d)
    )
    seen = max(1, round(pairs / d["queries"]))
    size = {"batch": d["batch"] * d["kv_heads"], "m": d["queries"] * d["heads"] // d["kv_heads"]}
    scores = {"rows": d["batch"] * d["heads"] * d["queries"], "cols": seen}
    capped = program("elementwise", v, **scores, inputs=1)
    by_keys, by_values = (replace(v, kernel=f"torch.{name}") for name in ("linear", "bmm"))
    of_scores = program("matmul", by_keys, **size, n=seen, k=d["head_dim"])
    of_values = program("matmul", by_values, **size, n=d["head_dim"], k=seen)
    found = [
        (of_scores, 1.0), (capped, 3.0 if d["queries"] == 1 else 4.0),
        (program("softmax", v, **scores), 1.0), (of_values, 1.0),
    ]  # fmt: skip
    if item.op == "sink_attention":
        full = replace(v, storage="fp32", compute="fp32")
        found.append((program("elementwise", full, **scores, inputs=1), _SINK_MAPS))
    if gpu:
        found += _copies_of_a_gpu(item, v, capped, seen)
    if item.variant.storage != v.storage:  # the cache is cast, or read from its codes and scales
        rows = 2 * d["batch"] * d["kv_heads"] * d["keys"]
        read = program("elementwise", v, rows=rows, cols=d["head_dim"], inputs=1)
        found.append((read, 1.0 if item.variant.storage == "bf16" else 3.0))
    return found


def _copies_of_a_gpu(item: Program, plain: Variant, capped: Program, seen: int) -> Shares:
    """What a GPU does beside products, cap and softmax.

    Kernels over strides count for `_STRIDED` plain ones: queries and results that change places
    between tokens and heads, and the mask, which heads and sequences share.
    """
    d, few = item.dims, item.dims["queries"] == 1
    rows = {"rows": d["batch"] * d["heads"] * d["queries"], "cols": d["head_dim"]}
    found = [(program("elementwise", plain, **rows, inputs=1), 1.0 if few else 2.0 * _STRIDED)]
    if plain.compute == "bf16":  # shares come in fp32
        found.append((capped, 1.0 if few else 1.5))
    if not few:
        mask = program("elementwise", plain, rows=d["queries"], cols=seen, inputs=1)
        found += [(capped, _STRIDED - 1.0), (mask, _MASK_KERNELS)]
    return found


def _computed_pairs(queries: int, keys: int, block: int) -> float:
    """Pairs of query and key whose scores are computed, a block of queries at a time."""
    starts = range(0, queries, block)
    ends = [min(start + block, queries) for start in starts]
    pairs = [
        (end - start) * (keys - queries + end) for start, end in zip(starts, ends, strict=True)
    ]
    return float(sum(pairs))


def _latent_attention(item: Program) -> Shares | None:
    """Scores, softmax and sum of an attention over latents; ``None`` where one kernel does it."""
    d, v = item.dims, item.variant
    if not v.kernel.endswith("_bmm"):
        return None
    width, product = d["latent"] + d["turned"], replace(v, kernel="torch.bmm")
    rows = d["batch"] * d["heads"]
    size = {"batch": d["batch"], "m": d["heads"]}
    scores = program("matmul", replace(v, kernel="torch.linear"), **size, n=d["keys"], k=width)
    plain = replace(v, kernel="any")
    return [
        # Queries are put together and scaled.
        (program("elementwise", plain, rows=rows, cols=width, inputs=1), 2.0),
        (scores, 1.0),
        (program("softmax", v, rows=rows, cols=d["keys"]), 1.0),
        (program("matmul", product, **size, n=d["latent"], k=d["keys"]), 1.0),
    ]


def _expanded_heads(item: Program) -> Shares:
    """Copies of keys and values, and of queries and keys that are turned."""
    d = item.dims
    size = {"rows": d["rows"], "cols": d["heads"] * (d["plain"] + d["turned"])}
    copied = program("elementwise", replace(item.variant, kernel="any"), **size, inputs=1)
    return [(copied, 2.0 + d["turned"] / (d["plain"] + d["turned"]))]
