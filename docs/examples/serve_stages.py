"""Serve a batch by the stages of a plan, one process each.

    torchrun --nproc-per-node STAGES serve_stages.py plan.json

The plan's batch goes through in its micro-batches; hidden states travel down the stages, the next
token from the last stage to the first. Rank 0 prints the tokens as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist
from decoder_stage import DecoderStage

import foreplan


def serve(path: str) -> None:
    plan = foreplan.load_plan(path)
    decision = foreplan.decision_of(plan, foreplan.ServingDecision)
    batch, prompt, new = (plan.workload[k] for k in ("batch", "prompt_tokens", "new_tokens"))
    size, width = decision.prefill_microbatch, plan.model.hidden if plan.model else 0
    if size != decision.decode_microbatch:
        raise SystemExit("this launcher keeps a micro-batch together: plan with equal sizes")
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), len(decision.stages) - 1
    if last + 1 != dist.get_world_size():
        raise SystemExit(f"start {last + 1} processes, one for each stage of the plan")
    stage, sent = DecoderStage(plan, rank), []  # what is sent is kept until the end
    torch.manual_seed(1)
    prompts = torch.randint(plan.model.vocab if plan.model else 2, (batch, prompt))
    tokens: list[list[torch.Tensor]] = [[] for _ in range(0, batch, size)]
    for step in range(new):
        for m, given in enumerate(torch.split(prompts, size)):
            x = given
            if rank > 0:
                x = torch.empty(size, prompt if step == 0 else 1, width)
                dist.recv(x, rank - 1, tag=m)
            elif step > 0:
                x = tokens[m][-1] if last == 0 else torch.empty(size, 1, dtype=torch.int64)
                if last > 0:
                    dist.recv(x, last, tag=m)
                    tokens[m].append(x)
            x = stage.forward(m, x).contiguous()
            if last == 0:
                tokens[m].append(x)
            else:
                sent.append((x, dist.isend(x, (rank + 1) % (last + 1), tag=m)))
    for m, known in enumerate(tokens) if rank == 0 and last > 0 else ():
        known.append(torch.empty(size, 1, dtype=torch.int64))
        dist.recv(known[-1], last, tag=m)
    if rank == 0:
        print(json.dumps(torch.cat([torch.cat(t, 1) for t in tokens]).tolist()))
    dist.barrier()  # what was sent has arrived
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(sys.argv[1])
