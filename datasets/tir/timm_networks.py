"""Tasks of networks of timm, to train on beside the zoo's: other blocks than its families have.

Run as ``python -m foreplan.datasets.tir.timm_networks -o tasks.jsonl.xz --without PROGRAMS``; timm
(Apache-2.0) and the torchvision of the installed torch are wanted for that alone, weights are not.
The networks were chosen before any was timed: one or two sizes of every design that is no mere
variant of a family of the zoo. So there is no ResNeXt or Res2Net, no EfficientNet or other network
of inverted residuals alone, no DeiT, BEiT or EVA, no ConvNeXt V2 and no Swin V2. Networks that take
over parts of such families are there: ResNet's stages in TResNet, GERNet, BoTNet and LambdaNet,
ViT's blocks in CrossViT, inverted residuals in MobileViT, CoAtNet, MaxViT and EfficientViT. Image
sizes are not the zoo's, where a network takes any. Like synthetic tasks they belong to no family:
they are in every training set and in no test. What a network of the zoo calls too is left out, or
a family's tasks would be trained on while it is held out.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from foreplan.datasets.storage import exclusive
from foreplan.datasets.tir.extract import extract_module
from foreplan.datasets.tir.synthetic import MOST_TEXT, known_keys
from foreplan.datasets.tir.task import Task, merge
from foreplan.datasets.tir.tir_jsonl import write_tasks
from foreplan.datasets.tir.toolchain import load_tvm
from foreplan.errors import MissingDataError, SpecError, told

if TYPE_CHECKING:
    import torch

#: Batch and side of the images of a network that takes any, one and several at a time.
_ANY = ((1, 256), (6, 192))
#: The same for more pixels.
_LARGE = ((1, 288), (3, 256))
#: Of a network whose windows or positions are made for one size.
_FIXED = ((2, 224), (8, 224))

#: Batches and sides of each network. Seven others (EdgeNeXt, MobileViT V2, XCiT, VOLO, TNT, Hiera,
#: CPUBone) are left out: TVM 0.27 does not take them, or timm 1.0.31 has other names.
NETWORKS: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        # convolutions
        "vgg11_bn": _ANY, "vgg19": _LARGE, "densenet121": _ANY, "densenet161": _LARGE,
        "inception_v3": _LARGE, "inception_v4": _ANY, "inception_resnet_v2": _ANY,
        "xception41": _ANY, "dla34": _ANY, "dla102x": _LARGE, "dpn68": _ANY, "dpn92": _LARGE,
        "hrnet_w18_small_v2": _ANY, "hrnet_w32": _LARGE, "darknet53": _ANY, "cspdarknet53": _LARGE,
        "vovnet39a": _ANY, "ese_vovnet19b_dw": _LARGE, "hgnet_small": _ANY, "hgnetv2_b2": _LARGE,
        "dm_nfnet_f0": _ANY, "repvgg_a1": _ANY, "repvgg_b1g4": _LARGE, "selecsls42b": _ANY,
        "regnetx_016": _ANY, "regnety_032": _LARGE, "gernet_m": _ANY, "tresnet_m": _ANY,
        "nasnetalarge": _ANY, "pnasnet5large": _LARGE, "ghostnet_100": _ANY, "mobileone_s1": _LARGE,
        "starnet_s2": _ANY, "fasternet_t1": _ANY, "convmixer_768_32": _ANY, "repvit_m1": _ANY,
        "mambaout_tiny": _ANY, "poolformer_s12": _ANY, "convformer_s18": _LARGE,
        # convolutions and attention
        "efficientformer_l1": _FIXED, "efficientformerv2_s1": _FIXED, "swiftformer_s": _ANY,
        "fastvit_t12": _ANY, "nextvit_small": _ANY, "levit_256": _FIXED, "coat_lite_small": _FIXED,
        "coatnet_0_rw_224": _FIXED, "maxvit_tiny_tf_224": _FIXED, "mobilevit_s": _ANY,
        "efficientvit_b1": _ANY, "shvit_s3": _ANY, "visformer_small": _FIXED, "lowformer_b1": _ANY,
        # attention in other layouts, and mixers
        "crossvit_small_240": ((2, 240), (8, 240)), "twins_svt_small": _FIXED, "pvt_v2_b1": _ANY,
        "mvitv2_tiny": _FIXED, "nest_tiny": _FIXED, "focalnet_small_srf": _ANY, "davit_tiny": _ANY,
        "gcvit_xtiny": _FIXED, "mixer_s16_224": _FIXED, "gmlp_s16_224": _FIXED,
        "resmlp_24_224": _FIXED, "botnet26t_256": ((1, 256), (6, 256)),
        "lambda_resnet26rpt_256": ((1, 256), (6, 256)),
    }
)  # fmt: skip


def timm_tasks(
    networks: Collection[str] = (),
    *,
    known: Collection[str] = (),
    named: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Task]:
    """Return the tasks of networks of timm at two sizes each; what cannot be captured is told.

    Args:
        networks: names in `NETWORKS`; all by default.
        known: task keys that are left out: those of the zoo's networks.
        named: only tasks with one of these in their names, as ``conv``. All by default.
        progress: called with a line for people, network by network.

    Raises:
        MissingDataError: no TVM, or no timm.
        SpecError: TVM of another version, or no such network.
    """
    if unknown := sorted(set(networks) - set(NETWORKS)):
        raise SpecError("--networks", got=unknown[0], expected="one of " + ", ".join(NETWORKS))
    load_tvm()  # before torch, see there
    found: list[Task] = []
    for name in networks or NETWORKS:
        for batch, side in NETWORKS[name]:
            label = f"{name}/batch={batch},height={side},width={side}"
            try:
                tasks = _extract(name, batch, side, label)
            except SpecError as error:
                progress(str(error))
                continue
            wanted = [
                task
                for task in tasks
                if task.key not in known and len(task.module) <= MOST_TEXT
                and (not named or any(word in task.name for word in named))
            ]  # fmt: skip
            found = merge([*found, *wanted])
            progress(f"{label}: {len(found)} tasks so far")
    return found


def _extract(name: str, batch: int, side: int, label: str) -> list[Task]:
    import torch

    inputs = (torch.zeros(batch, 3, side, side),)
    return extract_module(_module(name), inputs, label, family=None)


def _module(name: str) -> torch.nn.Module:
    """A network without weights, its last features in place of its classes."""
    import torch

    try:
        timm = importlib.import_module("timm")
        layers = importlib.import_module("timm.layers")
    except ImportError as error:
        raise MissingDataError(f"timm: {error}", fix="pip install timm torchvision") from error
    layers.set_exportable(True)
    layers.set_fused_attn(False)
    try:
        with torch.device("meta"):
            module = timm.create_model(name, pretrained=False, num_classes=0)
    except Exception as error:  # whatever its code raises, as for a name that it dropped
        raise SpecError(f"network {name}", got=str(error), expected="one that timm has") from error
    empty: torch.nn.Module = module.to_empty(device="cpu").eval()
    for buffer in empty.buffers():
        # TVM folds constants by running look-ups on them.
        buffer.zero_()
    return empty


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=[], help="of timm; all by default")
    parser.add_argument("--named", nargs="+", default=[], help="tasks so named, as conv matmul")
    parser.add_argument("--most", type=int, help="tasks, drawn at random where there are more")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="tasks or programs")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    with told():
        if chosen.most is not None and chosen.most < 1:
            raise SpecError("--most", got=chosen.most, expected="at least 1")
        known = known_keys(chosen.without)
        # A path that cannot be written is found before the work.
        with exclusive(chosen.output, file=True):
            tasks = timm_tasks(
                chosen.networks, known=known, named=chosen.named,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )  # fmt: skip
            if chosen.most is not None and len(tasks) > chosen.most:
                tasks = random.Random(0).sample(tasks, chosen.most)
            write_tasks(tasks, chosen.output)


if __name__ == "__main__":
    main()
