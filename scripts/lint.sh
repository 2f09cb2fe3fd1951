#!/usr/bin/env bash
# Runs gofmt, vet, staticcheck and the checks of the documents and of NOTICE on the whole
# repository. It stops at the first failure.
set -euo pipefail
cd "$(dirname "$0")/.."
unformatted=$(git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -l)
if [ -n "$unformatted" ]; then
  echo "lint: these files are not formatted; run gofmt -w on them:" >&2
  echo "$unformatted" >&2
  exit 1
fi
go vet ./...
CGO_ENABLED=0 go vet ./nixl/... ./native/...
go vet -tags purego ./dataplane/jsonscan # without the assembly, as on other processors
go tool staticcheck ./...
scripts/check_docs.py
scripts/dashboards.py --check
scripts/notice.py --check
echo "lint: no findings"
