#!/usr/bin/env bash
# Runs the router in front of llm-d-inference-sim, a simulated vLLM of the llm-d project that
# shares no code with this tree, as one prefill and one decode worker, and checks that every
# request is handed over and that its KV events are understood, in both of its formats.
#
#   scripts/e2e-llmd-sim.sh
#
# The simulator is built once, outside of this tree, into ${SLUICE_CACHE:-~/.cache/sluice}
# (a download of some 100 MB of Go modules). It is not a part of the tests that run
# everywhere; what they know of it was captured from it (cmd/sluice: TestLLMDSimHandle,
# router/kvevents: TestLLMDSimEvents).
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
  # `go install MODULE@VERSION` asks for the list of all versions, which not every proxy has.
  dir=$(cd "$work" && go mod download -json "github.com/llm-d/llm-d-inference-sim@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
  [ -n "$dir" ] || die "cannot download llm-d-inference-sim $version"
  cp -r "$dir" "$work/src" && chmod -R u+w "$work/src"
  (cd "$work/src" && go build -o "$bin/llm-d-inference-sim" ./cmd/llm-d-inference-sim)
fi
go build -o "$work/sluice" ./cmd/sluice

# port prints a TCP port that nobody listens on now.
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
# settles TRIES COMMAND...: until the command succeeds.
settles() { local n=$1; shift; for _ in $(seq "$n"); do "$@" >/dev/null 2>&1 && return 0; sleep 0.2; done; return 1; }

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
  # The simulator connects to its subscriber, so the router binds.
  "$work/sluice" serve --listen "127.0.0.1:$r" --admin off \
    --prefill "http://127.0.0.1:$p,id=p0,kv_events=bind:tcp://127.0.0.1:$pe" \
    --decode "http://127.0.0.1:$d,id=d0,kv_events=bind:tcp://127.0.0.1:$de" >"$work/$format-router.log" 2>&1 &
  pids+=($!)
  settles 150 curl -sf "http://127.0.0.1:$r/readyz" || die "$format: the router is not ready"

  words=$(seq -s ' ' 100 160)
  ask() { # PATH BODY: the answer's head
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
  grep '^sluice_fallbacks_total' <<<"$metrics" && die "$format: plans were not run as made"
  # counted NAME: a counter of the events, over both ranks.
  counted() { awk -v n="kind=\"$1\"" '/^sluice_kv_feed_total/ && index($0, n) { s += $2 } END { print s + 0 }' <<<"$metrics"; }
  predicts() { # a prompt that was computed before is found
    ask /v1/completions "{\"model\":\"test\",\"prompt\":\"7 $words\",\"max_tokens\":2}" | grep -qiE '^X-Sluice-Cached-Tokens: [1-9]'
  }
  settles 50 predicts || die "$format: nothing is predicted to be cached"
  metrics=$(curl -s "http://127.0.0.1:$r/metrics")
  [ "$(counted stored)" -gt 0 ] && [ "$(counted orphans)" = 0 ] || die "$format: stored $(counted stored), orphans $(counted orphans)"
  echo "e2e-llmd-sim.sh: $format events: 60 requests handed over, none decoded alone; $(counted stored) blocks stored, 0 orphans"
done
