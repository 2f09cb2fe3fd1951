#!/usr/bin/env bash
# Checks the dashboards of docs/observability/dashboards/ against Grafana's schema (scripts/grafana), which
# comes from the Go module proxy in the version of scripts/grafana/go.mod. A dashboard with a misspelt
# member must be refused, so that a schema that accepts everything is noticed.
set -euo pipefail
cd "$(dirname "$0")/.."

key=$(cat scripts/grafana/main.go scripts/grafana/go.* | sha256sum | cut -c1-12)
program=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/tools/grafana-schema-$key
if [ ! -x "$program" ]; then
  mkdir -p "${program%/*}"
  (cd scripts/grafana && GOFLAGS='' go build -trimpath -o "$program.part" .)
  mv "$program.part" "$program"
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-grafana.XXXXXX")
trap 'rm -rf "$work"' EXIT

for change in 's/"legendFormat"/"legendFormt"/' 's/"fillOpacity": 8/"fillOpacity": "8"/' 's/"title": "Requests"/"titel": "Requests"/' 's/"id": 2,/"id": 1,/'; do
  sed "$change" docs/observability/dashboards/fleet.json >"$work/bad.json"
  if "$program" "$work/bad.json" >"$work/out" 2>&1; then
    echo "grafana: the schema accepts a dashboard after $change" >&2
    exit 1
  fi
done
"$program" docs/observability/dashboards/*.json
echo "grafana: every dashboard follows Grafana's schema; a changed one is refused"
