#!/usr/bin/env bash
# Runs the router in front of three real vLLM engines (two prefill, one decode) that
# run Sluice's connector, and checks what it is told of their KV transfers: over NIXL,
# over UCX, over ZMQ with the NIXL library hidden, and when a prefill engine is killed in
# mid-transfer; what the side channel does for engines without the connector; then
# three engines in push mode.
#
# usage: scripts/e2e-nixl-vllm.sh [--report FILE] [--router FILE] [--keep-logs]
#
# The kept report is docs/e2e-nixl.md. What it needs and what the arguments mean:
# scripts/e2e-vllm.sh, of which these are two sections. About 10 minutes on two idle cores.
set -euo pipefail
case ${1:-} in -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
exec "$(dirname "$0")/e2e-vllm.sh" --only transfers,push --no-clients "$@"
