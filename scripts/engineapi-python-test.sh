#!/usr/bin/env bash
# Builds the package of the Python client (router/engineapi/python), checks its types and
# runs its tests against bin/sluice in front of simulated engines.
#
#   scripts/engineapi-python-test.sh [ARGUMENT...]   run the tests; arguments are passed to unittest
#   scripts/engineapi-python-test.sh --setup         only create the environment
#
# The tests need Python 3.10 or newer with msgpack: $SLUICE_PYTHON, or else a virtual
# environment that the first run creates in ${SLUICE_CACHE:-~/.cache/sluice}/engineapi-python.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
package=$here/../router/engineapi/python
pins=(msgpack==1.1.2 mypy==2.4.1 setuptools==80.9.0)

die() { echo "engineapi-python-test.sh: $*" >&2; exit 2; }

# set_up VENV: creates the virtual environment unless it exists.
set_up() {
  local venv=$1 base= p
  local stamp=$venv/.done-${pins[*]}
  stamp=${stamp// /-}
  [ ! -e "$stamp" ] || return 0
  for p in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then base=$p; break; fi
  done
  [ -n "$base" ] || die "no Python 3.10 or newer with venv (apt-get install python3 python3-venv; or set SLUICE_PYTHON)"
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  flock 9
  [ ! -e "$stamp" ] || return 0 # another process has created it
  echo "engineapi-python-test.sh: creating $venv"
  rm -rf "$venv"
  "$base" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "${pins[@]}"
  touch "$stamp"
}

python=${SLUICE_PYTHON:-} venv=
if [ -z "$python" ]; then
  venv=${SLUICE_CACHE:-$HOME/.cache/sluice}/engineapi-python
  set_up "$venv"
  python=$venv/bin/python
fi
[ "${1:-}" != --setup ] || exit 0
[ -x "$here/../bin/sluice" ] || die "bin/sluice is not built; run: make build"

export PYTHONDONTWRITEBYTECODE=1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
if [ -n "$venv" ]; then
  # The package is built from a copy, as for a release, so that the build leaves no files in the repository.
  cp -r "$package" "$tmp/source"
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-build-isolation --no-deps --target "$tmp/installed" "$tmp/source"
  [ -e "$tmp/installed/sluice_engineapi/py.typed" ] || die "the built package lacks py.typed"
  (cd "$package" && "$python" -m mypy --cache-dir "$venv/mypy")
  export PYTHONPATH=$tmp/installed
else
  export PYTHONPATH=$package/src
fi
cd "$package/tests"
SLUICE_BIN=$here/../bin/sluice "$python" -m unittest discover -s . "$@"
