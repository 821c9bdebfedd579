"""Weights are packed slice by slice, so that a large one never stands in fp32 as a whole."""

from __future__ import annotations

import pytest
import torch

from foreplan.datasets.kernels import registry
from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.weights import RandomWeights
from foreplan.planner.verify import _decoder_layer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("n", [64, 192, 208])
def test_packing_in_slices_gives_the_same_bytes(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny-llama-random").model_copy(update={"vocab": n, "hidden": 128})
    weights = RandomWeights(model)
    weight = weights.tensor("head", "head.weight").float()
    monkeypatch.setattr(_decoder_layer, "slice_rows", lambda *_: 64)
    for variant in kernels_for("linear", "cpu", n=n, k=128):
        kernel = registry.linear_kernel(variant, "cpu")
        whole = kernel.pack(weight)
        where = ("head", "head.weight", torch.device("cpu"))
        sliced = _decoder_layer.pack(kernel, weights, *where)
        assert (sliced.layout, sliced.n, sliced.k) == (whole.layout, n, 128)
        assert sliced.tensors.keys() == whole.tensors.keys()
        for role, tensor in whole.tensors.items():
            assert torch.equal(sliced.tensors[role], tensor), variant
