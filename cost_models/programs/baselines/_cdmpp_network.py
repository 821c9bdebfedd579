"""Parts of CDMPP's released network: positional encoding, layers, discrepancy of embeddings."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_table import Floats

HEADS = 4
#: PyTorch's default, which the release does not change.
DROPOUT = 0.1
#: Units of the head's first layer, the three after it and its output, and of the decoder's three.
UNITS = (716, 985, 69, 930)


def encoding(place: NDArray[np.int64], width: int) -> Floats:
    """Sines and cosines with the release's exponents, which run to 2 and not to 1."""
    even = np.arange(0, width, 2)
    found = np.zeros((*place.shape, width))
    found[..., 0::2] = np.sin(place[..., None] / 10000.0 ** (2 * even / width))
    found[..., 1::2] = np.cos(place[..., None] / 10000.0 ** (2 * (even + 1) / width))
    return found


def mmd(one: Any, two: Any) -> Any:
    """Maximum mean discrepancy with kernels exp(-a d^2), a = 1, 0.1 and 0.001.

    Args:
        one: a sample (..., N, D).
        two: another (..., M, D).
    """
    import torch

    both = torch.cat([one, two], -2)
    squares = both.square().sum(-1)
    products = both @ both.mT
    distance = (squares[..., :, None] + squares[..., None, :] - 2 * products).clamp(min=0)
    kernel = torch.exp(-distance)
    for rate in (0.1, 0.001):
        kernel = kernel + torch.exp(-distance * rate)
    n = one.shape[-2]

    def mean(part: Any) -> Any:
        return part.mean((-2, -1))

    inside = mean(kernel[..., :n, :n]) + mean(kernel[..., n:, n:])
    return inside - 2 * mean(kernel[..., :n, n:])


def cmd(one: Any, two: Any) -> Any:
    """Central moment discrepancy (shapes of `mmd`): means, and moments of orders 2 to 5."""
    mean, other = one.mean(-2, keepdim=True), two.mean(-2, keepdim=True)
    found = (mean - other).norm(dim=-1)[..., 0]
    for order in range(2, 6):
        apart = ((one - mean) ** order).mean(-2) - ((two - other) ** order).mean(-2)
        found = found + apart.norm(dim=-1)
    return found


def network(
    width: int, devices: bool, leaves: int, layers: int, dropout: float = DROPOUT,
    units: tuple[int, int, int, int] = UNITS,
) -> Any:  # fmt: skip
    """The network for programs of one leaf count: (labels, hidden layer before them) of a batch.

    Args:
        width: entries of a leaf.
        devices: whether figures of the device take part.
        leaves: of each program.
        layers: of the encoder.
        dropout: in the encoder.
        units: of the other layers, as in `UNITS`.
    """
    import torch
    from torch import Tensor, nn

    first, head, out, deep = units

    def stack(*sizes: int) -> list[nn.Module]:
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            parts += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
        return parts

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaves, self.joins_devices = leaves, devices
            layer = nn.TransformerEncoderLayer(width, HEADS, 2048, dropout, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            flatten = stack(leaves * width, first, head, head, head, out)
            flatten[2] = nn.Identity()  # the release's input layer has no activation
            self.flatten = nn.Sequential(*flatten)
            self.device = nn.Sequential(*stack(8, 128, 128, 128, out))
            self.norm = nn.BatchNorm1d(out, affine=False)
            self.decoder = nn.Sequential(*stack(out, deep, deep, deep))
            self.last = nn.Linear(deep, 1)

        def forward(self, leaves: Tensor, device: Tensor) -> tuple[Tensor, Tensor]:
            embedded = self.flatten(self.encoder(leaves).flatten(1))
            if self.joins_devices:
                embedded = self.norm(embedded) + self.norm(self.device(device))
            hidden = self.decoder(embedded)
            return torch.nan_to_num(self.last(hidden)[:, 0]), hidden

    return Network()
