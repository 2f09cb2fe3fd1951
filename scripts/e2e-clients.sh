#!/usr/bin/env bash
# Runs the official OpenAI clients, Python and Node.js, against the router in front of
# simulated engines: separate prefill and decode engines, then one aggregated engine.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x bin/sluice ] || { echo 'e2e-clients: bin/sluice is not built; run: make build' >&2; exit 1; }

tmp=$(mktemp -d)
pids=()
cleanup() {
  [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$tmp"
}
trap cleanup EXIT

start() { # start NAME COMMAND...: sets $addr to the first line that the command prints
  local name=$1
  shift
  : >"$tmp/$name.out" # the shell may read it before the command has opened it
  "$@" >"$tmp/$name.out" 2>"$tmp/$name.err" &
  pids+=($!)
  for _ in $(seq 200); do
    addr=$(head -n 1 "$tmp/$name.out")
    [ -n "$addr" ] && return 0
    kill -0 "${pids[-1]}" 2>/dev/null || break
    sleep 0.05
  done
  echo "e2e-clients: $name did not start:" >&2
  cat "$tmp/$name.err" >&2
  exit 1
}
ready() {
  for _ in $(seq 200); do
    [ "$(curl -s -o /dev/null -w '%{http_code}' "http://$1/readyz")" = 200 ] && return 0
    sleep 0.05
  done
  echo "e2e-clients: the router is not ready: $(curl -s "http://$1/readyz")" >&2
  exit 1
}

sim() { start "$1" bin/sluice sim --role "$2" --speed 20; }
sim p0 prefill; p0=$addr
sim p1 prefill; p1=$addr
sim d0 decode; d0=$addr
sim d1 decode; d1=$addr
start router bin/sluice serve --listen 127.0.0.1:0 --admin off --prefill "http://$p0" --prefill "http://$p1" --decode "http://$d0" --decode "http://$d1"
ready "$addr"
echo '--- separate prefill and decode engines'
scripts/clients/run.sh "http://$addr"

sim agg aggregated; agg=$addr
start router2 bin/sluice serve --listen 127.0.0.1:0 --admin off --engine "http://$agg"
ready "$addr"
echo '--- one aggregated engine'
scripts/clients/run.sh "http://$addr"
