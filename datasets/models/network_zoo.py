"""The network zoo: published networks of images, text and sound by name, ``zoo/networks.yaml``.

What is no decoder, so that no plan takes it: passes of it are priced (`foreplan.predict_latency`,
``foreplan predict``), and tensor programs are taken from some (`datasets.tir.networks`). Weights of
a network here are random, and none is needed for a price.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from foreplan.datasets.models.zoo_entries import zoo_entries
from foreplan.datasets.specs import StrictModel, validate

_FILE = Path(__file__).parents[1] / "zoo" / "networks.yaml"
_SCHEMA = "foreplan.network_zoo/1"


class ZooNetwork(StrictModel):
    """One published network.

    Attributes:
        name: that the zoo knows it by.
        family: networks of one family are held out together.
        model_type: transformers' word for the architecture.
        class_: transformers' class.
        config: fields of its configuration that are not the class's defaults, or tell its size.
        image: usual side of its images in pixels; ``None`` if it takes none.
        beside: what its encoder takes beside the decoder's tokens, in words; "" without one.
        parameters: that `source` publishes.
        source: repository at huggingface.co, which is another name of it.
        aliases: other names.
    """

    name: str
    family: str
    model_type: str
    class_: str = Field(alias="class")
    config: Mapping[str, Any]
    image: PositiveInt | None = None
    beside: str = ""
    parameters: PositiveInt
    source: str
    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()

    @property
    def takes(self) -> str:
        """What it computes on, in words."""
        if self.image is not None:
            return f"images, {self.image} x {self.image}"
        return f"tokens {self.beside}".rstrip()


def zoo_networks() -> Mapping[str, ZooNetwork]:
    """Every network by name, in the file's order."""
    return _read()[0]


def zoo_network(name: str) -> ZooNetwork | None:
    """The network of a name or alias, ``None`` where none has it.

    Args:
        name: letters' case, dashes, underscores, dots and spaces do not matter.
    """
    found = _read()[1].get(_key(name))
    return None if found is None else zoo_networks()[found]


def network_aliases() -> Mapping[str, str]:
    """Names of networks by all that they are called, for "did you mean"."""
    return {
        called: network.name
        for network in zoo_networks().values()
        for called in (network.name, *network.aliases, network.source.rpartition("/")[2])
    }


def network_documents() -> list[dict[str, Any]]:
    """Each network as JSON: family, what it takes, parameters and source."""
    return [
        {
            "name": network.name, "family": network.family, "takes": network.takes,
            "parameters": network.parameters, "source": network.source,
        }
        for network in zoo_networks().values()
    ]  # fmt: skip


def _key(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


@functools.cache
def _read() -> tuple[dict[str, ZooNetwork], dict[str, str]]:
    """Networks by name, and names by `_key` of all that they are called."""
    networks = {
        name: validate(ZooNetwork, {"name": name, **fields}, f"{_FILE.name}: networks.{name}")
        for name, fields in zoo_entries(_FILE, _SCHEMA, "networks").items()
    }
    called: dict[str, str] = {}
    for network in networks.values():
        repository = network.source.rpartition("/")[2]
        for name in (network.name, *network.aliases, network.source, repository):
            called[_key(name)] = network.name
    return networks, called
