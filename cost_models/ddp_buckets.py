"""Gradient buckets of `DistributedDataParallel`: which gradients one all-reduce carries.

Gradients become ready from the last parameter to the first, and DDP fills buckets in that order: a
small first one, so that communication starts early, then larger ones, each closed as soon as it
holds at least its limit (Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3; limits from
``torch.nn.parallel.DistributedDataParallel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.errors import SpecError

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
GRADIENT_BYTES = 4


def ddp_buckets(
    parameters: Mapping[str, int],
    *,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[tuple[str, ...], ...]:
    """Buckets in the order in which they are launched; torch's own rule, called.

    Args:
        parameters: number of elements by name, in the order of registration; fp32 gradients.
        first_bucket_bytes: limit of the bucket launched first.
        bucket_bytes: limit of the others.

    Returns:
        Names of the parameters of each bucket.

    Raises:
        SpecError: no parameters.
    """
    if not parameters:
        raise SpecError("parameters", got={}, expected="at least one that is trained")
    import torch
    import torch.distributed as dist

    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    names = list(parameters)[::-1]
    tensors = [torch.empty(1).expand(parameters[name]) for name in names]
    indices, _ = assign(tensors, [first_bucket_bytes, bucket_bytes])
    return tuple(tuple(names[i] for i in bucket) for bucket in indices)
