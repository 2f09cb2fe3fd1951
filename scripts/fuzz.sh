#!/usr/bin/env bash
# Runs each fuzz target of the repository for the given time, as many at once as there are cores, each
# with one worker.
#
#   scripts/fuzz.sh [DURATION]      default 5s
#
# The instrumented test binary of a package is built once for all its targets.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export each=${1:-5s}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export work corpora=$(go env GOCACHE)/fuzz

# fuzz FOLDER TARGET
fuzz() {
  local folder=$1 target=$2 name=${1//\//_} log
  log=$work/$name.$target.log
  cd "$folder"
  # Minimisation of an interesting input counts against the time and can use all of it,
  # so it is limited to 10 executions; a crash is minimised by hand. If the time ends
  # during an input, the fuzzing engine itself may fail with "context deadline exceeded"
  # without a finding. Only that failure is retried, once.
  for try in 1 2; do
    if "$work/$name.test" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$each" -test.fuzzminimizetime 10x \
      -test.parallel 1 -test.fuzzcachedir "$corpora/sluice/$folder" >"$log" 2>&1; then
      if ! grep -q '^fuzz: elapsed' "$log"; then
        echo "fuzz: $folder has no fuzz target $target" >&2
        return 1
      fi
      printf 'fuzz ./%s %s for %s: %s\n' "$folder" "$target" "$each" "$(grep '^fuzz: elapsed' "$log" | tail -n 1 | cut -d' ' -f4-)"
      return
    fi
    if [ "$try" = 2 ] || grep -q 'Failing input written' "$log" || ! grep -q 'context deadline exceeded' "$log"; then
      tail -n 60 "$log" >&2
      echo "fuzz: $folder $target failed" >&2
      return 255 # ends xargs
    fi
  done
}
export -f fuzz

git ls-files -co --exclude-standard '*_test.go' | xargs grep -oHE '^func Fuzz[A-Za-z0-9_]*' |
  sed -E 's#/[^/]*:func # #' >"$work/targets"
while read -r folder; do
  go test -c -vet=off -fuzz=. -o "$work/${folder//\//_}.test" "./$folder"
done < <(cut -d' ' -f1 "$work/targets" | sort -u)
cd "$root"
xargs -P "$(nproc)" -L 1 bash -c 'fuzz "$1" "$2"' fuzz <"$work/targets"
echo "fuzz: $(wc -l <"$work/targets") targets passed"
