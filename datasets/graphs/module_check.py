"""`check_module`: what no trace can be made of, whatever its inputs are."""

from __future__ import annotations

from foreplan.errors import SpecError


def check_module(source: object) -> None:
    """Refuse what cannot be captured, whatever its inputs are.

    Raises:
        SpecError: no module, one that ``torch.compile`` has compiled, or one whose class does not
            initialise `torch.nn.Module`.
    """
    import torch

    if isinstance(source, torch.nn.Module):
        if isinstance(source, torch.jit.ScriptModule):
            raise SpecError(
                "capture", got="a scripted or traced module", expected="modules as they are",
                fix="give the module that torch.jit was given",
            )  # fmt: skip
        if "_modules" not in vars(source):
            raise SpecError(
                "capture", got=f"{type(source).__name__} without parameters or parts",
                expected="a module that is initialised",
                fix="begin its __init__ with super().__init__()",
            )  # fmt: skip
        for path, part in source.named_modules():
            # torch.compile(module) wraps it; module.compile() keeps the compiled call beside it.
            if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None):
                raise SpecError(
                    "capture", got=f"a compiled module{path and ', '}{path}",
                    expected="modules as they are",
                    fix="give module._orig_mod, and predict it with execution='compiled'",
                )  # fmt: skip
        return
    fix = None
    if isinstance(source, type) and issubclass(source, torch.nn.Module):
        fix = f"make one: {source.__name__}(...)"
    elif isinstance(source, torch.export.ExportedProgram):
        fix = "give program.module()"
    raise SpecError(
        "capture", got=source if isinstance(source, type) else type(source).__name__,
        expected="a module", fix=fix,
    )  # fmt: skip
