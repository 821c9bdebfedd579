"""Gradients that a lowered training step has, against those that autograd computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.cost_models.autograd_kernels import autograd, priced
from torch import Tensor, nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.passes.end_to_end_networks import IMAGE, NETWORKS, build, example
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program


class Patches(nn.Module):
    """A small vision transformer: patches, a class token, positions, attention, two products."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.zeros(1, 5, 16))
        self.norm = nn.LayerNorm(16)
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = self.head(x[:, 0])
        return out


class Gated(nn.Module):
    """Products with data: a table of positions without weights, a mask, a parameter on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(6, 8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.mixing = nn.Parameter(torch.rand(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid((x @ self.table.T).cumsum(-1) @ self.table)  # of data alone
        x = torch.matmul(self.mixing, gate)
        x = self.second(F.gelu(self.first(x))) * gate
        return torch.addmm(x[0], x[0] @ self.table.T, self.table)


def frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(8 * 36, 8), nn.Linear(8, 4))


def middle_frozen() -> nn.Module:
    """Gradients go through frozen layers, not to them."""
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 16, 8),
        nn.Linear(8, 4),
    )  # fmt: skip
    layers[1].requires_grad_(False)
    layers[3].requires_grad_(False)
    return layers


#: Networks beside the checked ones; a Swin's attention with a trained bias is none on a CPU.
OTHERS = ("gpt_neox", "phi", "distilbert", "regnet", "mobilenet_v2", "gemma", "pvt_v2")
PICTURES = (*IMAGE, "regnet", "mobilenet_v2", "pvt_v2")
IMAGES = torch.rand(2, 3, 8, 8)
MADE: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "vit": (Patches, IMAGES),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3),
                              nn.ConvTranspose2d(4, 4, 2), nn.Flatten(), nn.Linear(100, 5)),
        IMAGES,
    ),
    "normalised images": (
        lambda: nn.Sequential(nn.LayerNorm([3, 8, 8]), nn.Conv2d(3, 8, 3), nn.Flatten()), IMAGES,
    ),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)),
        torch.rand(6, 8),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12)),
        torch.randint(12, (2, 6)),
    ),
    "gated": (Gated, torch.rand(2, 6, 8)),
    "frozen backbone": (frozen_backbone, IMAGES),
    "frozen middle": (middle_frozen, IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_a_step_has_the_gradients_of_autograd(name: str) -> None:
    make, given = MADE[name]
    module = make().eval()
    # What has no gradient is in no step, and nothing else is left out.
    found = priced(lower(capture(module, [given], eager=True), "training"))
    assert found == autograd(module(given))
    assert found


@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_networks_have_the_gradients_of_autograd(name: str) -> None:
    module = build(name, "tiny").eval()
    inputs = example(name, "tiny", (2, 32 if name in PICTURES else 4), "cpu", torch.float32)
    steps = lower(capture(module, inputs, eager=True), "training")
    called = [step for step in steps if step.calls]  # not what a norm copies for itself
    assert priced(called) == autograd(module(**inputs)[0])


def test_what_is_frozen_is_not_updated() -> None:
    module = frozen_backbone()
    steps = lower(capture(module, [IMAGES], eager=True), "training")
    (update,) = (step for step in steps if step.part == "optimizer")
    trained = [p for p in module.parameters() if p.requires_grad]
    assert isinstance(update.work, Program)
    sizes = [p.numel() for p in trained]
    assert update.work.dims == {"parameters": sum(sizes), "kernels": 1, "longest": max(sizes)}
    assert update.calls == len(trained) == 4
    backward = [step.kind for step in steps if step.part == "backward"]
    assert not {"convolution", "norm", "activation"} & set(backward)


def test_a_module_made_for_inference_trains_everything() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    before = lower(capture(module, [torch.rand(2, 8)], eager=True), "training")
    module.requires_grad_(False)
    assert lower(capture(module, [torch.rand(2, 8)], eager=True), "training") == before
