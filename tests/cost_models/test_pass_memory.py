"""Which devices hold a pass: by its state, and by the largest operator whatever its kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foreplan.cost_models.ranking import rank_devices
from foreplan.errors import InfeasibleError

IMAGES = torch.empty(64, 3, 1024, 1024, device="meta")  # 0.75 GiB


@pytest.mark.parametrize(("module", "channels"), [
    (nn.Conv2d(3, 128, 3, padding=1), 131),
    (nn.Sequential(nn.Conv2d(3, 96, 1), nn.BatchNorm2d(96)), 192),
])  # fmt: skip
def test_images_count_as_rows_do(module: nn.Module, channels: int) -> None:
    need = channels * 64 * 1024**2 * 4  # 32.75 or 48 GiB
    module.to("meta")
    found = rank_devices(module, "l4,h200", inputs=[IMAGES])
    assert found.fits == {"l4": False, "h200": True}
    assert found.fastest.device == "h200"
    with pytest.raises(InfeasibleError, match=f"one operator's .* {need / 2**30:.2f} GiB"):
        rank_devices(module, "l4", inputs=[IMAGES])


def test_a_network_of_images_is_refused_where_one_tensor_of_it_is_too_large() -> None:
    assert rank_devices("resnet-18", "l4", batch=256).fits == {"l4": True}
    with pytest.raises(InfeasibleError, match="100000 images of 224 x 224, needs at least"):
        rank_devices("resnet-18", "l4", batch=100_000)
