#!/usr/bin/env bash
# Joins a Ray cluster from this terminal; Ctrl-C leaves it. usage: worker.sh HEAD:PORT [more options of ray start]
#
# It needs the head's token, in ~/.ray/auth_token or in RAY_AUTH_TOKEN.
set -euo pipefail
address=${1:?give the address of the head node, HOST:PORT}
shift
if [[ -z ${RAY_AUTH_TOKEN:-} && ! -s ~/.ray/auth_token ]]; then
  echo "there is no token; copy ~/.ray/auth_token of the head node to this machine (chmod 600)" >&2
  exit 2
fi
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_AUTH_MODE=token
# Nodes of one machine must not share a folder: each removes the packages of jobs from its own.
exec ray start --address="$address" --block --disable-usage-stats \
  --temp-dir="${RAYSIM_TEMP_DIR:-/tmp/raysim-worker-$$}" "$@"
