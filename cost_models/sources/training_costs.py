"""`TrainingSource`: prices the passes of a training step as the forward programs they are made of.

Tables and predictors of inference know forward passes alone. Of a training step (all ``theory``):

- the gradients of a product for its input and for its weights are products of the same FLOP, and
  those of weights are added to a buffer in fp32, which is read and written;
- attention's backward pass counts as `ATTENTION_BACKWARD` forward passes;
- what moves memory alone moves twice as much in its backward pass; the loss over a vocabulary is
  such, a softmax in fp32;
- the gradient of a look-up is a table of zeros with some rows filled in, added like any other;
- a cast moves its input and its output.

Bytes without an operator of their own are priced as those of sums in fp32. A product in 8 bits or
tf32 is taken to lose as much of its roofline as the same in bf16 (assumed), so that precisions are
compared by one measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreplan.cost_models.costs import BatchSource, CostSource, Estimate, Work
from foreplan.cost_models.lowering.graph_backward import ATTENTION_BACKWARD
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.kernels.training_programs import BACKWARD, FORWARD, WEIGHT_GRADIENT
from foreplan.datasets.program import Program, Variant, program

#: Dtypes that forward programs are known in.
_DTYPES = ("fp32", "fp16", "bf16")
#: Forward programs that move memory alone: what the inference kernel of an operator is called.
_MAPS = {
    "torch.rms_norm": ("norm", "torch.rms_norm"),
    "torch.layer_norm": ("norm", "torch.rms_norm"),  # as many bytes
    "torch.gelu": ("activation", "torch.gelu_tanh"),
    "torch.gelu_tanh": ("activation", "torch.gelu_tanh"),
    "torch.silu": ("activation", "torch.gelu_tanh"),  # as many bytes
    "torch.add": ("add", "torch.add"),
    "torch.mul": ("add", "torch.add"),
}


class TrainingSource:
    """A `CostSource` of passes of a training step; ``None`` for everything else.

    Args:
        forward: prices forward programs.
        roofline: prices any program by peak rates.
    """

    def __init__(self, forward: CostSource, roofline: CostSource) -> None:
        self._forward, self._roofline = forward, roofline

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Let the source of forward programs price all parts at once."""
        if isinstance(self._forward, BatchSource):
            asked = (part for work in programs for part, _ in forward_parts(_alike(work)))
            self._forward.prepare(list(dict.fromkeys(asked)), device)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds, or ``None``."""
        if not isinstance(work, Program):
            return None
        alike = _alike(work)
        if alike is not work:
            whole = self.estimate(alike, device)
            at_peak = [self._roofline.estimate(item, device) for item in (work, alike)]
            if whole is None or at_peak[0] is None or at_peak[1] is None:
                return None
            return whole.times(at_peak[0].mean_s / at_peak[1].mean_s)
        parts = forward_parts(work)
        found = [(self._forward.estimate(part, device), count) for part, count in parts]
        known = [estimate.times(count) for estimate, count in found if estimate is not None]
        return Estimate.total(known) if known and len(known) == len(parts) else None


def _alike(work: Program) -> Program:
    """A product in bf16 for one in 8 bits or tf32, else the program itself."""
    if work.op.startswith("linear_") and work.variant.compute not in _DTYPES:
        return replace(work, variant=Variant("bf16", "bf16", "torch.linear"))
    return work


def forward_parts(work: Program) -> list[tuple[Program, float]]:
    """The forward programs that a pass of a training step is made of, and how often each.

    Args:
        work: a product, attention, norm, activation, element-wise operator, look-up, loss or cast.

    Returns:
        Nothing for any other program or dtype.
    """
    op, dtype, d = work.op, work.variant.compute, work.dims
    if op == "cast" and work.variant.kernel.startswith("torch.to"):
        return [_moved(d["rows"], d["cols"], work.variant.storage, dtype)]
    direction = next((w for w in (FORWARD, BACKWARD, WEIGHT_GRADIENT) if op.endswith(w)), "")
    op = op.removesuffix(f"_{direction}")
    if dtype not in _DTYPES or not direction:
        return []
    if op == "linear":
        rows, n, k = d["rows"], d["n"], d["k"]
        # A gradient in the product's dtype is read, the sum of earlier ones read and written.
        added = _moved(n, k, dtype, "fp32", "fp32")
        weights, inputs = _linear(dtype, n, k, rows), _linear(dtype, rows, k, n)
        return {
            FORWARD: [(_linear(dtype, rows, n, k), 1.0)],
            BACKWARD: [(inputs, 1.0), (weights, 1.0), added],
            WEIGHT_GRADIENT: [(weights, 1.0), added],
        }[direction]
    if op in ("embedding", "embedding_bag"):
        found = [_moved(d["rows"], d["cols"], dtype, dtype)]
        if direction == BACKWARD:
            found.append(_moved(d["vocab"], d["cols"], dtype, dtype, "fp32", "fp32"))
        return found
    if op == "pool":  # zeros are written and added to in the backward pass
        images = d["batch"] * d["channels"]
        read = _moved(images * d["height"], d["width"], *[dtype] * (1 + (direction == BACKWARD)))
        return [read, _moved(images * d["out_height"], d["out_width"], dtype)]
    if op == "cross_entropy":
        whole = program(
            "softmax", Variant("fp32", "fp32", "torch.softmax"), rows=d["rows"], cols=d["cols"]
        )
        return [(whole, 1.0 if direction == FORWARD else 2.0)]
    if op == "attention":
        forward = program(
            "attention", Variant(dtype, dtype, "torch.sdpa"), batch=d["batch"],
            queries=d["queries"], keys=d["keys"], heads=d["heads"], kv_heads=d["heads"],
            head_dim=d["head_dim"],
        )  # fmt: skip
        # A causal mask leaves half of the pairs: full attention is two causal ones.
        pairs = 1.0 if work.variant.kernel.endswith("_causal") else 2.0
        return [(forward, pairs * (1.0 if direction == FORWARD else ATTENTION_BACKWARD))]
    if op in ("norm", "activation", "elementwise") and work.variant.kernel in _MAPS:
        name, kernel = _MAPS[work.variant.kernel]
        moved = program(name, Variant(dtype, dtype, kernel), rows=d["rows"], cols=d["cols"])
        return [(moved, 1.0 if direction == FORWARD else 2.0)]
    return []


def _moved(rows: int, cols: int, *dtypes: str) -> tuple[Program, float]:
    """Tensors of these dtypes, read or written, as sums of two in fp32 to a third."""
    summed = program("add", Variant("fp32", "fp32", "torch.add"), rows=rows, cols=cols)
    share = sum(DTYPE_BYTES[dtype] for dtype in dtypes) / (3.0 * DTYPE_BYTES["fp32"])
    return summed, share


def _linear(dtype: str, rows: int, n: int, k: int) -> Program:
    return program("linear", Variant(dtype, dtype, "torch.linear"), rows=rows, n=n, k=k)
