#!/usr/bin/env bash
# What a stranger does with a clone and the README: install, then a plan for a model folder and a
# cluster that are not in the repository. Prints the seconds of each step.
# Usage: first_use.sh CHECKOUT FOLDER     FOLDER must not exist
set -euo pipefail
checkout=$(realpath "${1:?usage: first_use.sh CHECKOUT FOLDER}")
mkdir "${2:?usage: first_use.sh CHECKOUT FOLDER}"
cd "$2"
step() {
  local start=$EPOCHREALTIME
  "${@:2}" > "$1.txt" 2>&1 || { tail -20 "$1.txt" >&2; exit 1; }
  awk -v a="$start" -v b="$EPOCHREALTIME" -v n="$1" 'BEGIN { printf "%-10s %6.1f s\n", n, b - a }'
}
step clone git clone -q "$checkout" foreplan
install() {
  python3 -m venv venv
  venv/bin/pip install -q -c foreplan/constraints.txt ./foreplan
}
step install install
export PATH=$PWD/venv/bin:$PATH
mkdir my-model
cat > my-model/config.json <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1280, "head_dim": 64,
 "num_hidden_layers": 18, "num_attention_heads": 20, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
 "intermediate_size": 3584, "vocab_size": 50304, "max_position_embeddings": 4096,
 "tie_word_embeddings": true, "hidden_act": "silu", "dtype": "bfloat16"}
JSON
cat > cluster.yaml <<'YAML'
devices:
  - {name: rtx_3090, host: desk, memory_bytes: 3221225472}
  - {name: t4, host: closet, count: 2, memory_bytes: 2147483648}
tiers:
  - {group: [all], scope: network, latency_s: 5.0e-5, bandwidth_bytes_per_s: 1.25e9,
     source: "10 GbE, stated"}
  - {group: [closet], scope: host, latency_s: 2.0e-5, bandwidth_bytes_per_s: 1.2e10,
     source: "PCIe 3, stated"}
YAML
step devices foreplan devices
step predict foreplan predict ./my-model --devices rtx_3090,t4 --batch 8 --sequence-length 512
step plan foreplan plan serving --model ./my-model --cluster cluster.yaml --costs predicted \
  --workload batch=64,prompt_tokens=512,new_tokens=64,min_average_bits=8 -o plan.json
step again foreplan plan serving --model ./my-model --cluster cluster.yaml --costs predicted \
  --workload batch=64,prompt_tokens=512,new_tokens=64,min_average_bits=6 -o other.json
step report foreplan report plan.json -o report.html
step export foreplan export plan.json --to vllm -o launch
echo "all        $SECONDS s"
