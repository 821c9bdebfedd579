"""`LatentAttention`: multi-head latent attention (DeepSeek-V2, 2024, section 2.1), as sizes.

Of each token the cache keeps one latent, from which every head's key and value follow by a linear,
and one key that is turned by its position and that all heads share. Queries may come from a latent
of their own.

Shape legend: H = query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from foreplan.datasets.models.linear_shape import LinearShape
from foreplan.datasets.specs import StrictModel

#: What the norms of latents add to the variance, whatever a configuration says of the others
#: (transformers, ``modeling_deepseek_v3.py``: the default of its norm).
LATENT_NORM_EPS = 1e-6

#: What the rest of a layer has to be like.
_BESIDE = {"norms": "before", "parallel": False, "qk_norm": False, "sliding_window": None}
_Even = Annotated[int, Field(gt=0, multiple_of=2)]


class LatentAttention(StrictModel):
    """Sizes of an attention over latents.

    Attributes:
        rank: features of the latent from which keys and values are made (``kv_lora_rank``).
        plain: features of a head's queries and keys that are not turned (``qk_nope_head_dim``).
        turned: features that are; the key's are shared (``qk_rope_head_dim``).
        value: features of a head's values (``v_head_dim``).
        query_rank: features of the latent of queries; ``None`` = they come from the layer's input.
    """

    rank: _Even
    plain: PositiveInt
    turned: _Even
    value: PositiveInt
    query_rank: PositiveInt | None = None

    @field_validator("value")
    @classmethod
    def _fits_keys(cls, value: int, info: ValidationInfo) -> int:
        width = info.data.get("plain", 0) + info.data.get("turned", 0)
        if value > width:
            raise ValueError(f"at most the {width} features of a key, to which values are padded")
        return value

    def beside(self, facts: Mapping[str, object]) -> Self:
        """Itself, or `ValueError` where other facts of a model do not go with latents."""
        if self.turned != facts.get("head_dim"):
            raise ValueError("as many turned features as head_dim says")
        if any(facts.get(name) != value for name, value in _BESIDE.items()):
            raise ValueError("none: latents come with norms in front, every key and no head norms")
        return self

    @property
    def cached(self) -> int:
        """Features that the cache keeps of a token: latent and turned key."""
        return self.rank + self.turned

    @property
    def width(self) -> int:
        """Features of a head's queries and keys."""
        return self.plain + self.turned

    def linears(
        self, heads: int, hidden: int, *, bias: bool, out_bias: bool
    ) -> tuple[LinearShape, ...]:
        """The fused linears of a layer's attention whose precision is chosen, as they run.

        ``latents`` computes latent, turned key and the queries' latent in one product, ``queries``
        takes that latent or the layer's input. What makes keys and values from the latent
        (`expanding`) stays in bf16, as both ways of attention read it (`latent_programs`).
        """
        return (
            LinearShape("latents", self.cached + (self.query_rank or 0), hidden, bias),
            LinearShape("queries", heads * self.width, self.query_rank or hidden, False),
            LinearShape("out", hidden, heads * self.value, out_bias),
        )

    def expanding(self, heads: int) -> tuple[int, int]:
        """``[n, k]`` of the linear from latents to heads: of each its plain key, then its value."""
        return heads * (self.plain + self.value), self.rank

    def beside_linears(self, heads: int) -> int:
        """Parameters of a layer's attention that are not in `linears`: `expanding` and norms."""
        n, k = self.expanding(heads)
        return n * k + self.rank + (self.query_rank or 0)
