"""`Scalars`: numbers by which a family's computation differs from Llama's."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from foreplan.datasets.specs import StrictModel


class Scalars(StrictModel):
    """Factors and an offset. Loading puts them into the weights, so that no operator knows them.

    Attributes:
        embedding: factor of embedded tokens.
        attention: factor of the products of queries and keys; ``head_dim^-0.5`` if ``None``.
        residual: factor of what attention and MLP add to the residual stream.
        logits: factor of the head's result.
        norm: added to the weights of all norms.
    """

    embedding: PositiveFloat = 1.0
    attention: PositiveFloat | None = None
    residual: PositiveFloat = 1.0
    logits: PositiveFloat = 1.0
    norm: float = Field(default=0.0, ge=0)

    def of_queries(self, head_dim: int) -> float:
        """Factor of queries that makes `attention` the scale, where attention has its own."""
        return 1.0 if self.attention is None else self.attention * head_dim**0.5
