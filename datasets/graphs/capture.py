"""Captures a model into an `OperatorGraph` with ``torch.export``, without weights.

A Hugging Face folder or a described `Model` is built on the meta device; a module of your own is
traced as it is. Only shapes are computed, so that a 70-billion-parameter model takes seconds and no
memory. Imports torch and transformers when called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs._causal_masks import causal_masks
from foreplan.datasets.graphs._checkpoints import checkpointed_layers
from foreplan.datasets.graphs._composites import expand_composites
from foreplan.datasets.graphs._convolution_layouts import convolution_layouts
from foreplan.datasets.graphs._fused_layers import fused_layers
from foreplan.datasets.graphs._modes import Modes
from foreplan.datasets.graphs._recurrent_shapes import recurrent_shapes
from foreplan.datasets.graphs._regions import inline_regions, under_autocast
from foreplan.datasets.graphs._trace import TraceReader
from foreplan.datasets.graphs._vectorised import unvectorised
from foreplan.datasets.graphs.decoder_module import decoder_module
from foreplan.datasets.graphs.input_words import input_words
from foreplan.datasets.graphs.module_check import check_module
from foreplan.datasets.graphs.operator_graph import OperatorGraph
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.quantity import format_bytes
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch


def capture(
    source: Model | str | Path | torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
    tokens: int = 128,
    name: str | None = None,
    eager: bool = False,
    observe: bool = False,
    training: bool = False,
) -> OperatorGraph:
    """Capture one forward pass.

    Args:
        source: a described model, a folder or zoo name for `load_model`, or any module, which may
            lie on the meta device.
        inputs: example inputs of a module, positional or by name; tensors, those in tuples, lists
            and mappings too, are moved to the module's device. A described model takes ``batch``
            and ``tokens`` instead.
        batch: sequences, for a described model.
        tokens: tokens of each.
        name: of the graph; the model's or the class's if ``None``.
        eager: keep what eager execution launches; see `TraceReader`.
        observe: run a module's pass once, and take over how its results lie in memory. A trace
            knows what torch's rules for shapes say, which for convolutions of images as channels
            last on a GPU is not what cuDNN leaves.
        training: as in a training step, with dropout and batch norms of the batch's own
            statistics: a module that is in training mode as it is, parts in evaluation mode
            included, any other in training mode. What cannot be traced so is traced in
            evaluation mode, see `OperatorGraph.evaluated`. Without it all is in evaluation mode.
            Modes, and generators of random numbers, are put back afterwards.

    Raises:
        SpecError: not a supported model; a module that cannot be traced, that ``torch.compile``
            has compiled in part or whole, or with an operator that nothing is known of.
    """
    if isinstance(source, (str, Path)):
        source = load_model(source)
    if isinstance(source, Model):
        module, inputs = decoder_module(source, batch, tokens)
        return _capture_module(module, inputs, name or source.name, eager, training=training)
    check_module(source)
    if inputs is None:
        raise SpecError("capture.inputs", got=None, expected="example inputs of the module")
    name = name or type(source).__name__
    return _capture_module(source, inputs, name, eager, observe, training)


# Tracing ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def attention_of_eager(module: torch.nn.Module) -> Iterator[None]:
    """Let a module of transformers attend as its ``sdpa`` does when nobody traces or records.

    Then it leaves out a mask that masks nothing but the future and tells the kernel that attention
    is causal; traced, or recorded as a CUDA graph, it would build the mask and compute every pair.
    Where a sliding window is no longer than the sequence it builds the mask untraced, too. Models
    that compare the implementation's name themselves, as Falcon, are left alone.
    """
    found: dict[int, Any] = {
        id(part.config): part.config
        for part in module.modules()
        if hasattr(part, "config") and not _asks_by_name(type(part).__module__)
    }
    configs = [c for c in found.values() if getattr(c, "_attn_implementation", "") == "sdpa"]
    if configs:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        def mask(*given: Any, **named: Any) -> Any:
            length = given[2] if len(given) > 2 else named["kv_length"]
            window = named.get("local_size")
            # As `_ignore_causal_mask_sdpa` has it.
            return None if window is None or length < window else sdpa_mask(*given, **named)

        AttentionInterface.register("foreplan_eager", sdpa_attention_forward)
        AttentionMaskInterface.register("foreplan_eager", mask)
    try:
        for config in configs:
            config._attn_implementation = "foreplan_eager"
        yield
    finally:
        for config in configs:
            config._attn_implementation = "sdpa"


@functools.cache
def _asks_by_name(module: str) -> bool:
    """Whether the code of a model takes another way by the name of its attention."""
    code = sys.modules.get(module)
    try:
        return code is not None and '_attn_implementation == "sdpa"' in inspect.getsource(code)
    except (OSError, TypeError):  # written in a notebook, say
        return False


def _capture_module(
    module: torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    name: str,
    eager: bool,
    observe: bool = False,
    training: bool = False,
) -> OperatorGraph:
    import torch
    from torch.utils import _pytree as pytree

    from foreplan.datasets.graphs._attention_layouts import AttentionLayouts

    class Wrapped(torch.nn.Module):
        """Takes positional arguments only and returns plain tensors."""

        def __init__(self, names: tuple[str, ...] | None, fixed: dict[str, Any]) -> None:
            super().__init__()
            self.wrapped = module
            self.names = names
            self.fixed = fixed

        def forward(self, *values: Any) -> Any:
            if self.names is None:
                result = self.wrapped(*values)
            else:
                given = dict(zip(self.names, values, strict=True))
                result = self.wrapped(**given, **self.fixed)
            # Hugging Face's output classes; the first entry is the prediction.
            return result[0] if hasattr(result, "to_tuple") else result

    if isinstance(inputs, torch.Tensor):  # a sequence of its rows, for Python
        raise SpecError(
            "capture.inputs", got="a tensor",
            expected="the module's arguments: a tuple, as in (x,), or a mapping by name",
        )  # fmt: skip
    # What torch.Tensor(...) makes lies on the CPU in a module that is built on the meta device.
    places = dict.fromkeys(p.device for p in module.parameters())
    device = next((place for place in places if place.type == "meta"), next(iter(places), None))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if device is None:
            return tensor
        try:  # only the shape of a tensor without data is known, and asked for
            return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        except RuntimeError as error:  # no memory for it
            raise SpecError(
                "capture.inputs", got=f"{format_bytes(tensor.nbytes)} beside weights with data",
                expected="what this machine's memory holds",
                fix='make the module, too, without data: with torch.device("meta")',
            ) from error  # fmt: skip

    def placed(value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, place, value)

    def holds_tensors(value: Any) -> bool:
        return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))

    if isinstance(inputs, Mapping):
        tensors = {key: placed(v) for key, v in inputs.items() if holds_tensors(v)}
        fixed = {key: v for key, v in inputs.items() if key not in tensors}
        wrapper, values = Wrapped(tuple(tensors), fixed), tuple(tensors.values())
    else:
        wrapper, values = Wrapped(None, {}), tuple(placed(value) for value in inputs)
    given_mask = isinstance(inputs, Mapping) and "attention_mask" in inputs
    attention = attention_of_eager(module) if eager and not given_mask else nullcontext()
    where = _Inside(module)
    fused = fused_layers(module) if eager and not training else nullcontext()

    def traced() -> torch.export.ExportedProgram:
        # With gradients on, a trace tells what a module computes without them.
        gradients = torch.set_grad_enabled(training)
        checkpoints = checkpointed_layers(training=training)
        layouts = convolution_layouts(), AttentionLayouts()
        with (
            where,
            recurrent_shapes(),
            causal_masks(),
            layouts[0],
            layouts[1],
            gradients,
            checkpoints,
        ):
            return torch.export.export(wrapper, values, strict=False)

    with Modes(module, training=training) as modes, torch.no_grad(), attention, fused, _quiet():
        try:
            program = unvectorised(modes.tried(traced, lambda: where.path))
            inline_regions(program, name)
            AttentionLayouts.settle(program)
            expand_composites(program)
            if observe:
                _observe(program, values)
        except SpecError:
            raise
        except Exception as error:  # torch.export raises whatever the module's code runs into
            raise _untraced(module, inputs, name, where.path, error) from error
    return TraceReader(program, name, eager=eager).graph(modes.evaluated)


def _untraced(
    module: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any], name: str, path: str,
    error: Exception,
) -> SpecError:  # fmt: skip
    """What is said of a module that torch.export could not trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, UserWarning) and "autocast" in str(error):
        return under_autocast(name, f"torch.autocast: {lines[0]}")
    where = f"module {name}" + (f": {path}" if path else "")
    if found := re.search(
        r"[Ss]torage size calculation overflowed with sizes=(\[.*?\])", str(error)
    ):
        return SpecError(
            where, got=f"a tensor of the sizes {found[1]}", expected="fewer than 2^63 bytes",
            fix="ask for a smaller batch, or give smaller inputs",
        )  # fmt: skip
    fix = f"its forward takes {_taken(module)}, the inputs are {input_words(inputs)}"
    if "data-dependent" in str(error) or type(error).__name__ == "UncapturedHigherOrderOpError":
        fix = "control flow that depends on values of tensors cannot be captured"
    elif type(error).__name__ in _OF_VALUES:
        fix = "sizes and checks that depend on values of tensors cannot be captured"
    return SpecError(
        where,
        got=f"{type(error).__name__}: {lines[0] if lines else ''}",
        expected="a module that torch.export can trace with these inputs",
        fix=fix,
    )


#: Errors where values decide what runs, or how large it is.
_OF_VALUES = frozenset({"DataDependentOutputException", "DynamicOutputShapeException"})


class _Inside:
    """Which part of a module a pass is in, or broke off in.

    Attributes:
        path: of the innermost part that was entered and not left.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._entered: list[str] = []
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        return self._entered[-1] if self._entered else ""

    def __enter__(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self._entered.clear()
        # Of all modules: some run other operators where they have hooks of their own.
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._leave))

    def _enter(self, part: torch.nn.Module, given: Sequence[Any]) -> None:
        path = self._paths.get(id(part))
        if path is None:
            return
        self._entered.append(path)
        if any(type(value).__name__ == "PackedSequence" for value in given):
            raise SpecError(
                f"module {path or type(part).__name__}", got="packed sequences",
                expected="padded ones: how many go on at a step is a matter of values",
                fix="give the layer a tensor, as without pack_padded_sequence",
            )  # fmt: skip

    def _leave(self, part: torch.nn.Module, *_: Any) -> None:
        if id(part) in self._paths:
            self._entered.pop()

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging and printing what it raises an error about, too."""
    names = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    before = {logger: logger.disabled for logger in map(logging.getLogger, names)}
    try:
        for logger in before:
            logger.disabled = True
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # Recurrent layers keep views of their weights, which nothing here reads.
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned", UserWarning)
            # An autocast of a device that this machine has not got is off here, and on where it is.
            warnings.filterwarnings("error", ".*Disabling autocast", UserWarning)
            yield
    finally:
        for logger, disabled in before.items():
            logger.disabled = disabled


def _taken(module: torch.nn.Module) -> str:
    """Arguments of a module's ``forward``, by name."""
    return f"({', '.join(inspect.signature(module.forward).parameters)})"


def _observe(program: torch.export.ExportedProgram, inputs: Sequence[Any]) -> None:
    """Run an exported program on real tensors, and give its nodes the strides that come out."""
    import torch
    from torch.utils import _pytree as pytree

    class Observer(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            traced = n.meta.get("val")
            if isinstance(result, torch.Tensor) and isinstance(traced, torch.Tensor):
                if result.stride() != traced.stride():
                    n.meta["val"] = traced.new_empty_strided(result.shape, result.stride())
            elif isinstance(result, (tuple, list)) and isinstance(traced, (tuple, list)):
                n.meta["val"] = type(traced)(
                    old.new_empty_strided(new.shape, new.stride())
                    if isinstance(new, torch.Tensor) and new.stride() != old.stride() else old
                    for old, new in zip(traced, result, strict=True)
                )  # fmt: skip
            return result

    # A pass in training mode writes statistics into buffers.
    state = {name: tensor.clone() for name, tensor in program.named_buffers()}
    given = iter(pytree.tree_leaves(inputs))
    held = {**program.constants, **program.state_dict, **state}
    flat = [
        next(given) if spec.target is None else held[spec.target]
        for spec in program.graph_signature.input_specs
    ]
    Observer(program.graph_module).run(*flat)
