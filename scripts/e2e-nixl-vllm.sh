#!/usr/bin/env bash
# Runs the router in front of three real vLLM engines (two prefill, one decode) that
# run Sluice's connector, and checks what it is told of their KV transfers: over NIXL,
# over ZMQ with the NIXL library hidden, and when a prefill engine is killed in
# mid-transfer.
#
# usage: scripts/e2e-nixl-vllm.sh [--report FILE] [--router FILE] [--keep-logs]
#
# The kept report is docs/e2e-nixl.md. What it needs and what the arguments mean:
# scripts/e2e-vllm.sh, of which this is one section. About 6 minutes on two idle cores.
set -euo pipefail
case ${1:-} in -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
exec "$(dirname "$0")/e2e-vllm.sh" --only transfers --no-clients "$@"
