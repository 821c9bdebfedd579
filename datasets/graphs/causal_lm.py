"""Builds the causal language model that a `Model` describes, with weights, by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs.decoder_module import LOCAL_DATA, config_fields
from foreplan.datasets.models.model import Model

if TYPE_CHECKING:
    import torch


def causal_lm(model: Model) -> torch.nn.Module:
    """The module in fp32: the folder's weights where it has them, else torch's random ones.

    Without weights where it is built on the meta device.
    """
    import torch
    import transformers

    # transformers refuses to load weights there.
    empty = torch.get_default_device().type == "meta"
    if model.weights == "trained" and not empty:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        with _no_bar():
            loaded: torch.nn.Module = load(
                model.path, dtype=torch.float32, use_safetensors=True, **LOCAL_DATA
            )
        return loaded
    if model.path is not None:
        config = transformers.AutoConfig.from_pretrained(model.path, **LOCAL_DATA)
    else:
        config = transformers.AutoConfig.for_model(model.family, **config_fields(model))
    build: Any = transformers.AutoModelForCausalLM.from_config
    module: torch.nn.Module = build(config, dtype=torch.float32)
    return module


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' own progress bars: what a program prints is the program's."""
    from transformers.utils import logging

    bars: Any = logging  # its functions carry no types
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
