#!/usr/bin/env bash
# Builds bin/libsluice_tokenizer.so, the native tokenizer (native/tokenizer), where cargo is
# installed. The binary runs without it, so what keeps it from being built is a warning and
# no failure, unless --require asks for it.
#
#   scripts/tokenizer.sh [--require] [FILE]    FILE is where the library goes
set -euo pipefail
cd "$(dirname "$0")/.."

require=0 out=bin/libsluice_tokenizer.so
for a in "$@"; do
  case "$a" in
    --require) require=1 ;;
    -h | --help) sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    -*) echo "tokenizer: unknown argument \"$a\"; want --require or a file" >&2; exit 2 ;;
    *) out=$a ;;
  esac
done
without() {
  echo "tokenizer: $1; sluice runs without the native tokenizer" >&2
  exit "$require"
}

command -v cargo >/dev/null || without "cargo is not installed"
log=build/tokenizer.log
mkdir -p build "$(dirname "$out")"
[ -d build/tokenizer/release ] || echo "tokenizer: the first build compiles its dependencies, which takes some minutes"
if ! (cd native/tokenizer && cargo build --release --locked --quiet) >"$log" 2>&1; then
  tail -20 "$log" >&2
  without "cargo cannot build native/tokenizer (build/tokenizer.log)"
fi
cp build/tokenizer/release/libsluice_tokenizer.so "$out.new"
mv "$out.new" "$out" # a router that runs keeps the file that it has mapped
