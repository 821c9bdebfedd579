"""Predictor: the trained model behind ``foreplan.Predictor``, asked in terms of `Program`s.

Of a GPU, times are of the device alone: the launch by the host is a `HostLaunch` of its own. On a
chip whose torch operators were timed inside CUDA graphs (library ``torch_graph``) these answer for
what they saw. Elsewhere weights measured around CUDA graphs (TensorRT-LLM, SGLang) answer for
reduced precision and attention, and torch's FP32 operators, less their launch, for the rest.
What no published table has (gathers, sums, pools, convolutions of groups or of 16 bits) is carried
from a chip with such a sweep. Processors are priced by the rates of others (`known_rates`), whose
times hold the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.lowering.graph_backward import ATTENTION_BACKWARD
from foreplan.cost_models.operators.decoding_kernels import caches_s
from foreplan.cost_models.operators.fitted_experts import FittedExperts
from foreplan.cost_models.operators.slow_kernels import slow_seconds
from foreplan.cost_models.program_table import program_table, recorded_libraries
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.rate_law import COLD, Waits
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program
from foreplan.datasets.sweeps.operator_table import (
    OperatorTable,
)
from foreplan.errors import MissingDataError, SpecError


class Predictor:
    """Predicts the time of library operators on any device with known figures.

    Build it with `load`.

    Args:
        model: prices GPUs; processors are priced by `KnownRates`, loaded when the first is asked.
    """

    def __init__(self, model: FittedExperts) -> None:
        self.model = model

    @functools.cached_property
    def processors(self) -> KnownRates:
        """The shipped rates of processors."""
        return KnownRates.load()

    @classmethod
    def load(cls, name_or_path: str = "pretrained:ops") -> Self:
        """Load weights.

        Args:
            name_or_path: ``pretrained:ops`` or a folder that ``foreplan train`` wrote; processors
                have ``pretrained:processors`` either way.

        Raises:
            MissingDataError: no such shipped model.
            SpecError: no such folder, or broken weights.
        """
        from foreplan.cost_models.model_store import model_folder
        from foreplan.cost_models.operators.operator_weights import load_experts

        return cls(load_experts(model_folder(name_or_path)))

    def unseen(self, chip: str) -> Predictor:
        """Without what was timed on a processor's chip: as if it were new."""
        found = Predictor(self.model)
        found.processors = self.processors.without({chip})
        return found

    def predict(self, programs: Sequence[Program], device: Device | str) -> list[Estimate]:
        """Estimate each program, in order, seconds with a nominal 90 % interval.

        Raises:
            MissingDataError: a program or device outside what the model saw; see `supported`.
            SpecError: no such device in the zoo, or what is no program or device.
        """
        if not isinstance(device, (Device, str)):
            raise SpecError(
                "Predictor.predict: device", got=device, expected="a name of the zoo, or figures"
            )
        asked = _asked(programs)
        found = self.supported(asked, device)
        for program, estimate in zip(asked, found, strict=True):
            if estimate is None:
                raise MissingDataError(
                    f"the predictor has seen nothing like {program} on "
                    f"{device if isinstance(device, str) else device.name}",
                    fix="profile the device, or allow '--costs roofline'",
                )
        return [estimate for estimate in found if estimate is not None]

    def supported(
        self, programs: Sequence[Program], device: Device | str, *, waits: Waits = COLD
    ) -> list[Estimate | None]:
        """As `predict`, with ``None`` for what is outside of what the model saw.

        Args:
            programs: what is asked for.
            device: on which.
            waits: on processors, what the caches hold of the pass; see `reuse.pass_waits`.

        Outside are on GPUs cache writes and arg-max, FP32 attention and three-bit weights; on
        processors kernels that no known one was timed with, and all of processors without a known
        bandwidth or fp32 peak.
        """
        target = device_zoo.device(device) if isinstance(device, str) else device
        if not programs:
            return []
        if target.kind == "cpu":
            try:
                mean, low, high = self.processors.forecast(programs, target, waits=waits)
            except MissingDataError:  # a figure of the device
                return [None] * len(programs)
        else:
            table = program_table(
                programs, target, recorded_libraries(self.model, target),
                recorded_libraries(self.model),
            )  # fmt: skip
            mean, low, high = (
                found * _times(programs, table) for found in self.model.predict_interval(table)
            )
            least = np.maximum(
                slow_seconds(programs, target), caches_s(table, target.memory_bandwidth)
            )
            slower = np.maximum(1.0, least / mean)
            mean, low, high = (found * slower for found in (mean, low, high))
        return [
            Estimate(float(m), float(lo), float(hi), "predicted") if np.isfinite(m) else None
            for m, lo, hi in zip(mean, low, high, strict=True)
        ]


def _times(programs: Sequence[Program], table: OperatorTable) -> NDArray[np.float64]:
    """How often its row stands for each program (N,).

    Once, but forward passes of attention for gradients that no table has, and rolls.
    """
    forward = table.kind == "context_attention"
    gradient = np.array([program.op.endswith("attention_gradient") for program in programs])
    rolls = np.array([p.dims["times"] if p.op == "roll" else 1.0 for p in programs])
    return np.where(forward & gradient, ATTENTION_BACKWARD, rolls)


def _asked(programs: object) -> list[Program]:
    """Programs, of what a notebook may give in their place, too."""
    given = list(programs) if isinstance(programs, Iterable) else [programs]
    wrong = [item for item in given if not isinstance(item, Program)]
    if wrong or isinstance(programs, Program):
        raise SpecError(
            "Predictor.predict: programs", got=wrong[0] if wrong else str(programs),
            expected="a list of programs", fix="predict_latency takes a whole model",
        )  # fmt: skip
    return [item for item in given if isinstance(item, Program)]
