#!/usr/bin/env bash
# Train one network on two unlike devices of this machine: measure, choose the precision of every
# operator on each, train for real with it and with what others would choose, report.
# Usage: precision_cpu.sh [FOLDER]    results go to FOLDER (out/precision); measurements found there
# are kept. Two slices of one processor: a core held to AVX2, and one with everything.
set -euo pipefail
out=${1:-out/precision}
mkdir -p "$out"
# A byte language model of 6.6M parameters, 512 tokens a device and step, SGD with momentum.
cat > "$out/workload.yaml" <<'YAML'
network: byte_lm
network_options: {width: 512, layers: 2, heads: 8, context: 128}
batch: 4
steps: 4
YAML

echo "== 1/3 profile: the programs of a training step in every precision, on each device"
foreplan profile "cpu:threads=1" "cpu:threads=1,isa=avx2" --for precision \
  --workload "$out/workload.yaml" --quick -o "$out/profiles"

echo "== 2/3 plan; what published figures alone would decide goes along, to be run too"
foreplan plan precision --cluster "$out/profiles/cluster.yaml" --workload "$out/workload.yaml" \
  --beside roofline -o "$out/plan.json"

echo "== 3/3 verify: the plan and its alternatives, two real processes each"
code=0
foreplan verify "$out/plan.json" -o "$out/verification.json" \
  --report "$out/report.html" --trace "$out/trace.json" "${@:2}" || code=$?
# 5: the prediction was off by more than the tolerance, as on a machine that is busy now and was not
# while it was measured. The table says by how much; anything else is a failure.
[ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
