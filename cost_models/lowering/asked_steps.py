"""`asked_steps`: steps of the pass that a caller of `predict_latency` describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.lowering.graph_programs import lower, lower_compiled, model_steps
from foreplan.cost_models.lowering.graph_step import Phase, Step
from foreplan.datasets.graphs.network_folder import NetworkFolder, network_or_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.quantity import whole_number
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch


def asked_steps(
    model: str | Path | Model | NetworkFolder | torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | None,
    batch: int | None,
    sequence_length: int | None,
    dtype: str | None,
    phase: Phase,
    compiled: bool,
) -> list[Step]:
    """Steps of the pass that `predict_latency` is asked for."""
    source: Model | NetworkFolder | torch.nn.Module
    if isinstance(model, (str, Path, Model, NetworkFolder)):
        source = network_or_model(model, dtype)
    elif dtype is None:
        source = model
    else:
        raise SpecError(
            "predict_latency: dtype", got=dtype, expected="none, as a module has its own",
            fix="convert it and its inputs: module.to(torch.bfloat16)",
        )  # fmt: skip
    if isinstance(source, (Model, NetworkFolder)):
        if inputs is not None:
            raise SpecError(
                "predict_latency: inputs", got=type(inputs).__name__,
                expected="batch and sequence_length, as the model is described",
            )  # fmt: skip
        tokens = 128 if sequence_length is None else sequence_length
        return model_steps(
            source, batch=whole_number(1 if batch is None else batch, "predict_latency: batch"),
            tokens=whole_number(tokens, "predict_latency: sequence_length"), phase=phase,
            compiled=compiled,
        )  # fmt: skip
    for name, given in (("batch", batch), ("sequence_length", sequence_length)):
        if given is not None:
            raise SpecError(
                f"predict_latency: {name}", got=given,
                expected="none, as a module's inputs have their own shapes",
                fix="give inputs of that size",
            )  # fmt: skip
    from foreplan.datasets.graphs.capture import capture

    graph = capture(source, inputs, eager=True, training=phase == "training")
    return (lower_compiled if compiled else lower)(graph, phase)
