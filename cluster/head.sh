#!/usr/bin/env bash
# Starts the head node of a Ray cluster in this terminal; Ctrl-C ends it. usage: head.sh [PORT] [more options of ray start]
#
# The address that workers join is this machine's private one, or RAYSIM_ADDRESS. Only the dashboard is bound to it: Ray's
# own ports listen on all interfaces, also with 127.0.0.1. They are protected by the token in ~/.ray/auth_token, which is
# made if there is none. Close them to other networks with a firewall too.
set -euo pipefail
port=${1:-6379}
shift || true
address=${RAYSIM_ADDRESS:-$(hostname -I | tr ' ' '\n' | grep -m 1 -E '^(10|127|192\.168|172\.(1[6-9]|2[0-9]|3[01]))\.' || true)}
if [[ -z $address ]]; then
  echo "no private address on this machine; give the one that workers join: RAYSIM_ADDRESS=… cluster/head.sh" >&2
  exit 2
fi
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null
echo "workers, with the same ~/.ray/auth_token, join with: cluster/worker.sh $address:$port"
echo "Ray's ports listen on all interfaces of this machine; who has no token is refused"
# Nodes of one machine must not share a folder: each removes the packages of jobs from its own.
exec ray start --head --node-ip-address="$address" --port="$port" --dashboard-host="$address" --block \
  --disable-usage-stats --temp-dir="${RAYSIM_TEMP_DIR:-/tmp/raysim-head-$port}" "$@"
