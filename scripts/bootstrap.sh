#!/usr/bin/env bash
# Installs the packages that building and testing Sluice needs on Debian or Ubuntu.
# It can run again: it does nothing if everything is installed.
#
#   scripts/bootstrap.sh             for `go build` and the demo
#   scripts/bootstrap.sh --test      also for `make test` (a browser, NIXL in the cache)
#   scripts/bootstrap.sh --bench     also the baselines of `make bench` (nginx, haproxy)
set -euo pipefail

want_test=0 want_bench=0
for a in "$@"; do
  case "$a" in
    --test) want_test=1 ;;
    --bench) want_bench=1 ;;
    -h | --help) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "bootstrap: unknown argument \"$a\"; want --test, --bench or nothing" >&2; exit 2 ;;
  esac
done

missing=()
need() { # need PACKAGE TEST...: the package is missing when the test fails
  local pkg=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$pkg")
}
has() { command -v "$1"; }
has_chromium() { has chromium || has chromium-browser || has google-chrome; }

need pkg-config has pkg-config
if has pkg-config >/dev/null; then need libzmq3-dev pkg-config --exists libzmq; else missing+=(libzmq3-dev); fi
need gcc has cc
need make has make
need cmake has cmake
need ca-certificates test -e /etc/ssl/certs/ca-certificates.crt
if [ "$want_test" = 1 ]; then
  need curl has curl
  need openssl has openssl
  need python3 has python3
  need python3-venv python3 -c 'import venv, ensurepip'
  need chromium has_chromium
fi
if [ "$want_bench" = 1 ]; then
  need nginx-light has nginx
  need haproxy has haproxy
fi

if ! has go >/dev/null; then
  echo "bootstrap: Go is not installed. Install Go 1.26 or newer (https://go.dev/dl) and put it on PATH." >&2
  exit 1
fi

if [ ${#missing[@]} -gt 0 ]; then
  echo "bootstrap: missing: ${missing[*]}"
  if ! has apt-get >/dev/null; then
    echo "bootstrap: this script installs with apt-get, which is not available. Install these packages yourself (Debian's names): ${missing[*]}" >&2
    exit 1
  fi
  run=()
  if [ "$(id -u)" != 0 ]; then
    if has sudo >/dev/null && sudo -n true 2>/dev/null; then
      run=(sudo -n)
    else
      echo "bootstrap: no permission to install packages. Ask an administrator to run:" >&2
      echo "    apt-get update && apt-get install -y ${missing[*]}" >&2
      exit 1
    fi
  fi
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  for attempt in 1 2 3; do
    if "${run[@]}" apt-get update -qq >"$log" 2>&1 &&
      "${run[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then
      break
    fi
    if [ "$attempt" = 3 ]; then
      tail -20 "$log" >&2
      echo "bootstrap: cannot install ${missing[*]}; apt-get's output is above" >&2
      exit 1
    fi
    sleep 3
  done
fi

if [ "$want_test" = 1 ]; then
  "$(dirname "$0")/nixl-wheel.sh"
  "$(dirname "$0")/nixl-wheel.sh" 1.3.2
  "$(dirname "$0")/connector-test.sh" --setup
  "$(dirname "$0")/engineapi-python-test.sh" --setup
fi

if [ "$want_test" = 1 ] && ! has node >/dev/null; then
  echo "bootstrap: Node.js is not installed; the client tests need version 20 or newer." >&2
  exit 1
fi
echo "bootstrap: ready ($(go version | cut -d' ' -f3), libzmq $(pkg-config --modversion libzmq))"
