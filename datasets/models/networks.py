"""Small networks to train, described by records from which any process can rebuild them.

`build` makes a network without touching torch's random state: it is described on the meta device
and filled by integer arithmetic (`bell_shaped`), so that ranks with other instruction sets start
from the same bits. Imports torch.

Shape legend: B = batch, T = tokens, D = width, H = heads.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.datasets.models.weights import INIT_STD, bell_shaped
from foreplan.datasets.specs import StrictModel

Size = Annotated[int, Field(gt=0, le=1 << 20)]


class ByteLMConfig(StrictModel):
    """A pre-norm GPT on bytes.

    Attributes:
        width: D; heads divide it.
        layers: blocks.
        heads: H.
        context: most tokens of a sample.
    """

    kind: Literal["byte_lm"] = "byte_lm"
    width: Size = 256
    layers: Size = 4
    heads: Size = 4
    context: Size = 128

    @model_validator(mode="after")
    def _divides(self) -> ByteLMConfig:
        if self.width % self.heads:
            raise ValueError(f"a width that {self.heads} heads divide")
        return self


class DigitsMLPConfig(StrictModel):
    """A perceptron of ``layers`` hidden layers of ``width`` on 8 x 8 images."""

    kind: Literal["digits_mlp"] = "digits_mlp"
    width: Size = 256
    layers: Size = 2


class DigitsCNNConfig(StrictModel):
    """Two convolutions of ``width`` and ``2 width`` channels with batch norms, and two linears."""

    kind: Literal["digits_cnn"] = "digits_cnn"
    width: Size = 32


NetworkConfig = ByteLMConfig | DigitsMLPConfig | DigitsCNNConfig


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        fused = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        made: Tensor = x + self.down(self.activation(self.up(self.norm2(x))))
        return made


class ByteLM(nn.Module):
    """Predicts the next byte; bytes ``[B, T]`` int64 to logits ``[B, T, 256]``."""

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _table(256, config.width)
        self.position = _table(config.context, config.width)
        self.blocks = nn.ModuleList(
            _Block(config.width, config.heads) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the byte behind each of ``ids``."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _mlp(config: DigitsMLPConfig) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    features = 64
    for _ in range(config.layers):
        layers += [nn.Linear(features, config.width), nn.ReLU()]
        features = config.width
    return nn.Sequential(*layers, nn.Linear(features, 10))


def _cnn(config: DigitsCNNConfig) -> nn.Module:
    width = config.width
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * width, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def build(config: NetworkConfig, seed: int) -> nn.Module:
    """A network with weights of a seed, on the caller's default device (also ``meta``).

    Linears and convolutions are bell-shaped with variance 2 / fan-in (He et al. 2015); those of the
    language model with deviation 0.02, divided by sqrt(2 layers) where they end a residual branch
    (GPT-2). Biases are 0.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        module: nn.Module
        if isinstance(config, ByteLMConfig):
            module = ByteLM(config)
        elif isinstance(config, DigitsMLPConfig):
            module = _mlp(config)
        else:
            module = _cnn(config)
    if device.type == "meta":
        return module
    module.to_empty(device=device)
    with torch.no_grad():
        for name, part in module.named_modules():
            if isinstance(part, (nn.LayerNorm, nn.BatchNorm2d)):
                part.reset_parameters()  # ones and zeros
            elif isinstance(part, (nn.Linear, nn.Conv2d, nn.Embedding)):
                weight = bell_shaped(f"{seed}/{name}", tuple(part.weight.shape), torch.float32)
                part.weight.copy_(weight.mul_(_deviation(config, name, part) / INIT_STD))
                bias = getattr(part, "bias", None)
                if isinstance(bias, Tensor):
                    bias.zero_()
    return module


def _table(rows: int, width: int) -> nn.Embedding:
    """A look-up without values: its own draw of them on ``meta`` imports torch's compiler (3 s)."""
    values = torch.empty(rows, width)
    table: nn.Embedding = nn.Embedding.from_pretrained(values, freeze=False)  # type: ignore[no-untyped-call]
    return table


def _deviation(config: NetworkConfig, name: str, part: nn.Module) -> float:
    if isinstance(config, ByteLMConfig):
        ends_branch = name.endswith((".out", ".down"))
        return INIT_STD / (2 * config.layers) ** 0.5 if ends_branch else INIT_STD
    if isinstance(part, nn.Conv2d):
        return float((2 / (part.in_channels * part.kernel_size[0] * part.kernel_size[1])) ** 0.5)
    return float((2 / part.in_features) ** 0.5) if isinstance(part, nn.Linear) else INIT_STD
