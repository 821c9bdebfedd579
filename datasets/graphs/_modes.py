"""`Modes`: which parts of a module train while it is traced, and what it draws meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from foreplan.errors import ForeplanError

if TYPE_CHECKING:
    import torch

Traced = TypeVar("Traced")

#: Parts that are put into evaluation mode one by one before all are (each costs a trace).
_MOST_PARTS = 8


class Modes:
    """Puts a module into the mode that a pass runs in, and every part back into its own at the end.

    A step trains what its user trains: a module in training mode keeps the modes of its parts, as
    frozen ones are left in evaluation mode; one in evaluation mode, as builders of pretrained
    networks return it, is put into training mode.

    What a module draws meanwhile in Python, NumPy or torch (a layer that it skips, positions that
    it masks) comes out equal each time; the caller's generators are put back. Those of GPUs are
    left alone: no trace draws from them.

    Args:
        module: whose parts they are.
        training: whether the pass is one of a training step.

    Attributes:
        evaluated: paths of parts that a pass of a training step has in evaluation mode all the
            same, because they could not be traced in training mode; the parts inside of them are
            not, but where the path is empty: then all are.
    """

    def __init__(self, module: torch.nn.Module, *, training: bool) -> None:
        self._module, self._training = module, training
        self._before = [(part, part.training) for part in module.modules()]
        self.evaluated: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        import torch

        # Models draw from NumPy's global generator.
        self._drawn = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
        if not (self._training and self._module.training):
            self._put_into(training=self._training)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        for part, training in self._before:
            part.training = training
        python, arrays, tensors = self._drawn
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
        torch.set_rng_state(tensors)

    def tried(self, trace: Callable[[], Traced], at: Callable[[], str]) -> Traced:
        """What a trace gives, with fewer parts in training mode where it fails.

        A layer that is skipped by a number that torch draws, or a batch norm of a single value,
        fails in training mode alone. The part that the trace broke off in is put into evaluation
        mode, without the parts inside of it; where that does not help, all are.

        Args:
            trace: called until it raises nothing, or all are in evaluation mode.
            at: the path that it broke off at.

        Raises:
            Exception: what ``trace`` raises in evaluation mode.
        """
        import torch

        while True:
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            torch.default_generator.manual_seed(0)
            try:
                return trace()
            except ForeplanError:  # of what no mode changes
                raise
            except Exception:
                if not self._training or not any(p.training for p in self._module.modules()):
                    raise
                part = self._module.get_submodule(at())
                if at() and part.training and len(self.evaluated) < _MOST_PARTS:
                    part.training = False
                    self.evaluated += (at(),)
                else:
                    self._put_into(training=False)
                    self.evaluated = ("",)

    def _put_into(self, *, training: bool) -> None:
        """Put the module and its parts into a mode, but for the trace of one, which keeps its."""
        try:
            self._module.train(training)
        except NotImplementedError:  # of torch.export
            for part in self._module.modules():
                part.training = training
