#!/usr/bin/env bash
# A Ray cluster inside of a SLURM job, for one raysim command. usage, from the folder with your configuration:
#
#   sbatch --nodes=4 --gpus-per-node=4 cluster/slurm.sh run my.yaml resources.actors=64 resources.gpus=0.25
#
# The folder must be on a disk that all nodes see; there the run, and an MLflow database, are left. SLURM's time limit
# sends SIGTERM 60 s before the end, upon which the run saves what is done. `raysim resume` continues it in another job.
#SBATCH --job-name=raysim
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --output=%x-%j.out
set -euo pipefail
(($#)) || { echo "usage: sbatch [--nodes=N] cluster/slurm.sh run|sweep|resume ..." >&2; exit 2; }

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname -I | tr ' ' '\n' | grep -m 1 .)
port=$((20000 + SLURM_JOB_ID % 10000))
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_ENABLE_UV_RUN_RUNTIME_ENV=0

start() { # NODE, then options of ray start
  local node=$1
  shift
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" ray start --block --disable-usage-stats \
    --temp-dir="/tmp/ray-$SLURM_JOB_ID" "$@" &
}

start "${nodes[0]}" --head --node-ip-address="$address" --port="$port" --dashboard-host=127.0.0.1
for _ in $(seq 60); do
  ray health-check --address "$address:$port" >/dev/null 2>&1 && break
  sleep 2
done
for node in "${nodes[@]:1}"; do start "$node" --address="$address:$port"; done

export RAY_ADDRESS="$address:$port"
# raysim waits for the nodes of an autoscaler only, and Ray may start later on the others than raysim here.
((${#nodes[@]} == 1)) || python -c '
import sys, time, ray
ray.init(log_to_driver=False)
end = time.monotonic() + 300
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]) and time.monotonic() < end:
    time.sleep(1)
' "${#nodes[@]}" || true # raysim says what is missing
raysim "$@" &
run=$!
trap 'kill -TERM $run' TERM INT
code=0
wait $run || code=$?
kill -0 $run 2>/dev/null && { code=0; wait $run || code=$?; } # a signal ends the first wait, not the run
exit $code
