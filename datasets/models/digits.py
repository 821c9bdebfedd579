"""scikit-learn's handwritten digits (1,797 images of 8 x 8), which come with the package."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
import numpy.typing as npt

Split = Literal["train", "test"]


@functools.cache
def digits(split: Split) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Images and labels of one split; every fifth image is a test image.

    Returns:
        Read-only fp32 ``[images, 1, 8, 8]`` of mean 0 and deviation 1 over the training images, and
        int64 ``[images]`` labels 0..9.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    images, labels = load_digits(return_X_y=True)
    test = np.arange(len(images)) % 5 == 0
    mean, deviation = images[~test].mean(), images[~test].std()
    mine = test if split == "test" else ~test
    x = ((images[mine] - mean) / deviation).astype(np.float32).reshape(-1, 1, 8, 8)
    y = labels[mine].astype(np.int64)
    x.flags.writeable = y.flags.writeable = False
    return x, y
