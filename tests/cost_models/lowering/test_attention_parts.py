"""Attention with dropout on a processor: its parts are what torch runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from foreplan.cost_models.lowering.attention_parts import attention_parts, drops_scores
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program

#: What launches nothing but a view, or writes a single number.
_NOTHING = ("view", "transpose", "expand", "squeeze", "detach", "scalar_tensor", "empty", "reshape")
#: Calls of torch by the names of parts.
_AS = {"_softmax_backward_data": "backward", "bernoulli_": "bernoulli", "div_": "div"}


class Attention(nn.Module):
    """Scores of given queries, keys and values, with dropout in training mode."""

    def __init__(self, causal: bool, shared: bool) -> None:
        super().__init__()
        self.causal, self.shared = causal, shared

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, 0.1 if self.training else 0.0, self.causal, enable_gqa=self.shared
        )


class _Recorder(TorchDispatchMode):
    """Lists what runs, as names and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name == "_safe_softmax":  # its own parts are below dispatch
            self.found += Counter(
                (part, result.numel()) for part in ("softmax", "eq", "all", "where")
            )
        elif name == "bmm":
            self.found["bmm", 2 * args[0].numel() * args[1].shape[-1]] += 1
        elif not any(word in name for word in _NOTHING):
            given = args[0] if name == "sum" else result
            self.found[_AS.get(name, name), given.numel()] += 1
        return result


def parts(item: Program) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for part, count in attention_parts(item):
        name = part.variant.kernel.removeprefix("torch.").removesuffix("_by_block")
        size = int(part.flops) if part.op == "matmul" else part.dims["rows"] * part.dims["cols"]
        found[name, size] += count
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "shared", "causal", "mask"),
    [
        (2, 4, 4, True, None), (2, 4, 4, False, None), (1, 4, 4, True, None),
        (1, 4, 2, False, None), (3, 4, 2, True, None),
        (2, 4, 4, False, torch.ones(2, 1, 7, 7, dtype=torch.bool)),
        (2, 4, 4, False, torch.ones(1, 1, 7, 7, dtype=torch.bool)),
        (2, 4, 4, False, torch.zeros(2, 4, 7, 7)),
    ],
)  # fmt: skip
def test_parts_are_what_torch_runs(
    batch: int, heads: int, shared: int, causal: bool, mask: Tensor | None, dtype: torch.dtype
) -> None:
    module = Attention(causal, shared < heads)

    def drawn(count: int) -> Tensor:  # as networks hand them over: heads inside of positions
        return torch.rand(batch, 7, count, 5, dtype=dtype).transpose(1, 2).requires_grad_()

    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    given = (drawn(heads), drawn(shared), drawn(shared), *([] if mask is None else [mask]))
    steps = lower(capture(module, given, eager=True, training=True))
    (forward,) = [step.work for step in steps if step.kind == "attention"]
    assert isinstance(forward, Program)
    assert drops_scores(forward)
    back = Program(f"{forward.op}_gradient", forward.sizes, forward.variant)
    with _Recorder() as seen:
        result = module.train()(*given)
    assert parts(forward) == seen.found
    gradient = torch.rand_like(result)
    with _Recorder() as seen:
        torch.autograd.grad(result, given[:3], gradient)
    assert parts(back) == seen.found


def test_attention_without_dropout_is_one_kernel() -> None:
    given = [torch.rand(2, 4, 7, 5) for _ in range(3)]
    for training, drops in ((False, False), (True, True)):
        graph = capture(Attention(True, False), given, eager=True, training=training)
        (work,) = [step.work for step in lower(graph) if step.kind == "attention"]
        assert isinstance(work, Program)
        assert drops_scores(work) == drops
