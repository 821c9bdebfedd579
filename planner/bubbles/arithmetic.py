"""`Arithmetic`: in which dtype devices train, and by which programs that is priced."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.dtypes import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a real run in mode ``fast`` computes with; see ``execution/entry.py``.

    Attributes:
        dtype: of weights, activations and messages: ``fp32`` on processors, ``bf16`` elsewhere.
            Gradients and the optimizer are fp32 everywhere.
        measurable: the devices are of a machine that ``foreplan profile`` can measure, so that the
            passes are priced as the training programs that it measures (`TrainingPasses`); devices
            of the zoo are priced from forward programs (`TheoryPasses`).
    """

    dtype: str
    measurable: bool

    @classmethod
    def of(cls, cluster: Cluster) -> Arithmetic:
        """The arithmetic of a cluster, whose devices are of one kind."""
        kind = cluster.ranks()[0].name.kind
        return cls("fp32" if kind == "cpu" else "bf16", kind != "zoo")

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an element of activations."""
        return int(DTYPE_BYTES[self.dtype])

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of a parameter's optimizer states: two moments, and a master copy beside bf16."""
        return 8 if self.dtype == "fp32" else 12
