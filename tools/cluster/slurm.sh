#!/bin/bash
# Trains on all nodes of a Slurm job and requeues the job until the run has finished. From the checkout, which all
# nodes see at one path, as they see the run directory and the model:
#
#   sbatch --nodes=2 --gpus-per-node=8 --time=04:00:00 tools/cluster/slurm.sh /shared/runs/one +recipe=qwen3_8b_dapo runtime.num_workers=16
#
# Every argument after the run directory is one of `python -m april_rl.train`. docs/gpu.md
#SBATCH --job-name=april_rl --exclusive --ntasks-per-node=1 --signal=USR1@360 --requeue --open-mode=append
set -uo pipefail

fail() {
    echo "slurm.sh: error: $*" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a job script; submit it: sbatch --nodes=2 tools/cluster/slurm.sh RUN_DIRECTORY +recipe=NAME"
[[ $# -ge 2 && $1 == /* ]] || fail "the arguments must be RUN_DIRECTORY +recipe=NAME [key=value ...], the directory with an absolute path; got: $*"
python=${PYTHON:-$PWD/.venv/bin/python} ray=$(dirname "${PYTHON:-$PWD/.venv/bin/python}")/ray
[ -x "$python" ] || fail "$python does not exist; run \`make setup\` in the checkout and submit from there, or export PYTHON"

run=$1${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # each task of an array has a run of its own
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
nodes=${SLURM_JOB_NUM_NODES:-1}
settings=("${@:2}" hydra.run.dir="$run" resume=auto)

# One task on each of the nodes that the options name. Slurm gives every step all of the job's GPUs and memory
# (--overlap), and no task is bound to a core.
step=(srun --overlap --cpu-bind=none --ntasks-per-node=1)

# A Ray node, on the machine of a step. Slurm's signals are for the run, which stops in order; Ray ignores them.
start_ray='exec env --block-signal=INT,TERM,USR1 "$0" start --block --num-cpus="$SLURM_CPUS_ON_NODE" --disable-usage-stats "$@"'

# Wait until the cluster has $1 nodes; fail as soon as Ray ends on one of them.
await_nodes() {
    local ray_step
    "$python" tools/cluster/await_nodes.py "$address" "$1" &
    waiting=$!
    while kill -0 "$waiting" 2>/dev/null; do
        for ray_step in "${ray_steps[@]}"; do
            kill -0 "$ray_step" 2>/dev/null || fail "Ray has ended on a node before the run began; its last lines are above"
        done
        sleep 0.5
    done
    wait "$waiting" || exit 2
}

trap : TERM INT # outlive the signal: the run is writing its checkpoint
if [ "$nodes" -gt 1 ]; then
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    ip=${RAY_HEAD_IP:-$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}')}
    [[ -n $ip && ($ip != 127.* || -n ${RAY_HEAD_IP:-}) ]] ||
        fail "on $head the name $head means ${ip:-no address}, which other nodes cannot reach; export RAY_HEAD_IP with the address that they can"
    port=$((20000 + SLURM_JOB_ID % 5000)) # another job on this machine has another one
    address=$ip:$port
    RAY_AUTH_TOKEN=$("$python" -c "import secrets; print(secrets.token_hex(32))") # srun hands the environment on
    export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0
    ray_steps=() waiting=
    trap 'kill "${ray_steps[@]}" $waiting 2>/dev/null' EXIT
    "${step[@]}" --nodes=1 --ntasks=1 -w "$head" bash -c "$start_ray" "$ray" --head --node-ip-address="$ip" --port="$port" \
        --ray-client-server-port=$((port + 5000)) --include-dashboard=false &
    ray_steps+=($!)
    await_nodes 1
    "${step[@]}" --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) -x "$head" bash -c "$start_ray" "$ray" --address="$address" &
    ray_steps+=($!)
    await_nodes "$nodes"
    settings+=(runtime.ray_address="$address")
fi

"${step[@]}" --nodes=1 --ntasks=1 ${head:+-w "$head"} "$python" -m april_rl.train "${settings[@]}" || exit
grep -q '"is_finished": true' "$run/checkpoints/$(cat "$run/checkpoints/latest")/manifest.json" || scontrol requeue "$job"
