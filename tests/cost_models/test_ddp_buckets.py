"""DDP buckets against the sizes that QSync's released code lists for public architectures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models import ddp_buckets as ddp_buckets_of
from foreplan.cost_models.ddp_buckets import ddp_buckets
from foreplan.errors import SpecError

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def resnet50() -> Shapes:
    """Parameters in torchvision's order (He et al., 2016, table 1)."""

    def convolution(name: str, out: int, source: int, kernel: int) -> Shapes:
        yield f"{name}.weight", (out, source, kernel, kernel)

    def norm(name: str, width: int) -> Shapes:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)

    yield from convolution("conv1", 64, 3, 7)
    yield from norm("bn1", 64)
    source = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for i, (out, inner, kernel) in enumerate(
                ((width, source, 1), (width, width, 3), (4 * width, width, 1)), start=1
            ):
                yield from convolution(f"{name}.conv{i}", out, inner, kernel)
                yield from norm(f"{name}.bn{i}", out)
            if block == 0:
                yield from convolution(f"{name}.downsample.0", 4 * width, source, 1)
                yield from norm(f"{name}.downsample.1", 4 * width)
            source = 4 * width
    yield "fc.weight", (1000, 2048)
    yield "fc.bias", (1000,)


def vgg16() -> Shapes:
    """Configuration D (Simonyan & Zisserman, 2015, table 1)."""
    source = 3
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    for i, width in enumerate(widths):
        yield f"features.{i}.weight", (width, source, 3, 3)
        yield f"features.{i}.bias", (width,)
        source = width
    for i, (out, inner) in enumerate(((4096, 512 * 49), (4096, 4096), (1000, 4096))):
        yield f"classifier.{i}.weight", (out, inner)
        yield f"classifier.{i}.bias", (out,)


def bert_base() -> Shapes:
    """BERT-base with a span head and no pooler (Devlin et al., 2019), in transformers' order."""

    def linear(name: str, out: int, source: int) -> Shapes:
        yield f"{name}.weight", (out, source)
        yield f"{name}.bias", (out,)

    def norm(name: str) -> Shapes:
        yield f"{name}.weight", (768,)
        yield f"{name}.bias", (768,)

    for name, rows in (("word", 30522), ("position", 512), ("type", 2)):
        yield f"embeddings.{name}", (rows, 768)
    yield from norm("embeddings.norm")
    for layer in range(12):
        for name in ("query", "key", "value", "out"):
            yield from linear(f"{layer}.{name}", 768, 768)
        yield from norm(f"{layer}.norm1")
        yield from linear(f"{layer}.up", 3072, 768)
        yield from linear(f"{layer}.down", 768, 3072)
        yield from norm(f"{layer}.norm2")
    yield from linear("qa", 2, 768)


@pytest.mark.parametrize(
    ("network", "key"),
    [
        (resnet50, "resnet50 (torchvision parameter order)"),
        (vgg16, "vgg16"),
        (bert_base, "bert-base-qa"),
    ],
)
def test_buckets_of_public_networks(network: object, key: str) -> None:
    folder = os.environ.get("FOREPLAN_DATA")
    if folder is None:
        pytest.skip("FOREPLAN_DATA is not set: no published bucket sizes")
    published = json.loads((Path(folder) / "qsync_fixtures.json").read_text())
    parameters = {name: math.prod(shape) for name, shape in network()}  # type: ignore[operator]
    found = ddp_buckets(parameters)
    sizes = [sum(parameters[name] for name in bucket) for bucket in found]
    assert sizes == published["ddp_buckets_parameters"][key]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30), st.integers(4, 10**6))
def test_every_parameter_once_from_last_to_first(sizes: list[int], limit: int) -> None:
    parameters = {f"p{i}": size for i, size in enumerate(sizes)}
    found = ddp_buckets(parameters, first_bucket_bytes=limit, bucket_bytes=2 * limit)
    assert [name for bucket in found for name in bucket] == list(reversed(parameters))
    for q, bucket in enumerate(found[:-1]):
        size = 4 * sum(parameters[name] for name in bucket)
        most = limit if q == 0 else 2 * limit
        assert size >= most > size - 4 * parameters[bucket[-1]]


def test_limits_are_those_of_this_torch() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import distributed

    assert dist._DEFAULT_FIRST_BUCKET_BYTES == ddp_buckets_of.FIRST_BUCKET_BYTES
    # Before 2.13 torch gave the number no name.
    assert getattr(distributed, "_DEFAULT_BUCKET_CAP_MB", 25) << 20 == ddp_buckets_of.BUCKET_BYTES
    assert torch.float32.itemsize == ddp_buckets_of.GRADIENT_BYTES


def test_nothing_to_train() -> None:
    with pytest.raises(SpecError, match="at least one"):
        ddp_buckets({})
