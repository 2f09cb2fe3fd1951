#!/usr/bin/env bash
# Measures the tiers that report KV transfers: latency of a notification until Go
# receives it (p50, p99), CPU of the router's process at one notification per
# millisecond and per notification, idle CPU, the rings, a registration, the completion
# board and the cost per request. Needs the cached NIXL wheel (scripts/nixl-wheel.sh)
# and a quiet machine; takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
export SLUICE_REQUIRE_NIXL=1
echo '## Targets: NIXL p50 130 µs at 20 % of a core, UCX 30 µs at 2 %, ZMQ 80 µs; idle NIXL 2 %, UCX and ZMQ 0.5 %; a request 300 ns, no allocation'
echo '## Wake-up latency of an idle thread on this machine: the lower bound for the tiers'
go test -run '^$' -bench 'Calibrate' -benchtime 1x ./nixl | grep -E '^(Benchmark|---|FAIL)'
echo '## The tiers'
go test -run '^$' -bench 'RealRing|RealRegister|RealWriteVisible|RealPost|BoardRequest|CgoCall' -benchtime 0.5s -benchmem ./nixl | grep -E '^(Benchmark|---|FAIL)'
go test -run '^$' -bench 'Real(UCX)?Notification' -benchtime 1x ./nixl | grep -E '^(Benchmark|---|FAIL)'
go test -run '^$' -bench 'ReportOverZMQ' -benchtime 1x ./router/kvtransfer/notify | grep -E '^(Benchmark|---|FAIL)'
go test -run '^$' -bench 'Watched' -benchtime 0.5s -benchmem ./router/kvtransfer | grep -E '^(Benchmark|---|FAIL)'
echo '## Idle'
go test -count 1 -run 'Idle' -v ./nixl ./router/kvtransfer/notify | grep -E '% of a core|^(---|FAIL)'
