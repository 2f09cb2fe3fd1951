#!/usr/bin/env bash
# Runs every fuzz target of the tree for the given time each (default 5s).
set -euo pipefail
cd "$(dirname "$0")/.."
each=${1:-5s}
passed=0
while IFS=: read -r file target; do
  pkg=./$(dirname "$file")
  printf 'fuzz %s %s for %s\n' "$pkg" "$target" "$each"
  # -fuzzminimizetime keeps a slow minimisation from eating the whole budget.
  go test -run '^$' -fuzz "^$target\$" -fuzztime "$each" -fuzzminimizetime 5s "$pkg" | tail -n 1
  passed=$((passed + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -ohH '^func Fuzz[A-Za-z0-9_]*' | sed 's/:func /:/')
echo "fuzz: $passed targets passed"
