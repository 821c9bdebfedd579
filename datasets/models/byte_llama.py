"""Trains a byte-level Llama on the Python standard library's source and writes a model folder.

The folder (``config.json``, bf16 ``model.safetensors``, ``card.json``) is read by every command as
any Hugging Face folder is: a language model whose quality is real and that needs no download.

``python -m foreplan.datasets.models.byte_llama FOLDER --steps 4000`` trains; called again after an
interruption it goes on where its last checkpoint stood (``training.safetensors``, removed at the
end). Batches depend on (seed, step) alone, so that an interruption changes nothing but rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from foreplan.datasets.models.byte_text import Split, standard_library_text, windows
from foreplan.datasets.specs import StrictModel
from foreplan.datasets.storage import exclusive, write_atomically
from foreplan.errors import ForeplanError, SpecError

if TYPE_CHECKING:
    import torch

_CHECKPOINT = "training.safetensors"
#: AdamW: betas and decay as usual for small decoders; gradients are clipped to this norm.
_BETAS, _DECAY, _CLIP = (0.9, 0.95), 0.1, 1.0
#: Share of the steps that warm up; the cosine ends at this share of the peak rate.
_WARM_UP, _FLOOR = 0.04, 0.05
#: Share of an early stop's steps after which the rate falls to that floor in a line.
_COOL = 0.75


class ByteLlama(StrictModel):
    """Shape and training of a byte-level Llama.

    Attributes:
        layers, hidden, heads, ffn, context: its shape; vocabulary 256, head tied to the embedding.
        batch: windows of ``context`` bytes a step.
        steps: of AdamW, with warm-up and a cosine.
        peak_rate: largest learning rate.
        seed: of weights and windows.
        stop: end at this step already, cooled down over its last quarter; a training that is not
            there yet can still be given one.
    """

    layers: int = Field(default=12, gt=0)
    hidden: int = Field(default=128, gt=0)
    heads: int = Field(default=4, gt=0)
    ffn: int = Field(default=384, gt=0)
    context: int = Field(default=256, gt=1)
    batch: int = Field(default=8, gt=0)
    steps: int = Field(default=4000, gt=0)
    peak_rate: float = Field(default=3e-3, gt=0)
    seed: int = Field(default=0, ge=0)
    stop: int | None = Field(default=None, gt=0)

    @property
    def last(self) -> int:
        """Steps that are made."""
        return self.steps if self.stop is None else min(self.stop, self.steps)

    @property
    def cool(self) -> int:
        """Step from which on the rate is not the cosine's."""
        return self.steps if self.stop is None else round(_COOL * self.last)

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        if step >= self.cool:
            left = (self.last - step) / (self.last - self.cool)
            low = self.peak_rate * _FLOOR
            return low + (self.rate(self.cool - 1) - low) * left
        warm = max(1, round(self.steps * _WARM_UP))
        if step < warm:
            return self.peak_rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.peak_rate * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2)


def train_byte_llama(
    settings: ByteLlama,
    folder: Path,
    *,
    device: str = "cpu",
    every: int = 200,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train, or go on training, and write the folder.

    Args:
        settings: shape and training.
        folder: made where there is none.
        device: torch device; products are computed in bf16, weights kept in fp32.
        every: steps between checkpoints.
        command: for the card.
        say: hears a line of progress at each checkpoint.

    Returns:
        The card: where the model is from and its bits per byte on files that it never saw.

    Raises:
        SpecError: the folder holds a training with other settings, or another process writes it.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            module = _module(settings).to(device)
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=settings.peak_rate, betas=_BETAS, weight_decay=_DECAY
        )
        start, seconds = _resume(folder, settings, module, optimizer)
        text, began, last = standard_library_text("train"), time.process_time(), float("nan")
        for step in range(start, settings.last):
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step)
            key = (settings.seed, step)
            drawn = windows(text, settings.batch, settings.context + 1, key).astype(np.int64)
            ids = torch.from_numpy(drawn).to(device)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = _loss(module, ids)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(module.parameters(), _CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0 or step + 1 == settings.last:
                last = float(loss.detach()) / math.log(2)
                spent = seconds + time.process_time() - began
                _save(folder, settings, module, optimizer, step + 1, spent)
                say(f"step {step + 1} of {settings.last}, {last:.3f} bits a byte, {spent:.0f} s")
        spent = seconds + time.process_time() - began
        _export(folder, settings, module)
        with torch.no_grad():  # what is judged is what is stored
            for parameter in module.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        card = _card(settings, module, device, command, spent)
        write_atomically(folder / "card.json", json.dumps(card, indent=2) + "\n")
        (folder / _CHECKPOINT).unlink(missing_ok=True)
    return card


def bits_per_byte(
    module: torch.nn.Module, split: Split, context: int, most: int = 1024, batch: int = 16
) -> float:
    """Mean bits a byte of a split, in up to ``most`` windows of ``context`` spread evenly."""
    import torch

    text = standard_library_text(split)
    count = min((len(text) - 1) // context, most)
    starts = np.linspace(0, len(text) - 1 - context, count).astype(np.int64)
    device = next(module.parameters()).device
    total = 0.0
    with torch.inference_mode():
        for first in range(0, count, batch):
            taken = starts[first : first + batch, None] + np.arange(context + 1)
            ids = torch.from_numpy(text[taken].astype(np.int64)).to(device)
            total += float(_loss(module, ids)) * len(ids)
    return total / count / math.log(2)


def _config(settings: ByteLlama) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=settings.hidden, intermediate_size=settings.ffn,
        num_hidden_layers=settings.layers, num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads, max_position_embeddings=settings.context,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def _module(settings: ByteLlama) -> torch.nn.Module:
    import transformers

    build: Any = transformers.LlamaForCausalLM
    module: torch.nn.Module = build(_config(settings))
    return module


def _loss(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of every byte of ``[windows, context + 1]`` but the first."""
    from torch.nn import functional as F

    logits = module(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _export(folder: Path, settings: ByteLlama, module: torch.nn.Module) -> None:
    import torch
    from safetensors.torch import save

    fields = _config(settings).to_diff_dict() | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    }  # fmt: skip
    write_atomically(folder / "config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
    tensors = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in module.named_parameters()  # a tied head comes once
    }
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt"}))


def _card(
    settings: ByteLlama, module: torch.nn.Module, device: str, command: str, seconds: float
) -> dict[str, Any]:
    import torch

    text = standard_library_text("train")
    return {
        "what": "byte-level Llama, trained by Foreplan",
        "text": f"source of Python {platform.python_version()}'s standard library, split by file: "
        "train, validation, test (foreplan.datasets.models.byte_text)",
        "train_bytes": len(text),
        "train_crc32": f"{zlib.crc32(text.tobytes()):08x}",
        "command": command,
        "settings": settings.model_dump(mode="json"),
        "parameters": sum(p.numel() for p in module.parameters()),
        "bytes_seen": settings.last * settings.batch * settings.context,
        "process_s": round(seconds),
        "device": torch.device(device).type,
        "torch": torch.__version__,
        "bits_per_byte": {
            split: round(bits_per_byte(module, split, settings.context), 4)
            for split in ("validation", "test")
        },
        "judged_on": "1024 windows of each split at most, spread evenly",
        "licence": "weights: as Foreplan's; they were trained on the PSF-licensed standard library",
    }


def _save(
    folder: Path, settings: ByteLlama, module: torch.nn.Module, optimizer: torch.optim.Optimizer,
    step: int, seconds: float,
) -> None:  # fmt: skip
    from safetensors.torch import save

    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach()
        for word in ("exp_avg", "exp_avg_sq"):
            tensors[f"{word}/{name}"] = optimizer.state[parameter][word]
    notes = {"step": str(step), "process_s": str(seconds), "settings": settings.model_dump_json()}
    content = save({name: x.cpu().contiguous() for name, x in tensors.items()}, notes)
    write_atomically(folder / _CHECKPOINT, content)


def _resume(
    folder: Path, settings: ByteLlama, module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Load the last checkpoint; the step it stands at and the processor seconds spent."""
    import torch
    from safetensors import safe_open

    path = folder / _CHECKPOINT
    if not path.is_file():
        return 0, 0.0
    with safe_open(path, framework="pt") as stored, torch.no_grad():
        notes = stored.metadata()
        step, before = int(notes["step"]), ByteLlama.model_validate_json(notes["settings"])
        same = before.model_copy(update={"stop": settings.stop}) == settings
        if not same or (before.stop != settings.stop and step > min(before.cool, settings.cool)):
            raise SpecError(
                str(path), got=notes["settings"], expected=settings.model_dump_json(),
                fix="use another folder, or remove the checkpoint",
            )  # fmt: skip
        for name, parameter in module.named_parameters():
            parameter.copy_(stored.get_tensor(f"weight/{name}"))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                **{
                    word: stored.get_tensor(f"{word}/{name}").to(parameter.device)
                    for word in ("exp_avg", "exp_avg_sq")
                },
            }
        return step, float(notes["process_s"])


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m foreplan.datasets.models.byte_llama")
    parser.add_argument("folder", type=Path)
    for name, field in ByteLlama.model_fields.items():
        kind: Any = int if name == "stop" else field.annotation
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    given = vars(parser.parse_args(arguments))
    folder, device, every = given.pop("folder"), given.pop("device"), given.pop("every")
    try:
        settings = ByteLlama(**given)
        words = (f"--{k.replace('_', '-')} {v}" for k, v in given.items() if v is not None)
        card = train_byte_llama(
            settings, folder, device=device, every=every,
            command=f"python -m foreplan.datasets.models.byte_llama FOLDER {' '.join(words)}",
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    except (ForeplanError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(card, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
