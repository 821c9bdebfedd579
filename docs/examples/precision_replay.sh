#!/usr/bin/env bash
# How well do the times of single operators foretell a training step in mixed precision? Measures
# the operators on two unlike devices of this machine, predicts mixtures that no profile ran, runs
# each in two real processes, and prints both; once more with casts taken to cost nothing.
# Usage: precision_replay.sh [FOLDER]    results go to FOLDER (out/precision_replay); measurements
# found there are kept. MIXTURES=8 ROUNDS=5 WIDTH=512. Two slices of one processor, as in
# train_cpu.sh; nothing else should run beside it.
set -euo pipefail
out=${1:-out/precision_replay}
mkdir -p "$out"
cat > "$out/workload.yaml" <<YAML
network: byte_lm
network_options: {width: ${WIDTH:-512}, layers: 2, heads: 8, context: 128}
batch: 4
steps: 4
YAML
study() { python -m foreplan.planner.precision.partial_plans "$@"; }

echo "== 1/3 profile: the operators of a training step on each device, and the link"
foreplan profile "cpu:threads=1" "cpu:threads=1,isa=avx2" --for precision \
  --workload "$out/workload.yaml" --quick -o "$out/profiles"

echo "== 2/3 predict: mixtures in which every module of every device draws its own precision"
study plan "$out/profiles/cluster.yaml" "$out/workload.yaml" -o "$out/mixtures.json" \
  --count "${MIXTURES:-8}"

echo "== 3/3 run: two processes a mixture"
# 5: the plan was off by more than the tolerance, as on a machine that is busy.
code=0
foreplan verify "$out/mixtures.json" --rounds "${ROUNDS:-5}" -o "$out/verification.json" || code=$?
[ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
study table "$out/mixtures.json" "$out/verification.json"
echo "done in $SECONDS s"
