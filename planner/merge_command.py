"""What ``foreplan cluster merge`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_merge import add_links, merge, unjoined
from foreplan.datasets.specs import StrictModel, load_document, validate
from foreplan.datasets.storage import refuse_overwriting, write_atomically
from foreplan.datasets.tier import Tier
from foreplan.errors import SpecError

#: Pairs of hosts without a link that are named.
_NAMED = 3


class _Links(StrictModel):
    """A link file."""

    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)]


def merge_files(files: Sequence[Path], output: Path) -> tuple[Cluster, list[str]]:
    """Join clusters of several hosts, and the links measured between them, and write the result.

    Args:
        files: clusters, and link files (documents with ``tiers`` and nothing else).
        output: where the merged cluster goes; profile paths become relative to its folder.

    Returns:
        What was written, and what its reader should know: figures that differ, hosts that no link
        joins.

    Raises:
        SpecError: fewer than two files, a file that is wrong or the output, clusters that
            contradict each other.
    """
    refuse_overwriting(output, *files)
    clusters: list[Cluster] = []
    links: dict[str, Tier] = {}
    for file in files:
        document = load_document(file)
        if set(document) == {"tiers"}:
            for i, tier in enumerate(validate(_Links, document, str(file)).tiers):
                links[f"{file}: tiers[{i}]"] = tier
        else:
            cluster = validate(Cluster, document, str(file))
            clusters.append(cluster.rebase(file.parent, output.parent))
    if len(files) < 2 or not clusters:
        raise SpecError(
            "cluster merge", got=[str(f) for f in files], expected="two or more, one a cluster"
        )
    merged, notes = add_links(merge(*clusters), links)
    named_json = output.suffix.lower() == ".json"  # and read back as that
    write_atomically(output, merged.to_json() if named_json else merged.to_yaml())
    return merged, notes + _apart(merged)


def _apart(cluster: Cluster) -> list[str]:
    """Which hosts no plan can span, and what would join them."""
    pairs = [f"{a} and {b}" for a, b in unjoined(cluster)]
    if not pairs:
        return []
    named = "; ".join(pairs[:_NAMED]) + (
        f"; {more} more" if (more := len(pairs) - _NAMED) > 0 else ""
    )
    return [
        f"no link joins {named}: merge the link file of 'foreplan profile --serve HOST:PORT "
        "--peer NAME' there too, or write one under tiers (scope: network)"
    ]
