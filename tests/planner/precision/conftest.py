"""Public architectures as plain modules; precision problems on zoo devices at roofline prices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.planner.base import Problem
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.spec import PrecisionWorkload


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut (He et al., 2016, figure 5)."""

    def __init__(self, source: int, width: int, stride: int, down: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(source, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU()
        self.downsample = (
            nn.Sequential(
                nn.Conv2d(source, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
            if down else None
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out = out + (x if self.downsample is None else self.downsample(x))
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet50(nn.Module):
    """ResNet-50 (He et al., 2016, table 1; stride in the 3x3 convolution)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        source = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                blocks.append(Bottleneck(source, width, stride if i == 0 else 1, i == 0))
                source = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def vgg16() -> nn.Module:
    """VGG-16 without norms (Simonyan & Zisserman, 2015, configuration D)."""
    parts: list[nn.Module] = []
    source = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(source, width, 3, padding=1), nn.ReLU()]
            source = width
        parts.append(nn.MaxPool2d(2))
    parts += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for out, inner in ((4096, 512 * 49), (4096, 4096)):
        parts += [nn.Linear(inner, out), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*parts, nn.Linear(4096, 1000))


@pytest.fixture(scope="session")
def public_graph():
    """(module, training graph) of ``resnet50`` or ``vgg16`` at 64 x 224 x 224, on no device."""
    made = {}

    def build(name):
        if name not in made:
            with torch.device("meta"):
                module = {"resnet50": ResNet50, "vgg16": vgg16}[name]()
                graph = capture(module, (torch.zeros(64, 3, 224, 224),), name=name)
            made[name] = module, TrainingGraph.from_capture(graph, module)
        return made[name]

    return build


#: A byte model of two blocks: small, but large enough that products cost more than launches.
BYTES = {"context": 32, "width": 128, "layers": 2, "heads": 2}


@pytest.fixture(scope="session")
def make_problem():
    """A problem on zoo devices: ``make_problem("1xt4", batch=4, ...)``."""

    def make(devices="1xa100-80g,1xt4", *, seed=0, memory_bytes=None, **fields):
        """A problem; ``fields`` are the workload's."""
        cluster = parse_devices(devices, "--devices")
        if memory_bytes is not None:
            entries = tuple(
                e.model_copy(update={"memory_bytes": memory_bytes}) for e in cluster.devices
            )
            cluster = cluster.model_copy(update={"devices": entries})
        cluster = Profiles().completed(cluster)
        fields = {
            "batch": 32, "network": "byte_lm", "network_options": BYTES, "steps": 1,
            "calibration_batches": 1, "first_bucket_bytes": 1 << 14, "bucket_bytes": 1 << 16,
        } | fields  # fmt: skip
        workload = PrecisionWorkload(**fields)
        costs = cost_book(cluster, Profiles(), "roofline")
        return Problem(None, cluster, workload, costs, seed)

    return make
