#!/usr/bin/env bash
# Traffic on one core and on a pipeline of two unlike ones: profile, plan, then serve the same
# requests for real at three rates, beside their simulation. Two idle cores: about twelve minutes.
# Usage: traffic.sh [FOLDER]     results go to FOLDER (out/traffic); measurements there are kept.
set -euo pipefail
out=${1:-out/traffic}
mkdir -p "$out"
# 222M parameters in 16 layers, random weights (real times, no meaning).
model=demo-llama-random
work=batch=8,prompt_tokens=64,new_tokens=16,bits=16+8
requests="requests: 60
prompt_tokens: {20: 0.3, 32: 0.3, 64: 0.4}
new_tokens: {1: 0.1, 8: 0.4, 16: 0.5}"
printf '%s\n' "$requests" "rate_per_s: 2" > "$out/low.yaml"
printf '%s\n' "$requests" "rate_per_s: 6.5" > "$out/high.yaml"
printf '%s\n' "$requests" "rate_per_s: 1" "arrivals: together" > "$out/full.yaml"

plan() { # NAME MEMORY DEVICES: profile the model's own shapes, plan
  local here=$out/$1 memory=$2
  foreplan profile "${@:3}" --quick --model $model --workload $work --memory "$memory" -o "$here"
  foreplan plan serving --model $model --cluster "$here/cluster.yaml" --workload $work \
    -o "$here/plan.json"
}
plan one 600MiB cpu:threads=1
plan two 240MiB cpu:threads=1 cpu:threads=1,isa=avx2   # at 8 bits neither holds all layers

for plan in one two; do
  for rate in low high full; do
    foreplan verify "$out/$plan/plan.json" --traffic "$out/$rate.yaml" --rounds "${ROUNDS:-3}" \
      -o "$out/$plan/$rate.json" || [ $? -eq 5 ]
  done
done
