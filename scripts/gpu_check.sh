#!/usr/bin/env bash
# Runs the test suite and every placement on whatever accelerator JAX finds, and prints a table.
#   scripts/gpu_check.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python}
export XLA_PYTHON_CLIENT_PREALLOCATE=false
"$python" -c 'import jax; print("devices:", jax.devices())'
"$python" -m pytest -x -n 0
"$python" scripts/check_placements.py
