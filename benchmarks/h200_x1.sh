#!/usr/bin/env bash
# Check, time, write: what results/h200_x1 holds, on one H200. Wants at most 8 minutes of the GPU.
#
#   benchmarks/h200_x1.sh [RESULTS_DIR]     (outputs/h200_x1 if not given; must not exist yet)
#
# Wants nvcc for the plain copy. PYTHON= picks the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${1:-outputs/h200_x1}
if [ -e "$results" ]; then
  echo "$results exists: old and new figures would mix; name another folder" >&2
  exit 2
fi
python=${PYTHON:-.venv/bin/python}
mkdir -p "$results"
"$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu
"$python" -m benchmarks.beside_limit "${results}_beside_limit.csv"
for experiment in dispatch combine dispatch_granularity; do
  "$python" -m tilepipe.run +experiment=$experiment hardware=h200_x1 results_dir="$results"
done
"$python" -m benchmarks.publish "$results"
"$python" -m tilepipe.validate "$results"
