#!/usr/bin/env bash
# Starts the head node of a Ray cluster in this terminal; Ctrl-C ends it. usage: head.sh [PORT] [more options of ray start]
set -euo pipefail
port=${1:-6379}
shift || true
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
echo "workers join with: cluster/worker.sh $(hostname -I | awk '{print $1}'):$port"
exec ray start --head --port="$port" --block --disable-usage-stats "$@"
