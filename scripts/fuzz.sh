#!/usr/bin/env bash
# Runs each fuzz target of the repository for the given time.
#
#   scripts/fuzz.sh [DURATION]      default 5s
set -euo pipefail
cd "$(dirname "$0")/.."
each=${1:-5s}
passed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
while IFS=: read -r file target; do
  pkg=./$(dirname "$file")
  printf 'fuzz %s %s for %s\n' "$pkg" "$target" "$each"
  # Minimisation of an interesting input counts against the time and can use all of it,
  # so it is limited to 10 executions; a crash is minimised by hand. If the time ends
  # during an input, the fuzzing engine itself may fail with "context deadline exceeded"
  # without a finding. Only that failure is retried, once.
  for try in 1 2; do
    if go test -run '^$' -fuzz "^$target\$" -fuzztime "$each" -fuzzminimizetime 10x "$pkg" >"$log" 2>&1; then
      tail -n 1 "$log"
      break
    fi
    if [ "$try" = 2 ] || grep -q 'Failing input written' "$log" || ! grep -q 'context deadline exceeded' "$log"; then
      tail -n 60 "$log" >&2
      echo "fuzz: $pkg $target failed" >&2
      exit 1
    fi
  done
  passed=$((passed + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -ohH '^func Fuzz[A-Za-z0-9_]*' | sed 's/:func /:/')
echo "fuzz: $passed targets passed"
