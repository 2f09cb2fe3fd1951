#!/usr/bin/env bash
# Prints what the tiers that tell of KV transfers take: a notification's way to Go
# (p50, p99, CPU of the router's process at one a millisecond, and for each), rest, the rings, a
# registration, the board, and a request's share. Needs the cached NIXL wheel
# (scripts/nixl-wheel.sh) and a quiet machine; about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
export SLUICE_REQUIRE_NIXL=1
echo '## Targets: NIXL p50 130 µs at 20 % of a core, UCX 30 µs at 2 %, ZMQ 80 µs; idle NIXL 2 %, UCX and ZMQ 0.5 %; a request 300 ns, no allocation'
echo '## What the machine takes to wake somebody at rest: the floor under the tiers'
go test -run '^$' -bench 'Calibrate' -benchtime 1x ./nixl | grep -E '^(Benchmark|---|FAIL)'
echo '## The tiers'
go test -run '^$' -bench 'RealRing|RealRegister|RealWriteVisible|RealPost|BoardRequest|CgoCall' -benchtime 0.5s -benchmem ./nixl | grep -E '^(Benchmark|---|FAIL)'
go test -run '^$' -bench 'Real(UCX)?Notification' -benchtime 1x ./nixl | grep -E '^(Benchmark|---|FAIL)'
go test -run '^$' -bench 'ReportOverZMQ' -benchtime 1x ./router/kvtransfer/notify | grep -E '^(Benchmark|---|FAIL)'
go test -run '^$' -bench 'Watched' -benchtime 0.5s -benchmem ./router/kvtransfer | grep -E '^(Benchmark|---|FAIL)'
echo '## At rest'
go test -count 1 -run 'Idle' -v ./nixl ./router/kvtransfer/notify | grep -E '% of a core|^(---|FAIL)'
