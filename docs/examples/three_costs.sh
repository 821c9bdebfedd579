#!/usr/bin/env bash
# What is each source of costs worth? Plans one job from measured, from predicted (the shipped
# predictor, fitted to each device by a tenth to a third of the tasks) and from roofline costs, runs all three
# decisions and the baselines for real, and prints the regret of each source.
# Usage: three_costs.sh [FOLDER] [serving|precision|bubbles ...]     results go to FOLDER
# (out/three_costs); measurements found there are kept. Two slices of one processor: a core with
# everything, and one held to AVX2. ROUNDS=5, DEVICES="cpu:threads=1 cpu:threads=1,isa=avx2".
set -euo pipefail
out=${1:-out/three_costs}
read -ra devices <<< "${DEVICES:-cpu:threads=1 cpu:threads=1,isa=avx2}"
kinds=("${@:2}")
[ ${#kinds[@]} -gt 0 ] || kinds=(serving precision bubbles)
mkdir -p "$out"
# Narrow, so that casts and calls weigh as much as products: published peaks alone make every
# operator 8 bits wide here.
cat > "$out/precision.yaml" <<'YAML'
network: byte_lm
network_options: {width: 64, layers: 4, heads: 4, context: 128}
batch: 4
steps: 4
precisions: [fp32, bf16, int8, int8-all]
YAML
# Two unlike encoders, because only ratios of costs decide: one takes its time in attention and
# element-wise operators, where the roofline is furthest off, the other in products.
cat > "$out/bubbles.yaml" <<'YAML'
backbone: {layers: 4, hidden: 512, heads: 8, vocab: 2048}
encoders:
  - name: vit
    dims: {layers: 4, hidden: 64, heads: 8}
    tokens: 1024
    projected_tokens: 64
    patch_features: 192
  - name: audio
    dims: {layers: 4, hidden: 768, heads: 12}
    tokens: 64
    patch_features: 192
    frozen: true
sequence_length: 256
microbatch: 1
microbatches: 6
plan: {pp: 2}
YAML

plans=() runs=()
for kind in "${kinds[@]}"; do
  workload=$out/$kind.yaml model=() memory=() tasks=12
  [ "$kind" = precision ] && tasks=24
  if [ "$kind" = serving ]; then
    workload=batch=8,prompt_tokens=64,new_tokens=24,min_average_bits=8
    model=(--model demo-llama-random) memory=(--memory 240MiB) tasks=32
  fi
  job=(-o "$out/$kind" --for "$kind" --workload "$workload" "${model[@]}" "${memory[@]}")
  echo "== $kind: fit by $tasks tasks, measure the rest, plan from each, run all"
  foreplan profile "${devices[@]}" --fit --unseen --tasks $tasks --quick "${job[@]}"
  foreplan profile "${devices[@]}" "${job[@]}"
  foreplan plan "$kind" --cluster "$out/$kind/cluster.yaml" --workload "$workload" "${model[@]}" \
    --beside predicted --beside roofline -o "$out/$kind.json"
  code=0 rounds=${ROUNDS:-5}
  [ "$kind" = serving ] || rounds=$((3 * rounds))  # short runs, so that medians need more of them
  foreplan verify "$out/$kind.json" -o "$out/$kind-run.json" --rounds $rounds \
    --report "$out/$kind.html" || code=$?
  # 5: off by more than the tolerance; the table says by how much. Anything else is a failure.
  [ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
  plans+=("$out/$kind.json") runs+=(--verification "$out/$kind-run.json")
done
if [ ${#kinds[@]} -gt 1 ]; then
  foreplan report "${plans[@]}" "${runs[@]}" -o "$out/report.html"
fi
