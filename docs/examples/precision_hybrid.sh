#!/usr/bin/env bash
# Does a precision plan train better than uniform precision and than random plans that take as long?
# Measure two unlike devices of this machine, plan, run step times in real processes, train from
# several seeds (emulated in one process), compare.
# Usage: precision_hybrid.sh [FOLDER] [times|training]    results go to FOLDER
# (out/precision_hybrid); measurements and training runs found there are kept. Two slices of one
# processor, as in train_cpu.sh. `times` needs two idle cores for three minutes; `training` (after
# it) two minutes of a core for each seed, idle or not, on CORES cores at a time.
# ROUNDS=5 STEPS=400 FIRST=8 SEEDS=64 DRAWS=3 CORES=2; every seed trains DRAWS random plans of its
# own.
set -euo pipefail
out=${1:-out/precision_hybrid}
part=${2:-all}
first=${FIRST:-8} seeds=${SEEDS:-64} draws=${DRAWS:-3} cores=${CORES:-2}
pids=()
case $part in all | times | training) mkdir -p "$out" ;; *)
  echo "precision_hybrid.sh: $part is neither times nor training" >&2
  exit 2
  ;;
esac
cat > "$out/workload.yaml" <<'YAML'
network: byte_lm
network_options: {width: 256, layers: 2, heads: 4, context: 64}
batch: 4
steps: 4
optimizer: adamw
learning_rate: 0.001
precisions: [fp32, int8-tensor]
YAML
study() { python -m foreplan.planner.precision.hybrid_training "$@"; }

if [ "$part" != training ]; then
  echo "== 1/4 profile"
  foreplan profile "cpu:threads=1" "cpu:threads=1,isa=avx2" --for precision \
    --workload "$out/workload.yaml" --quick -o "$out/profiles"

  echo "== 2/4 the plan, uniform precision, random plans of equal time"
  [ -e "$out/hybrid.json" ] ||
    study plan "$out/profiles/cluster.yaml" "$out/workload.yaml" -o "$out/hybrid.json"

  echo "== 3/4 step times, two real processes each"
  # 5: the prediction was off by more than the tolerance, as on a machine that is busy.
  code=0
  foreplan verify "$out/hybrid.json" --rounds "${ROUNDS:-5}" -o "$out/verification.json" || code=$?
  [ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
fi
if [ "$part" != times ]; then
  echo "== 4/4 training, emulated"
  [ -e "$out/training.json" ] ||
    study plan "$out/profiles/cluster.yaml" "$out/workload.yaml" -o "$out/training.json" \
      --draws $((draws * (first + seeds)))
  for ((k = 0; k < cores && k < seeds; k++)); do
    OMP_NUM_THREADS=1 study train "$out/training.json" -o "$out/losses.jsonl" \
      --arms "uniform fp32" "lowest uniform" plan --draws-a-seed "$draws" \
      --steps "${STEPS:-400}" --seeds $(seq $((first + k)) "$cores" $((first + seeds - 1))) &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  study table "$out/losses.jsonl" --together
  study table "$out/losses.jsonl" --together --against plan
fi
