"""What an attention over latents holds beside weights, cache and tables; see `StageWorkspace`.

The tensors are those of `planner/verify/_latent_layer.py`, in bf16 where nothing else is said.
Legend as there: rows = requests x tokens of a pass, H = heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.model import Model
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.planner.serving.stage_pass import StagePass


def latent_moments(
    model: Model, latent: LatentAttention, now: StagePass, products: Sequence[int],
    norms: tuple[int, int], *, casts: bool,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """A GPU's moments of the attention, in order, without the residual stream.

    Args:
        model: the model.
        latent: its attention.
        now: the pass.
        products: most that each of its linears holds, results included.
        norms: what the layer's norm holds while it runs, and its result.
        casts: attention is computed in fp32.
    """
    norm, entry = norms
    latents, queries, out = products
    kept, wide = _kept(model, latent, now), 2 * now.rows * model.attention_linears[0].n
    yield "norm", norm
    yield "latents", entry + latents
    yield "queries", entry + 2 * wide + queries  # whose latent is normed
    for name, held in _beside(model, latent, now, casts=casts):
        yield name, kept + held
    yield "out", kept + 2 * now.rows * model.heads * latent.value + out


def heap_of_latents(
    model: Model, latent: LatentAttention, workload: ServingWorkload, sizes: MicroBatches
) -> int:
    """The most of a pass's attention, everything added up, as a processor's heap keeps it.

    Args:
        model: the model.
        latent: its attention.
        workload: batch and lengths.
        sizes: of the micro-batches.
    """
    prompt, new = workload.prompt_tokens, workload.new_tokens
    passes = (
        StagePass(PREFILL, sizes.prefill, prompt, prompt),
        StagePass(DECODE, sizes.decode, 1, prompt + new),
    )
    return max(
        _kept(model, latent, now) + sum(held for _, held in _beside(model, latent, now, casts=True))
        for now in passes
    )


def _kept(model: Model, latent: LatentAttention, now: StagePass) -> int:
    """What is there when attention begins: the latents' product, queries, turned parts."""
    row = latent.cached + (latent.query_rank or 0) + latent.cached
    return 2 * now.rows * (row + model.heads * (latent.width + latent.turned))


def _beside(
    model: Model, latent: LatentAttention, now: StagePass, *, casts: bool
) -> Iterator[tuple[str, int]]:
    """Moments behind the projections, by what is held beside what is kept.

    The rotation of queries makes turned halves, two products and their sum. Expanded, every head's
    products, keys, values and results lie side by side, with fp32 copies where a kernel casts;
    absorbed, queries and results in the latent's features, scores with their softmax in fp32, and
    the cache where it is cast.
    """
    rows, heads = now.rows, model.heads
    yield "rotation", 2 * rows * 4 * heads * latent.turned
    if now.tokens > 1:
        made = latent.plain + latent.value + 2 * latent.width
        yield "expand", 2 * rows * heads * made
        cast = 16 * latent.width if casts else 0
        yield "attention", rows * heads * (2 * made + 4 * latent.width + cast)
        return
    yield "absorb", 2 * rows * heads * (latent.plain + latent.rank)
    queries = 4 * rows * heads * (latent.cached + latent.rank)
    scores = (2 + 4 + 2) * rows * heads * now.keys
    cast = 4 * latent.cached * (now.batch * now.keys + 2 * rows * heads) if casts else 0
    yield "attention", queries + scores + cast
    yield "restore", 2 * rows * heads * (latent.rank + 2 * latent.value)
