#!/usr/bin/env bash
# Starts the head node of a Ray cluster in this terminal; Ctrl-C ends it. usage: head.sh [PORT] [more options of ray start]
#
# It binds to this machine's private address (or to RAYSIM_ADDRESS), never to all, and asks everybody for a token: that
# in ~/.ray/auth_token, which is made if there is none.
set -euo pipefail
port=${1:-6379}
shift || true
address=${RAYSIM_ADDRESS:-$(hostname -I | tr ' ' '\n' | grep -m 1 -E '^(10|127|192\.168|172\.(1[6-9]|2[0-9]|3[01]))\.' || true)}
if [[ -z $address ]]; then
  echo "no private address on this machine; give the one to bind to: RAYSIM_ADDRESS=… cluster/head.sh" >&2
  exit 2
fi
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null
echo "workers, with the same ~/.ray/auth_token, join with: cluster/worker.sh $address:$port"
exec ray start --head --node-ip-address="$address" --port="$port" --dashboard-host="$address" --block \
  --disable-usage-stats "$@"
