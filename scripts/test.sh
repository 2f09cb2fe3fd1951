#!/usr/bin/env bash
# Everything that must hold before a change lands; CI runs it and `make fuzz`.
# Each step prints its name and how long it took.
#
#   scripts/test.sh           what `make test` runs; the fuzz targets run their seed corpora only
#   scripts/test.sh --tools   what `make test-tools` runs: heavy real tools
set -euo pipefail
cd "$(dirname "$0")/.."

step() { # step NAME COMMAND...
  local name=$1 t0=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  if ! "$@"; then
    printf '=== %s FAILED after %ss\n' "$name" $((SECONDS - t0)) >&2
    exit 1
  fi
  printf '=== %s ok, %ss\n' "$name" $((SECONDS - t0))
}

step 'set-up' scripts/bootstrap.sh --test
# The tests on the real NIXL must run where its wheel is pinned (scripts/nixl-wheel.sh).
if [ "$(uname -m)" = x86_64 ]; then export SLUICE_REQUIRE_NIXL=1; fi
step 'build' make --no-print-directory build
if [ "${1:-}" = --tools ]; then
  step 'connector' scripts/connector-test.sh
  step 'routed python' scripts/routed-python-test.sh
  step 'clients' scripts/e2e-clients.sh
  browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
  step 'page' go test -count=1 -run TestConsoleInBrowser ./router/admin -browser "$browser"
  printf '\nall steps passed in %ss\n' "$SECONDS"
  exit
fi
step 'native' make --no-print-directory native-test
step 'lint' scripts/lint.sh
step 'unit' make --no-print-directory unit
step 'system' make --no-print-directory system
race=$(go list ./dataplane/... ./router/... ./bench/... ./nixl/... | grep -v '/router/e2e/')
step 'race' go test -race -short -shuffle=on -timeout 15m $race
step 'demo' env DEMO_SECONDS=20 make --no-print-directory demo
printf '\nall steps passed in %ss\n' "$SECONDS"
