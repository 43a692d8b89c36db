#!/usr/bin/env bash
# Everything that needs a CUDA device, in under 8 minutes: the tests with the marker `gpu`, then the benches.
#
#   bench/gpu_check.sh [--device cuda:0|cpu] [--chunks N] [--tests PATH]
#
# Leaves gpu_check.jsonl (one JSON object a measurement and one a step) and gpu_check.log in $OUT, by default
# bench/results. Runs $PYTHON, by default that of .venv; needs no network. Exit status: 0 all steps passed, 1 one did
# not, 2 wrong arguments, 3 no such device. `--device cpu` is a trial of this script: the tests skip, the benches run small.
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=${OUT:-$root/bench/results}
device=cuda:0 chunks="" tests=tests
while [ $# -gt 0 ]; do
    case "$1" in
    --device) device=${2:?--device needs a name} && shift 2 ;;
    --chunks) chunks=${2:?--chunks needs a number} && shift 2 ;;
    --tests) tests=${2:?--tests needs a path} && shift 2 ;;
    *) echo "unknown argument $1; see the head of $0" >&2 && exit 2 ;;
    esac
done
if [ -z "$chunks" ]; then
    if [ "$device" = cpu ]; then chunks=2; else chunks=32; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out" || exit 2
json=$out/gpu_check.jsonl log=$out/gpu_check.log
: >"$json" && : >"$log" || exit 2
cd "$root" || exit 2

if [ "$device" != cpu ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>>"$log"; then
    echo "$python finds no CUDA device here ($log says more); --device cpu is a trial of this script" >&2
    exit 3
fi

failed=0
# step NAME LIMIT_S COMMAND...: runs it, its JSON lines into $json, all else into $log.
step() {
    local name=$1 limit_s=$2 began=$SECONDS status
    shift 2
    echo "== $name" | tee -a "$log" >&2
    timeout --kill-after=10 "$limit_s" "$@" >"$out/.step" 2>>"$log"
    status=$?
    grep '^{' "$out/.step" >>"$json"
    grep -v '^{' "$out/.step" >>"$log"
    rm -f "$out/.step"
    printf '{"bench": "gpu_check", "op": "%s", "device": "%s", "exit_status": %d, "seconds": %d, "limit_s": %d}\n' \
        "$name" "$device" "$status" $((SECONDS - began)) "$limit_s" | tee -a "$json"
    [ "$status" -eq 0 ] || failed=1
}

# The limits add up to 7 minutes.
step pytest 210 "$python" -m pytest -m gpu -rs "$tests"
step gpu_copy 120 "$python" bench/gpu_copy.py --device "$device" --chunks "$chunks"
step gpu_ssd 90 "$python" bench/gpu_ssd.py --device "$device" --chunks $(((chunks + 1) / 2))
echo "results: $json, output: $log" >&2
exit $failed
