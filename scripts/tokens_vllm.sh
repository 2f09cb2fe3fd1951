#!/usr/bin/env bash
# Compares the token ids that Sluice finds itself with those of a real vLLM server on this
# machine's CPU: random requests over chat completions, completions, Responses and Messages
# with tools, tool results, reasoning, documents and parts, each compared id by id with the
# server's render endpoint. A second router has the model's own template, which is not that of
# the server (--chat-template): it must render with the one that the server reports.
#
# With --prefill it measures instead what the front end of a prefill server spends on
# prompts of 16,000 tokens as text and as token ids (pd.prefill_by_ids).
#
# usage: scripts/tokens_vllm.sh [--prefill [--report FILE]] [--requests N] [--router FILE] [--library FILE] [--keep-logs]
#
#   --prefill       measure prefill by token ids
#   --report FILE   with --prefill: write the figures into this document (docs/tokens.md in the repository)
#   --requests N    requests to send [1000; with --prefill 20 for each of 5 rounds]
#   --router FILE   the binary to test [bin/sluice, built]
#   --library FILE  the tokenizer library [beside the binary, built]
#   --keep-logs     keep the logs of engine and router even if every id is equal
#
# The first run installs vLLM (6 GB), as scripts/e2e-vllm.sh does. The exit status is 0 only
# if both routers have compared prompts of every API and no id differs, the engine was never asked
# to tokenize a prompt, the second router is not degraded, and predicted and reported cached
# tokens differ by at most 1 %.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
cache=${SLUICE_CACHE:-$HOME/.cache/sluice}/vllm-0.32
requests= router= library= keep= report= script=compare.py

die() { echo "tokens_vllm.sh: $*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    --keep-logs) keep=1 ;;
    --prefill) script=prefill.py ;;
    --requests|--router|--library|--report)
      [ $# -gt 1 ] || die "$1 needs a value; see --help"
      case $1 in --requests) requests=$2 ;; --router) router=$2 ;; --library) library=$2 ;; --report) report=$2 ;; esac
      shift ;;
    *) die "unknown argument $1; see --help" ;;
  esac
  shift
done

[ -z "$report" ] || [ "$script" = prefill.py ] || die "--report needs --prefill; see --help"

run=$(mktemp -d "${TMPDIR:-/tmp}/sluice-tokens.XXXXXX")
touch "$run/groups"
child=
finish() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; then wait "$child" 2>/dev/null || true; fi
  while read -r group; do kill -KILL -- "-$group" 2>/dev/null || true; done <"$run/groups"
  if [ "$status" = 0 ] && [ -z "$keep" ]; then rm -rf "$run"; else echo "logs: $run" >&2; fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$here/e2e_vllm/setup.sh" "$cache"
if [ -z "$router" ]; then
  router=$root/bin/sluice
  make -s -C "$root" build
fi
if [ -n "$library" ]; then export SLUICE_TOKENIZER_LIBRARY=$library; fi
"$cache/venv/bin/python" "$here/tokens/$script" --cache "$cache" --run-dir "$run" --router "$router" ${requests:+--requests "$requests"} ${report:+--report "$report"} &
child=$!
wait "$child" && status=0 || status=$?
child=
exit "$status"
