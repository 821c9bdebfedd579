#!/usr/bin/env bash
# Bubble plans on 4 or 8 ranks of one host, one core or GPU each: measure, plan, run every decision,
# for six or seven shapes of a training step.
# Usage: taskset -c 40-43 bubble_ranks.sh 4 [FOLDER]      4 pipeline ranks (2: for a try-out)
#        taskset -c 44-51 bubble_ranks.sh 8 [FOLDER]      4 pipeline ranks of two lanes; once 8 ranks
# A rank takes as many of the cores that the command may use as its device has threads, in order: so
# name one thread of each physical core (lscpu -e), away from other work; of more cores than ranks
# planning takes the others. One size at a time: what one measures the other disturbs. Everything is
# measured first, then planned, all shapes side by side, then run, shape by shape. Results go to
# FOLDER (out/ranks4, out/ranks8), each as soon as it is there; measurements found there are kept.
# Random weights and data.
# Variables: ROUNDS (3); SHAPES (names; all); WIDTH (512) and POSITIONS (128) of the backbone, 64 for
# a try-out; FIT (12): programs that predicted costs are fitted to, 0 for plans without them; LIMIT:
# seconds after which no shape is begun. DEVICE=cuda: GPUs, for which WIDTH=2048 POSITIONS=2048
# HEADS=16 is small; nothing is fitted there unless FIT says so.
set -uo pipefail
ranks=${1:?usage: bubble_ranks.sh 2|4|8 [FOLDER]}
out=${2:-out/ranks$ranks}
case $ranks in 2 | 4 | 8) ;; *)
  echo "bubble_ranks.sh: $ranks is none of 2, 4 and 8" >&2
  exit 2
  ;;
esac
width=${WIDTH:-512} positions=${POSITIONS:-128} heads=${HEADS:-8} failed=0 names=()
devices=()
case ${DEVICE:=cpu} in
  cpu) for _ in $(seq "$ranks"); do devices+=("cpu:threads=1"); done ;;
  cuda) for k in $(seq 0 $((ranks - 1))); do devices+=("cuda:$k"); done ;;
  *)
    echo "bubble_ranks.sh: DEVICE is $DEVICE, neither cpu nor cuda" >&2
    exit 2
    ;;
esac
if [ "$DEVICE" = cpu ]; then fit=${FIT:-12}; else fit=${FIT:-0}; fi

# NAME MICRO-BATCHES ENCODER_LAYERS ENCODER_WIDTH STAGES CHUNKS FROZEN
shapes=("base 8 4 $width 4 1 false" "few 4 4 $width 4 1 false" "large 6 8 $width 4 1 false"
  "interleaved 8 4 $width 4 2 false" "frozen 6 8 $width 4 1 true" "small 6 4 $((width / 2)) 4 1 false")
if [ "$ranks" = 8 ]; then shapes+=("stages 8 8 $width 8 1 false"); fi

for shape in "${shapes[@]}"; do
  read -r name microbatches layers encoder stages chunks frozen <<< "$shape"
  [[ " ${SHAPES:-$name} " == *" $name "* ]] || continue
  stages=$((stages < ranks ? stages : ranks))
  here=$out/$name lanes=$((ranks / stages))
  mkdir -p "$here"
  names+=("$name")
  cat > "$here/workload.yaml" << YAML
backbone: {layers: 8, hidden: $width, heads: $heads, vocab: 2048}
encoders:
  - name: vit
    dims: {layers: $layers, hidden: $encoder, heads: $heads}
    tokens: $((positions / 2))
    patch_features: 192
    frozen: $frozen
sequence_length: $positions
microbatch: 1
microbatches: $microbatches
sharded_optimizer: $([ "$lanes" = 1 ] && echo true || echo false)
plan: {pp: $stages, tp: $lanes, chunks: $chunks}
YAML
  echo "== $name is measured, $SECONDS s"
  profile=("${devices[@]}" --for bubbles --workload "$here/workload.yaml" -o "$out/profiles")
  # Without a fit, predicted costs of processors are the roofline's.
  if [ "$fit" != 0 ] && ! compgen -G "$out/profiles/*.fit.json" > /dev/null; then
    foreplan profile "${profile[@]}" --fit --tasks "$fit" --quick || failed=$?
  fi
  foreplan profile "${profile[@]}" || failed=$?
done

beside=(--beside roofline)
if [ "$fit" != 0 ] || [ "$DEVICE" = cuda ]; then beside+=(--beside predicted); fi
echo "== all are planned, $SECONDS s"
for name in "${names[@]}"; do
  foreplan plan bubbles --cluster "$out/profiles/cluster.yaml" --workload "$out/$name/workload.yaml" \
    "${beside[@]}" -o "$out/$name/plan.json" > "$out/$name/plan.txt" 2>&1 &
done
wait

for name in "${names[@]}"; do
  here=$out/$name
  if [ "$SECONDS" -gt "${LIMIT:-$SECONDS}" ]; then
    echo "== $name is left out, $SECONDS s"
    continue
  fi
  echo "== $name runs, $SECONDS s"
  cat "$here/plan.txt"
  foreplan verify "$here/plan.json" --rounds "${ROUNDS:-3}" --trust-paths \
    -o "$here/verification.json" --trace "$here/trace.json"
  code=$?
  # 5: the prediction was off by more than the tolerance; the table says by how much.
  [ $code -eq 0 ] || [ $code -eq 5 ] || failed=$code
done
echo "== done, $SECONDS s"
exit $failed
