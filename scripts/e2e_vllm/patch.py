"""Patches two packages so that several engines can share two cores.

usage: patch.py SITE-PACKAGES

NIXL 1.5.1: the Python layer hard-codes pthrDelay = 0, so the progress thread of each agent
polls without a pause and an idle engine uses a whole core. With the patch the pause is
$NIXL_PTHR_DELAY_US microseconds, 0 if that is not set.

vLLM 0.32.0: an engine's core and its worker wait for each other by calling sched_yield in a
loop. Under Linux 6.18 they then occupy both cores, and other processes, including those of
other engines, get no CPU for seconds, sometimes for the whole duration of a request. With
the patch they wait with time.sleep(0), as vLLM does under Python 3.10, unless
$VLLM_SCHED_YIELD is 1.
"""

import os
import sys

EDITS = (
    (
        "nixl_cu13/_api.py",
        "agent_config.pthrDelay = 0\n",
        'agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))\n',
    ),
    (
        "vllm/distributed/utils.py",
        "USE_SCHED_YIELD = sys.version_info[:3] >= (3, 11, 1)\n",
        'USE_SCHED_YIELD = os.environ.get("VLLM_SCHED_YIELD") == "1"\n',
    ),
)


def edit(path, stock, edited):
    with open(path, encoding="utf-8") as f:
        source = f.read()
    if edited in source:
        return
    if source.count(stock) != 1:
        raise SystemExit(f"patch: {path} does not have exactly one line {stock.strip()!r}; is it another version?")
    with open(path, "w", encoding="utf-8") as f:
        f.write(source.replace(stock, edited))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    for name, stock, edited in EDITS:
        edit(os.path.join(sys.argv[1], name), stock, edited)
