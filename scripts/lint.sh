#!/usr/bin/env bash
# Runs gofmt, vet, staticcheck and the checks of the documents, of NOTICE and of the latest
# commits' subjects on the whole repository. It stops at the first failure.
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
# Older subjects are longer here and there; a history stays as it is.
long=$(git log -30 --format=%s 2>/dev/null | awk 'length > 72' || true)
if [ -n "$long" ]; then
  echo "lint: the subjects of these commits have more than 72 characters; shorten them with git commit --amend or git rebase -i:" >&2
  echo "$long" >&2
  exit 1
fi
echo "lint: no findings"
