#!/usr/bin/env bash
# Runs the checks that a change must pass; CI runs both parts, `make race` and `make fuzz`.
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

# in_background NAME COMMAND...: begins a step that runs only while the processors have nothing else to do.
# Most tests wait rather than compute, so it takes little time of its own and disturbs no test that
# measures time. await_background prints its output and fails if it failed.
background=() logs=$(mktemp -d)
in_background() {
  local name=$1 idle=(nice -n 19)
  shift
  if chrt --idle 0 true 2>/dev/null; then idle=(chrt --idle 0); fi
  set -m # a process group of its own, which the trap ends
  (
    t0=$SECONDS status=0
    "${idle[@]}" "$@" >"$logs/$name" 2>&1 || status=$?
    echo "$((SECONDS - t0))" >"$logs/$name.seconds"
    exit "$status"
  ) &
  set +m
  background+=("$name:$!")
}
await_background() {
  local entry name failed=0
  for entry in "${background[@]}"; do
    name=${entry%:*}
    printf '\n=== %s, in the background\n' "$name"
    if wait "${entry##*:}"; then
      cat "$logs/$name"
      printf '=== %s ok, %ss\n' "$name" "$(cat "$logs/$name.seconds")"
    else
      cat "$logs/$name"
      printf '=== %s FAILED\n' "$name" >&2
      failed=1
    fi
  done
  background=()
  [ "$failed" = 0 ]
}
end() {
  local entry
  for entry in "${background[@]}"; do kill -- "-${entry##*:}" 2>/dev/null || true; done
  rm -rf "$logs"
}
trap end EXIT

step 'set-up' scripts/bootstrap.sh --test
# On the platform for which scripts/nixl-wheel.sh pins a wheel, the tests with the real NIXL must not be skipped.
if [ "$(uname -m)" = x86_64 ]; then export SLUICE_REQUIRE_NIXL=1; fi
step 'build' make --no-print-directory -j 2 build # Go and Rust at once
if [ "${1:-}" = --tools ]; then
  in_background 'docs' make --no-print-directory docs
  in_background 'charts' scripts/charts-test.sh
  step 'connector' scripts/connector-test.sh
  step 'engine API python' scripts/engineapi-python-test.sh
  step 'clients' scripts/e2e-clients.sh
  step 'FastAPI server' scripts/fastapi-test.sh
  step 'console' scripts/console-test.sh
  step 'observability' make --no-print-directory observability-test
  step 'traces' scripts/traces_test.py
  step 'docs and charts' await_background
  step 'image' bash -c 'scripts/packages.sh --keep && scripts/image.py && scripts/image_test.py'
  printf '\nall steps passed in %ss\n' "$SECONDS"
  exit
fi
in_background 'lint' scripts/lint.sh
in_background 'compile native tests' make --no-print-directory native-compile tokenizer-test
step 'rules' bash -c 'scripts/observability_test.py "$(scripts/prometheus.sh)" --rules'
step 'unit' make --no-print-directory unit
step 'lint and compiled native tests' await_background
step 'native' make --no-print-directory native-test # measures time
step 'system' make --no-print-directory system
step 'limits' make --no-print-directory limits
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  step 'packages' make --no-print-directory packages-test
else
  printf '\n=== packages skipped: installing them in a Debian root needs root and apt-get\n'
fi
step 'demo' env DEMO_SECONDS=20 make --no-print-directory demo
printf '\nall steps passed in %ss\n' "$SECONDS"
