"""`asked_model`, `asked_steps`: the model, and the steps of its pass, that a caller describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from foreplan.cost_models.lowering.graph_programs import lower, lower_compiled, model_steps
from foreplan.cost_models.lowering.graph_step import Phase, Step
from foreplan.datasets.graphs.given_module import GivenModule
from foreplan.datasets.graphs.transformers_network import TransformersNetwork, network_or_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.quantity import whole_number
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: Whose pass is priced.
Priced: TypeAlias = Model | TransformersNetwork | GivenModule

#: New tokens of a sequence where nobody says.
USUAL_TOKENS = 128


def asked_model(
    model: str | Path | Model | TransformersNetwork | torch.nn.Module,
    inputs: Any,
    dtype: str | None,
    image_size: int | tuple[int, int] | None,
    where: str,
) -> Priced:
    """The model that is to be priced.

    Args:
        model: what the caller gave.
        inputs: of a module, see `GivenModule.of`.
        dtype: of a described model.
        image_size: side of images in pixels, or height and width, of a described model.
        where: function that was called, for errors.

    Raises:
        SpecError: as `network_or_model`; what only modules or only described models have.
    """
    if isinstance(model, (str, Path, Model, TransformersNetwork)):
        if inputs is not None:
            raise SpecError(
                f"{where}: inputs", got=type(inputs).__name__,
                expected="batch and sequence_length, as the model is described",
            )  # fmt: skip
        return network_or_model(model, dtype, image_size)
    if dtype is not None:
        raise SpecError(
            f"{where}: dtype", got=dtype, expected="none, as a module has its own",
            fix="convert it and its inputs: module.to(torch.bfloat16)",
        )  # fmt: skip
    if image_size is not None:
        raise _own_shapes(f"{where}: image_size", image_size)
    from foreplan.datasets.graphs.module_check import check_module

    check_module(model)
    if inputs is None:
        raise SpecError(f"{where}: inputs", got=None, expected="example inputs of the module")
    return GivenModule.of(type(model).__name__, model, inputs)


def takes_images(model: Priced) -> bool:
    """Whether a described model is one of images, which are no sequences."""
    return isinstance(model, TransformersNetwork) and model.images


def asked_sizes(
    model: Priced,
    batch: int | None,
    tokens: int | None,
    where: tuple[str, str],
) -> tuple[int | None, int | None]:
    """Sizes that a model takes, as whole numbers.

    Args:
        model: what is priced.
        batch: sequences or images; ``None`` where nobody says.
        tokens: of each sequence, likewise.
        where: what to call the two in errors.

    Returns:
        The batch and the tokens, ``None`` where nobody says.

    Raises:
        SpecError: a size of a module, whose inputs have their own; tokens of images; no number.
    """
    sizes: list[int | None] = []
    for word, given in zip(where, (batch, tokens), strict=True):
        if given is not None and isinstance(model, GivenModule):
            raise _own_shapes(word, given)
        sizes.append(None if given is None else whole_number(given, word))
    if tokens is not None and takes_images(model):
        raise SpecError(
            where[1], got=tokens, expected=f"none: {model.name} takes images",
            fix="give the size of the images",
        )  # fmt: skip
    return sizes[0], sizes[1]


def asked_steps(
    model: Priced,
    batch: int | None,
    sequence_length: int | None,
    phase: Phase,
    compiled: bool,
) -> list[Step]:
    """Steps of the pass that `predict_latency` is asked for.

    Args:
        model: what is priced.
        batch: sequences or images, 1 if ``None``.
        sequence_length: tokens of each sequence, `USUAL_TOKENS` if ``None``.
        phase: as `graph_programs.lower`.
        compiled: as `graph_programs.lower_compiled`.

    Raises:
        SpecError: as `asked_sizes`, `model_steps` and `module_steps`.
    """
    where = ("predict_latency: batch", "predict_latency: sequence_length")
    batch, tokens = asked_sizes(model, batch, sequence_length, where)
    if isinstance(model, GivenModule):
        return module_steps(model, phase, compiled)
    return model_steps(
        model, batch=1 if batch is None else batch, phase=phase, compiled=compiled,
        tokens=USUAL_TOKENS if tokens is None else tokens,
    )  # fmt: skip


def module_steps(given: GivenModule, phase: Phase, compiled: bool) -> list[Step]:
    """Steps of a pass of a user's own module.

    Args:
        given: module and inputs.
        phase: as `graph_programs.lower`.
        compiled: as `graph_programs.lower_compiled`.

    Raises:
        SpecError: a module that cannot be captured.
    """
    from foreplan.datasets.graphs.capture import capture

    graph = capture(
        given.module, given.inputs, name=given.name, eager=True, training=phase == "training"
    )
    return (lower_compiled if compiled else lower)(graph, phase)


def _own_shapes(where: str, given: Any) -> SpecError:
    return SpecError(
        where, got=given, expected="none, as a module's inputs have their own shapes",
        fix="give inputs of that size",
    )  # fmt: skip
