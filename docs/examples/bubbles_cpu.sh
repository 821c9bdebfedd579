#!/usr/bin/env bash
# A multimodal training step on two cores: measure, plan where the encoder runs, run it, report.
# Usage: bubbles_cpu.sh [FOLDER]   results go to FOLDER (out/bubbles); measurements there are kept.
set -euo pipefail
out=${1:-out/bubbles}
mkdir -p "$out"
# Two pipeline ranks and few micro-batches: a third of each rank's time would be idle, and an
# encoder half as large as the backbone to put there. Random weights and data: times alone count.
cat > "$out/workload.yaml" <<'YAML'
backbone: {layers: 4, hidden: 512, heads: 8, vocab: 2048}
encoders:
  - name: vit
    dims: {layers: 4, hidden: 512, heads: 8}
    tokens: 128
    patch_features: 192
sequence_length: 256
microbatch: 1
microbatches: 4
plan: {pp: 2}
YAML

echo "== 1/3 profile: the training programs of both towers on two like cores"
foreplan profile cpu:threads=1 cpu:threads=1 -o "$out/profiles" --for bubbles \
  --workload "$out/workload.yaml"

echo "== 2/3 plan: from measured times, and beside it from the roofline"
foreplan plan bubbles --cluster "$out/profiles/cluster.yaml" --workload "$out/workload.yaml" \
  --beside roofline -o "$out/plan.json"

echo "== 3/3 verify: the plan and its baselines, two pinned processes each"
code=0
foreplan verify "$out/plan.json" -o "$out/verification.json" \
  --report "$out/report.html" --trace "$out/trace.json" "${@:2}" || code=$?
# 5: the prediction was off by more than the tolerance, as happens on a machine that is busy now and
# was not while it was measured. The table says by how much; anything else is a failure.
[ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
