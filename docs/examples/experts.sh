#!/usr/bin/env bash
# A mixture of experts on two unlike cores: profile its exact shapes, plan, run the plan and its
# baselines. Idle machine: about four minutes.
# Usage: experts.sh [FOLDER]     results go to FOLDER (out/experts); measurements there are kept.
set -euo pipefail
out=${1:-out/experts}
mkdir -p "$out"
devices=("cpu:threads=1" "cpu:threads=1,isa=avx2")   # a core with everything, one held to AVX2
# 176M parameters, 54M of them for one token; 12 layers, the first dense, 11 of 16 experts and a
# shared one; random weights (real times, no meaning).
model=demo-moe-random
work=batch=8,prompt_tokens=64,new_tokens=24,min_average_bits=8

# 200 MiB each: at 16 bits the experts fit in neither.
foreplan profile "${devices[@]}" --quick --model $model --workload $work --memory 200MiB -o "$out"
foreplan plan serving --model $model --cluster "$out/cluster.yaml" --workload $work -o "$out/plan.json"
foreplan verify "$out/plan.json" -o "$out/run.json" --rounds "${ROUNDS:-5}" || [ $? -eq 5 ]
