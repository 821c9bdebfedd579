"""`SparseModel`: a record that grows without changing the documents written before."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from foreplan.datasets.specs import StrictModel


class SparseModel(StrictModel):
    """A record whose document leaves fields out that came later, while they have their defaults.

    Attributes:
        later: these fields.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> Any:
        made = handler(self)
        fields = type(self).model_fields
        for name in self.later:
            if name in made and getattr(self, name) == fields[name].default:
                del made[name]
        return made

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # The schema of the fields, which a serializer hides.
        return handler(_plain(core_schema))


def _plain(core_schema: Any) -> Any:
    """A model's schema without its serializer, below whatever validators wrap it."""
    kept = {name: part for name, part in core_schema.items() if name != "serialization"}
    if core_schema["type"] != "model":
        kept["schema"] = _plain(core_schema["schema"])
    return kept
