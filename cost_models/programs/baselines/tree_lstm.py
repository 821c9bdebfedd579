"""TreeLstm: a recursive network over the loop tree, as Tiramisu's cost model has it.

The tree is rebuilt from positions and depths of the leaves: every loop holds a leaf, so the nodes
numbered between two leaves are the ancestors that the second does not share with the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.baselines._base import NetworkBaseline
from foreplan.cost_models.programs.program_table import ProgramTable


def shared_depths(position: NDArray[np.int64], depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """Depth of the deepest node that each leaf shares with the one before it (leaves - 1)."""
    return depth[1:] - (position[1:] - position[:-1])


class TreeLstm(NetworkBaseline):
    """Batches hold programs of one tree shape; a node sums its children through an LSTM cell."""

    def _batches(
        self, table: ProgramTable, generator: np.random.Generator | None
    ) -> Iterator[NDArray[np.int64]]:
        groups: dict[bytes, list[int]] = {}
        for row in range(len(table)):
            part = slice(table.offsets[row], table.offsets[row + 1])
            shape = np.stack([table.position[part], table.depth[part]])
            groups.setdefault(shape.tobytes(), []).append(row)
        batches = []
        for rows in groups.values():
            order = np.array(rows) if generator is None else generator.permutation(rows)
            batches += [order[at : at + self.batch] for at in range(0, len(order), self.batch)]
        if generator is not None:
            generator.shuffle(batches)
        yield from batches

    def _network(self, features: int, device_features: int) -> Any:
        import torch
        from torch import Tensor, nn

        width = 128

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.leaf = nn.Sequential(
                    nn.Linear(features, width), nn.ELU(), nn.Linear(width, width), nn.ELU()
                )
                self.cell = nn.LSTMCell(width, width)
                self.head = nn.Sequential(
                    nn.Linear(width + device_features, width), nn.ELU(), nn.Linear(width, 1)
                )

            def forward(
                self, leaves: Tensor, mask: Tensor, device: Tensor, places: Tensor
            ) -> Tensor:
                encoded = self.leaf(leaves)
                tree = places[0].cpu().numpy()[mask[0].cpu().numpy()]
                position, depth = tree[:, 0], tree[:, 1]
                shared = np.append(shared_depths(position, depth), 0)
                zero = encoded.new_zeros(len(encoded), width)
                # State of each open node, outermost first; the root is number 0.
                states = [(zero, zero)]
                for number, below in enumerate(shared):
                    while len(states) < depth[number]:
                        states.append((zero, zero))
                    states[-1] = self.cell(encoded[:, number], states[-1])
                    while len(states) > below + 1:
                        closed = states.pop()
                        states[-1] = self.cell(closed[0], states[-1])
                output: Tensor = self.head(torch.cat([states[0][0], device], 1))[:, 0]
                return output

        return Network()
