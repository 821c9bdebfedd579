"""LeafMlp: an MLP on each leaf, summed; no tree (TenSet's MLP, made to predict latency)."""

from __future__ import annotations

from typing import Any

from foreplan.cost_models.programs.baselines._base import NetworkBaseline


class LeafMlp(NetworkBaseline):
    """Hidden 256, sum over stores, two more layers (TenSet: hidden 256, lr 7e-4)."""

    def _network(self, features: int, device_features: int) -> Any:
        import torch
        from torch import Tensor, nn

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.leaf = nn.Sequential(
                    nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
                )
                self.head = nn.Sequential(
                    nn.Linear(256 + device_features, 256), nn.ReLU(), nn.Linear(256, 1)
                )

            def forward(
                self, leaves: Tensor, mask: Tensor, device: Tensor, places: Tensor
            ) -> Tensor:
                summed = (self.leaf(leaves) * mask[..., None]).sum(1)
                output: Tensor = self.head(torch.cat([summed, device], 1))[:, 0]
                return output

        return Network()
