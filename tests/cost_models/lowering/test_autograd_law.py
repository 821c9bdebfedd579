"""The law of a lowered training step, on small modules: its gradients are what autograd runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.cost_models.autograd_kernels import autograd, priced
from torch import Tensor, nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture


class Of(nn.Module):
    """A function of what a linear (or two) makes of the input, so that gradients come back."""

    def __init__(self, function: Callable[..., Tensor], *more: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.first = function, nn.Linear(8, 8, bias=False)
        self.more = nn.ParameterList(nn.Parameter(torch.rand(shape) + 0.5) for shape in more)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), *self.more)


class Attending(nn.Module):
    """Attention of four heads that share ``kv`` of keys and values."""

    def __init__(self, kv: int, *, causal: bool, repeat: bool = False) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 16), nn.Linear(8, 2 * kv * 4)
        self.out = nn.Linear(16, 8, bias=False)
        self.heads, self.causal, self.repeat = kv, causal, repeat

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, self.heads, 4).permute(2, 0, 3, 1, 4)
        if self.repeat:
            k, v = (
                y[:, :, None].expand(b, self.heads, 4 // self.heads, t, 4).reshape(b, 4, t, 4)
                for y in (k, v)
            )
        grouped = not self.repeat and self.heads < 4
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + out


class WrittenOut(nn.Module):
    """Attention as products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-2, -1) / 3.0, -1) @ v


class Tied(nn.Module):
    """A table that is read twice: by its rows, and as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.table(ids)), self.table.weight)


class Residual(nn.Module):
    """A block of a network of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.deep(F.relu(self.norm(self.first(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


ROWS = torch.rand(2, 6, 8) + 0.1
IMAGES = torch.rand(2, 3, 8, 8)
IDS = torch.randint(12, (2, 6))


def scattered(how: str, alone: bool, x: Tensor) -> Tensor:
    at = (torch.arange(6) % 4)[:, None].expand(-1, 16)
    wide = x.transpose(0, 1).flatten(1)
    return torch.zeros(4, 16).scatter_reduce(0, at, wide, how, include_self=not alone)


def rotated(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), -1) + x


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], *tuple[tuple[int, ...], ...]]] = {
    "add": (lambda x, y: x + y, (8,)),
    "sub": (lambda x, y: x - y, (2, 6, 8)),
    "sub from": (lambda x, y: y - x, (8,)),
    "sub a column": (lambda x, y: x - y, (6, 1)),
    "one less": (lambda x: 1.0 - x,),
    "mul": (lambda x, y: x * y, (6, 1)),
    "square": (lambda x: x * x,),
    "scaled": (lambda x: x * 3.0,),
    "div": (lambda x, y: x / y, (2, 6, 8)),
    "div by columns": (lambda x, y: x / y, (8,)),
    "div of columns": (lambda x, y: y / (x + 3.0), (8,)),
    "div by a number": (lambda x: x / 3.0,),
    "where": (lambda x, y: torch.where(x > 0, x, y), (8,)),
    "where a number": (lambda x: torch.where(x > 0, x, 0.0),),
    "clamp": (lambda x: x.clamp(-0.1, 0.1),),
    "detached": (lambda x: x * x.detach(),),
    "norm": (lambda x: torch.linalg.norm(x, dim=-1),),
    "normalised": (lambda x: F.normalize(x, dim=-1),),
    "gated": (F.glu,),
    # Composed of others.
    "converted": (lambda x: x.double().type_as(x),),
    "outer": (lambda x: torch.outer(x[0, 0], x[0, 1]),),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([2], [1])), (5, 8)),
    "distance": (F.pairwise_distance, (2, 6, 8)),
    "taken": (lambda x: torch.take_along_dim(x, torch.zeros(2, 6, 1, dtype=torch.long), 2),),
    "weight norm": (lambda x, v, g: F.linear(x, torch._weight_norm(v, g, 0)), (8, 8), (8, 1)),
    "masked": (lambda x: x.masked_fill(torch.ones(8, dtype=torch.bool), 0.0),),
    "maximum": (lambda x, y: torch.maximum(x, y), (2, 6, 8)),
    "hypotenuse": (torch.hypot, (2, 6, 8)),
    "sum of two exponentials": (torch.logaddexp, (2, 6, 8)),
    "prelu": (F.prelu, (1,)),
    "written-out norm": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), (8,),
    ),
    "sum": (lambda x: x.sum(-1),),
    "mean": (lambda x: x.mean(1),),
    "amax": (lambda x: x.amax(-1),),
    "cumsum": (lambda x: x.cumsum(1),),
    "softmax": (lambda x: x.softmax(-1),),
    "rotated": (rotated,),
    "stack": (lambda x, y: torch.stack((x, y)), (2, 6, 8)),
    "transposed copy": (lambda x: x.transpose(0, 1).reshape(12, 8) * 2.0,),
    "clone": (lambda x: x.clone(),),
    "repeat": (lambda x: x.repeat(2, 1, 1),),
    "expand": (lambda x: x[:, :, None].expand(2, 6, 3, 8) * 2.0,),
    "expanded parameter": (lambda x, y: torch.cat((y.expand(2, -1, -1), x), 1), (1, 1, 8)),
    "last row": (lambda x: x[:, -1],),
    "halves": (lambda x: x[..., :4] * x[..., 4:],),
    "chunks": (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[0],),
    "split": (lambda x: torch.mul(*x.split(4, -1)),),
    "roll": (lambda x: x.roll(1, 1),),
    "pad": (lambda x: F.pad(x, (1, 1)),),
    "picked": (lambda x: x.index_select(1, torch.tensor([0, 2])),),
    "rows of a table": (lambda x, w: x + w[torch.tensor([0, 2, 2, 1, 0, 3])], (5, 8)),
    "columns": (lambda x: x[:, torch.tensor([0, 2])],),
    "twice": (lambda x: F.gelu(x) + x.tanh(),),
    "three views": (lambda x: x.flatten(1) + x.view(2, 48) * x.reshape(2, 48),),
    "half": (lambda x: x.to(torch.bfloat16),),
    "parameter on the left": (lambda x, w: w @ x, (6, 6)),
    "batched": (lambda x, w: x @ w, (2, 8, 5)),
    "broadcast products": (lambda x, w: x[:, None] @ w, (1, 3, 8, 4)),
    "addmm": (lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w), (8, 5), (5,)),
    "addmm full": (lambda x, w: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), w), (8, 8)),
}  # fmt: skip
FUNCTIONS |= {
    name: (function,) for name, function in {
        "sqrt": lambda x: (x + 3.0).sqrt(), "abs": torch.abs, "rsqrt": lambda x: (x + 3.0).rsqrt(),
        "exp": torch.exp, "log": lambda x: (x + 3.0).log(), "sin": torch.sin, "cos": torch.cos,
        "erf": torch.erf, "neg": torch.neg, "reciprocal": lambda x: (x + 3.0).reciprocal(),
        "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu,
        "silu": F.silu, "relu6": F.relu6, "hardswish": F.hardswish, "cube": lambda x: x.pow(3.0),
        "leaky": F.leaky_relu, "elu": F.elu, "mish": F.mish,
        "squared": torch.square, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh,
        "erfinv": lambda x: (x / 9.0).erfinv(), "asin": lambda x: (x / 9.0).asin(),
        "acos": lambda x: (x / 9.0).acos(),
        "logit": lambda x: x.sigmoid().logit(), "threshold": lambda x: F.threshold(x, 0.1, 0.0),
        "celu": F.celu, "lgamma": lambda x: (x + 3.0).lgamma(),
        "digamma": lambda x: (x + 3.0).digamma(), "tril": torch.tril,
        "flipped": lambda x: x.flip(1), "variance": lambda x: x.var(-1),
        "spread": lambda x: x.std(-1), "largest of all": torch.max,
        "sum of exponentials": lambda x: x.logsumexp(-1),
        "scan of products": lambda x: x.logcumsumexp(1),
        "gathered": lambda x: x.gather(1, torch.zeros(2, 3, 8, dtype=torch.long)),
        "added at": lambda x: torch.zeros(2, 4, 8).index_add(1, torch.arange(6) % 4, x),
        "scattered": lambda x: torch.zeros(2, 4, 8).scatter_add(
            1, (torch.arange(6) % 4)[None, :, None].expand(2, -1, 8), x),
        **{
            f"{how} of what is scattered{', alone' * alone}": partial(scattered, how, alone)
            for how in ("sum", "mean", "amax", "amin") for alone in (False, True)
        },
        "fractional power": lambda x: (x + 3.0).pow(1.7),
        "powers of a number": lambda x: torch.pow(2.0, x),
        "masked in part": lambda x: x.masked_fill(torch.ones(6, 8) > 0, 1.0),
        "windows": lambda x: F.unfold(x[:, None], 3), "from windows": lambda x: F.fold(
            x.reshape(2, 4, 12), (5, 4), 2),
        "squared errors": lambda x: F.mse_loss(x, torch.ones(2, 6, 8)),
        "smooth errors": lambda x: F.smooth_l1_loss(x, torch.ones(2, 6, 8)),
        "divergence": lambda x: F.kl_div(x, torch.ones(2, 6, 8), reduction="batchmean"),
        "cross-entropy of bits": lambda x: F.binary_cross_entropy_with_logits(
            x, torch.ones(2, 6, 8)),
    }.items()
}  # fmt: skip


def frozen_first(*layers: nn.Module) -> nn.Module:
    """Layers of which the first has no gradient."""
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers)


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)), ROWS),
    "residual": (Residual, IMAGES),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, stride=2), IMAGES),
    "convolution of rows": (lambda: nn.Conv1d(6, 4, 3), ROWS),
    "batch norm alone": (lambda: frozen_first(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), IMAGES),
    "batch norm of rows": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.rand(6, 8),
    ),
    "batch norm of rows alone": (lambda: nn.BatchNorm1d(8), torch.rand(6, 8)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), ROWS),
    "layer norm of two": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm((6, 8))), ROWS),
    "layer norm alone": (lambda: nn.LayerNorm((6, 8)), ROWS),
    "pools": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2)), IMAGES,
    ),
    "adaptive pool": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGES,
    ),
    "attention": (lambda: Attending(4, causal=False), ROWS),
    "causal attention": (lambda: Attending(4, causal=True), ROWS),
    "shared heads": (lambda: Attending(2, causal=True), ROWS),
    "repeated heads": (lambda: Attending(2, causal=True, repeat=True), ROWS),
    "attention written out": (WrittenOut, ROWS),
    "tied": (Tied, IDS),
    "embedding": (lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4)), IDS),
}  # fmt: skip
MODULES |= {
    name: (lambda function=function, more=more: Of(function, *more), ROWS)  # type: ignore[misc]
    for name, (function, *more) in FUNCTIONS.items()
}


def check(module: nn.Module, given: Tensor) -> None:
    steps = lower(capture(module, [given], eager=True), "training")
    assert priced(steps) == autograd(module(given))


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_what_autograd_runs(name: str) -> None:
    make, given = MODULES[name]
    check(make().eval(), given)


@pytest.mark.parametrize("name", ["residual", "batch norm alone", "batch norm of rows"])
def test_batch_norms_that_train_go_back_the_same_way(name: str) -> None:
    make, given = MODULES[name]
    check(make().train(), given)


def test_the_loss_goes_back_as_autograd_has_it() -> None:
    module = nn.Linear(8, 5)
    steps = lower(capture(module, [ROWS], eager=True), "training")
    loss = F.cross_entropy(module(ROWS).flatten(0, 1), torch.randint(5, (12,)))
    assert priced(steps, loss=True) == autograd(loss)


def test_sizes_are_compared() -> None:
    one, other = (
        priced(lower(capture(Residual().eval(), [images], eager=True), "training"))
        for images in (IMAGES, IMAGES[:, :, :4])
    )
    assert one != other
