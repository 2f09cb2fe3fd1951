#!/usr/bin/env bash
# Tests an OpenAI-compatible server with the official Python and Node.js clients.
#
# usage: run.sh [--only python|node] [--skip GROUP,GROUP] [--model NAME] BASE_URL
#        run.sh --setup            only install the clients
#
# BASE_URL is http://HOST:PORT, with or without /v1. The clients are installed once, under
# ${SLUICE_CACHE:-~/.cache/sluice}/clients. The exit status is 0 only if every check of
# every client passed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${SLUICE_CACHE:-$HOME/.cache/sluice}/clients
only= url= setup= pass=()

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; }
die() { echo "run.sh: $*" >&2; exit 2; }

while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) usage; exit 0 ;;
    --setup) setup=1 ;;
    --only) only=${2:-}; shift ;;
    --skip|--model) [ $# -gt 1 ] || die "$1 needs a value"; pass+=("$1" "$2"); shift ;;
    -*) die "unknown option $1; see --help" ;;
    *) [ -z "$url" ] || die "more than one BASE_URL: $url, $1"; url=$1 ;;
  esac
  shift
done
case $only in ''|python|node) ;; *) die "--only takes python or node, not \"$only\"" ;; esac
[ -n "$setup$url" ] || { usage >&2; exit 2; }
url=${url%/}; url=${url%/v1}/v1

# The folder names contain a hash of the pinned versions, so that a change of a pin installs again.
key() { cat "$@" | sha256sum | cut -c1-12; }

setup_python() {
  local p python=
  for p in "${SLUICE_PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
    # Run it: a version manager's shim can exist for a Python that is not installed.
    if [ -n "$p" ] && "$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      python=$p
      break
    fi
  done
  [ -n "$python" ] || die "no Python 3.10 or newer (apt-get install python3 python3-venv; or set SLUICE_PYTHON)"
  venv=$cache/python-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$(key "$here/requirements.txt")
  [ -e "$venv/.done" ] && return
  echo "run.sh: installing the Python client in $venv" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv" >&2 || die "cannot create a virtual environment with $python (apt-get install python3-venv)"
  "$venv/bin/pip" install -q --disable-pip-version-check -r "$here/requirements.txt" >&2
  touch "$venv/.done"
}

setup_node() {
  node -e 'process.exit(parseInt(process.versions.node) < 18 ? 1 : 0)' 2>/dev/null ||
    die "no Node 18 or newer (apt-get install nodejs npm)"
  modules=$cache/node-$(key "$here/package-lock.json")
  [ -e "$modules/.done" ] && return
  command -v npm >/dev/null || die "npm is missing (apt-get install npm)"
  echo "run.sh: installing the Node client in $modules" >&2
  rm -rf "$modules"
  mkdir -p "$modules"
  cp "$here/package.json" "$here/package-lock.json" "$here/.npmrc" "$modules/"
  (cd "$modules" && npm ci --no-audit --no-fund --loglevel=error >&2)
  touch "$modules/.done"
}

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
[ "$only" = node ] || setup_python
[ "$only" = python ] || setup_node
flock -u 9
[ -z "$setup" ] || exit 0

# The servers under test are on loopback; proxy settings of the environment must not apply.
export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost

status=0
if [ "$only" != node ]; then
  "$venv/bin/python" "$here/openai_client.py" "$url" "${pass[@]}" || status=1
fi
if [ "$only" != python ]; then
  # Node.js resolves modules from the script's own folder upwards, whatever the working
  # directory is, so the script is copied into the folder of the modules.
  script=$modules/openai_client.$$.mjs
  trap 'rm -f "$script"' EXIT
  cp "$here/openai_client.mjs" "$script"
  node "$script" "$url" "${pass[@]}" || status=1
fi
exit "$status"
