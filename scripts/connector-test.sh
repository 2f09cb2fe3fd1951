#!/usr/bin/env bash
# Runs the tests of the vLLM connector (nixl/connector) without an engine. The Python
# environment that it creates also serves the Go tests that use the connector or
# LMCache's message classes.
#
#   scripts/connector-test.sh [ARGUMENT...]   run the tests; arguments are passed to unittest
#   scripts/connector-test.sh --setup         only create the environment
#
# The tests need a Python with pyzmq, NIXL and numpy: $SLUICE_PYTHON, or else a virtual
# environment that the first run creates in ${SLUICE_CACHE:-~/.cache/sluice}/connector-tests
# (a download of 100 MB). If NIXL cannot be installed, its tests are skipped, or fail
# with SLUICE_REQUIRE_NIXL=1.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
nixl=1.5.1

die() { echo "connector-test.sh: $*" >&2; exit 2; }

# set_up VENV: creates the virtual environment unless it exists.
set_up() {
  local venv=$1 stamp=$1/.nixl-$nixl-releases base= p work
  [ ! -e "$stamp" ] || return 0
  for p in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then base=$p; break; fi
  done
  [ -n "$base" ] || die "no Python 3.10 to 3.13 with venv (apt-get install python3 python3-venv; or set SLUICE_PYTHON)"
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  flock 9
  [ ! -e "$stamp" ] || return 0 # another process has created it
  echo "connector-test.sh: creating $venv"
  work=$(mktemp -d "$venv-XXXXXX")
  trap 'rm -rf "$work"' RETURN
  "$base" -m venv "$work/venv"
  local pip=("$work/venv/bin/python" -m pip install -q --disable-pip-version-check)
  "${pip[@]}" 'pyzmq==27.1.0' 'numpy==2.2.6'
  # --no-deps: NIXL depends on torch, which only VRAM tensors need.
  if ! "${pip[@]}" --no-deps "nixl==$nixl" "nixl-cu12==$nixl"; then
    [ "${SLUICE_REQUIRE_NIXL:-}" != 1 ] || die "cannot install nixl $nixl, and SLUICE_REQUIRE_NIXL=1"
    echo "connector-test.sh: cannot install nixl $nixl on this machine; tests that need it are skipped" >&2
  fi
  # Only the files that define LMCache's messages and vLLM's connector, a few kilobytes
  # of each wheel: the packages themselves need torch or a GPU runtime.
  "${pip[@]}" 'msgspec==0.20.0'
  if ! PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/fixtures/lmcache.py" sources "$work/venv/lmcache"; then
    [ "${SLUICE_REQUIRE_NIXL:-}" != 1 ] || die "cannot read LMCache's releases, and SLUICE_REQUIRE_NIXL=1"
    echo "connector-test.sh: cannot read LMCache's releases; tests of its messages are skipped" >&2
  fi
  if ! PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/fixtures/vllm_nixl.py" "$work/venv/vllm"; then
    [ "${SLUICE_REQUIRE_NIXL:-}" != 1 ] || die "cannot read vLLM's releases, and SLUICE_REQUIRE_NIXL=1"
    rm -rf "$work/venv/vllm"
    echo "connector-test.sh: cannot read vLLM's releases; tests of the connector on them are skipped" >&2
  fi
  touch "$work/venv/.nixl-$nixl-releases"
  rm -rf "$venv"
  # The first lines of the scripts in bin/ keep the old path; python itself works from the new one.
  mv "$work/venv" "$venv"
}

python=${SLUICE_PYTHON:-}
if [ -z "$python" ]; then
  venv=${SLUICE_CACHE:-$HOME/.cache/sluice}/connector-tests
  set_up "$venv"
  python=$venv/bin/python
fi
[ "${1:-}" != --setup ] || exit 0
cd "$here/../nixl/connector"
PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 exec "$python" -m unittest discover -s tests "$@"
