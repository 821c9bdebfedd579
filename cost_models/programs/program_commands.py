"""What the commands ``evaluate`` and ``train`` do with scheduled programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.evaluation import summary
from foreplan.cost_models.model_store import model_folder, read_card
from foreplan.cost_models.programs.program_data import read_programs
from foreplan.cost_models.programs.program_evaluation import ProgramModel, evaluate_programs
from foreplan.cost_models.programs.program_folds import families_of
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets.device import Device
from foreplan.datasets.device_zoo import own_figures
from foreplan.datasets.tir.records import read_records
from foreplan.datasets.tir.tir_jsonl import read_tir_jsonl
from foreplan.datasets.torch_device import usable
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.programs.program_predictor import ProgramPredictor

#: Programs whose repetitions spread more are not trained on: others used the machine meanwhile.
TRAINING_SPREAD = 0.5
#: Folds of tasks that say how good a fine-tuned predictor is.
TUNING_FOLDS = 5
#: The device of programs whose file has no word for it.
_NOT_SAID = "not said"


def holds_programs(data: Path, format_name: str) -> bool:
    """Whether data is of scheduled programs: tir-jsonl, a folder, or Parquet of their schema.

    Raises:
        SpecError: a folder of other Parquet files.
    """
    if format_name == "tir-jsonl":
        return True
    if format_name != "foreplan":
        return False
    from foreplan.datasets.tir.records import SCHEMA

    if not data.is_dir():
        return _schema(data) == SCHEMA
    schemas = [_schema(path) for path in data.glob("*.parquet")]
    if schemas and all(schema is not None and schema != SCHEMA for schema in schemas):
        raise SpecError(
            "--data", got=str(data), expected="a folder of measured programs, or a file of "
            "operators: none of the folder's Parquet files is of programs",
        )  # fmt: skip
    return True


def _schema(path: Path) -> str | None:
    """What a Parquet file says that it is of, ``None`` for what is no such file."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    try:
        found = pq.read_schema(path).metadata or {}
    except (OSError, ValueError):
        return None
    return str(found.get(b"schema", b"").decode())


def load_program_model(
    name_or_path: str, *, torch_device: str = "cpu", where: str = "--model"
) -> ProgramModel:
    """A model of scheduled programs: ``roofline``, ``pretrained:programs`` or a folder.

    ``where`` is the option that names it.

    Raises:
        MissingDataError: no such shipped model.
        SpecError: no such path, or a model of something else.
    """
    if name_or_path == "roofline":
        from foreplan.cost_models.programs.baselines import BASELINES

        return BASELINES["roofline"]()  # type: ignore[no-any-return]
    from foreplan.cost_models.programs.program_predictor import ProgramPredictor

    folder = model_folder(name_or_path)
    if read_card(folder).get("kind") != "programs":
        raise SpecError(
            where, got=name_or_path, expected="a model of scheduled programs for this data",
            fix="use pretrained:programs, or a folder that 'foreplan train' wrote from programs",
        )  # fmt: skip
    return ProgramPredictor.load(folder, torch_device=torch_device)


def evaluate_program_files(
    model: str,
    data: Sequence[Path],
    format_name: str,
    *,
    device: str | None = None,
    device_files: Sequence[Path] = (),
) -> dict[str, object]:
    """Errors of a model on measured programs; see `program_evaluation.evaluate_programs`.

    Args:
        model: as `load_program_model`.
        data: tir-jsonl files, or shards or folders of Parquet.
        format_name: ``tir-jsonl`` or ``foreplan``.
        device: what every program ran on: a zoo name, a device that the model was trained on, or
            the name of one of ``device_files``.
        device_files: figures of devices that the zoo lacks.

    Raises:
        SpecError: a bad file, format, device or model.
        MissingDataError: the model or the data is not there.
    """
    predictor = load_program_model(model)
    known = _known(predictor, device) | own_figures(device_files)
    read = read_programs(data, format_name, device=device, known=known, count_all=True)
    names = None if device is None else [device] * len(read.table.devices)
    result = evaluate_programs(predictor, read.table, read.unsupported, names=names)
    return {"model": model, "format": format_name, **result}


def train_programs(
    data: Sequence[Path],
    formats: Sequence[str],
    output: Path,
    *,
    device: str | None = None,
    device_files: Sequence[Path] = (),
    hold_out: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> dict[str, object]:
    """Fit the predictor of scheduled programs and write it; returns its card.

    Its ``left_out`` counts programs that were not fitted to: ``noisy`` (`TRAINING_SPREAD`) and
    ``unsupported`` ones.

    Args:
        data: folders or files of measured programs.
        formats: one for all, or one each.
        output: folder to write to; made if missing.
        device: as `evaluate_program_files`.
        device_files: likewise.
        hold_out: families, chips or devices that no program may come from.
        settings: seed and further arguments of `ProgramPredictor`.

    Raises:
        SpecError: bad files, formats or settings, or nothing left to train on.
    """
    from foreplan.cost_models.programs.program_predictor import ProgramPredictor

    given = dict(settings or {})
    usable(given.get("torch_device", "cpu"), "--torch-device")
    kept, left_out = _kept(data, formats, device, own_figures(device_files), hold_out)
    model = ProgramPredictor(**given).fit(kept)
    return model.save(
        output,
        sources=[str(path.name) for path in data],
        held_out=list(hold_out),
        left_out=left_out,
        fit=summary(np.abs(model.predict(kept) / kept.latency_s - 1)),
    )


def tune_programs(
    start: str,
    data: Sequence[Path],
    formats: Sequence[str],
    output: Path,
    *,
    device: str | None = None,
    device_files: Sequence[Path] = (),
    hold_out: Sequence[str] = (),
    torch_device: str = "cpu",
) -> dict[str, object]:
    """Fine-tune a predictor of scheduled programs to a device and write it; returns its card.

    Its ``tuning`` says the mean relative error before, and of tasks that a fit on the others did
    not see (five folds of tasks; ``None`` for fewer tasks). ``left_out`` is as of `train_programs`.

    Args:
        start: ``pretrained:programs`` or a trained folder.
        data: as `train_programs`.
        formats: likewise.
        output: likewise.
        device: likewise.
        device_files: likewise.
        hold_out: likewise.
        torch_device: where networks are trained.

    Raises:
        SpecError: as `train_programs`, or a model of something else.
        MissingDataError: no such shipped model.
    """
    first = _predictor(start, usable(torch_device, "--torch-device"))
    known = _known(first, device) | own_figures(device_files)
    table, left_out = _kept(data, formats, device, known, hold_out)
    before = np.abs(first.predict(table) / table.latency_s - 1)
    tasks = np.unique(table.task)
    unseen = np.full(len(table), np.nan)
    if len(tasks) >= TUNING_FOLDS:
        fold = np.random.default_rng(0).permutation(len(tasks)) % TUNING_FOLDS
        number = fold[np.searchsorted(tasks, table.task)]
        for out in range(TUNING_FOLDS):
            held = table.take(number == out)
            made = _predictor(start, torch_device).continue_fit(table.take(number != out))
            unseen[number == out] = np.abs(made.predict(held) / held.latency_s - 1)
    model = first.continue_fit(table)
    card: Any = read_card(model_folder(start))
    return model.save(
        output,
        sources=[*card.get("sources", ()), *(str(path.name) for path in data)],
        held_out=list(hold_out),
        left_out=left_out,
        tuning={
            "programs": len(table), "tasks": len(tasks), "mape_before": float(before.mean()),
            "mape_unseen": float(unseen.mean()) if np.isfinite(unseen).all() else None,
        },
    )  # fmt: skip


def _predictor(name_or_path: str, torch_device: str) -> ProgramPredictor:
    from foreplan.cost_models.programs.program_predictor import ProgramPredictor

    found = load_program_model(name_or_path, torch_device=torch_device, where="--start")
    if not isinstance(found, ProgramPredictor):
        raise SpecError("--start", got=name_or_path, expected="pretrained:programs or a folder")
    return found


def _known(predictor: Any, device: str | None) -> dict[str, Device]:
    """Devices that a predictor was trained on, by the names that data may use for them.

    Records say their chip: the short name of a device, as ``cpu:threads=1,isa=avx2``, would make a
    program of any chip one of the first that the model was trained on. A word of the caller's may
    be one.
    """
    known: dict[str, Device] = dict(getattr(predictor, "known_devices", dict)())
    return {item.name: item for item in known.values()} if device is None else known


def _kept(
    data: Sequence[Path], formats: Sequence[str], device: str | None, known: Mapping[str, Device],
    hold_out: Sequence[str],
) -> tuple[ProgramTable, dict[str, int]]:  # fmt: skip
    """Programs of files to fit on, and how many are left out: ``noisy`` or ``unsupported``."""
    tables, left_out = [], {"noisy": 0, "unsupported": 0}
    for name in sorted(set(formats)):
        chosen = [
            path for path, own in zip(data, _each(formats, len(data)), strict=True) if own == name
        ]
        read = read_programs(chosen, name, device=device, known=known, max_spread=TRAINING_SPREAD)
        tables.append(read.table)
        left_out["noisy"] += read.noisy
        left_out["unsupported"] += len(read.unsupported)
    return without(ProgramTable.join(tables), hold_out), left_out


def without(table: ProgramTable, hold_out: Sequence[str]) -> ProgramTable:
    """The programs of a table that no held-out family calls and no held-out chip or device ran.

    Raises:
        SpecError: a name that no program has, or no program left.
    """
    families = families_of(table)
    device = np.array([item.name for item in table.devices], dtype=np.str_)[table.device]
    keep = np.ones(len(table), dtype=np.bool_)
    for name in hold_out:
        out = families.get(name, np.zeros(len(table), dtype=np.bool_))
        out = out | (table.chips == name) | (device == name)
        if not out.any():
            names = [*sorted(families), *sorted(set(table.chips)), *sorted(set(device))]
            raise SpecError("--hold-out", got=name, expected="one of " + ", ".join(names))
        keep &= ~out
    if not keep.any():
        raise SpecError("--hold-out", got=list(hold_out), expected="something left to train on")
    return table.take(keep)


def program_stats(data: Path, format_name: str) -> dict[str, object]:
    """Programs by device and network of a file or folder; none is encoded.

    Args:
        data: a shard, a folder of shards (``foreplan``) or a tir-jsonl file.
        format_name: ``foreplan`` or ``tir-jsonl``, which does not say the device.

    Returns:
        ``rows`` that ran, their ``tasks``, ``by_device_op`` (device, then network; a program counts
        for each that calls it), ``chips`` and how often programs ``failed``, by how.

    Raises:
        MissingDataError: no such file or folder.
        SpecError: a file that cannot be read.
    """
    chips, tasks = {}, set()
    counts: dict[str, Counter[str]] = {}
    failed: Counter[str] = Counter()
    rows = 0
    if format_name == "tir-jsonl":
        for line in read_tir_jsonl(data):
            if line.rows:
                tasks.add(line.key)
                chips[_NOT_SAID] = _NOT_SAID
                rows += len(line.rows)
                called = counts.setdefault(_NOT_SAID, Counter())
                called.update({network: len(line.rows) for network, _ in line.nets})
    else:
        for record in read_records(data):
            if not record.median_s > 0:
                failed[record.status] += 1
                continue
            device = f"{record.chip}/{record.device}"
            chips[device] = record.chip
            tasks.add(record.task_key)
            rows += 1
            counts.setdefault(device, Counter()).update(record.networks)
    return {
        "rows": rows,
        "tasks": len(tasks),
        "by_device_op": {name: dict(sorted(counts[name].items())) for name in sorted(counts)},
        "chips": chips,
        "failed": dict(failed),
    }


def _each(formats: Sequence[str], count: int) -> list[str]:
    if len(formats) not in (1, count):
        raise SpecError("--format", got=list(formats), expected="one, or one for each --data")
    return list(formats) * count if len(formats) == 1 else list(formats)
