"""`convolution_layouts`: in a trace, convolutions of images with channels last leave them so.

cuDNN and oneDNN do (torch's memory-format rules); a trace of a module without data asks no backend,
and says that all results lie with their channels first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def convolution_layouts() -> Iterator[None]:
    """Let torch's fake convolutions keep the layout of their images for a while."""
    import torch
    from torch._subclasses.fake_impls import op_implementations_dict

    convolution = torch.ops.aten.convolution.default
    before: Any = op_implementations_dict[convolution]

    def kept(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        result = before(fake_mode, func, *args, **kwargs)
        image = args[0] if args else kwargs["input"]
        if image.device.type != "meta" or image.dim() != 4:
            return result
        if not image.is_contiguous(memory_format=torch.channels_last) or image.is_contiguous():
            return result
        with fake_mode:
            return torch.empty_like(result, memory_format=torch.channels_last)

    op_implementations_dict[convolution] = kept
    try:
        yield
    finally:
        op_implementations_dict[convolution] = before
