"""What the commands ``evaluate``, ``train`` and ``dataset`` of operator tables do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreplan.cost_models.model_store import CARD, model_folder, read_card
from foreplan.cost_models.programs.program_commands import (
    evaluate_program_files,
    holds_programs,
    program_stats,
    train_programs,
    tune_programs,
)
from foreplan.datasets.device_zoo import own_figures
from foreplan.datasets.importers import read_operators
from foreplan.datasets.storage import folder_for, refuse_overwriting, refuse_unwritable
from foreplan.datasets.sweeps.operator_table import OperatorTable, write_operators
from foreplan.errors import SpecError


def evaluate_file(
    model: str,
    data: Path,
    format_name: str,
    *,
    device: str | None = None,
    device_files: Sequence[Path] = (),
) -> dict[str, object]:
    """Errors of a model on a file of measurements; see `evaluation.evaluate`.

    Args:
        model: ``pretrained:ops``, ``pretrained:programs``, a trained model's folder, ``roofline``.
        data: the file; of programs a folder of Parquet files, too.
        format_name: ``foreplan``, ``neusight``, ``aiconfigurator``, ``helix`` or ``tir-jsonl``.
        device: device of every row, for files that do not say.
        device_files: figures of devices that the zoo lacks.

    Raises:
        SpecError: a bad file, format or device.
        MissingDataError: the model is not there.
    """
    programs = holds_programs(data, format_name)
    _refuse_other_data(model, data, programs, format_name)
    if programs:
        return evaluate_program_files(
            model, [data], format_name, device=device, device_files=device_files
        )
    from foreplan.cost_models.evaluation import evaluate
    from foreplan.cost_models.model_store import load_operator_model

    table = read_operators(data, format_name, device=device, devices=own_figures(device_files))
    return {"model": model, "format": format_name, **evaluate(load_operator_model(model), table)}


def _refuse_other_data(model: str, data: Path, programs: bool, format_name: str) -> None:
    """Refuse data that a model does not predict, before its columns are asked about.

    Raises:
        MissingDataError: no such shipped model.
        SpecError: no such model, no such file, or one of the other sort.
    """
    from foreplan.cost_models.operators.baselines import BASELINES

    if model in BASELINES or not data.exists():  # the one is of both; the other is told by readers
        return
    if (read_card(model_folder(model)).get("kind") == "programs") == programs:
        return
    operators = "measured operators (a table, see --format)"
    scheduled = "measured programs (a folder that 'dataset build' wrote, or --format tir-jsonl)"
    wanted, sort = (operators, "programs") if programs else (scheduled, "ops")
    shown = str(data) if format_name == "foreplan" else f"{data} --format {format_name}"
    raise SpecError(
        "--data", got=shown, expected=f"{wanted}, which {model} predicts",
        fix=f"for this data use -m pretrained:{sort}",
    )  # fmt: skip


def train_files(
    data: Sequence[Path],
    formats: Sequence[str],
    output: Path,
    *,
    hold_out: Sequence[str] = (),
    seed: int = 0,
    device: str | None = None,
    torch_device: str = "cpu",
    start: str | None = None,
    device_files: Sequence[Path] = (),
) -> dict[str, object]:
    """Fit the predictor of what the data is of, operators or programs; returns its card.

    Args:
        data: files of measurements, or folders of measured programs.
        formats: one for all, or one each.
        output: folder to write to; made if missing.
        hold_out: chips, devices or (of programs) families that no row may come from.
        seed: of every random choice.
        device: what every program of a tir-jsonl file ran on.
        torch_device: where networks are trained.
        start: a model to fine-tune, as `evaluate_file` takes one; ``None`` fits one anew.
        device_files: figures of devices that the zoo lacks.

    Raises:
        SpecError: a bad file or format, operators and programs together, a start that is of
            something else, or a folder that cannot be written, which is said before the training.
        MissingDataError: no such shipped model.
    """
    names = list(formats) * len(data) if len(formats) == 1 else list(formats)
    if len(names) != len(data):
        raise SpecError("--format", got=names, expected="one, or one for each --data")
    programs = [holds_programs(path, name) for path, name in zip(data, names, strict=True)]
    if any(programs) and not all(programs):
        raise SpecError("--data", got=[str(p) for p in data], expected="operators or programs")
    with folder_for(output):
        refuse_unwritable(output / CARD)
        if all(programs):
            given: dict[str, Any] = {
                "device": device, "device_files": device_files, "hold_out": hold_out
            }  # fmt: skip
            if start is not None:
                return tune_programs(start, data, names, output, torch_device=torch_device, **given)
            return train_programs(
                data, names, output, settings={"seed": seed, "torch_device": torch_device}, **given
            )
        return train_operators(
            data, names, output, hold_out=hold_out, seed=seed, device=device, start=start,
            device_files=device_files,
        )  # fmt: skip


def train_operators(
    data: Sequence[Path],
    formats: Sequence[str],
    output: Path,
    *,
    hold_out: Sequence[str] = (),
    seed: int = 0,
    device: str | None = None,
    start: str | None = None,
    device_files: Sequence[Path] = (),
) -> dict[str, object]:
    """Fit the operator predictor, or fine-tune one, and write it; returns its card.

    Args:
        data: files of measurements.
        formats: one for all files, or one each.
        output: folder to write to; made if missing.
        hold_out: chips (``gh100``) or devices that no row may come from.
        seed: of every random choice.
        device: device of every row, for files that do not say.
        start: ``pretrained:ops`` or a trained folder, whose experts are fine-tuned; ``None`` fits
            new ones.
        device_files: figures of devices that the zoo lacks.

    Raises:
        SpecError: a bad file or format, a held-out name that no row has, no row left, or a start
            that is fine-tuned already.
        MissingDataError: no such shipped model.
    """
    if len(formats) not in (1, len(data)):
        raise SpecError("--format", got=list(formats), expected="one, or one for each --data")
    names = list(formats) * len(data) if len(formats) == 1 else list(formats)
    known = own_figures(device_files)
    table = OperatorTable.concat(
        read_operators(path, name, device=device, devices=known)
        for path, name in zip(data, names, strict=True)
    )
    kept = without(table, hold_out)
    facts = {
        "sources": [{"file": path.name, "format": name}
                    for path, name in zip(data, names, strict=True)],
        "held_out": list(hold_out),
    }  # fmt: skip
    if start is not None:
        return _tune_operators(start, kept, output, seed, facts)
    from foreplan.cost_models.operators.operator_predictor import OperatorPredictor

    return OperatorPredictor(seed=seed).fit(kept).save(output, **facts)


def _tune_operators(
    start: str, table: OperatorTable, output: Path, seed: int, facts: Mapping[str, object]
) -> dict[str, object]:
    from foreplan.cost_models.model_store import model_folder
    from foreplan.cost_models.operators.operator_weights import load_experts, save_tuned
    from foreplan.cost_models.operators.tuned_experts import TunedExperts

    folder = model_folder(start)
    experts = load_experts(folder)
    if isinstance(experts, TunedExperts):
        raise SpecError(
            "--start", got=start, expected="a model that was not fine-tuned",
            fix="start from what it was made of, with all rows",
        )  # fmt: skip
    return save_tuned(TunedExperts.fit(experts, table, seed=seed), folder, output, facts)


def without(table: OperatorTable, hold_out: Sequence[str]) -> OperatorTable:
    """The rows of a table that come from none of these chips or devices.

    Raises:
        SpecError: a name that no row has, or no row left.
    """
    chips = table.chips
    keep = chips == chips
    for name in hold_out:
        out = (chips == name) | (table.device == name)
        if not out.any():
            names = [*sorted(set(chips)), *sorted(set(table.device))]
            raise SpecError("--hold-out", got=name, expected="one of " + ", ".join(names))
        keep &= ~out
    if not keep.any():
        raise SpecError("--hold-out", got=list(hold_out), expected="something left to train on")
    return table.take(keep)


def import_operators(
    data: Path, format_name: str, output: Path, *, device: str | None = None
) -> dict[str, object]:
    """Write a file of a public source as an operator table; returns its statistics.

    Raises:
        SpecError: a file that cannot be read, or that would be written over.
    """
    refuse_overwriting(output, data)
    table = read_operators(data, format_name, device=device)
    write_operators(table, output)
    return {"written": str(output), **_stats(table)}


def operator_stats(data: Path, format_name: str) -> dict[str, object]:
    """Rows by device and operator of a file of measurements; of programs, by network."""
    if holds_programs(data, format_name):
        return program_stats(data, format_name)
    return _stats(read_operators(data, format_name))


def _stats(table: OperatorTable) -> dict[str, object]:
    pairs = Counter(zip(table.device, table.op, strict=True))
    devices: dict[str, dict[str, int]] = {}
    for (name, op), count in sorted(pairs.items()):
        devices.setdefault(name, {})[op] = count
    return {
        "rows": len(table),
        "by_device_op": devices,
        "chips": {name: table.chip_of(name) for name in devices},
        "not_in_zoo": [name for name in devices if table.device_of(name) is None],
        "unknown_operators": sorted(set(table.op[table.kind == "unknown"])),
        "libraries": sorted(set(table.library)),
    }
