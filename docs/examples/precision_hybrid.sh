#!/usr/bin/env bash
# Does a precision plan train better than uniform precision that takes as long? Measure two unlike
# devices of this machine, plan, run step times in real processes, train from eight seeds (emulated
# in one process), compare.
# Usage: precision_hybrid.sh [FOLDER] [times|training]    results go to FOLDER
# (out/precision_hybrid); measurements and training runs found there are kept. Two slices of one
# processor, as in train_cpu.sh. `times` needs two idle cores for three minutes; `training` (after
# it) 100 s of a core for each seed, idle or not, on two cores at a time.
# ROUNDS=5 STEPS=400 SEEDS="0 1 2 3 4 5 6 7".
set -euo pipefail
out=${1:-out/precision_hybrid}
part=${2:-all}
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
learning_rate: 0.002
slack: 0.015
precisions: [fp32, bf16, int8, int8-all, int8-tensor]
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
  read -ra seeds <<< "${SEEDS:-0 1 2 3 4 5 6 7}"
  half=$((${#seeds[@]} / 2))
  for some in "${seeds[*]:0:half}" "${seeds[*]:half}"; do
    read -ra mine <<< "$some"
    [ ${#mine[@]} -eq 0 ] || OMP_NUM_THREADS=1 study train "$out/hybrid.json" \
      -o "$out/losses.jsonl" --steps "${STEPS:-400}" --seeds "${mine[@]}" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  study table "$out/losses.jsonl"
  study table "$out/losses.jsonl" --against plan
fi
