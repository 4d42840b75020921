#!/usr/bin/env bash
# Checks this project on the accelerator that JAX finds: placements first, then measurements, then
# tests. Each part is a process of its own, of eight minutes at most, and none stops the others.
# Prints a table at the end; the exit code is 0 if every part has passed. Without a GPU, a CPU copies
# between two memories, and the tests use the kernels of a GPU.
#
#   scripts/gpu_check.sh [--quick] [--only NAME] [--logs FOLDER] [python]
#
#   --quick      fewer placements, small measurements, and the tests of what a GPU does differently
#   --only NAME  the parts whose name contains NAME: placements, layers, measure, families, tests
#   --logs FOLDER  keep what each part prints in a file there too
set -uo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.."

seconds=480 quick="" only="" logs="" python=python
while (($#)); do
  case $1 in
    --quick) quick=--quick ;;
    --only) only=${2:?"--only needs a name"} && shift ;;
    --logs) logs=$(realpath -m "${2:?"--logs needs a folder"}") && mkdir -p "$logs" && shift ;;
    -h | --help)
      sed -n '2,12s/^# \{0,1\}//p' "$script"
      exit
      ;;
    -*) echo "gpu_check.sh: no option $1 (see --help)" >&2 && exit 2 ;;
    *) python=$1 ;;
  esac
  shift
done

export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
device=$("$python" -c 'import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)') || {
  echo "gpu_check.sh: JAX finds no device with $python" >&2
  exit 2
}
copies=""
if [[ $device == cpu* ]]; then
  copies=--copies
  export FLEXGEN_TEST_AS_ON_GPU=1
  echo "no GPU here: the CPU takes the copying path"
fi

table="" failed=0

# part NAME WHAT COMMAND...: runs a command, and adds a line to the table.
part() {
  local name=$1 what=$2 began=$SECONDS outcome=passed code
  shift 2
  [[ $name == *"$only"* ]] || return 0
  echo "== $name: $what"
  if [[ $logs ]]; then
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$logs/$name.log"
    code=${PIPESTATUS[0]}
  else
    timeout --kill-after=10 "$seconds" "$@"
    code=$?
  fi
  if ((code)); then
    failed=1 outcome="failed, exit code $code"
    ((code == 124)) && outcome="stopped after $seconds s"
    ((code == 137)) && outcome="killed"
  fi
  table+=$(printf '%-22s %-24s %5d s  %s' "$name" "$outcome" $((SECONDS - began)) "$what")$'\n'
}

formats="16 8 4 sparse-16 sparse-4"
[[ $quick ]] && formats="16 4 sparse-4"
# What is compared is tokens: XLA need not try which formulation of a product is fastest, which on a
# GPU takes most of the time of compiling.
untried="${XLA_FLAGS:-} --xla_gpu_autotune_level=0"
for format in $formats; do
  part "placements-$format" "fp32 tokens of every placement are the resident run's" \
    env XLA_FLAGS="$untried" "$python" scripts/checks/check_placements.py --formats "$format" $copies $quick
done
layers=()
[[ $copies ]] && layers=(--model facebook/opt-125m --context 32 --layers 1 --bits 16 --rows 1)
part layers "a resident layer's token, by XLA's code and by kernels" \
  "$python" scripts/benchmarks/gpu_layers.py ${layers[@]+"${layers[@]}"}
part measure "links, overlap, alignment, memory, tokens in 16 bits" \
  "$python" scripts/benchmarks/gpu_measure.py $quick
if [[ ! $quick ]] && "$python" -c 'import torch, transformers' 2>/dev/null; then
  for family in llama gemma2 gpt_oss deepseek_v3; do
    part "families-$family" "everywhere the tokens of transformers" \
      env XLA_FLAGS="$untried" "$python" scripts/checks/check_families.py --family "$family"
  done
fi
pytest=(env XLA_FLAGS="$untried" "$python" -m pytest -n 2 -p no:cacheprovider)
part tests-kernels "the GPU's kernels against NumPy" "${pytest[@]}" tests/gpu
if [[ $quick ]]; then
  part tests-copying "what a GPU does differently" "${pytest[@]}" \
    tests/offload/test_copying.py tests/schedule/test_loop.py tests/machine/test_jax_settings.py
else
  plans="tests/policy tests/schedule tests/search"
  for room in offload "engine tests/requests" "layers $plans" "cli tests/machine tests/models"; do
    # shellcheck disable=SC2086 # a room may be several folders
    part "tests-${room%% *}" "tests/$room" "${pytest[@]}" tests/$room
  done
fi

echo
echo "device: $device"
printf '%-22s %-24s %7s  %s\n' part outcome time "what was run"
printf '%s' "$table"
if [[ ! $table ]]; then
  echo "gpu_check.sh: no part's name contains $only" >&2
  exit 2
fi
exit $failed
