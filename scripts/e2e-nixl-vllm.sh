#!/usr/bin/env bash
# Runs the router in front of three real vLLM engines (two prefill, one decode) with
# Sluice's connector and checks the notifications of their KV transfers: over NIXL, over
# UCX, over ZMQ with the NIXL library hidden, and while a prefill engine is killed during
# a transfer. Then it checks the side channel with engines that lack the connector, and
# three engines in push mode.
#
# usage: scripts/e2e-nixl-vllm.sh [--report FILE] [--router FILE] [--keep-logs]
#
# docs/e2e-nixl.md is the report in the repository. The script runs two sections of
# scripts/e2e-vllm.sh, which documents the requirements and the arguments. It takes
# about 10 minutes on two idle cores.
set -euo pipefail
case ${1:-} in -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac
exec "$(dirname "$0")/e2e-vllm.sh" --only transfers,push --no-clients "$@"
