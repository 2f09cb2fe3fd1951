#!/usr/bin/env bash
# Runs the router in front of llm-d-inference-sim, the simulated vLLM of the llm-d project,
# which shares no code with Sluice. One simulator is the prefill worker, another the decode
# worker. The script checks that every request is handed over and that the router applies the
# KV events, in both formats of the simulator.
#
#   scripts/e2e-llmd-sim.sh
#
# The first run builds the simulator in ${SLUICE_CACHE:-~/.cache/sluice} (a download of about
# 100 MB of Go modules). `make test` does not run this script; it uses data captured from the
# simulator (router/e2e/families: TestLLMDSimHandle, router/kvevents: TestLLMDSimEvents).
set -euo pipefail
cd "$(dirname "$0")/.."
version=v0.10.2
bin=${SLUICE_CACHE:-$HOME/.cache/sluice}/llm-d-inference-sim-$version
work=$(mktemp -d)
pids=()
cleanup() {
  local p
  for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
die() { echo "e2e-llmd-sim.sh: $*" >&2; tail -n 20 "$work"/*.log >&2 || true; exit 1; }

if [ ! -x "$bin/llm-d-inference-sim" ]; then
  mkdir -p "$bin"
  # `go install MODULE@VERSION` requests the list of all versions, which not every proxy serves.
  dir=$(cd "$work" && go mod download -json "github.com/llm-d/llm-d-inference-sim@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
  [ -n "$dir" ] || die "cannot download llm-d-inference-sim $version"
  cp -r "$dir" "$work/src" && chmod -R u+w "$work/src"
  (cd "$work/src" && go build -o "$bin/llm-d-inference-sim" ./cmd/llm-d-inference-sim)
fi
go build -o "$work/sluice" ./cmd/sluice

# port: prints a TCP port that is free now.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
# retry TRIES COMMAND...: runs the command every 0.2 s until it succeeds.
retry() { local n=$1; shift; for _ in $(seq "$n"); do "$@" >/dev/null 2>&1 && return 0; sleep 0.2; done; return 1; }

for format in array map; do
  p=$(port) d=$(port) pe=$(port) de=$(port) r=$(port)
  extra=(); [ $format = array ] || extra=(--use-vllm-map-event-format)
  start() { # NAME PORT EVENTS
    POD_IP=127.0.0.1 "$bin/llm-d-inference-sim" --port "$2" --model test --block-size 16 --enable-kvcache --kv-cache-size 512 \
      --zmq-endpoint "tcp://127.0.0.1:$3" "${extra[@]}" >"$work/$1.log" 2>&1 &
    pids+=($!)
  }
  start "$format-prefill" "$p" "$pe"
  start "$format-decode" "$d" "$de"
  # The simulator's publisher connects, so the router binds.
  "$work/sluice" serve --listen "127.0.0.1:$r" --admin off \
    --prefill "http://127.0.0.1:$p,id=p0,kv_events=bind:tcp://127.0.0.1:$pe" \
    --decode "http://127.0.0.1:$d,id=d0,kv_events=bind:tcp://127.0.0.1:$de" >"$work/$format-router.log" 2>&1 &
  pids+=($!)
  retry 150 curl -sf "http://127.0.0.1:$r/readyz" || die "$format: the router is not ready"

  words=$(seq -s ' ' 100 160)
  ask() { # PATH BODY: sends a request and prints the head of the answer
    curl -s -o "$work/body" -D - -H 'Content-Type: application/json' "http://127.0.0.1:$r$1" -d "$2"
  }
  for i in $(seq 20); do
    for body in "{\"model\":\"test\",\"prompt\":\"$i $words\",\"max_tokens\":8,\"stream\":false}" "{\"model\":\"test\",\"prompt\":\"$i $words\",\"max_tokens\":8,\"stream\":true}"; do
      head=$(ask /v1/completions "$body")
      grep -q '^HTTP/1.1 200' <<<"$head" || die "$format: not 200: $head $(cat "$work/body")"
      grep -qi '^X-Sluice-Prefill-Worker: p0' <<<"$head" || die "$format: not handed over: $head"
    done
    head=$(ask /v1/chat/completions "{\"model\":\"test\",\"messages\":[{\"role\":\"user\",\"content\":\"$i $words\"}],\"max_tokens\":8}")
    grep -qi '^X-Sluice-Prefill-Worker: p0' <<<"$head" || die "$format: a chat is not handed over: $head $(cat "$work/body")"
  done
  metrics=$(curl -s "http://127.0.0.1:$r/metrics")
  grep '^sluice_fallbacks_total' <<<"$metrics" && die "$format: requests fell back from their plans"
  # counted KIND: prints the number of events of this kind, over both ranks.
  counted() { awk -v n="kind=\"$1\"" '/^sluice_kv_feed_total/ && index($0, n) { s += $2 } END { print s + 0 }' <<<"$metrics"; }
  predicts() { # the router predicts cached tokens for a prompt that was computed before
    ask /v1/completions "{\"model\":\"test\",\"prompt\":\"7 $words\",\"max_tokens\":2}" | grep -qiE '^X-Sluice-Cached-Tokens: [1-9]'
  }
  retry 50 predicts || die "$format: the router predicts no cached tokens"
  metrics=$(curl -s "http://127.0.0.1:$r/metrics")
  [ "$(counted stored)" -gt 0 ] && [ "$(counted orphans)" = 0 ] || die "$format: stored $(counted stored), orphans $(counted orphans)"
  echo "e2e-llmd-sim.sh: $format events: 60 requests handed over, none decoded alone; $(counted stored) blocks stored, 0 orphans"
done
