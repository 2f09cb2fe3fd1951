#!/usr/bin/env bash
# Builds the wheels of the two Python packages: the client of the engine API (router/engineapi/python) and
# vLLM's connector (nixl/connector).
#
#   scripts/wheels.sh [FOLDER]    default build/dist
#
# They are built from copies, so that the build leaves no files in the repository. Times are those of the
# commit: the same commit gives the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-build/dist}
venv=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/tools/wheels-setuptools-80.9.0
if [ ! -e "$venv/.done" ]; then
  echo "wheels: creating $venv" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check setuptools==80.9.0 wheel==0.45.1
  touch "$venv/.done"
fi
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH

rm -rf build/wheels && mkdir -p build/wheels "$out"
for package in router/engineapi/python nixl/connector; do
  # Each folder has a copy of the licence, because pip builds from that folder alone.
  cmp LICENSE "$package/LICENSE" || { echo "wheels: copy LICENSE to $package" >&2; exit 1; }
  source=build/wheels/$(basename "$(dirname "$package")")-$(basename "$package")
  mkdir -p "$source"
  git ls-files -co --exclude-standard -z -- "$package" | xargs -0 cp --parents -t "$source"
  "$venv/bin/python" -m pip wheel -q --disable-pip-version-check --no-index --no-deps --no-build-isolation --wheel-dir "$out" "$source/$package"
done
