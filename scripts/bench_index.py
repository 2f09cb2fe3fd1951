#!/usr/bin/env python3
"""Compares the KV index, its events and the scheduler's choice with their targets.

The script runs the benchmarks of bench/index and bench/schedule (extra arguments are passed
to `go test`) and prints a table. The targets apply to a quiet machine whose
BenchmarkCalibrate takes about 30 ns and whose timer takes 24 ns. On another machine, compare
the ratios of two runs instead of the figures. Quantiles include the time of the timer.
"""

import re
import subprocess
import sys

# Description; benchmark and point (a regular expression); unit; target: the maximum, or the
# minimum for rates per second.
ROWS = [
    ("store, capacity known, ns/block", r"Store/load=(unique|shared)/workers=64/depth=256", "ns/block", 55),
    ("store, capacity known, ns/block", r"Store/.*(depth=2048|workers=1000.*)", "ns/block", 55),
    ("store, growing, ns/block", r"StoreGrowing/.*", "ns/block", 100),
    ("growing to 2 M blocks, longest event, ns", r"GrowPause/.*", "max-event-ns", 1_000_000),
    ("as many turns of a loop without memory, longest, ns", r"GrowPause/.*", "noise-ns", None),
    ("remove, ns/block", r"Remove/.*depth=(256|2048)", "ns/block", 50),
    ("1 block an event: store, ns/block", r"Single/do=store/.*", "ns/block", 150),
    ("1 block an event: remove, ns/block", r"Single/do=remove/.*", "ns/block", 110),
    ("hit, unique, p50 ns", r"Hit/load=unique/workers=64/.*", "p50-ns", 100),
    ("hit, shared 64 x 256, p50 ns", r"Hit/load=shared/workers=64/depth=256", "p50-ns", 150),
    ("hit, shared 64 x 2048, p50 ns", r"Hit/load=shared/workers=64/depth=2048", "p50-ns", 200),
    ("hit, shared 1000 x 256, as runs, p50 ns", r"Hit/load=shared/workers=1000/.*", "p50-ns", 300),
    ("hit, shared 1000 x 256, dense, p50 ns", r"HitDense/load=shared/workers=1000/.*", "p50-ns", 600),
    ("partial hit, 64 x 2048, p50 ns", r"Partial/.*workers=64/.*", "p50-ns", 400),
    ("partial hit, 1000 x 256, p50 ns", r"Partial/.*workers=1000/.*", "p50-ns", 800),
    ("miss, p50 ns", r"Miss/.*", "p50-ns", 40),
    ("mix under writes, p50 ns", r"MixUnderWrites/.*", "p50-ns", 200),
    ("mix under writes, p99 ns", r"MixUnderWrites/.*", "p99-ns", 600),
    ("mix under writes, p99.9 ns", r"MixUnderWrites/.*", "p999-ns", 2000),
    ("memory, branches of 16 and more, B/entry", r"Memory/.*(workers=64/.*|depth=256)", "B/entry", 40),
    ("memory, branches of 8, B/entry", r"Memory/load=shared/workers=1000/depth=16", "B/entry", 60),
    ("1,000 ranks, each at its own depth of 2,048, p50 ns", r"Worst/.*", "p50-ns", 6000),
    ("8.4 M entries: store, ns/block", r"Large/do=store", "ns/block", 110),
    ("8.4 M entries: remove, ns/block", r"Large/do=remove", "ns/block", 110),
    ("8.4 M entries: hit, p50 ns", r"Large/do=hit", "p50-ns", 100),
    ("events decoded and applied, a second", r"EventsApply/.*", "events/s", 300_000),
    ("hashing a prompt, ns", r"HashTokens/tokens=4096", "ns/op", 3000),
    ("the choice alone, ns", r"Select/ranks=1000/.*", "choice-ns", 1500),
    ("hash, lookup, choice and booking, ns", r"Select/ranks=1000/tokens=256", "ns/op", 2000),
    ("hash, lookup, choice and booking, ns", r"Select/ranks=1000/tokens=4096", "ns/op", 6000),
    ("hash, lookup, choice and booking, ns", r"Select/ranks=1000/tokens=32768", "ns/op", 30000),
]


def measure(args):
    command = ["go", "test", "-run", "^$", "-bench", "Index|Select|Hash|Events|Calibrate", "-benchtime", "0.2s", *args, "./bench/index", "./bench/schedule"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stdout + run.stderr)
    results = {}
    for line in run.stdout.splitlines():
        if not line.startswith("Benchmark"):
            continue
        name, _, *rest = line.split()
        name = re.sub(r"-\d+$", "", name).removeprefix("Benchmark").removeprefix("Index")
        results[name] = {unit: float(value) for value, unit in zip(rest[::2], rest[1::2])}
    return results


def main():
    results = measure(sys.argv[1:])
    calibration, timer = results.get("Calibrate", {}), results.get("CalibrateTimer", {})
    print(f"calibration: {calibration.get('ns/op', float('nan')):.1f} ns; the timer in each p50: {timer.get('p50-ns', float('nan')):.0f} ns\n")
    print("| what | point | measured | target | |\n| --- | --- | ---: | ---: | --- |")
    for what, pattern, unit, target in ROWS:
        for name, units in results.items():
            if re.fullmatch(pattern, name) and unit in units:
                value = units[unit]
                over = 0 if target is None else target / value if unit.endswith("/s") else value / target
                verdict = "" if over <= 1 else f"{over:.1f} x"
                aim = "" if target is None else f"{target:,}"
                print(f"| {what} | {name.partition('/')[2]} | {value:,.0f} | {aim} | {verdict} |")


if __name__ == "__main__":
    main()
