"""Networks that timm times on consumer boards: ``python -m tests.benchmarks.timm_networks``.

Seven networks of convolutions of 16 bits, four of them with one filter a channel and two of groups,
as transformers builds them from a configuration, without weights; predicted beside what pytorch-
image-models publishes of them: ``results/benchmark-infer-amp-nchw-pt240-cu124-rtx4090.csv`` and
``...rtx3090.csv`` (commits 5c33776 and 7479d45, Apache-2.0), inference at 1,024 images of 224
pixels, mixed precision, eager. No row of either board is in the shipped weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers

import foreplan

IMAGES = 1024
#: Milliseconds of a pass on an RTX 4090 and an RTX 3090.
MEASURED_MS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "mobilenetv1_100": (74.406, 94.780), "mobilenetv2_100": (94.710, 118.650),
        "efficientnet_b0": (114.703, 147.857), "convnext_tiny": (213.450, 331.339),
        "regnetx_016": (151.313, 223.096), "regnety_016": (172.381, 240.571),
        "resnet50": (242.763, 318.095),
    }
)  # fmt: skip


def configuration(name: str) -> transformers.PretrainedConfig:
    """A network of timm as a configuration of transformers."""
    regnet = {"groups_width": 24, "embedding_size": 32}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "mobilenetv1_100": ("MobileNetV1", {"tf_padding": False}),
        "mobilenetv2_100": ("MobileNetV2", {"tf_padding": False}),
        "efficientnet_b0": (
            "EfficientNet",
            {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
        ),
        "convnext_tiny": ("ConvNext", {}),
        "regnetx_016": (
            "RegNet",
            regnet | {"layer_type": "x", "depths": [2, 4, 10, 2],
                      "hidden_sizes": [72, 168, 408, 912]},
        ),
        "regnety_016": (
            "RegNet",
            regnet | {"layer_type": "y", "depths": [2, 6, 17, 2],
                      "hidden_sizes": [48, 120, 336, 888]},
        ),
        "resnet50": ("ResNet", {}),
    }  # fmt: skip
    family, fields = kinds[name]
    made = getattr(transformers, f"{family}Config")(image_size=224, num_labels=1000, **fields)
    made.architectures = [f"{family}ForImageClassification"]
    assert isinstance(made, transformers.PretrainedConfig)
    return made


def main() -> None:
    """Print predicted and published times of every network and board."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for name, measured in MEASURED_MS.items():
            where = Path(folder) / name
            configuration(name).save_pretrained(where)
            for device, ms in zip(("rtx_4090", "rtx_3090"), measured, strict=True):
                found = foreplan.predict_latency(str(where), device, batch=IMAGES, dtype="fp16")
                errors.append(found.latency_s * 1e3 / ms - 1)
                inside = found.low_s * 1e3 <= ms <= found.high_s * 1e3
                print(
                    f"{name:16} {device}: predicted {found.latency_s * 1e3:6.1f} ms, measured "
                    f"{ms:6.1f}, {errors[-1]:+.0%}{'' if inside else ', outside the interval'}"
                )
    print(f"mean absolute error {sum(map(abs, errors)) / len(errors):.1%} of {len(errors)}")


if __name__ == "__main__":
    main()
