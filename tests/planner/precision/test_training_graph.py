"""The captured step against published depths and plans; cascade and casts on small networks."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreplan.cost_models.costs import CostBook, Estimate
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.causal_lm import causal_lm
from foreplan.datasets.kernels.runnable import runnable
from foreplan.datasets.kernels.training_programs import BACKWARD, FORWARD, dependent_program
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.operators import OPERATORS
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.precision import decoder_task
from foreplan.planner.precision.decoder_task import DecoderTask
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.pricing import StepTables
from foreplan.planner.precision.spec import PrecisionWorkload

FP32, BF16 = "fp32/fp32/torch.linear", "fp32/bf16/torch.linear"
INT8 = "fp32/int8/torch.int_mm+bf16"


class Unit:
    """Every work takes a second."""

    def estimate(self, work, device):
        return Estimate.exact(1.0)


@pytest.fixture(scope="module")
def published():
    folder = os.environ.get("FOREPLAN_DATA")
    if folder is None:
        pytest.skip("FOREPLAN_DATA is not set: no published depths and plans")
    return json.loads((Path(folder) / "qsync_fixtures.json").read_text())


@pytest.mark.parametrize("name", ["resnet50", "vgg16"])
def test_depths_are_the_published_ones(published, public_graph, name):
    _, graph = public_graph(name)
    depth, ours = graph.depth(), {"conv2d": [], "linear": []}
    for i in graph.adjustable:
        ours[graph.operators[i].family].append(depth[i])
    theirs = {"conv2d": [], "linear": []}
    for operator, value in published["depth"][name].items():
        theirs[operator.removeprefix("aten::").rpartition("_")[0]].append(value)
    assert sorted(ours["conv2d"]) == sorted(theirs["conv2d"])
    # Theirs counts the flatten before the classifier as an operator; to us it is a view.
    assert [d + 1 for d in ours["linear"]] == theirs["linear"]


@pytest.mark.parametrize(
    ("name", "folder", "plan", "share"),
    [
        ("resnet50", "resnet", "resnet50_GVAR", 0.4000),
        ("resnet50", "resnet", "resnet50_HESS", 0.3998),
        ("resnet50", "resnet", "resnet50_WVAR", 0.3997),
        ("vgg16", "vgg", "vgg16_GVAR", 0.3998),
        ("vgg16", "vgg", "vgg16_HESS", 0.3931),
        ("vgg16", "vgg", "vgg16_WVAR", 0.3931),
    ],
)
def test_published_plans_take_two_fifths_of_fp32(
    published, public_graph, name, folder, plan, share
):
    """Input and weight in the planned bits, batch 64: each plan solves "at most 0.40 of fp32"."""
    module, graph = public_graph(name)
    sizes = {
        graph.operators[i].module: graph.operators[i].input_elements
        + math.prod(graph.operators[i].weight_shape)
        for i in graph.adjustable
    }
    order = {
        word: [n for n, part in module.named_modules() if isinstance(part, kind)]
        for word, kind in (("conv", nn.Conv2d), ("linear", nn.Linear))
    }
    whole = used = 0.0
    for operator, bits in published["bit_plans"][folder][plan].items():
        word, _, index = operator.rpartition("_")
        size = sizes[order[word][int(index)]]
        whole, used = whole + size, used + size * bits / 32
    assert used / whole == pytest.approx(share, abs=6e-5)


class Branches(nn.Module):
    """Two linears that are added, a third that reads the sum, and a residual."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.c = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.c(F.gelu(self.norm(self.a(x) + self.b(x))))


def tables(module, example, *, kind="cpu", precisions=("fp32", "bf16", "int8"), costs=None):
    graph = TrainingGraph.from_capture(capture(module, (example,)), module)
    return StepTables(graph, costs or CostBook([Unit()]), "device", kind, precisions)


def states(table, names):
    choice = table.choice(names)
    return {
        o.module or o.node.op: table.options[i][choice[i]].state
        for i, o in enumerate(table.graph.operators)
    }


@pytest.mark.parametrize(("a", "b", "low"), [(BF16, BF16, 1), (BF16, FP32, 0), (FP32, FP32, 0),
                                             (INT8, BF16, 1)])  # fmt: skip
def test_cascade_takes_what_all_producers_agree_on(a, b, low):
    found = states(tables(Branches(), torch.zeros(4, 16)), {"a": a, "b": b, "c": FP32})
    assert found["elementwise"] == found["norm"] == found["activation"] == low
    assert found["loss"] == 0


def test_norms_are_pinned_on_cuda():
    names = {"a": BF16, "b": BF16, "c": BF16}
    found = states(tables(Branches(), torch.zeros(4, 16), kind="cuda"), names)
    assert (found["elementwise"], found["norm"], found["activation"]) == (1, 0, 0)


def casts(table, names):
    """Casts of a plan: (producer, consumer, pass, variant)."""
    choice, operators = table.choice(names), table.graph.operators
    found = []
    for edge in table.edges:
        a, b = choice[edge.producer], choice[edge.consumer]
        for word, works in (("forward", edge.forward[a][b]), ("backward", edge.backward[a][b])):
            for work in works:
                ends = (operators[i].module or operators[i].node.op
                        for i in (edge.producer, edge.consumer))  # fmt: skip
                found.append((*ends, word, f"{work.variant.storage}>{work.variant.compute}"))
    return sorted(found)


def test_a_change_renews_the_casts_of_both_neighbours():
    """QSync's code refreshes successors only; here c's change shows on the edge before it too."""
    table = tables(Branches(), torch.zeros(4, 16))
    low = {"a": BF16, "b": BF16, "c": BF16}
    assert ("activation", "c", "forward", "bf16>fp32") not in casts(table, low)
    raised = casts(table, {**low, "c": FP32})
    assert ("activation", "c", "forward", "bf16>fp32") in raised
    assert ("activation", "c", "backward", "fp32>bf16") in raised
    assert ("c", "loss", "forward", "bf16>fp32") in casts(table, low)
    assert not [cast for cast in raised if cast[:2] == ("c", "loss")]


def test_casts_of_data_have_no_way_back():
    found = casts(tables(Branches(), torch.zeros(4, 16)), {"a": BF16, "b": INT8, "c": FP32})
    assert ("input", "a", "forward", "fp32>bf16") in found
    assert ("input", "b", "forward", "fp32>int8") in found
    assert not [cast for cast in found if cast[0] == "input" and cast[2] == "backward"]


def test_cascade_is_what_torch_does():
    """Dtypes of the operators of a real module under a plan."""
    from foreplan.planner.precision.execution.modules import apply_variants

    seen = {}
    module = Branches()
    module.norm.register_forward_hook(lambda _, x, out: seen.update(norm=(x[0].dtype, out.dtype)))
    table = tables(module, torch.zeros(4, 16))
    dtypes = (torch.float32, torch.bfloat16)
    for a in (FP32, BF16, INT8):
        for b in (FP32, BF16):
            names = {"a": a, "b": b, "c": FP32}
            apply_variants(module, names)
            module(torch.randn(4, 16))
            state = states(table, names)
            assert seen["norm"] == (dtypes[state["elementwise"]], dtypes[state["norm"]])


def test_int8_needs_multiples_of_eight():
    module = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8))
    table = tables(module, torch.zeros(4, 16))
    texts = {o.module: [p.name for p in table.options[i]]
             for i, o in enumerate(table.graph.operators)}  # fmt: skip
    assert INT8 not in texts["0"]
    assert BF16 in texts["0"]


def test_plan_of_another_network_is_refused():
    table = tables(Branches(), torch.zeros(4, 16))
    with pytest.raises(SpecError, match="for which the plan was not made"):
        table.choice({"a": FP32, "b": FP32, "c": FP32, "d": FP32})
    with pytest.raises(SpecError, match=r"operators\[c\]"):
        table.choice({"a": FP32, "b": FP32})


def test_without_a_price_in_fp32_the_module_is_named():
    book = CostBook([], profiling="foreplan profile --for precision")
    with pytest.raises(MissingDataError, match=r"a: no cost for .* on device; .*--for precision"):
        tables(Branches(), torch.zeros(4, 16), costs=book)


def test_without_a_kernel_the_module_is_named():
    with pytest.raises(InfeasibleError, match="no kernel for linear a on device"):
        tables(Branches(), torch.zeros(4, 16), precisions=("int8",))


def test_nothing_to_lower():
    module = nn.LayerNorm(8)
    with pytest.raises(SpecError, match="no operator whose precision can be chosen"):
        tables(module, torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 8, 5, 2, 2, groups=2), (3, 4, 33)),
        (nn.Conv1d(4, 8, 3), (4, 20)),  # a sample without a batch
        (nn.Conv3d(4, 8, 3, 2, 1), (2, 4, 9, 10, 11)),
        (nn.ConvTranspose1d(4, 6, 4, 2, 1), (3, 4, 17)),
        (nn.ConvTranspose2d(8, 6, 2, 2, groups=2), (3, 8, 9, 7)),
        (nn.ConvTranspose3d(8, 6, 2, 2), (3, 8, 4, 5, 6)),
        (nn.Conv2d(3, 5, 3, padding=2, dilation=2), (2, 3, 14, 15)),
    ],
)
def test_a_convolution_that_no_plan_chooses_for_counts_its_arithmetic(layer, shape):
    """Not as an element-wise operator, which takes a hundredth of it."""
    (node,) = capture(layer, [torch.zeros(shape)]).operators("convolution")
    for direction, times in ((FORWARD, 1), (BACKWARD, 2)):
        item = dependent_program(direction, node, "fp32")
        assert item.op == f"conv2d_{direction}"
        assert OPERATORS[item.op].flops(dict(item.dims)) == times * node.flops
    runnable(dependent_program(FORWARD, node, "fp32"), "cpu").call()  # a profile times it


def test_the_first_layer_of_rows_has_no_gradient_by_its_input():
    module = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
    found = tables(module, torch.zeros(2, 4, 20))
    ops = [
        found.options[i][0].backward[0].op
        for i, o in enumerate(found.graph.operators) if o.node.op == "convolution"
    ]  # fmt: skip
    assert ops == ["conv2d_weight_gradient", "conv2d_backward"]


def test_grouped_products_of_experts_are_refused():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.zeros(2, 8, 8)), nn.Linear(8, 4)

        def forward(self, x):
            ends = torch.tensor([2, 4], dtype=torch.int32)
            made = torch._grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends)
            return self.head(made.float())

    graph = capture(Experts(), [torch.zeros(4, 8)])
    with pytest.raises(SpecError, match="expected no recurrent layer, grouped product of experts"):
        TrainingGraph.from_capture(graph, Experts())


def test_a_recurrent_layer_is_refused():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.layer(x)[0])

    graph = capture(Recurrent(), [torch.zeros(3, 2, 8)])
    with pytest.raises(SpecError, match=r"network Recurrent: layer: got 'aten.gru'"):
        TrainingGraph.from_capture(graph, Recurrent())


def test_untraceable_module():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else x

    with pytest.raises(SpecError, match=r"torch\.export can trace"):
        tables(Branching(), torch.zeros(4, 8))


def test_weights_that_the_host_cannot_hold_are_refused_before_they_are_made(monkeypatch):
    described = load_model("tiny-llama-random")
    task = DecoderTask(described, PrecisionWorkload(batch=1, sequence_length=8), seed=0)
    monkeypatch.setattr(decoder_task, "free_bytes", lambda: 4 * described.parameters - 1)
    with pytest.raises(InfeasibleError, match=r"tiny-llama-random is run with its weights"):
        task.module()
    assert TrainingGraph.of(task, 1).adjustable, "a decoder is captured without weights"


def test_a_mixture_of_experts_is_not_trained() -> None:
    with pytest.raises(SpecError, match=r"tiny-moe-random: got 'layers of experts'"):
        DecoderTask(load_model("tiny-moe-random"), PrecisionWorkload(batch=1), seed=0)


def test_a_decoder_is_not_trained_beyond_its_window():
    model = load_model("tiny-llama-random").model_copy(update={"sliding_window": 8})
    DecoderTask(model, PrecisionWorkload(batch=1, sequence_length=8), seed=0)
    DecoderTask(model, PrecisionWorkload(batch=1), seed=0)  # the window's length, unasked
    with pytest.raises(SpecError, match=r"sequence_length: got 9, expected at most the sliding"):
        DecoderTask(model, PrecisionWorkload(batch=1, sequence_length=9), seed=0)


def test_a_decoder_captured_without_weights_is_the_one_with_weights():
    task = DecoderTask(
        load_model("tiny-llama-random"), PrecisionWorkload(batch=2, sequence_length=8), seed=0
    )
    module = task.module()
    captured = capture(module, task.batch(0, 0)[0], name=task.name)
    bare, whole = TrainingGraph.of(task, 2), TrainingGraph.from_capture(captured, module)
    assert bare.operators == whole.operators
    assert (bare.parameters, bare.digest) == (whole.parameters, whole.digest)
    with torch.device("meta"):  # shapes alone take none
        assert all(p.is_meta for p in task.module().parameters())


def test_a_trained_decoder_is_built_without_weights_on_the_meta_device(tmp_path):
    causal_lm(load_model("tiny-llama-random")).save_pretrained(tmp_path)
    trained = load_model(tmp_path)
    assert trained.weights == "trained"
    with torch.device("meta"):
        assert all(p.is_meta for p in causal_lm(trained).parameters())
