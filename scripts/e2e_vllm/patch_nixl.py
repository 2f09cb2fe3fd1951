"""Lets NIXL's progress thread sleep: a deviation from stock NIXL 1.5.1.

usage: patch_nixl.py PATH/nixl_cu13/_api.py

Stock, the Python layer hard-codes pthrDelay = 0 and the progress thread of
each agent polls without a pause: a whole core per idle engine. After this
edit the pause is $NIXL_PTHR_DELAY_US microseconds, 0 when that is not set.
Nothing else of NIXL changes.
"""

import sys

STOCK = "agent_config.pthrDelay = 0\n"
EDITED = 'agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))\n'


def main(path):
    with open(path, encoding="utf-8") as f:
        source = f.read()
    if EDITED in source:
        return
    if source.count(STOCK) != 1:
        raise SystemExit(f"patch_nixl: {path} has no single line {STOCK.strip()!r}: is this nixl 1.5.1?")
    with open(path, "w", encoding="utf-8") as f:
        f.write(source.replace(STOCK, EDITED))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
