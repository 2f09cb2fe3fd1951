#!/usr/bin/env bash
# Runs the tests of the vLLM connector (nixl/connector) with a Python that has
# pyzmq. Over NIXL it is tested only where that is installed: $SLUICE_PYTHON may
# name such a Python (scripts/e2e-vllm.sh installs one under
# ${SLUICE_CACHE:-~/.cache/sluice}/vllm-0.32/venv).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${SLUICE_PYTHON:-}
if [ -z "$python" ]; then
  venv=${SLUICE_CACHE:-$HOME/.cache/sluice}/connector
  python=$venv/bin/python
  if [ ! -e "$venv/.done" ]; then
    base=
    for p in python3 python3.13 python3.12 python3.11 python3.10; do
      if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then base=$p; break; fi
    done
    [ -n "$base" ] || { echo "connector-test.sh: no Python 3.9 or newer (apt-get install python3 python3-venv; or set SLUICE_PYTHON)" >&2; exit 2; }
    rm -rf "$venv"
    "$base" -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check 'pyzmq==27.1.0'
    touch "$venv/.done"
  fi
fi
cd "$here/../nixl/connector"
PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 exec "$python" -m unittest discover -s tests "$@"
