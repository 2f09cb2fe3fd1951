#!/usr/bin/env bash
# Runs the tests of the vLLM connector (nixl/connector), without an engine, and sets
# up what Go tests need of Python: that, and LMCache's own message classes.
#
#   scripts/connector-test.sh [ARGUMENT...]   the tests; arguments go to unittest
#   scripts/connector-test.sh --setup         only what they need, for `go test` too
#
# They need a Python with pyzmq, NIXL and numpy: $SLUICE_PYTHON, else an environment
# of their own in ${SLUICE_CACHE:-~/.cache/sluice}/connector-tests, made once (a download
# of 100 MB). Where no NIXL can be had its tests are skipped; with
# SLUICE_REQUIRE_NIXL=1 they fail instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
nixl=1.5.1

die() { echo "connector-test.sh: $*" >&2; exit 2; }

# set_up VENV: makes the environment unless it is there.
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
  [ ! -e "$stamp" ] || return 0 # another has made it meanwhile
  echo "connector-test.sh: making $venv"
  work=$(mktemp -d "$venv-XXXXXX")
  trap 'rm -rf "$work"' RETURN
  "$base" -m venv "$work/venv"
  local pip=("$work/venv/bin/python" -m pip install -q --disable-pip-version-check)
  "${pip[@]}" 'pyzmq==27.1.0' 'numpy==2.2.6'
  # NIXL asks for torch, which only VRAM tensors need.
  if ! "${pip[@]}" --no-deps "nixl==$nixl" "nixl-cu12==$nixl"; then
    [ "${SLUICE_REQUIRE_NIXL:-}" != 1 ] || die "cannot install nixl $nixl, and SLUICE_REQUIRE_NIXL=1"
    echo "connector-test.sh: no nixl $nixl for this machine: what needs it will be skipped" >&2
  fi
  # The files of LMCache's releases that define its messages, and of vLLM's that have
  # its connector, a few kilobytes each out of their wheels: the packages themselves
  # want torch or a GPU runtime.
  "${pip[@]}" 'msgspec==0.20.0'
  if ! PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/fixtures/lmcache.py" sources "$work/venv/lmcache"; then
    [ "${SLUICE_REQUIRE_NIXL:-}" != 1 ] || die "cannot read LMCache's releases, and SLUICE_REQUIRE_NIXL=1"
    echo "connector-test.sh: LMCache's releases cannot be read: its messages will not be tested" >&2
  fi
  if ! PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" "$here/fixtures/vllm_nixl.py" "$work/venv/vllm"; then
    [ "${SLUICE_REQUIRE_NIXL:-}" != 1 ] || die "cannot read vLLM's releases, and SLUICE_REQUIRE_NIXL=1"
    rm -rf "$work/venv/vllm"
    echo "connector-test.sh: vLLM's releases cannot be read: the connector will not be tested on them" >&2
  fi
  touch "$work/venv/.nixl-$nixl-releases"
  rm -rf "$venv"
  # Scripts in bin/ keep the old path in their first line; python itself does not care.
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
