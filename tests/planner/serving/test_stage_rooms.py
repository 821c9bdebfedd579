"""What the search leaves for a stage follows from what it uses: tight plans by brute force."""

import itertools
import json
import math
import random

import pytest

import foreplan
from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.models.attention_window import LayerKind
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import InfeasibleError
from foreplan.planner.api import load_cluster
from foreplan.planner.base import Problem
from foreplan.planner.load_workload import load_workload
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.chain import static_bytes
from foreplan.planner.serving.pipeline import stage_kernels
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.spec import StageDecision
from foreplan.planner.serving.workspace import StageWorkspace
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage

PLANNER = ServingPlanner()


class Drawn:
    """A small llama on two GPUs that it barely fits."""

    def __init__(self, seed, folder):
        draw = random.Random(seed)
        hidden = draw.choice([512, 1024, 2048])
        self.config = {
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": hidden // 64, "num_key_value_heads": 2,
            "intermediate_size": draw.choice([2, 4]) * hidden,
            "vocab_size": draw.choice([1000, 32000]), "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        }  # fmt: skip
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(self.config))
        names = draw.sample(["l4", "t4", "v100_pcie_16gb", "a100_sxm_40gb", "p4"], 2)
        self.devices = [{"name": name, "host": f"h{i}"} for i, name in enumerate(names)]
        self.latency_s = draw.choice([1e-6, 1e-4, 1e-3])
        self.workload = {
            "batch": draw.choice([1, 2, 6]), "prompt_tokens": draw.choice([16, 128, 512]),
            "new_tokens": draw.choice([2, 8]),
        }  # fmt: skip
        if draw.random() < 0.5:
            self.workload["min_average_bits"] = draw.choice([6, 10, 12])
        model = load_model(str(folder))
        w = load_workload("serving", self.workload)
        whole = static_bytes(model, w, 0, model.layers, (16,) * model.layers)
        space = StageWorkspace(model, w, MicroBatches(1, 1), "cuda")
        need = sum(whole.values()) + space.stage_bytes(0, model.layers, (16,) * model.layers)
        for device in self.devices:
            device["memory_bytes"] = int(need * draw.uniform(0.55, 1.1))

    def problem(self, bits):
        """The instance at some numbers of bits."""
        path = self.folder / "cluster.json"
        tier = {"group": ["all"], "scope": "network", "latency_s": self.latency_s,
                "bandwidth_bytes_per_s": 1e9, "source": "made up"}  # fmt: skip
        path.write_text(json.dumps({"devices": self.devices, "tiers": [tier]}))
        cluster, folder = load_cluster(str(path))
        profiles = Profiles.of(cluster, folder)
        cluster = profiles.completed(cluster)
        asked = load_workload("serving", {**self.workload, "bits": bits})
        costs = cost_book(
            cluster, profiles, "roofline", given=PLANNER.given(asked), issued=PLANNER.issues
        )
        return Problem(
            model=load_model(str(self.folder)), cluster=cluster, workload=asked, costs=costs, seed=0
        )


def proven_s(problem):
    """What the planner proves, within a ten-thousandth of its answer; ``inf`` if there is none."""
    try:
        bound = PLANNER.decide(problem).bound
    except InfeasibleError:
        return math.inf
    assert bound.status == "optimal"
    return bound.lower_s


def fits(problem, stage, sizes):
    """Whether a stage's items and what it leaves room for are within its device, item by item."""
    model, w = problem.model, problem.workload
    rank = problem.cluster.ranks()[stage.rank]
    items = static_bytes(model, w, stage.start, stage.end, stage.bits)
    space = StageWorkspace(model, w, sizes, "cuda", stage_kernels(stage).table)
    place = int(stage.start == 0) + 2 * int(stage.end == model.layers)
    layers = stage.end - stage.start
    each, of = items["kv_cache"] // layers, LayerKind("dense")
    rooms = [space.room_bytes(of, b, each) for b in set(stage.bits)]
    room = max(int(r[place, layers - 1]) for r in rooms)
    assert room >= space.stage_bytes(stage.start, stage.end, stage.bits, items["kv_cache"])
    return sum(items.values()) + room <= rank.capacity


def splits(layers):
    """Devices, their layers and the least layer of each."""
    for order in [(0,), (1,), (0, 1), (1, 0)]:
        for cut in range(1, layers) if len(order) == 2 else [layers]:
            yield order, ([0, cut, layers] if len(order) == 2 else [0, layers])


def best_by_brute_force(problem):
    """Least seconds by the law of all decisions that leave room; ``inf`` if there is none."""
    chains, best = PLANNER._chains(problem), math.inf
    w, layers, ranks = problem.workload, problem.model.layers, problem.cluster.ranks()
    for sizes, (order, bounds) in itertools.product(chains.sizes(), splits(layers)):
        law = chains.problem(sizes)
        for bits in itertools.product(w.bits, repeat=layers):
            # Layers are alike, so that of a stage only their numbers count.
            parts = [bits[a:b] for a, b in itertools.pairwise(bounds)]
            low = w.min_average_bits is not None and sum(bits) < w.min_average_bits * layers - 1e-9
            if low or any(list(part) != sorted(part) for part in parts):
                continue
            stages = []
            for at, (k, part) in enumerate(zip(order, parts, strict=True)):
                kind = next(t for t, of in enumerate(chains.types) if of[0].index == k)
                kernels = chains.kernels(kind, sizes).texts(set(part))
                if any(f"prefill/linear/{b}" not in kernels for b in part):
                    break
                stages.append(
                    StageDecision(
                        rank=k, device=ranks[k].label, start=bounds[at], end=bounds[at + 1],
                        bits=part, kernels=kernels,
                    )
                )  # fmt: skip
            if len(stages) < len(order) or not all(fits(problem, s, sizes) for s in stages):
                continue
            chain = [
                make_stage(
                    law, chains.kind_of(s), s.start, s.end, [w.bits.index(b) for b in s.bits]
                )
                for s in stages
            ]
            best = min(best, evaluate(law, ChainAssignment(tuple(chain))).latency_s)
    return best


@pytest.mark.parametrize("seed", range(24))
def test_more_bits_never_hurt_and_the_plan_is_the_best_there_is(seed, tmp_path):
    drawn = Drawn(seed, tmp_path)
    found = [proven_s(drawn.problem(bits)) for bits in ((16,), (16, 8), (16, 8, 4))]
    assert found[1] <= found[0] * (1 + 2e-4)
    assert found[2] <= found[1] * (1 + 2e-4)
    some = (16, 4) if seed % 2 else (16, 8)
    problem = drawn.problem(some)
    expected = best_by_brute_force(problem)
    assert proven_s(problem) <= expected * (1 + 1e-9)
    assert proven_s(problem) >= expected * (1 - 2e-4)


def test_a_model_that_fits_at_16_bits_fits_where_fewer_are_allowed():
    """8 bits would unpack weights for which there is no room here, and no layer needs to."""
    workload = {"batch": 8, "prompt_tokens": 512, "new_tokens": 300, "min_average_bits": 16,
                "prefill_microbatch": 2, "decode_microbatch": 8}  # fmt: skip
    totals = [
        foreplan.plan(
            "serving", "llama-3.1-8b", "v100_pcie_16gb", {**workload, "bits": bits},
            costs="roofline",
        ).predicted.total_s
        for bits in ((16,), (16, 8), (16, 8, 4))
    ]  # fmt: skip
    assert totals == pytest.approx([totals[0]] * 3)
