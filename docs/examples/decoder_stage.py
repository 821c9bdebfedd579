"""One stage of a serving plan as a piece of a Hugging Face decoder; used by the launchers here.

Your engine goes in this place: what it needs of the plan is the stage's layers and their bits.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import foreplan


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The weight as ``bits`` wide integers times a scale for each row would hold it."""
    if bits >= 16:
        return weight
    limit = 2.0 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / limit
    return (weight / scale).round() * scale


class DecoderStage:
    """Layers of stage ``index``; the first one embeds, the last one gives the next tokens."""

    def __init__(self, plan: foreplan.Plan, index: int) -> None:
        stages = foreplan.decision_of(plan, foreplan.ServingDecision).stages
        stage, folder = stages[index], plan.model.path if plan.model else None
        if folder is None:
            raise foreplan.SpecError("plan.model", got=None, expected="a Hugging Face folder")
        torch.manual_seed(0)  # random weights; an engine loads its own layers' and no others
        build: Any = AutoModelForCausalLM
        model = build.from_config(AutoConfig.from_pretrained(folder)).eval()
        self.first, self.last = index == 0, index == len(stages) - 1
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb
        self.layers = model.model.layers[stage.start : stage.end]
        self.norm, self.head = model.model.norm, model.lm_head
        self.caches: dict[int, DynamicCache] = {}  # of each micro-batch
        for layer, bits in zip(self.layers, stage.bits, strict=True):
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.data = rounded(module.weight.data, bits)

    @torch.inference_mode()
    def forward(self, microbatch: int, x: Tensor) -> Tensor:
        """Tokens or hidden states in, hidden states or next tokens out; keeps the KV cache."""
        cache = self.caches.setdefault(microbatch, DynamicCache())
        seen = cache.get_seq_length(self.layers[0].self_attn.layer_idx)
        x = self.embed(x) if self.first else x
        positions = torch.arange(seen, seen + x.shape[1])[None]
        turned = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_ids=positions, past_key_values=cache, position_embeddings=turned)
        return self.head(self.norm(x))[:, -1:].argmax(-1) if self.last else x
