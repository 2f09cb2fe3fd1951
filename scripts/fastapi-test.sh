#!/usr/bin/env bash
# Runs the test of servers without /health with a plain FastAPI application behind the router.
# The first run creates a virtual environment with FastAPI and uvicorn in
# ${SLUICE_CACHE:-~/.cache/sluice}/fastapi.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=(fastapi==0.115.12 uvicorn==0.34.2)

venv=${SLUICE_CACHE:-$HOME/.cache/sluice}/fastapi
stamp=$venv/.done-${pins[*]}
stamp=${stamp// /-}
if [ ! -e "$stamp" ]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "${pins[@]}"
  touch "$stamp"
fi
SLUICE_FASTAPI_PYTHON=$venv/bin/python go test -count=1 -run 'TestServerWithoutHealth$' ./cmd/sluice
