"""Towers given as torch modules: sizes found by structure, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.bubbles.module_sizes import backbone_sizes, is_module, with_sizes

META = torch.device("meta")


class Attention(nn.Module):
    """Queries, keys and values apart, or in one matrix; a head count of a name of its own."""

    def __init__(self, width, heads, kv_heads, head_dim, *, fused):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, head_dim
        inner, keys = heads * head_dim, kv_heads * head_dim
        if fused:
            self.wqkv = nn.Linear(width, inner + 2 * keys, bias=False)
        else:
            self.wq = nn.Linear(width, inner, bias=False)
            self.wk = nn.Linear(width, keys, bias=False)
            self.wv = nn.Linear(width, keys, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)


class Mlp(nn.Module):
    def __init__(self, width, ffn, *, gated, fused):
        super().__init__()
        if gated and not fused:
            self.w3 = nn.Linear(width, ffn, bias=False)
        self.w1 = nn.Linear(width, 2 * ffn if gated and fused else ffn, bias=False)
        self.w2 = nn.Linear(ffn, width, bias=False)


class Block(nn.Module):
    def __init__(self, width=64, heads=4, kv_heads=2, head_dim=16, ffn=160, *, gated=True,
                 fused=False):  # fmt: skip
        super().__init__()
        self.before = nn.RMSNorm(width)
        self.mixing = Attention(width, heads, kv_heads, head_dim, fused=fused)
        self.behind = nn.RMSNorm(width)
        self.feeding = Mlp(width, ffn, gated=gated, fused=fused)


class Language(nn.Module):
    def __init__(self, blocks, width=64, vocab=500):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(128, width)
        self.trunk = nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocab, bias=False)


class Vision(nn.Module):
    def __init__(self, width=48, layers=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 14, 14)
        layer = nn.TransformerEncoderLayer(width, 4, 96)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Linear(width, width)


def language(**sizes):
    with META:
        return Language([Block(**sizes) for _ in range(4)])


def vision(**sizes):
    with META:
        return Vision(**sizes)


@settings(max_examples=40, deadline=None)
@given(
    kv=st.sampled_from([1, 2, 4]), repeats=st.integers(1, 3), head_dim=st.sampled_from([8, 16, 24]),
    ffn=st.sampled_from([64, 160, 256]), gated=st.booleans(), fused=st.booleans(),
)  # fmt: skip
def test_whatever_a_block_is_made_of_is_found(kv, repeats, head_dim, ffn, gated, fused):
    sizes = {"heads": kv * repeats, "kv_heads": kv, "head_dim": head_dim, "ffn": ffn}
    found = backbone_sizes(language(**sizes, gated=gated, fused=fused), "backbone")
    assert found == sizes | {"layers": 4, "hidden": 64, "gated": gated, "vocab": 500}


def test_an_encoder_says_its_patches_and_a_projector_its_kind():
    with META:
        wide, narrow = nn.Linear(4 * 48, 64), nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 64))
        mlp = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 64))
    asked = {"name": "eye", "module": vision(), "tokens": 16}
    (found,) = with_sizes({"encoders": [asked]})["encoders"]
    assert found == {
        "name": "eye", "tokens": 16, "patch_features": 3 * 14 * 14,
        "dims": {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 4, "head_dim": 12, "ffn": 96,
                 "gated": False},
    }  # fmt: skip
    kinds = {}
    for name, projector in (("wide", wide), ("merger", narrow), ("mlp", mlp)):
        (kinds[name],) = with_sizes({"encoders": [asked | {"projector": projector}]})["encoders"]
    assert kinds["wide"]["projector"] == "linear"
    assert (kinds["wide"]["pool"], kinds["wide"]["projected_tokens"]) == ("concatenate", 4)
    assert [kinds[k]["projector"] for k in ("merger", "mlp")] == ["merger", "mlp"]
    # What is stated counts.
    stated = asked | {"dims": {"heads": 6, "head_dim": 8}, "patch_features": 10}
    (found,) = with_sizes({"encoders": [stated]})["encoders"]
    assert (found["dims"]["heads"], found["dims"]["layers"], found["patch_features"]) == (6, 3, 10)


def test_a_plan_from_modules_is_that_of_their_sizes():
    modules = {
        "encoders": [{"name": "eye", "module": vision(layers=4), "tokens": 16}],
        "backbone": language(), "sequence_length": 32, "microbatches": 4, "plan": {"pp": 2},
    }  # fmt: skip
    made = foreplan.plan("bubbles", None, "2xh200", modules, costs="roofline")
    assert made.workload["backbone"]["ffn"] == 160
    sizes = with_sizes(modules)
    assert foreplan.plan("bubbles", None, "2xh200", sizes, costs="roofline") == made
    assert "module" not in made.to_json()


def uneven():
    with META:
        return Language([Block(), Block(), Block(ffn=128)])


def two_stacks():
    with META:
        return nn.ModuleDict({"a": vision(), "b": vision()})


def convolutions():
    with META:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))


def decoders():
    with META:
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(48, 4, 96), 2)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (uneven, r"equal blocks \(trunk\.0 and trunk\.2 differ\)"),
        (two_stacks, r"one stack, not a\.encoder\.layers and b\.encoder\.layers"),
        (convolutions, "two or more equal transformer blocks"),
        (decoders, "one attention and one MLP"),
    ],
)
def test_anything_else_is_refused_in_one_line(module, words):
    asked = {"encoders": [{"name": "eye", "module": module(), "tokens": 4}]}
    with pytest.raises(
        SpecError, match=rf"encoders\[0\]\.module: got '\w+', expected .*{words}"
    ) as seen:
        with_sizes(asked)
    assert "\n" not in str(seen.value)


def test_modules_in_wrong_places_are_refused():
    with pytest.raises(SpecError, match=r"nn\.Embedding of width 48"):
        backbone_sizes(vision(), "backbone")
    with pytest.raises(SpecError, match=r"got 'str', expected a torch\.nn\.Module"):
        with_sizes({"encoders": [{"name": "eye", "module": "vit", "tokens": 4}]})
    with META:
        wrong = nn.Linear(50, 64)
    asked = {"name": "eye", "module": vision(), "tokens": 4, "projector": wrong}
    with pytest.raises(SpecError, match=r"50 -> 64.*multiple of 48"):
        with_sizes({"encoders": [asked]})
    with META:
        narrow = nn.Linear(48, 60)
    asked = {"backbone": {"hidden": 64}, "encoders": [asked | {"projector": narrow}]}
    with pytest.raises(SpecError, match=r"projector: got '60 features', expected the 64 of"):
        with_sizes(asked)
    assert is_module(wrong)
    assert not is_module({"hidden": 4})


def test_models_of_transformers_are_stacks_like_any_other():
    transformers = pytest.importorskip("transformers")
    with META:
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
            intermediate_size=352, vocab_size=1000,
        ))  # fmt: skip
        siglip = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(
            hidden_size=96, num_hidden_layers=2, num_attention_heads=6, intermediate_size=200,
            patch_size=14,
        ))  # fmt: skip
    found = backbone_sizes(llama, "backbone")
    assert (found["heads"], found["kv_heads"], found["ffn"], found["gated"]) == (8, 2, 352, True)
    (eye,) = with_sizes({"encoders": [{"name": "e", "module": siglip, "tokens": 4}]})["encoders"]
    assert (eye["dims"]["heads"], eye["dims"]["ffn"], eye["patch_features"]) == (6, 200, 588)


def test_a_module_that_does_not_train_is_frozen():
    fields = {"name": "eye", "module": vision().requires_grad_(requires_grad=False), "tokens": 9}
    assert with_sizes({"encoders": [fields]})["encoders"][0]["frozen"] is True
    stated = {**fields, "frozen": False}
    assert with_sizes({"encoders": [stated]})["encoders"][0]["frozen"] is False
    part = vision()
    part.patches.requires_grad_(requires_grad=False)
    assert "frozen" not in with_sizes({"encoders": [{**fields, "module": part}]})["encoders"][0]


def test_a_projector_that_trains_behind_a_frozen_module_has_to_be_said():
    tower, bridge = vision().requires_grad_(requires_grad=False), nn.Linear(48, 64)
    fields = {"name": "eye", "module": tower, "projector": bridge, "tokens": 9}
    with pytest.raises(SpecError, match=r"encoders\[0\]: got 'a frozen module and a proj"):
        with_sizes({"encoders": [fields]})
    assert with_sizes({"encoders": [{**fields, "frozen": True}]})["encoders"][0]["frozen"] is True
    bridge.requires_grad_(requires_grad=False)
    assert with_sizes({"encoders": [fields]})["encoders"][0]["frozen"] is True


def test_a_backbone_that_does_not_train_is_refused():
    with pytest.raises(SpecError, match="frozen parameters alone', expected a backbone that tra"):
        backbone_sizes(language().requires_grad_(requires_grad=False), "backbone")
