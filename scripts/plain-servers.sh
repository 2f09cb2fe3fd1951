#!/usr/bin/env bash
# usage: scripts/plain-servers.sh [llama-cpp|transformers]…
#
# Runs servers other than vLLM, SGLang and TensorRT-LLM on the CPU with a tiny model and
# sends requests to them through the router: `init` writes a configuration, `check --probe`
# accepts it, and `serve` becomes ready and answers a completion and a stream. `make test`
# does not run this script, because building llama-cpp-python takes minutes.
#
#   llama-cpp     llama-cpp-python's server with a generated model; the default
#   transformers  `transformers serve` of the Python environment in SLUICE_TRANSFORMERS_VENV
#                 with the model in the folder SLUICE_TRANSFORMERS_MODEL
#
# The first run creates the environment of llama-cpp-python in
# ${SLUICE_CACHE:-~/.cache/sluice}/llama-cpp-python (SLUICE_LLAMA_CPP_VENV names another).
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
pids=()
trap '((${#pids[@]})) && kill "${pids[@]}" 2>/dev/null; rm -rf "$work"' EXIT
bin=$work/sluice
go build -o "$bin" ./cmd/sluice

fail() { echo "FAILED: $*"; tail -n 20 "$work"/*.log; exit 1; }

# wait_for URL SECONDS: waits until the URL answers 200.
wait_for() {
  for ((i = 0; i < $2 * 5; i++)); do
    curl -fsS -o /dev/null --max-time 2 "$1" 2>/dev/null && return
    sleep 0.2
  done
  fail "$1 did not answer 200 within $2 s"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

status() { curl -s -o /dev/null -w '%{http_code}' --max-time 10 "$1" || true; }

# through NAME URL PATH BODY: runs init, check and serve, and sends a request and a stream.
through() {
  local name=$1 url=$2 path=$3 body=$4 port pid
  port=$(free_port)
  echo "$name: /health $(status "$url/health"), /ping $(status "$url/ping"), /v1/models $(status "$url/v1/models"), /metrics $(status "$url/metrics")"
  "$bin" init --force -o "$work/$name.yaml" --engine "$url" >"$work/$name-init.log" 2>&1 || fail "$name: init"
  grep health_path "$work/$name.yaml" || true
  "$bin" check --config "$work/$name.yaml" --probe >"$work/$name-check.log" 2>&1 || fail "$name: check --probe"
  grep -A2 "engines probed" "$work/$name-check.log"
  "$bin" serve --config "$work/$name.yaml" --listen "127.0.0.1:$port" --admin off >"$work/$name-serve.log" 2>&1 &
  pid=$!
  pids+=("$pid")
  wait_for "http://127.0.0.1:$port/readyz" 30
  sleep 5 # the router probes ten more times
  [ "$(status "http://127.0.0.1:$port/readyz")" = 200 ] || fail "$name: no longer ready"
  curl -fsS --max-time 120 "http://127.0.0.1:$port$path" -H 'Content-Type: application/json' -d "$body" >"$work/$name-answer.log" || fail "$name: a request"
  grep -q '"choices"' "$work/$name-answer.log" || fail "$name: no choices"
  curl -fsSN --max-time 120 "http://127.0.0.1:$port$path" -H 'Content-Type: application/json' -d "${body%\}},\"stream\":true}" >"$work/$name-stream.log" || fail "$name: a stream"
  grep -q '^data: ' "$work/$name-stream.log" || fail "$name: no events"
  kill "$pid" && wait "$pid" 2>/dev/null || true
  echo "$name: passed"
}

llama-cpp() {
  local venv=${SLUICE_LLAMA_CPP_VENV:-${SLUICE_CACHE:-$HOME/.cache/sluice}/llama-cpp-python} port
  if ! "$venv/bin/python" -c 'import llama_cpp.server, gguf' 2>/dev/null; then
    python3 -m venv "$venv"
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAMA_CURL=OFF -DMTMD_BUILD=OFF" "$venv/bin/pip" install --quiet 'llama-cpp-python[server]' gguf
  fi
  "$venv/bin/python" scripts/plain_servers/tiny_gguf.py "$work/tiny.gguf"
  port=$(free_port)
  "$venv/bin/python" -m llama_cpp.server --model "$work/tiny.gguf" --model_alias tiny --n_ctx 512 --host 127.0.0.1 --port "$port" >"$work/llama-cpp.log" 2>&1 &
  pids+=($!)
  wait_for "http://127.0.0.1:$port/v1/models" 120
  through llama-cpp "http://127.0.0.1:$port" /v1/completions '{"model":"tiny","prompt":"Hello","max_tokens":8}'
}

transformers() {
  local venv=${SLUICE_TRANSFORMERS_VENV:?must name a Python environment with transformers[serving] and accelerate} model=${SLUICE_TRANSFORMERS_MODEL:?must name a model folder} port
  port=$(free_port)
  # The server lists and serves the models in its hub cache.
  local repo=$work/hub/models--local--tiny
  mkdir -p "$repo/refs" "$repo/blobs" "$repo/snapshots/1"
  printf 1 >"$repo/refs/main"
  cp "$model"/* "$repo/snapshots/1/"
  HF_HUB_OFFLINE=1 HF_HUB_CACHE=$work/hub "$venv/bin/transformers" serve --host 127.0.0.1 --port "$port" --device cpu >"$work/transformers.log" 2>&1 &
  pids+=($!)
  wait_for "http://127.0.0.1:$port/v1/models" 300
  through transformers "http://127.0.0.1:$port" /v1/chat/completions '{"model":"local/tiny","messages":[{"role":"user","content":"Hello"}],"max_tokens":8}'
}

for what in "${@:-llama-cpp}"; do
  case $what in
  llama-cpp | transformers) "$what" ;;
  *) echo "plain-servers.sh: unknown server \"$what\"; the servers are llama-cpp and transformers" >&2; exit 2 ;;
  esac
done
