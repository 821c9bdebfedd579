"""Bags that can be differentiated twice are torch's own bags."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreplan.cost_models.quality.bag_of_rows import BagsOfRows
from foreplan.cost_models.quality.gradient_variance import Calibration, gradient_variance
from foreplan.datasets.kernels.training_variant import TRAINING_VARIANTS
from foreplan.errors import SpecError

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
WEIGHTS = torch.linspace(-1, 1, 12, dtype=torch.float64)
CALLS = {
    "square": (IDS.view(3, 4), {}),
    "starts": (IDS, {"offsets": torch.tensor([0, 5, 5, 7])}),
    "last": (IDS, {"offsets": torch.tensor([0, 5, 12]), "include_last_offset": True}),
    "padded": (IDS, {"offsets": torch.tensor([0, 1, 7]), "padding_idx": 3}),
    "padded from behind": (IDS.view(3, 4), {"padding_idx": -5}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_results_and_gradients_are_torchs(name: str, mode: str) -> None:
    ids, named = CALLS[name]
    if mode == "weighted":
        named = {**named, "mode": "sum", "per_sample_weights": WEIGHTS.view(ids.shape)}
    else:
        named = {**named, "mode": mode}

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.randn(
            10, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        ).requires_grad_()
        made = F.embedding_bag(ids, table, **named)
        return made.detach(), torch.autograd.grad(made.square().sum(), table)[0]

    theirs = run()
    with BagsOfRows():
        ours = run()
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their)


LINEAR = {text: v for text, v in TRAINING_VARIANTS.items() if text.endswith("torch.linear")}


def _calibration(first: nn.Module) -> Calibration:
    module = nn.Sequential(first, nn.Linear(6, 4))
    batches = [((IDS.view(3, 4),), torch.tensor([0, 1, 2]))]
    return Calibration(module, batches, F.cross_entropy, {"1": LINEAR})


def test_the_indicator_sees_through_a_bag() -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(10, 6, mode="sum")

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(bag.weight.detach().clone())

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, self.weight).sum(1)

    torch.manual_seed(1)
    found = gradient_variance(_calibration(bag))
    torch.manual_seed(1)
    assert found["1"] == pytest.approx(gradient_variance(_calibration(Rows()))["1"])


def test_an_operator_without_second_derivative_is_told() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(10, 6)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            parts = torch.tensor([1, 1, 1])
            return torch.segment_reduce(self.bag(ids), "sum", lengths=parts)

    with pytest.raises(SpecError, match=r"second derivative.*indicator=depth_weighted"):
        gradient_variance(_calibration(Opaque()))
