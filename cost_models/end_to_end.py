"""End-to-end check: real latency of networks against replays of their operators.

``measure`` runs small networks on this machine (needs torch, transformers, pydantic and networkx,
no TVM) and writes what it saw; ``score`` replays the operators, with the measured price of each and
with predicted prices, and prints the errors:

    python -m foreplan.cost_models.end_to_end measure --device cuda:0 --size large -o measured.json
    python -m foreplan.cost_models.end_to_end score measured.json --zoo h200

A predicted price uses no measurement of the networks or of their operators. One figure of the host
is measured, by a small GPT-NeoX that is none of the networks: what an ATen call costs the host in
eager execution, Python and autograd included (``launch_s``, in inference and by part of a training
step); the score is also given with the published launch overhead in its place.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.costs import Segment, Work
from foreplan.cost_models.graph_programs import (
    PARTS,
    PHASES,
    Part,
    Phase,
    Step,
    lower,
    programs,
)
from foreplan.datasets.program import Program, Variant
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

    from foreplan.datasets.device import Device

SCHEMA = "foreplan.end_to_end/1"

#: Width, layers, vocabulary, and (batch, tokens) or (batch, pixels) of each size.
SIZES: Mapping[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "layers": 4, "vocab": 64, "text": ((1, 1),), "image": ((1, 32),),
             "depths": (1, 1, 1, 1)},
    "small": {"hidden": 256, "layers": 4, "vocab": 2048, "text": ((1, 32), (4, 64)),
              "image": ((1, 64), (4, 64)), "depths": (1, 1, 1, 1)},
    "large": {"hidden": 2048, "layers": 12, "vocab": 32000, "text": ((1, 256), (8, 512)),
              "image": ((1, 224), (32, 224)), "depths": (3, 4, 6, 3)},
}  # fmt: skip

TEXT = ("llama", "gpt2", "opt", "qwen3", "bert")
IMAGE = ("resnet", "vit", "convnext")
NETWORKS = (*TEXT, *IMAGE)


def build(name: str, size: str) -> torch.nn.Module:
    """One network, with random weights; configurations are the published ones, shrunk."""
    import transformers as hf

    s = SIZES[size]
    hidden, layers, vocab, heads = s["hidden"], s["layers"], s["vocab"], max(2, s["hidden"] // 64)
    text = {
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }  # fmt: skip
    gated = {**text, "intermediate_size": 11 * hidden // 4, "num_key_value_heads": heads // 2}
    wide = {**text, "intermediate_size": 4 * hidden}
    model: Any
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**gated))
    elif name == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**gated, head_dim=hidden // heads))
    elif name == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=heads))  # fmt: skip
    elif name == "opt":
        model = hf.OPTForCausalLM(hf.OPTConfig(
            **text, ffn_dim=4 * hidden, word_embed_proj_dim=hidden))  # fmt: skip
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**wide))
    elif name == "gpt_neox":
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**wide))
    elif name == "vit":
        vit = {key: wide[key] for key in wide if key != "vocab_size"}
        model = hf.ViTForImageClassification(hf.ViTConfig(
            **vit, image_size=s["image"][0][1], patch_size=16))  # fmt: skip
    elif name == "resnet":
        model = hf.ResNetForImageClassification(hf.ResNetConfig(depths=list(s["depths"])))
    else:
        widths = [hidden // 8 * 2**stage for stage in range(4)]
        model = hf.ConvNextForImageClassification(
            hf.ConvNextConfig(depths=list(s["depths"]), hidden_sizes=widths)
        )
    made: torch.nn.Module = model
    return made


def example(name: str, size: str, shape: tuple[int, int], device: str, dtype: Any) -> Any:
    """Inputs of a network by name."""
    import torch

    batch, extent = shape
    if name in IMAGE:
        image = torch.rand(batch, 3, extent, extent, device=device).to(dtype)
        return {"pixel_values": image}
    ids = torch.randint(0, SIZES[size]["vocab"], (batch, extent), device=device)
    return {"input_ids": ids} | ({} if name == "bert" else {"use_cache": False})


def measure(
    device: str,
    *,
    size: str = "small",
    dtype: str = "fp32",
    networks: Iterable[str] = NETWORKS,
    phases: Iterable[Phase] = PHASES,
    seconds: float = 1.0,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run networks and their operators on a torch device.

    Args:
        device: ``cpu`` or ``cuda:N``.
        size: of `SIZES`.
        dtype: of weights and activations.
        networks: of `NETWORKS`.
        phases: what to run.
        seconds: spent on each network and shape; an operator gets a twentieth.
        keep: gets the document after every network, so that a run that is stopped loses one.

    Returns:
        A document for `score`.
    """
    import torch
    import transformers

    from foreplan.cost_models.program_timer import DTYPES, ProgramTimer
    from foreplan.datasets.capture import capture

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind = SIZES[size]
    calls_s = _host_seconds(device, DTYPES[dtype])
    cases: list[dict[str, Any]] = []
    document = {
        "schema": SCHEMA, "device": device, "size": size, "dtype": dtype,
        "board": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(), "launch_s": calls_s,
        "software": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": None if device.startswith("cuda") else _cpu_figures(torch.get_num_threads()),
        "cases": cases,
    }  # fmt: skip
    for name in networks:
        module = build(name, size).to(device=device, dtype=DTYPES[dtype]).eval()
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        known: dict[Program, tuple[float, float]] = {}
        for shape in kind["image" if name in IMAGE else "text"]:
            inputs = example(name, size, shape, device, DTYPES[dtype])
            graph = capture(module, inputs, name=name, eager=True)
            for phase in phases:
                steps = lower(graph, phase)
                timer = ProgramTimer(device, weight_bytes=weights, seconds=seconds / 20)
                for program in programs(steps):
                    if program not in known:
                        known[program] = timer.time(program)
                real = _real_seconds(module, inputs, phase, seconds)
                print(f"{name} {shape} {phase}: {1e3 * real[1]:.3f} ms", file=sys.stderr)
                cases.append({
                    "network": name, "shape": list(shape), "phase": phase,
                    "real_s": real[1], "real_low_s": real[0], "real_high_s": real[2],
                    "steps": [[s.kind, s.target, s.part, _words(s), s.calls] for s in steps],
                    "programs": {
                        _text(p): list(known[p]) for p in programs(steps)
                    },
                })  # fmt: skip
        del module
        if keep is not None:
            keep(document)
    return document


def score(document: Mapping[str, Any], device: Device, *, weights: str = "pretrained:ops") -> Any:
    """Replay what `measure` saw.

    Args:
        document: from `measure`.
        device: figures for the predicted prices.
        weights: of the predictor.

    Returns:
        ``cases`` with the real latency and, for each way to replay, the latency and its error;
        ``mape`` by way. Ways: ``measured`` (operators timed one by one, host measured),
        ``sum`` (the same operators, added up), ``predicted`` (host measured) and
        ``predicted_published_launch``.
    """
    from foreplan.cost_models.costs import CostBook
    from foreplan.cost_models.predictor import Predictor
    from foreplan.cost_models.replay import replay, replay_book, replay_steps

    host = document["launch_s"]
    cpu = device.kind == "cpu"
    predictor = None if cpu else Predictor.load(weights)
    rows = []
    for case in document["cases"]:
        steps = _steps(case["steps"])
        launch: Mapping[Part, float] = host[case["phase"]]
        given: dict[Work, float] = {_program(t): s[0] for t, s in case["programs"].items()}
        measured = CostBook((), given=given)
        book = replay_book(device, "predicted", predictor=predictor)
        found = {
            "measured": replay(steps, measured, device, launch_s=launch).latency_s,
            "sum": replay(steps, measured, device, launch_s=0.0).device_s,  # no host
            "predicted": replay_steps(steps, book, device, launch_s=launch).latency_s,
            "predicted_published_launch": replay_steps(steps, book, device).latency_s,
        }
        real = float(case["real_s"])
        rows.append({
            "network": case["network"], "shape": case["shape"], "phase": case["phase"],
            "real_s": real, "spread": (case["real_high_s"] - case["real_low_s"]) / real,
            "limit": replay(steps, measured, device, launch_s=launch).limit,
            "latency_s": found, "error": {key: value / real - 1 for key, value in found.items()},
        })  # fmt: skip
    keys = list(rows[0]["error"]) if rows else []
    return {
        **{key: document[key] for key in ("device", "board", "size", "dtype", "launch_s")},
        "mape": {
            phase: {
                key: float(np.mean([abs(r["error"][key]) for r in rows if r["phase"] == phase]))
                for key in keys
            }
            for phase in sorted({r["phase"] for r in rows})
        },
        "cases": rows,
    }  # fmt: skip


def _real_seconds(
    module: torch.nn.Module, inputs: Mapping[str, Any], phase: Phase, seconds: float
) -> tuple[float, float, float]:
    """10th percentile, median and 90th of a pass, start to synchronised end."""
    run = _inference(module, inputs) if phase == "inference" else _training(module, inputs)
    times = [sum(parts) for parts in _wall([lambda: [part() for part in run]], module, seconds)]
    low, median, high = np.quantile(times, [0.1, 0.5, 0.9])
    return float(low), float(median), float(high)


def _inference(module: torch.nn.Module, inputs: Mapping[str, Any]) -> list[Callable[[], object]]:
    import torch

    def infer() -> None:
        with torch.inference_mode():
            module(**inputs)

    return [infer]


def _training(module: torch.nn.Module, inputs: Mapping[str, Any]) -> list[Callable[[], object]]:
    """Forward pass with loss, backward pass, update."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    losses: list[Any] = []

    def forward() -> None:
        logits = module(**inputs).logits
        flat = logits.reshape(-1, logits.shape[-1])
        goal = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
        losses[:] = [torch.nn.functional.cross_entropy(flat, goal)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return [forward, lambda: losses[0].backward(), update]


def _wall(
    parts: list[Callable[[], object]], module: torch.nn.Module, seconds: float
) -> list[list[float]]:
    """Times of parts that run one after the other, the device idle between them."""
    import torch

    from foreplan.cost_models.program_timer import clock

    device = next(module.parameters()).device
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    now = clock(str(device))
    times: list[list[float]] = []
    begun = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - begun < seconds:
        row = []
        for part in parts:
            started = now()
            part()
            wait()
            row.append(now() - started)
        times.append(row)
    return times[3:]  # the first ones warm up


def _host_seconds(device: str, dtype: Any) -> dict[str, dict[str, float]]:
    """Host time of one ATen call of an eager network by phase and part.

    A narrow GPT-NeoX of one token runs, whose kernels are shorter than their launch. On a CPU the
    time its operators take by themselves is taken off, because their prices hold it already.
    """
    from foreplan.cost_models.program_timer import ProgramTimer
    from foreplan.datasets.capture import capture

    module = build("gpt_neox", "tiny").to(device=device, dtype=dtype).eval()
    inputs = example("gpt_neox", "tiny", (1, 1), device, dtype)
    graph = capture(module, inputs, eager=True)
    steps = lower(graph, "training")
    alone = dict.fromkeys(PARTS, 0.0)
    if not device.startswith("cuda"):
        timer = ProgramTimer(device, seconds=0.02)
        known = {program: timer.time(program).device_s for program in programs(steps)}
        for step in steps:
            ((work, count),) = step.work.parts if isinstance(step.work, Segment) else (
                (step.work, 1),
            )  # fmt: skip
            assert isinstance(work, Program)
            alone[step.part] += count * known[work]
    calls = {part: sum(step.calls for step in steps if step.part == part) for part in PARTS}

    def rate(seconds: float, *parts: Part) -> float:
        own = sum(alone[part] for part in parts)
        return max(0.0, seconds - own) / sum(calls[part] for part in parts)

    (inference,) = np.median(_wall(_inference(module, inputs), module, 0.5), axis=0)
    forward, backward, update = np.median(_wall(_training(module, inputs), module, 1.0), axis=0)
    return {
        "inference": dict.fromkeys(PARTS, rate(inference, "forward")),
        "training": {
            "forward": rate(forward, "forward", "loss"), "loss": rate(forward, "forward", "loss"),
            "backward": rate(backward, "backward"), "optimizer": rate(update, "optimizer"),
        },
    }  # fmt: skip


def _cpu_figures(threads: int) -> dict[str, Any]:
    """Measured peak rates, bandwidth and launch overhead of this processor."""
    import tempfile

    from foreplan.datasets.device_name import DeviceName
    from foreplan.datasets.profiling import measure_profile

    with tempfile.TemporaryDirectory() as folder:
        name = DeviceName.parse(f"cpu:threads={threads}")
        profile = measure_profile(name, [], Path(folder) / "cpu.json")
    found: dict[str, Any] = profile.device.model_dump(mode="json", exclude_none=True)
    return found


def _text(program: Program) -> str:
    return json.dumps([program.op, list(program.sizes), str(program.variant)])


def _program(text: str) -> Program:
    op, sizes, variant = json.loads(text)
    return Program(op, tuple(sizes), Variant.parse(variant))


def _words(step: Step) -> list[Any]:
    if isinstance(step.work, Program):
        return [_text(step.work), 1]
    ((part, count),) = step.work.parts  # type: ignore[union-attr]
    assert isinstance(part, Program)
    return [_text(part), count]


def _steps(rows: Iterable[Any]) -> list[Step]:
    steps = []
    for kind, target, part, (text, count), calls in rows:
        work: Work = _program(text)
        if count > 1:
            work = Segment("attention backward", ((work, count),))
        steps.append(Step(kind, target, part, work, calls))
    return steps


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure here, or score a document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("measure")
    taking.add_argument("--device", default="cpu")
    taking.add_argument("--size", choices=list(SIZES), default="small")
    taking.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    taking.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    taking.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    taking.add_argument("--seconds", type=float, default=1.0)
    taking.add_argument("-o", "--output", type=Path, required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("measured", type=Path)
    scoring.add_argument("--zoo", help="zoo name of the device; a processor brings its figures")
    scoring.add_argument("--weights", default="pretrained:ops")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.command == "measure":
        document = measure(
            options.device, size=options.size, dtype=options.dtype, networks=options.networks,
            phases=options.phases, seconds=options.seconds,
            keep=lambda part: write_atomically(options.output, json.dumps(part)),
        )  # fmt: skip
        write_atomically(options.output, json.dumps(document))
        return
    from foreplan.datasets import device_zoo
    from foreplan.datasets.device import Device
    from foreplan.datasets.specs import load_document, validate

    document = load_document(options.measured)
    if document.get("schema") != SCHEMA:
        raise SpecError(f"{options.measured}: schema", got=document.get("schema"), expected=SCHEMA)
    figures = document["figures"]
    own = validate(Device, figures, str(options.measured)) if figures else None
    device = own or device_zoo.device(options.zoo or document["board"], "--zoo")
    print(json.dumps(score(document, device, weights=options.weights), indent=1))


if __name__ == "__main__":
    main()
