"""Commands about models and what they cost: train, judge, predict; schedules with given times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreplan.cli._app import (
    Json,
    Output,
    OutputFolder,
    app,
    console,
    print_json,
    show,
    simulate_app,
)
from foreplan.cli._words import costs as cost_choices
from foreplan.cli._words import devices as device_names
from foreplan.cli._words import (
    dtypes,
    executions,
    formats,
    indicators,
    listed,
    models,
    phases,
    priced,
    schedules,
    shipped,
    words,
)
from foreplan.errors import MissingDataError


@app.command()
def train(
    data: Annotated[
        list[Path], typer.Option(help="Measured operators or programs; may be given again.")
    ],
    output: OutputFolder,
    format_name: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Format of each --data, or one of all; see evaluate.",
            autocompletion=words(formats),
        ),
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(help="Chip, device or family to leave out; may be given again."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="What every row ran on, where the file does not say.")
    ] = None,
    device_file: Annotated[
        list[Path] | None, typer.Option(help="Figures (YAML) of a device that the zoo lacks.")
    ] = None,
    torch_device: Annotated[str, typer.Option(help="Where networks are trained.")] = "cpu",
    start: Annotated[
        str | None,
        typer.Option(
            help="Fine-tune this model (pretrained:ops, pretrained:programs or a folder) by the "
            "rows of a device; without it a new one is trained.",
            autocompletion=words(shipped),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the predictor of library operators or of programs; write its weights and card."""
    from foreplan.cost_models.commands import train_files

    card = train_files(
        data, format_name or ["foreplan"], output, hold_out=hold_out or [], seed=seed,
        device=device, torch_device=torch_device, start=start, device_files=device_file or [],
    )  # fmt: skip
    if as_json:
        print_json(card)
        return
    from foreplan.planner.report.operator_tables import left_out, tuning_table

    if start is not None:
        show(tuning_table(card))
    if left_out(card):
        console().print(left_out(card))
    console().print(f"wrote {output}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[
        str,
        typer.Option(
            "-m",
            "--model",
            help="pretrained:ops or :programs, a trained folder, roofline.",
            autocompletion=words(lambda: (*shipped(), "roofline")),
        ),
    ],
    data: Annotated[Path, typer.Option(help="Measured operators or programs.")],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            help="foreplan, neusight, aiconfigurator, helix, tir-jsonl.",
            autocompletion=words(formats),
        ),
    ] = "foreplan",
    device: Annotated[
        str | None, typer.Option(help="What every row ran on, where the file does not say.")
    ] = None,
    device_file: Annotated[
        list[Path] | None, typer.Option(help="Figures (YAML) of a device that the zoo lacks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Error of a model on measured latencies, by device and operator."""
    from foreplan.cost_models.commands import evaluate_file

    result = evaluate_file(model, data, format_name, device=device, device_files=device_file or [])
    overall, why = result["overall"], result.get("unsupported_why")
    none = isinstance(overall, dict) and not overall["count"]
    if not as_json:
        from foreplan.planner.report.operator_tables import error_table

        show(error_table(result))
    elif not none:  # or else the error is the one document
        print_json(result)
    if none:
        first = next(iter(why), None) if isinstance(why, dict) else None
        raise MissingDataError(f"{data}: no row could be predicted", fix=first)


@app.command()
def predict(
    model: Annotated[
        str,
        typer.Argument(
            help="Name of 'foreplan models', Hugging Face folder of any network of transformers, "
            "or FILE.py[:NAME]: your own code, which is run.",
            autocompletion=words(priced),
        ),
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(
            "-d",
            "--device",
            "--devices",
            help="Zoo names, apart by commas, or all; one pass on one device of each. cpu, "
            "cpu:threads=1: this host's processor, by figures read off it.",
            autocompletion=listed(device_names),
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences or images; 1 if left out.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="New tokens of each sequence; 128 if left out.")
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(help="Pixels: 224, or height x width as 224x320; the network's if left out."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="fp32, fp16 or bf16; the checkpoint's if left out.", autocompletion=words(dtypes)
        ),
    ] = None,
    phase: Annotated[
        str, typer.Option(help="inference or training.", autocompletion=words(phases))
    ] = "inference",
    execution: Annotated[
        str,
        typer.Option(
            help="eager; on GPUs also graph (a CUDA graph) or compiled (torch.compile).",
            autocompletion=words(executions),
        ),
    ] = "eager",
    rank_by: Annotated[str, typer.Option(help="Order of the devices: latency.")] = "latency",
    costs: Annotated[
        str,
        typer.Option(help="measured, predicted or roofline.", autocompletion=words(cost_choices)),
    ] = "predicted",
    weights: Annotated[
        str, typer.Option(help="pretrained:ops, or a folder that train wrote from operators.")
    ] = "pretrained:ops",
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the device, for --costs measured.")
    ] = None,
    device_file: Annotated[
        list[Path] | None, typer.Option(help="Figures (YAML) of a device that the zoo lacks.")
    ] = None,
    launch_us: Annotated[
        float | None, typer.Option(help="Host time of one operator call, in microseconds.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write, one device.")] = None,
    as_json: Json = False,
) -> None:
    """Latency of a model's pass on devices that need not be here, fastest first."""
    from foreplan.cost_models.predict_command import predict_model

    result = predict_model(
        model, device or [], batch=batch, sequence_length=sequence_length, image_size=image_size,
        dtype=dtype, phase=phase, execution=execution, costs=costs, weights=weights,
        profile=profile, device_files=device_file or [],
        launch_s=None if launch_us is None else launch_us * 1e-6, rank_by=rank_by, trace=trace,
    )  # fmt: skip
    if as_json:
        print_json(result)
        return
    from foreplan.planner.report.predict_tables import predict_tables

    show(predict_tables(result))


@app.command("models")
def models_command(as_json: Json = False) -> None:
    """List the models known by name: decoders, which plans take, and networks for predict."""
    from foreplan.datasets.models.model_zoo import zoo_documents
    from foreplan.datasets.models.network_zoo import network_documents

    found = [{**document, "plans": True} for document in zoo_documents()]
    found += [{**document, "plans": False} for document in network_documents()]
    if as_json:
        print_json(found)
        return
    from foreplan.planner.report.model_tables import models_table

    show(models_table(found))


@app.command()
def quality(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face folder, or byte-llama.",
            autocompletion=words(models),
        ),
    ],
    text: Annotated[
        str, typer.Option(help="File to measure on, or stdlib: Python's own sources.")
    ] = "stdlib",
    output: Output = Path("quality.json"),
    indicator: Annotated[
        str,
        typer.Option(
            help="measured_kl, fisher, output_error, variance_bound, hessian or weights.",
            autocompletion=words(indicators),
        ),
    ] = "measured_kl",
    bits: Annotated[
        list[int] | None, typer.Option(help="Below 16; may be given again. 8, 4, 3 if left out.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Pieces of text.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure what each layer of a trained model loses at each number of bits, for plans."""
    from foreplan.cost_models.quality.quality_table import BITS, measure_quality
    from foreplan.datasets.models.load_model import load_model
    from foreplan.datasets.storage import exclusive, refuse_overwriting

    screen = console()
    refuse_overwriting(output, text)
    with exclusive(output, file=True):  # a path that cannot be written is found before the work
        table = measure_quality(
            load_model(model), text, indicator=indicator, bits=bits or BITS, windows=windows,
            length=length, seed=seed, device=device, say=screen.print,
        )  # fmt: skip
        table.save(output)
    if as_json:
        print_json(table.model_dump(mode="json", by_alias=True))
        return
    from foreplan.planner.report.quality_tables import quality_tables

    show(quality_tables(table))
    screen.print(f"wrote {output}")


@simulate_app.command("pipeline")
def simulate_pipeline(
    schedule: Annotated[
        str,
        typer.Option(
            help="gpipe, 1f1b, interleaved-1f1b, zb-h1 or zb-h2.", autocompletion=words(schedules)
        ),
    ],
    stages: Annotated[int, typer.Option(help="Pipeline stages.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")],
    forward_ms: Annotated[float, typer.Option(min=0, help="Forward pass, per chunk.")],
    backward_input_ms: Annotated[float, typer.Option(min=0, help="Backward pass for the input.")],
    backward_weight_ms: Annotated[
        float, typer.Option(min=0, help="Backward pass for the weights.")
    ],
    transfer_ms: Annotated[float, typer.Option(min=0, help="Sending an activation on.")] = 0.0,
    chunks: Annotated[int, typer.Option(help="Model chunks of a stage (interleaved).")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write.")] = None,
    as_json: Json = False,
) -> None:
    """Bubble rate, iteration time and peak activations of a pipeline schedule."""
    from foreplan.cost_models.pipeline_step import simulate_pipeline as run

    result = run(
        schedule, stages=stages, microbatches=microbatches, chunks=chunks,
        forward_s=forward_ms / 1e3, backward_input_s=backward_input_ms / 1e3,
        backward_weight_s=backward_weight_ms / 1e3, transfer_s=transfer_ms / 1e3,
    )  # fmt: skip
    if trace is not None:
        from foreplan.cost_models.timeline import chrome_trace
        from foreplan.datasets.storage import write_atomically

        write_atomically(trace, chrome_trace([(schedule, result.timeline)]))
    if as_json:
        print_json(result.document())
        return
    from foreplan.planner.report.tables import pipeline_table

    show(pipeline_table(result.document()))
