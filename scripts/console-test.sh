#!/usr/bin/env bash
# Tests the console of a router over simulated engines in a real browser: every view in light and
# dark at two widths, with axe-core's accessibility checks.
#
# usage: console-test.sh [GO TEST FLAGS…]      such as -shots /tmp/shots, for a picture of each view
#
# playwright-core and axe-core are installed once, under ${SLUICE_CACHE:-~/.cache/sluice}/console.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "console-test: $*" >&2; exit 2; }
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || die "no Chromium (apt-get install chromium)"
node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null || die "no Node 20 or newer (apt-get install nodejs npm)"

cache=${SLUICE_CACHE:-$HOME/.cache/sluice}/console
modules=$cache/$(sha256sum <scripts/console/package-lock.json | cut -c1-12)
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
if [ ! -e "$modules/.done" ]; then
  command -v npm >/dev/null || die "npm is missing (apt-get install npm)"
  echo "console-test: installing playwright-core and axe-core in $modules" >&2
  rm -rf "$modules"
  mkdir -p "$modules"
  cp scripts/console/package.json scripts/console/package-lock.json scripts/console/.npmrc "$modules/"
  (cd "$modules" && npm ci --no-audit --no-fund --loglevel=error >&2)
  touch "$modules/.done"
fi
flock -u 9

exec go test -count=1 -timeout 15m -run TestConsoleInBrowser ./router/admin -browser "$browser" -modules "$modules" "$@"
