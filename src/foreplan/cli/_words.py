"""What the shell offers for values: words that the commands know, looked up when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def words(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completion from a list of words, for typer's ``autocompletion``."""

    def complete(incomplete: str) -> list[str]:
        try:
            return [word for word in known() if word.startswith(incomplete)]
        except Exception:  # a broken installation must not print into somebody's prompt
            return []

    return complete


def listed(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """As `words`, for values with commas: the last item is completed, a count kept."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        count, times, name = last.partition("x")
        if not (times and count.isdigit()):
            count, times, name = "", "", last
        return [f"{before}{comma}{count}{times}{word}" for word in words(known)(name)]

    return complete


def costs() -> Sequence[str]:
    """Choices of ``--costs``."""
    return ("measured", "predicted", "roofline")


def devices() -> Sequence[str]:
    """Names of the device zoo."""
    from foreplan.datasets import device_zoo

    return device_zoo.names()


def kinds() -> Sequence[str]:
    """Installed planners."""
    from foreplan.planner.registry import kinds as installed

    return installed()


def models() -> Sequence[str]:
    """Names of the model zoo; folders are completed by the shell itself."""
    from foreplan.datasets.models.model_zoo import pretrained_folders, zoo_names

    return (*zoo_names(), *pretrained_folders())


def priced() -> Sequence[str]:
    """Names that ``predict`` takes; folders and files are completed by the shell itself."""
    from foreplan.datasets.models.network_zoo import zoo_networks

    return (*models(), *zoo_networks())


def targets() -> Sequence[str]:
    """Installed exporters."""
    from foreplan.planner.export.exporter import targets as installed

    return installed()


def schedules() -> Sequence[str]:
    """Pipeline schedules."""
    return ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")


def purposes() -> Sequence[str]:
    """Choices of ``profile --for``."""
    return ("serving", "precision", "bubbles")


def phases() -> Sequence[str]:
    """Choices of ``predict --phase``."""
    from foreplan.cost_models.lowering.graph_step import PHASES

    return PHASES


def executions() -> Sequence[str]:
    """Choices of ``predict --execution``."""
    from foreplan.cost_models.execution import EXECUTIONS

    return EXECUTIONS


def dtypes() -> Sequence[str]:
    """Choices of ``predict --dtype``."""
    return ("fp32", "fp16", "bf16")


def indicators() -> Sequence[str]:
    """Choices of ``quality --indicator``."""
    from foreplan.cost_models.quality.quality_table import INDICATORS

    return INDICATORS


def shipped() -> Sequence[str]:
    """Trained models that come along; folders are completed by the shell itself."""
    return ("pretrained:ops", "pretrained:programs")


def formats() -> Iterable[str]:
    """Forms of measured operators and programs."""
    from foreplan.datasets.importers import FORMATS

    return (*FORMATS, "tir-jsonl")


def networks() -> Iterable[str]:
    """Networks that tensor programs are taken from."""
    from foreplan.datasets.tir.networks import zoo

    return zoo()
