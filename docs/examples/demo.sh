#!/usr/bin/env bash
# The main jobs on this machine: fit the shipped predictor to two unlike devices by 30 timed tasks
# each, most of them what the plans rest on, plan a serving, a mixed-precision and a multimodal job
# from the prices that it predicts, run all three for real beside their alternatives, report.
# Usage: demo.sh [FOLDER]     results go to FOLDER (out/demo); measurements found there are kept.
set -euo pipefail
out=${1:-out/demo}
rounds=${ROUNDS:-3}
here=$out/profiles
mkdir -p "$out"
# A core with everything, one held to AVX2. DEVICES names others: see docs/limits.md.
read -ra devices <<< "${DEVICES:-cpu:threads=1 cpu:threads=1,isa=avx2}"
model=demo-llama-random   # 222M parameters in 16 layers, random weights (real times, no meaning)
serving=batch=8,prompt_tokens=64,new_tokens=16,min_average_bits=8
cat > "$out/precision.yaml" <<'YAML'
network: byte_lm
network_options: {width: 256, layers: 2, heads: 4, context: 128}
batch: 4
steps: 4
YAML
cat > "$out/bubbles.yaml" <<'YAML'
backbone: {layers: 4, hidden: 384, heads: 6, vocab: 2048}
encoders:
  - name: vit
    dims: {layers: 4, hidden: 384, heads: 6}
    tokens: 128
    patch_features: 192
sequence_length: 256
microbatch: 1
microbatches: 4
plan: {pp: 2}
YAML

echo "== 1/3 profile: the devices' figures, about 30 tasks each, the link between them"
fit() { foreplan profile "${devices[@]}" --fit --unseen --quick -o "$here" "$@"; }
fit --for precision --workload "$out/precision.yaml" --tasks 12
fit --for bubbles --workload "$out/bubbles.yaml" --tasks 6
cp "$here/cluster.yaml" "$here/training.yaml"
# 240 MiB each: the model fits in neither, and at 16 bits it does not fit in both.
fit --model $model --workload $serving --tasks 12 --memory 240MiB

echo "== 2/3 plan: from predicted prices; what the roofline would decide goes along, to be run too"
plan() { foreplan plan "$1" --cluster "$here/$2.yaml" --workload "$3" --costs predicted \
  --beside roofline -o "$out/$1.json" "${@:4}"; }
plan serving cluster $serving --model $model
plan precision training "$out/precision.yaml"
plan bubbles training "$out/bubbles.yaml"

echo "== 3/3 verify: each plan and its alternatives, two real processes each"
runs=()
for kind in serving precision bubbles; do
  code=0 count=$rounds
  # Runs of a quarter of a second: medians of three of one decision differ by up to 5 %.
  [ $kind = serving ] || count=$((2 * rounds + 1))
  foreplan verify "$out/$kind.json" -o "$out/$kind-run.json" --rounds $count \
    --report "$out/$kind.html" --trace "$out/$kind-trace.json" || code=$?
  # 5: the prediction was off by more than the tolerance, as happens on a machine that is busy now
  # and was not while it was measured. The table says by how much; anything else is a failure.
  [ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
  runs+=(--verification "$out/$kind-run.json")
done
foreplan report "$out"/{serving,precision,bubbles}.json "${runs[@]}" -o "$out/report.html"
echo "done in $SECONDS s"
