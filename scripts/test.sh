#!/usr/bin/env bash
# Runs the checks that a change must pass; CI runs both parts and `make fuzz`.
# Each step prints its name and its duration.
#
#   scripts/test.sh           the steps of `make test`; the fuzz targets run only their seed corpora
#   scripts/test.sh --tools   the steps of `make test-tools`, which need large external tools
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
# On the platform for which scripts/nixl-wheel.sh pins a wheel, the tests with the real NIXL must not be skipped.
if [ "$(uname -m)" = x86_64 ]; then export SLUICE_REQUIRE_NIXL=1; fi
step 'build' make --no-print-directory build
if [ "${1:-}" = --tools ]; then
  step 'connector' scripts/connector-test.sh
  step 'engine API python' scripts/engineapi-python-test.sh
  step 'clients' scripts/e2e-clients.sh
  step 'FastAPI server' scripts/fastapi-test.sh
  step 'console' scripts/console-test.sh
  step 'observability' make --no-print-directory observability-test
  step 'traces' scripts/traces_test.py
  step 'docs' make --no-print-directory docs
  step 'image' bash -c 'scripts/packages.sh --keep && scripts/image.py && scripts/image_test.py'
  step 'charts' scripts/charts-test.sh
  printf '\nall steps passed in %ss\n' "$SECONDS"
  exit
fi
step 'native' make --no-print-directory native-test
step 'lint' scripts/lint.sh
step 'rules' bash -c 'scripts/observability_test.py "$(scripts/prometheus.sh)" --rules'
step 'unit' make --no-print-directory unit
step 'system' make --no-print-directory system
step 'race' make --no-print-directory race
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  step 'packages' make --no-print-directory packages-test
else
  printf '\n=== packages skipped: installing them in a Debian root needs root and apt-get\n'
fi
step 'demo' env DEMO_SECONDS=20 make --no-print-directory demo
printf '\nall steps passed in %ss\n' "$SECONDS"
