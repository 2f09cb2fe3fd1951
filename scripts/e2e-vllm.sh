#!/usr/bin/env bash
# Runs Sluice in front of real vLLM engines on this machine's CPU and compares the answers
# with those of the engines without Sluice.
#
# usage: scripts/e2e-vllm.sh [--only pd,dp,migrate,engineapi,frozen,preempt,full,lora] [--report FILE] [--router FILE] [--no-clients] [--keep-logs]
#
#   --only LIST     sections to run, comma-separated; the default is the first eight:
#                   pd         separate prefill and decode engines with NixlConnector,
#                              clients that disconnect in each phase, an expired lease,
#                              then a second prefill engine
#                   dp         two data-parallel ranks behind one URL
#                   migrate    a decode engine is drained, then killed, while it streams
#                   engineapi  the engine API with vLLM's tokenizer as preprocessor
#                   frozen     an engine's processes are stopped, then only its core; an
#                              engine computes a very long prompt
#                   preempt    streams are suspended for requests of a higher class
#                   full       new prompts while the cache of one of two engines is full
#                   lora       a LoRA adapter with prefill and decode engines, prompts as token ids
#                   transfers, push   the sections of scripts/e2e-nixl-vllm.sh
#   --report FILE   write the table as Markdown (docs/e2e-vllm.md in the repository)
#   --no-clients    skip the official OpenAI clients
#   --router FILE   the binary to test, instead of building bin/sluice
#   --keep-logs     keep the logs of engines and router even if every check passed
#
# The first run installs vLLM (6 GB) and creates a tiny model under
# ${SLUICE_CACHE:-~/.cache/sluice}/vllm-0.32; later runs use them. The script needs
# Python 3.11 to 3.13 ($SLUICE_PYTHON), libnuma1, Go and 8 GB of memory, but no GPU.
# It takes about 10 minutes on two idle cores, mostly for the start of the engines.
# The exit status is 0 only if every check passed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
cache=${SLUICE_CACHE:-$HOME/.cache/sluice}/vllm-0.32
command="scripts/e2e-vllm.sh${*:+ $*}"
only=pd,dp,migrate,engineapi,frozen,preempt,full,lora report= clients=$here/clients/run.sh router= keep= commit=

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; }
die() { echo "e2e-vllm.sh: $*" >&2; exit 2; }
value() { [ $# -gt 1 ] && [ -n "$2" ] || die "$1 needs a value; see --help"; }

while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) usage; exit 0 ;;
    --only) value "$@"; only=$2; shift ;;
    --report) value "$@"; report=$2; shift ;;
    --router) value "$@"; router=$2; shift ;;
    --no-clients) clients= ;;
    --keep-logs) keep=1 ;;
    *) die "unknown argument $1; see --help" ;;
  esac
  shift
done
for section in ${only//,/ }; do
  case $section in pd|dp|migrate|engineapi|frozen|preempt|full|lora|transfers|push) ;; *) die "unknown section \"$section\"; the sections are pd, dp, migrate, engineapi, frozen, preempt, full, lora, transfers and push" ;; esac
done
case $report in ''|/*) ;; *) report=$PWD/$report ;; esac

run=$(mktemp -d "${TMPDIR:-/tmp}/sluice-e2e.XXXXXX")
touch "$run/groups"
child=
finish() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; then wait "$child" 2>/dev/null || true; fi
  # Each process leads a process group of its own. A group that has ended is not an error.
  while read -r group; do kill -KILL -- "-$group" 2>/dev/null || true; done <"$run/groups"
  if [ "$status" = 0 ] && [ -z "$keep" ]; then rm -rf "$run"; else echo "logs: $run" >&2; fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$here/e2e_vllm/setup.sh" "$cache"
[ -z "$clients" ] || "$clients" --setup
if [ -z "$router" ]; then
  router=$root/bin/sluice
  make -s -B -C "$root" bin/sluice # the same binary as `make build`
  commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || true)
  [ -z "$(git -C "$root" status --porcelain -- '*.go' 2>/dev/null)" ] || commit="$commit with uncommitted changes"
fi
echo "note: in this installation NIXL's progress thread sleeps 1 ms between polls, and vLLM's processes wait without sched_yield (scripts/e2e_vllm/patch.py has the reasons)" >&2

# In the background, so that a trap runs immediately and not only after the command ends.
"$cache/venv/bin/python" "$here/e2e_vllm/main.py" --cache "$cache" --run-dir "$run" --router "$router" \
  --only "$only" --clients "$clients" --report "$report" --command "$command" --commit "$commit" &
child=$!
wait "$child" && status=0 || status=$?
child=
exit "$status"
