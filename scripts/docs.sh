#!/usr/bin/env bash
# Builds the documentation site in build/site, from the Markdown files of the repository. A broken link
# and a page that the navigation (mkdocs.yml) lacks are errors.
#
# The tools are installed once, in exact versions, under ${SLUICE_CACHE:-~/.cache/sluice}/docs-HASH:
# mkdocs-material in a virtual environment, and Mermaid, which draws the diagrams in the browser and is
# part of the site, so that a reader's browser loads nothing from elsewhere.
# Needs Python 3.10 or newer ($SLUICE_PYTHON) and npm.
set -euo pipefail
cd "$(dirname "$0")/.."

mermaid=11.12.0
key=$(cat scripts/docs/requirements.txt <(echo "mermaid $mermaid") | sha256sum | cut -c1-12)
tools=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/docs-$key
if [ ! -e "$tools/.done" ]; then
  python=
  for p in "${SLUICE_PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
    # Run it: a version manager's shim can exist for a Python that is not installed.
    if [ -n "$p" ] && "$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then python=$p; break; fi
  done
  [ -n "$python" ] || { echo "docs: no Python 3.10 or newer with venv (apt-get install python3-venv; or set SLUICE_PYTHON)" >&2; exit 1; }
  command -v npm >/dev/null || { echo "docs: no npm (apt-get install npm)" >&2; exit 1; }
  echo "docs: installing the tools in $tools" >&2
  rm -rf "$tools"
  "$python" -m venv "$tools"
  "$tools/bin/pip" install -q --disable-pip-version-check -r scripts/docs/requirements.txt >&2
  (cd "$tools" && npm pack --silent "mermaid@$mermaid" >/dev/null && tar xzf "mermaid-$mermaid.tgz" package/dist/mermaid.min.js package/LICENSE && rm "mermaid-$mermaid.tgz")
  touch "$tools/.done"
fi

"$tools/bin/python" scripts/docs/stage.py build/docs
mkdir -p build/docs/assets
cp "$tools/package/dist/mermaid.min.js" scripts/docs/site.css build/docs/assets/
NO_MKDOCS_2_WARNING=1 "$tools/bin/mkdocs" build --strict --clean 2>&1 | { grep -vE "^INFO|^ *$" || true; } >&2
echo "docs: $(find build/site -name '*.html' | wc -l) pages in build/site"
