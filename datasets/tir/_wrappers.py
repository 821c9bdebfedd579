"""Modules of the workload zoo: tensors in, tensors out, so that ``torch.export`` takes them.

Imports torch, so it is only imported while a network is built.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ImageModel(nn.Module):
    """A transformers vision model on pixels ``(batch, 3, height, width)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the last hidden state."""
        state: Tensor = self.model(pixel_values=pixels).last_hidden_state
        return state


class TextModel(nn.Module):
    """A transformers encoder or decoder on token ids ``(batch, tokens)``, without a cache."""

    def __init__(self, model: nn.Module, *, cached: bool) -> None:
        super().__init__()
        self.model = model
        self.cached = cached

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden state ``(batch, tokens, features)``."""
        options = {"use_cache": False} if self.cached else {}
        state: Tensor = self.model(input_ids=tokens, **options).last_hidden_state
        return state


class EncoderDecoder(nn.Module):
    """A transformers encoder-decoder on source and target token ids, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the decoder's last hidden state."""
        state: Tensor = self.model(
            input_ids=source, decoder_input_ids=target, use_cache=False
        ).last_hidden_state
        return state


def _convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.second(self.first(x)) + self.skip(x)
        return functional.relu(joined)


class Detector(nn.Module):
    """Residual backbone, feature pyramid and region proposals: a Faster R-CNN's dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution(3, 48, 7, 2)
        widths = (48, 96, 192, 384)
        self.stages = nn.ModuleList(
            _Residual(widths[max(0, i - 1)], width, 2) for i, width in enumerate(widths)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, 128, 1) for width in widths)
        self.smooth = nn.Conv2d(128, 128, 3, padding=1)
        self.proposal = nn.Conv2d(128, 128, 3, padding=1)
        self.score = nn.Conv2d(128, 3, 1)
        self.box = nn.Conv2d(128, 12, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return objectness ``(batch, anchors)`` and boxes ``(batch, anchors * 4)``."""
        features, x = [], self.stem(image)
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        scores, boxes, above = [], [], None
        for feature, lateral in zip(reversed(features), reversed(self.lateral), strict=True):
            level = lateral(feature)
            if above is not None:
                # Sizes are ragged (an odd height halves unevenly), hence by size and not by two.
                level = level + functional.interpolate(above, size=level.shape[-2:])
            above = level
            head = functional.relu(self.proposal(self.smooth(level)))
            scores.append(torch.sigmoid(self.score(head)).flatten(1))
            boxes.append(self.box(head).flatten(1))
        return torch.cat(scores, 1), torch.cat(boxes, 1)


class _UNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(4, inputs), nn.GroupNorm(8, outputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(functional.silu(self.norm_in(x)))
        hidden = self.second(functional.silu(self.norm_out(hidden)))
        joined: Tensor = hidden + self.skip(x)
        return joined


class UNet(nn.Module):
    """A small diffusion U-Net: group norm, SiLU, skips, and attention at the lowest level."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256)
        self.stem = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            _UNetBlock(widths[max(0, i - 1)], width) for i, width in enumerate(widths)
        )
        self.middle = _UNetBlock(widths[-1], widths[-1])
        self.queries = nn.Linear(widths[-1], 3 * widths[-1])
        self.output = nn.Linear(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            _UNetBlock(2 * width, widths[max(0, i - 1)])
            for i, width in reversed(list(enumerate(widths)))
        )
        self.head = nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return noise of the shape of the input ``(batch, 4, height, width)``."""
        x = self.stem(x)
        skips = []
        for i, block in enumerate(self.down):
            x = block(functional.avg_pool2d(x, 2) if i else x)
            skips.append(x)
        x = self._attend(self.middle(x))
        for i, block in enumerate(self.up):
            x = functional.interpolate(x, size=skips[-1].shape[-2:]) if i else x
            x = block(torch.cat([x, skips.pop()], 1))
        noise: Tensor = self.head(x)
        return noise

    def _attend(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        flat = x.flatten(2).transpose(1, 2)
        q, k, v = self.queries(flat).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(1, 2) * channels**-0.5, dim=-1)
        mixed: Tensor = self.output(weights @ v).transpose(1, 2)
        return x + mixed.reshape(batch, channels, height, width)
