"""Time library operators of a processor: those of other profiles, and drawn convolutions.

``python -m foreplan.datasets.sweeps.processor_sweep DEVICE -o FILE.json.xz --like PROFILE``, e.g.
for
``cpu:threads=1,isa=avx2``, about five minutes. Its rows are what `cost_models.rates.known_rates` is
fitted to. Killed, it resumes from the journal beside the file; the uncompressed profile stays
there, and what it has is not timed again.

Convolutions are drawn by a seed from sizes that networks of images use in general: 7 to 112
pixels with 16 to 512 channels, and 2 to 32 pixels with 64 to 2048; windows of 1 to 7, stride 1 or
2, three in ten with a filter a channel.
"""

from __future__ import annotations

import argparse
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.storage import write_atomically
from foreplan.datasets.timing.profiling import Progress, measure_profile
from foreplan.errors import SpecError, told

#: Most FLOP of a convolution: some 50 ms of a core.
_MOST_FLOPS = 2e9
#: Widest window, of an image with its padding about as wide again.
_WIDEST = 2
_WINDOWS, _BATCHES = (1, 1, 3, 3, 5, 7), (1, 1, 2, 4, 8)


class Images(NamedTuple):
    """What convolutions are drawn from: heights and widths, and channels."""

    sizes: tuple[int, ...]
    channels: tuple[int, ...]


#: 224 pixels and more, down to a fifth layer.
LARGE = Images((7, 14, 28, 56, 112), (16, 32, 64, 96, 128, 192, 256, 384, 512))
#: 32 or 64 pixels, or the last layers of larger ones: few positions, many channels.
SMALL = Images((2, 4, 8, 16, 32), (64, 128, 256, 512, 768, 1024, 2048))


def convolutions(count: int, seed: int = 0, images: Images = LARGE) -> list[Program]:
    """Both passes of drawn convolutions in fp32, and of every third in bf16.

    Args:
        count: shapes.
        seed: of the draws.
        images: sizes to draw from.
    """
    rng = np.random.default_rng(seed)
    found: list[Program] = []
    shapes = 0
    while shapes < count:
        size, window = int(rng.choice(images.sizes)), int(rng.choice(_WINDOWS))
        channels, filters = (int(n) for n in rng.choice(images.channels, 2))
        stride, batch = int(rng.choice((1, 1, 2))), int(rng.choice(_BATCHES))
        alone = rng.random() < 0.3 and window > 1
        out = -(-size // stride)
        dims = {
            "batch": batch, "channels": channels, "height": size, "width": size,
            "filters": channels if alone else filters, "kernel_height": window,
            "kernel_width": window, "out_height": out, "out_width": out, "stride": stride,
            "groups": channels if alone else 1,
        }  # fmt: skip
        whole = program("conv2d_forward", Variant("fp32", "fp32", "torch.conv2d"), **dims)
        if whole.flops > _MOST_FLOPS or window > _WIDEST * size:
            continue
        shapes += 1
        for dtype in ("fp32", "bf16") if shapes % 3 == 0 else ("fp32",):
            variant = Variant(dtype, dtype, "torch.conv2d")
            found += [program(f"conv2d_{way}", variant, **dims) for way in ("forward", "backward")]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("device")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--like", nargs="*", default=[], type=Path)
    parser.add_argument("--convolutions", type=int, default=90, help="of either size")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args(arguments)
    if asked.output.suffixes[-2:] != [".json", ".xz"]:
        raise SpecError("--output", got=asked.output, expected="a name that ends in .json.xz")
    if asked.convolutions < 0:
        raise SpecError("--convolutions", got=asked.convolutions, expected="at least 0")
    programs = [row.program() for path in asked.like for row in Profile.load(path).rows]
    for images in (LARGE, SMALL):
        programs += convolutions(asked.convolutions, images=images)
    plain = asked.output.with_suffix("")

    def tell(progress: Progress) -> None:
        if progress.message or progress.done % 100 == 0:
            print(f"{progress.done} of {progress.total} {progress.message or ''}", flush=True)

    found = measure_profile(
        DeviceName.parse(asked.device), programs, plain, rounds=asked.rounds, on_progress=tell
    )
    write_atomically(asked.output, lzma.compress(_bare(found).to_json().encode(), preset=9))
    ran = sum(row.status == "ok" for row in found.rows)
    print(f"{asked.output}: {len(found.rows)} operators, {ran} ran")


def _bare(profile: Profile) -> Profile:
    """Without the circumstances of each row."""
    bare = {"samples": 0, "preempted": 0, "load_average": None, "clock_hz": None}
    return profile.model_copy(
        update={"rows": tuple(row.model_copy(update=bare) for row in profile.rows)}
    )


if __name__ == "__main__":
    with told():
        main()
