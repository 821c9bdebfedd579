"""An einsum of two operands is a list of matrix products, whatever the order of its letters."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foreplan.cost_models.lowering.einsum_terms import EinsumTerms
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture

#: Equations of Mamba 2's scan as transformers writes it, attention's, and one that sums early.
EQUATIONS = {
    "bclhn,bcshn->bclsh": [(2, 3, 5, 4, 6), (2, 3, 7, 4, 6)],
    "bclsh,bcshp->bclhp": [(2, 3, 5, 7, 4), (2, 3, 7, 4, 6)],
    "bclhn,bclhp->bchpn": [(2, 3, 5, 4, 6), (2, 3, 5, 4, 7)],
    "bqhd,bkhd->bhqk": [(2, 5, 4, 6), (2, 7, 4, 6)],
    "ij,jk->ki": [(5, 6), (6, 7)],
    "bij,jk->bk": [(2, 5, 6), (6, 7)],
}


class _Products(TorchDispatchMode):
    """The batched products that torch runs: batch, m, n and k of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.bmm.default:
            (batch, m, k), (_, _, n) = (tensor.shape for tensor in args)
            self.found.append((batch, m, n, k))
        return func(*args, **(kwargs or {}))


class _Einsum(torch.nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, left, right)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_are_those_that_torch_runs(equation: str) -> None:
    left, right = (torch.randn(*shape) for shape in EQUATIONS[equation])
    with _Products() as ran:
        torch.einsum(equation, left, right)
    graph = capture(_Einsum(equation), (left, right), eager=True)
    works = [step.work.dims for step in lower(graph) if step.kind == "matmul"]
    found = [(d["batch"], d["m"], d["n"], d["k"]) for d in works]
    # torch may take the second operand's rows for the first's.
    assert found in (ran.found, [(b, n, m, k) for b, m, n, k in ran.found])


@pytest.mark.parametrize("equation", ["ij,jk", "...ij,jk->...ik", "ij->ji", "i,j,k->ijk"])
def test_other_equations_are_left_to_the_shapes(equation: str) -> None:
    assert EinsumTerms.of(equation) is None


def test_an_extent_of_one_is_broadcast() -> None:
    terms = EinsumTerms.of("bij,bjk->bik")
    assert terms is not None
    assert terms.sizes([(1, 5, 6), (8, 6, 7)]) == {"batch": 8, "m": 5, "n": 7, "k": 6}
