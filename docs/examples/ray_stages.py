"""Place the stages of a serving plan as Ray actors and serve a batch with them.

    python ray_stages.py plan.json

Each actor asks for what its stage was planned for: a GPU of the planned kind (Ray's accelerator
types are labels of your cluster; a custom resource named like the device will do) or a core.
Stages are chained by references, so that hidden states go from actor to actor, not through here.
"""

import json
import sys
from typing import Any

import ray
import torch
from decoder_stage import DecoderStage

import foreplan
from foreplan.datasets import device_zoo


def needs(plan: foreplan.Plan, index: int) -> dict[str, Any]:
    """Ray's words for the device of a stage."""
    stage = foreplan.decision_of(plan, foreplan.ServingDecision).stages[index]
    rank = plan.cluster.ranks()[stage.rank]
    kind = device_zoo.device(rank.name.zoo).kind if rank.name.zoo else rank.name.kind
    if kind == "cpu":
        return {"num_cpus": 1, "memory": sum(plan.predicted.ranks[index].memory_bytes.values())}
    return {"num_gpus": 1, "resources": {str(rank.name): 1}}


def serve(path: str) -> None:
    plan = foreplan.load_plan(path)
    decision = foreplan.decision_of(plan, foreplan.ServingDecision)
    batch, prompt, new = (plan.workload[k] for k in ("batch", "prompt_tokens", "new_tokens"))
    Actor: Any = ray.remote(DecoderStage)
    stages = [
        Actor.options(**needs(plan, index)).remote(plan, index)
        for index in range(len(decision.stages))
    ]
    torch.manual_seed(1)
    prompts = torch.randint(plan.model.vocab if plan.model else 2, (batch, prompt))
    tokens: list[list[Any]] = [[] for _ in range(0, batch, decision.prefill_microbatch)]
    for _ in range(new):
        for m, given in enumerate(torch.split(prompts, decision.prefill_microbatch)):
            x: Any = tokens[m][-1] if tokens[m] else given
            for stage in stages:
                x = stage.forward.remote(m, x)
            tokens[m].append(x)
    print(json.dumps(torch.cat([torch.cat(ray.get(t, timeout=250), 1) for t in tokens]).tolist()))


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    serve(sys.argv[1])
    ray.shutdown()
