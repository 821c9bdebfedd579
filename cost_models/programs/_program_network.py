"""ProgramNetwork: the encoder of scheduled programs. Imports torch.

Shape legend: B programs of a batch, L leaves of the longest, F features of a leaf, D features of
the device, W width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class ProgramNetwork(nn.Module):
    """Leaves and device to the logarithm of how far a program stays from its bound.

    One model serves every leaf count: padded leaves are masked, and pooling is attention from
    learned queries. Position and depth enter as sines and cosines that are projected and added.

    Args:
        features: F.
        device_features: D, values and known-mask together.
        width: W.
        layers: of the encoder (pre-norm).
        heads: of attention.
        queries: of the pooling.
    """

    def __init__(
        self,
        features: int,
        device_features: int,
        *,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        queries: int = 4,
    ) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.leaf = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))
        self.place = nn.Linear(2 * _WAVES * 2, width, bias=False)
        self.encoder = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(queries, width) / math.sqrt(width))
        self.device = nn.Sequential(
            nn.Linear(device_features, width), nn.GELU(), nn.Linear(width, width)
        )
        self.embed = nn.Sequential(nn.Linear(queries * width + 2 * width, width), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        #: Logit of the share of the launch overhead that back-to-back calls show.
        self.launch = nn.Parameter(torch.zeros(()))

    def forward(
        self, leaves: Tensor, places: Tensor, mask: Tensor, device: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the raw output (B,) and the embedding in [-1, 1] (B, W).

        Args:
            leaves: (B, L, F), standardised; anything where masked.
            places: position and depth (B, L, 2), float.
            mask: true for leaves that exist (B, L).
            device: (B, D), standardised, zeros where unknown.
        """
        x = self.leaf(leaves) + self.place(_waves(places))
        described = self.device(device)
        x = x + described[:, None]
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.norm(x)
        scores = x @ self.queries.T / math.sqrt(self.width)
        scores = scores.masked_fill(~mask[..., None], _NEVER)
        pooled = torch.einsum("blq,blw->bqw", torch.softmax(scores, 1), x).flatten(1)
        # Time adds up over leaves: a sum beside the averages lets the head count.
        summed = (x * mask[..., None]).sum(1) / 8.0
        embedding: Tensor = self.embed(torch.cat([pooled, summed, described], 1))
        raw: Tensor = self.head(embedding)[:, 0]
        return raw, embedding


_WAVES = 16
_NEVER = -1e9


def _waves(places: Tensor) -> Tensor:
    rates = 2.0 ** -torch.arange(0, _WAVES, device=places.device, dtype=places.dtype).mul(0.5)
    angles = places[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Written out: programs are short, and this form can be stacked over networks.
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask[:, None, None, :], _NEVER)
        mixed = torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, -1), v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.narrow(functional.gelu(self.wide(self.second(x))))
        return x + inner


def central_moment_discrepancy(
    sample: Tensor, one: Tensor, two: Tensor, *, moments: int = 5
) -> Tensor:
    """Distance of two groups of embeddings in [-1, 1] (Zellinger et al. 2017), a scalar.

    Args:
        sample: embeddings of both (n, W).
        one: 1 for members of the first group, else 0 (n).
        two: likewise of the second.
        moments: central moments compared beside the mean.
    """

    def mean(values: Tensor, member: Tensor) -> Tensor:
        return (values * member[:, None]).sum(0) / member.sum().clamp(min=1.0)

    def length(vector: Tensor) -> Tensor:
        return (vector.square().sum() + 1e-12).sqrt()

    mean_one, mean_two = mean(sample, one), mean(sample, two)
    total = length(mean_one - mean_two) / 2
    a, b = sample - mean_one, sample - mean_two
    for order in range(2, moments + 1):
        total = total + length(mean(a**order, one) - mean(b**order, two)) / 2**order
    return total
