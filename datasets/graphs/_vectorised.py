"""`unvectorised`: operators of batches in place of the functions that `torch.vmap` maps over them.

A trace keeps the calls by which `torch.vmap` begins and ends, and between them operators of one
element. Imports torch when called.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def unvectorised(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A trace in operators alone; the same one where nothing is mapped.

    Args:
        program: as torch.export has it.
    """
    modules = (getattr(node.target, "__module__", "") for node in program.graph.nodes)
    if not any(module.startswith("torch._functorch") for module in modules):
        return program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of calls of its own
        found: torch.export.ExportedProgram = program.run_decompositions({})
    return found
