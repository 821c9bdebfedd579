"""The launcher examples: short, and each does what its first lines say, in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreplan

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
CLUSTER = EXAMPLES / "two_xeons.yaml"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 256,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
WORKLOAD = {
    "batch": 4, "prompt_tokens": 12, "new_tokens": 5, "bits": [8, 4], "min_average_bits": 6,
    "prefill_microbatch": 2, "decode_microbatch": 2,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def run(folder: Path, *words: str) -> str:
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "default",
    }  # fmt: skip
    if "torch.distributed.run" in words:
        environment["TMPDIR"] = str(folder)  # it leaves a folder behind
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def torchrun(folder: Path, *words: str) -> str:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run(folder, *start, *words)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A serving plan of two stages, in plan.json."""
    folder = tmp_path_factory.mktemp("serving")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    made = foreplan.plan("serving", folder / "model", CLUSTER, WORKLOAD, costs="roofline")
    decision = foreplan.decision_of(made, foreplan.ServingDecision)
    assert len(decision.stages) == 2
    assert set(decision.bits) == {8, 4}
    made.save(folder / "plan.json")
    return folder / "plan.json"


@pytest.fixture(scope="module")
def expected(plan: Path) -> list[list[int]]:
    """Tokens of the same stages, one after another in this process."""
    import torch

    spec = importlib.util.spec_from_file_location("decoder_stage", EXAMPLES / "decoder_stage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = foreplan.load_plan(plan)
    stages = [module.DecoderStage(loaded, index) for index in (0, 1)]
    torch.manual_seed(1)
    rows = []
    for m, x in enumerate(torch.randint(256, (4, 12)).split(2)):
        tokens = []
        for _ in range(5):
            for stage in stages:
                x = stage.forward(m, x)
            tokens.append(x)
        rows += torch.cat(tokens, 1).tolist()
    return rows


def test_stages_under_torchrun(plan: Path, expected: list[list[int]]) -> None:
    out = torchrun(plan.parent, str(EXAMPLES / "serve_stages.py"), "plan.json")
    assert json.loads(out.splitlines()[-1]) == expected


def test_stages_as_ray_actors(plan: Path, expected: list[list[int]]) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; 'pip install foreplan[ray]' failed on this machine")
    out = run(plan.parent, str(EXAMPLES / "ray_stages.py"), "plan.json")
    assert json.loads(out.splitlines()[-1]) == expected


def test_training_under_torchrun_with_a_precision_plan(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_ddp.py")
    run(tmp_path, script, "--plan", str(CLUSTER), "plan.json")
    made = foreplan.load_plan(tmp_path / "plan.json")
    workers = foreplan.decision_of(made, foreplan.PrecisionDecision).workers
    used = {variant for worker in workers for variant in worker.operators.values()}
    assert used == {"fp32/fp32/torch.linear", "fp32/bf16/torch.linear"}
    lines = torchrun(tmp_path, script, "plan.json").splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < 0.75 * losses[0]


def test_training_by_a_bubble_plan(tmp_path: Path) -> None:
    tower = {"layers": 2, "hidden": 64, "heads": 4}
    workload = {
        "backbone": tower | {"vocab": 128}, "sequence_length": 32, "microbatches": 4,
        "encoders": [{"name": "vit", "dims": tower, "tokens": 16, "patch_features": 24}],
        "plan": {"pp": 2},
    }  # fmt: skip
    foreplan.plan("bubbles", None, CLUSTER, workload, costs="roofline").save(tmp_path / "plan.json")
    script = str(EXAMPLES / "bubbles_trainer.py")
    lines = torchrun(tmp_path, script, "plan.json", "--steps", "3").splitlines()
    losses = [float(line.split()[3].rstrip(",")) for line in lines if line.startswith("step")]
    assert len(losses) == 3
    assert all(0 < loss < 10 for loss in losses)
