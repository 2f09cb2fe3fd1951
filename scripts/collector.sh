#!/usr/bin/env bash
# Prints the path of an OpenTelemetry collector with the OTLP receiver and the file exporter
# (scripts/collector), and builds it first if the cache lacks it: from the Go module proxy, in the versions
# of scripts/collector/go.mod. That takes two minutes of CPU and once.
set -euo pipefail
cd "$(dirname "$0")/collector"

key=$(cat main.go go.mod go.sum | sha256sum | cut -c1-12)
program=${SLUICE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice}/tools/collector-$key
if [ ! -x "$program" ]; then
  echo "collector: building the OpenTelemetry collector" >&2
  mkdir -p "${program%/*}"
  GOFLAGS='' go build -trimpath -o "$program.part" . >&2
  mv "$program.part" "$program"
fi
echo "$program"
