"""`heap_bytes`: the most that a stage on a processor holds beside weights, cache and tables.

A processor's heap keeps the holes that freed tensors leave, so that everything is added up, where a
GPU's fullest moment counts (`StageWorkspace`).
"""

from __future__ import annotations

from foreplan.datasets.experts import computed_sizes
from foreplan.datasets.models.model import Model
from foreplan.planner.serving.expert_workspace import routing_bytes
from foreplan.planner.serving.latent_workspace import heap_of_latents
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.planner.serving.window_workspace import heap_of_calls

#: What oneDNN keeps for a product of one shape (``measured``, see `padded_rows`).
_PREPARED_BYTES = 1_200_000


def heap_bytes(model: Model, workload: ServingWorkload, sizes: MicroBatches) -> int:
    """Temporary tensors of a processor's largest pass and the buffers between stages, added up.

    Per row in bf16: the residual stream and its norm, and the wider of attention (qkv twice,
    because the rotation copies, and the output) and MLP (up; gated: the activation and the product
    too), and the input and the output of a linear in fp32. Besides: a hidden state for every token
    in flight, the logits, and the largest linear once in fp32. Of a mixture, one expert may get
    every row: then its rows are gathered, go through up, activation, product and down, and are
    added up, weighted, in fp32; besides come `routing_bytes`, and the library keeps a kernel for
    every number of rows that an expert computes. A quantised cache is read into fp32 before
    attention, one layer at a time, and new keys and values are quantised in fp32.

    Args:
        model: the model.
        workload: batch and lengths.
        sizes: of the micro-batches.
    """
    rows = max(sizes.prefill * workload.prompt_tokens, sizes.decode)
    linears, classes = model.every_linear, set(model.layer_classes)
    inner = 2 * model.attention_linears[0].n + model.heads * model.head_dim
    attention = inner if model.latent is None else 0
    mlp, routing, experts = 0, 0, model.experts
    if "dense" in classes:
        mlp = (4 if model.gated else 2) * model.ffn
    if experts is not None:
        mlp = max(mlp, 6 * model.hidden + 4 * experts.ffn, model.hidden + 4 * experts.shared_ffn)
        routing = routing_bytes(experts)
    per_row = 2 * (3 * model.hidden + max(attention, mlp)) + routing
    per_row += 4 * max(linear.n + linear.k for linear in linears)
    in_flight = 2 * workload.batch * (workload.prompt_tokens + 1) * model.hidden
    logits = 2 * max(sizes.prefill, sizes.decode) * model.vocab
    unpacked = 4 * max(linear.n * linear.k for linear in linears)
    if model.latent is not None:
        unpacked += heap_of_latents(model, model.latent, workload, sizes)
    if experts is not None:
        passes = (sizes.prefill * workload.prompt_tokens, sizes.decode)
        each = sum(computed_sizes(n, experts.count, experts.active) for n in passes)
        unpacked += len(model.expert_linears) * each * _PREPARED_BYTES
    if workload.cache_bits < 16:
        unpacked += _cache_bytes(model, workload, sizes)
    unpacked += heap_of_calls(model, workload, sizes)
    return rows * per_row + in_flight + logits + unpacked


def _cache_bytes(model: Model, workload: ServingWorkload, sizes: MicroBatches) -> int:
    """What reading a layer's quantised cache takes, or quantising a prompt where that is more.

    Three tensors at a time: keys, values and the codes on their way (see `QuantisedCache`).
    """
    positions = workload.prompt_tokens + workload.new_tokens
    most = max(sizes.decode * positions, sizes.prefill * workload.prompt_tokens)
    return 3 * model.kv_heads * model.head_dim * 4 * most
