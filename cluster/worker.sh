#!/usr/bin/env bash
# Joins a Ray cluster from this terminal; Ctrl-C leaves it. usage: worker.sh HEAD:PORT [more options of ray start]
set -euo pipefail
address=${1:?give the head's address, HOST:PORT}
shift
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
exec ray start --address="$address" --block --disable-usage-stats "$@"
