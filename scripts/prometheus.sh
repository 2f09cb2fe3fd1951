#!/usr/bin/env bash
# Prints the folder of promtool and prometheus, and builds both first if the cache lacks them: from the
# Go module proxy, in the version named here. That takes two minutes and once.
#
# `go install` refuses the module because it has replace directives, so this builds in a copy of it.
# The copy has no service discovery of cloud providers, which is most of what would be compiled.
set -euo pipefail

version=v0.305.0 # Prometheus 3.5
folder=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/tools/prometheus-$version
if [ ! -x "$folder/promtool" ] || [ ! -x "$folder/prometheus" ]; then
  echo "prometheus: building github.com/prometheus/prometheus@$version" >&2
  work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-prometheus.XXXXXX")
  trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
  module=$(cd "$work" && GOFLAGS='' go mod download -json "github.com/prometheus/prometheus@$version" | python3 -c 'import json, sys; print(json.load(sys.stdin)["Dir"])')
  cp -r "$module" "$work/source"
  chmod -R u+w "$work/source"
  cd "$work/source"
  rm plugins/*.go
  echo 'package plugins' >plugins/plugins.go
  mkdir -p "$folder"
  for program in promtool prometheus; do
    GOFLAGS='' go build -trimpath -o "$folder/$program.part" "./cmd/$program" >&2
    mv "$folder/$program.part" "$folder/$program"
  done
fi
echo "$folder"
