#!/usr/bin/env bash
# The main job on two GPUs of one host, made unlike: one whole, one held to a slice of 32 SMs.
# Usage: two_gpus.sh [FOLDER]     results go to FOLDER (out/two-gpus)
set -euo pipefail
out=${1:-out/two-gpus}
model=llama-3.2-1b
workload=batch=32,prompt_tokens=512,new_tokens=64,min_average_bits=8

foreplan profile cuda:0 cuda:1/sms=32 -o "$out/profiles" --model $model --workload $workload \
  --quick --memory cuda:0=1.75GiB --memory cuda:1/sms=32=2GiB
foreplan plan serving --model $model --cluster "$out/profiles/cluster.yaml" \
  --workload $workload -o "$out/plan.json"
foreplan verify "$out/plan.json" -o "$out/verification.json" --rounds 5 \
  --report "$out/report.html" --trace "$out/trace.json" "${@:2}"
