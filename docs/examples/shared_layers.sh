#!/usr/bin/env bash
# Layers shared by two equal cores (tensor parallelism) or split between them: profile the shapes of
# both, plan one device a group of two and the free choice, run each beside its alternatives.
# Usage: shared_layers.sh [FOLDER]   results go to FOLDER (out/shared-layers); measurements there are
# kept. Idle machine: about six minutes.
set -euo pipefail
out=${1:-out/shared-layers}
mkdir -p "$out"
model=${MODEL:-demo-llama-random}   # 222M parameters, 16 layers; random weights: real times, no meaning
work=${WORK:-batch=8,prompt_tokens=64,new_tokens=24,min_average_bits=8}

# The same device twice: two workers of one core each. `auto` measures the shapes of both degrees.
foreplan profile cpu:threads=1 cpu:threads=1 --quick --model "$model" \
  --workload "$work,tensor_parallel=auto" --memory "${MEMORY:-240MiB}" -o "$out"
for degree in 2 auto; do
  foreplan plan serving --model "$model" --cluster "$out/cluster.yaml" \
    --workload "$work,tensor_parallel=$degree" -o "$out/$degree.json"
  # Tokens are compared with one process; 5 means that the error is beyond the tolerance.
  foreplan verify "$out/$degree.json" -o "$out/$degree.run.json" --rounds "${ROUNDS:-5}" || [ $? -eq 5 ]
done
