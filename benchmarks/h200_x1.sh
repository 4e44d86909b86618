#!/usr/bin/env bash
# Check, time, write: what results/h200_x1 holds, on one H200. Each stage wants less than 8 minutes.
#
#   benchmarks/h200_x1.sh [STAGE...]        (all of them if none is given)
#
#   check   the GPU tests
#   limit   dispatch and combine beside a plain copy of the same rows; wants nvcc
#   depth   GB/s a CTA against bytes in flight, both copies; wants nvcc
#   plan    the device's maker of the Plan
#   copies  +experiment=dispatch and combine at 4096 tokens
#   tokens  the same at 2048, 8192 and 16 384 tokens
#   flags   +experiment=dispatch_granularity
#   decode  +experiment=decode and combine_decode
#   paced   +experiment=dispatch_paced
#   gemm    the grouped GEMM beside its peers by shape and tuning, then +experiment=grouped_gemm
#
# RESULTS= names the folder (outputs/h200_x1): points in it that nothing has changed since are
# reused. PYTHON= picks the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${RESULTS:-outputs/h200_x1}
python=${PYTHON:-.venv/bin/python}
all=(check limit depth plan copies tokens flags decode paced gemm)

run() {
  "$python" -m tilepipe.run hardware=h200_x1 results_dir="$results" "$@"
}

"$python" -c 'from benchmarks.program import need_gpus, run; run(need_gpus)' || exit
mkdir -p "$results"
[ $# -gt 0 ] || set -- "${all[@]}"
for stage in "$@"; do
  case $stage in
    check) "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu ;;
    limit) "$python" -m benchmarks.beside_limit "${results}_beside_limit.csv" ;;
    depth) "$python" -m benchmarks.depths "${results}_depths.csv" ;;
    plan) "$python" -m benchmarks.plan_times "${results}_plan_times.csv" ;;
    copies) for name in dispatch combine; do run +experiment=$name workload.num_tokens=4096; done ;;
    tokens)
      for name in dispatch combine; do
        run +experiment=$name workload.num_tokens=2048,8192,16384
      done
      ;;
    flags) run +experiment=dispatch_granularity ;;
    decode) for name in decode combine_decode; do run +experiment=$name; done ;;
    paced) run +experiment=dispatch_paced ;;
    gemm)
      "$python" -m benchmarks.gemm_peers "${results}_gemm" --total-s 300
      run +experiment=grouped_gemm
      ;;
    *)
      echo "no stage $stage: choose of ${all[*]}" >&2
      exit 2
      ;;
  esac
done
if compgen -G "$results/*/summary.parquet" >/dev/null; then
  "$python" -m benchmarks.publish "$results"
  "$python" -m tilepipe.validate "$results"
fi
