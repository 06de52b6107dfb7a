#!/usr/bin/env bash
# Runs the tests that need GPUs, and prints a table.
#
#   scripts/gpu_check.sh [--wheel FILE] [--quick] [--only NAME] [--out DIR] ...
#
# --wheel installs this wheel of amem first, without touching the network. All
# other options are those of tests/gpu/run.py. PYTHON chooses the interpreter,
# which needs PyTorch.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
args=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheel)
            "$python" -m pip install --quiet --no-index --no-deps --force-reinstall "$2"
            shift 2
            ;;
        *)
            args+=("$1")
            shift
            ;;
    esac
done
exec "$python" "$here/../tests/gpu/run.py" ${args[@]+"${args[@]}"}
