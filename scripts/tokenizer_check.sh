#!/usr/bin/env bash
# Runs the tests of native/tokenizer in Rust with debug assertions, checks for arithmetic overflow
# and, on x86-64 and arm64 Linux, the address sanitizer.
#
#   scripts/tokenizer_check.sh [CARGO TEST ARGUMENT]...
#
# Only this crate is compiled for it. Its dependencies and Rust's library are those of `make build`:
# of them the sanitizer checks what they allocate and free, but not each access.
#
# SLUICE_TOKENIZER_TRIES is how many damaged files of each format are loaded (20).
set -euo pipefail
cd "$(dirname "$0")/../native/tokenizer"
root=$(cd ../.. && pwd)
if [ "${1:-}" = --rustc ]; then
  shift
  # The sanitizer is an unstable option. The variable is set for this crate alone: some
  # dependencies compile other code where it is set.
  RUSTC_BOOTSTRAP=1 exec "$@" -C debug-assertions=on -C overflow-checks=on -C opt-level=1 ${SLUICE_SANITIZER:+-Z sanitizer=$SLUICE_SANITIZER}
fi
case "$(uname -sm)" in
  'Linux x86_64' | 'Linux aarch64') export SLUICE_SANITIZER=address ;;
esac
# cargo calls the wrapper for this crate alone, and passes it no arguments of its own.
wrapper=$root/build/tokenizer-check/rustc
mkdir -p "${wrapper%/*}"
printf '#!/bin/sh\nexec "%s/scripts/tokenizer_check.sh" --rustc "$@"\n' "$root" >"$wrapper.new"
chmod +x "$wrapper.new"
mv "$wrapper.new" "$wrapper"
RUSTC_WORKSPACE_WRAPPER=$wrapper cargo test --release --locked --quiet "$@"
echo "tokenizer_check: passed${SLUICE_SANITIZER:+ with the $SLUICE_SANITIZER sanitizer}"
