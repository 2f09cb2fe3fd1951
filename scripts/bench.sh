#!/usr/bin/env bash
# Prints the project's figures: Go benchmarks of the performance-critical packages,
# then the whole router, nginx and haproxy in front of one simulated engine.
set -euo pipefail
cd "$(dirname "$0")/.."
echo '## Packages (go test -bench)'
go test -run '^$' -bench 'Scan|Splice|TokenIDs|HashTokens|Index|Select|Events|Do|StreamChunk|ServeShort' -benchtime 0.2s -benchmem \
  ./dataplane/... ./router/blockhash/ ./bench/index/ ./router/kvevents/ ./router/schedule/ | grep -E '^(Benchmark|ok|FAIL|---)'
echo
echo '## Whole processes'
exec python3 scripts/bench_proxies.py "$@"
