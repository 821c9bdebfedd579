"""Bytes of a bubble plan: what is kept from forward to backward, and what stands throughout.

Activations (Korthikanti et al. 2022, "Reducing activation recomputation", section 4), per token of
a layer of width ``h`` with ``a`` heads over ``s`` positions, over ``t`` devices with sequence
parallelism: ``(34 h + 5 a s) / t`` bytes with everything kept, ``34 h / t`` without the inside of
attention (*selective*), ``2 h / t`` with layer inputs alone (*full*); here term by term, so that
other MLP widths, gates and grouped heads count as they are.

Model states a parameter: 2 bytes (bf16) for weights, 4 (fp32) for gradients, 12 for the optimizer's
fp32 copy and moments, which a sharded optimizer spreads over all replicas. The first two are the
k = 6 of Optimus' overhead formula.
"""

from __future__ import annotations

from foreplan.planner.bubbles.towers import Tower

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12


def half_activation_bytes(
    tower: Tower, half: int, *, rows: int, tokens: int, tp: int, recompute: str,
    element_bytes: int = 2,
) -> int:  # fmt: skip
    """What an attention block (even ``half``) or MLP block (odd) keeps of one micro-batch.

    Args:
        tower: sizes.
        half: number of the half layer.
        rows: tokens of the micro-batch.
        tokens: positions of a sequence.
        tp: devices that share it.
        recompute: ``none``, ``selective`` or ``full``.
        element_bytes: of an activation; the published terms are for 2.

    Returns:
        Bytes on one device. With ``full`` the input of the layer counts in its first half.
    """
    h, attention = tower.hidden, half % 2 == 0
    if recompute == "full":
        per_token = 2 * h if attention else 0
    elif attention:
        inner, keys = tower.heads * tower.head_dim, tower.kv_heads * tower.head_dim
        per_token = 2 * h + 2 * h + 2 * (inner + 2 * keys) + 2 * inner + h
        if recompute == "none":
            per_token += 5 * tower.heads * tokens
    else:
        inside = (3 if tower.gated else 2) * tower.ffn
        per_token = 2 * h + 2 * h + 2 * inside + h
    return rows * per_token * element_bytes // (2 * tp)


def stage_activation_bytes(
    tower: Tower, start: int, end: int, *, rows: int, tokens: int, tp: int, recompute: str,
    element_bytes: int = 2,
) -> int:  # fmt: skip
    """What layers ``[start, end)`` keep of one micro-batch; the last stage its logits in fp32."""
    layer = sum(
        half_activation_bytes(
            tower,
            half,
            rows=rows,
            tokens=tokens,
            tp=tp,
            recompute=recompute,
            element_bytes=element_bytes,
        )
        for half in (0, 1)
    )
    logits = 4 * rows * tower.vocab // tp if end == tower.layers else 0
    return (end - start) * layer + logits


def unit_activation_bytes(
    tower: Tower, begin: int, end: int, *, rows: int, tokens: int, tp: int, recompute: bool,
    element_bytes: int = 2,
) -> int:  # fmt: skip
    """What halves ``[begin, end)`` of an encoder keep; with ``recompute`` their input alone."""
    if recompute:
        return element_bytes * rows * tower.hidden // tp
    return sum(
        half_activation_bytes(
            tower,
            half,
            rows=rows,
            tokens=tokens,
            tp=tp,
            recompute="selective",
            element_bytes=element_bytes,
        )
        for half in range(begin, end)
    )


def state_bytes(
    parameters: int, *, replicas: int, sharded: bool, frozen: bool = False,
    weight_bytes: int = WEIGHT_BYTES, optimizer_bytes: int = OPTIMIZER_BYTES,
) -> dict[str, int]:  # fmt: skip
    """Model states of the parameters of one device, by item.

    Args:
        parameters: on the device.
        replicas: devices that hold the same parameters.
        sharded: they share the optimizer's states.
        frozen: weights alone.
        weight_bytes: of a parameter.
        optimizer_bytes: likewise; without bf16 weights there is no master copy.
    """
    if frozen:
        return {"weights": weight_bytes * parameters}
    return {
        "weights": weight_bytes * parameters,
        "gradients": GRADIENT_BYTES * parameters,
        "optimizer": optimizer_bytes * parameters // (replicas if sharded else 1),
    }


def colocation_overhead_bytes(
    parameters: int, *, encoder_replicas: int, backbone_replicas: int, devices: int
) -> float:
    """Weights and gradients a device holds for encoder replicas beyond the backbone's number.

    Source: Optimus (ATC 2025), section 4.2: ``k (DP_e - DP_l) Phi_e / n`` with ``k = 6``.
    """
    k = WEIGHT_BYTES + GRADIENT_BYTES
    return k * (encoder_replicas - backbone_replicas) * parameters / devices
