#!/usr/bin/env bash
# gofmt, vet and staticcheck over the whole tree, and the documents against it; fails on the first finding.
set -euo pipefail
cd "$(dirname "$0")/.."
unformatted=$(git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -l)
if [ -n "$unformatted" ]; then
  echo "lint: run gofmt -w on:" >&2
  echo "$unformatted" >&2
  exit 1
fi
go vet ./...
go vet -tags nokube ./cmd/sluice
CGO_ENABLED=0 go vet ./nixl/... ./native/...
go tool staticcheck ./...
scripts/check_docs.py
scripts/notice.py --check
echo "lint: clean"
