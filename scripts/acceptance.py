#!/usr/bin/env python3
"""Exercises installation, observation, operation and documentation with the real tools, and prints a table.

  scripts/acceptance.py [--only NAME,…] [--list]

Each check is a command that exists by itself (`make help`, docs). One that cannot run here, because a tool
cannot be had or root is needed, says so in the table and fails nothing; so does one that leaves a part out
(it prints a line "skip  …" for each, go test "--- SKIP"): it has "passed, in part". One that fails makes
the exit code 1. Tools come from the package registries and are kept in ${SLUICE_CACHE:-~/.cache/sluice}; the first run
builds them and takes about half an hour, later ones about 15 minutes. Output is in build/acceptance/.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUTPUT = os.path.join(ROOT, "build", "acceptance")


def root():
    return "" if os.geteuid() == 0 else "needs root, for chroot"


def have(*tools):
    """Returns a function that names the tools that are missing."""
    return lambda: ", ".join("no " + t for t in tools if not shutil.which(t))


def debian():
    return root() or have("apt-get", "dpkg")()


def browser():
    return have("node", "npm")() or ("" if any(shutil.which(b) for b in ("chromium", "chromium-browser", "google-chrome")) else "no Chromium")


# Name, what it shows, the command, and a function that returns why it cannot run here ("": it can).
CHECKS = [
    ("packages", ".deb and .rpm, units, man pages, completion: dpkg, rpm, systemd-analyze, groff, bash, zsh, fish", "make --no-print-directory packages-test", debian),
    ("image", "container image, run with a read-only root file system", "scripts/image.py && scripts/image_test.py", debian),
    ("containers", "the image archive run by podman; the Containerfile built and run: podman", "scripts/container_test.py", lambda: debian() or have("podman", "go", "cargo")()),
    ("charts", "Helm chart and manifests: helm, kubeconform", "scripts/charts-test.sh", have("go")),
    ("observability", "metrics, rules and every panel's query: promtool, Prometheus", 'scripts/observability_test.py "$(scripts/prometheus.sh)"', have("go")),
    ("dashboards", "dashboards against Grafana's schema: the Grafana project's Go types; Grafana itself is in no package registry", "scripts/grafana.sh", have("go")),
    ("traces", "spans over gRPC and HTTP: the OpenTelemetry collector", "scripts/traces_test.py", have("go")),
    ("access log", "CPU of the access log as a share of a request, printed", "scripts/bench_accesslog.py --rounds 8 --seconds 1", have("taskset", "cc")),
    ("console", "the console in a browser: Chromium; pictures of its views are in build/acceptance/shots",
     'mkdir -p build/acceptance/shots && scripts/console-test.sh -v -shots "$PWD/build/acceptance/shots"', browser),
    ("commands", "every command with its flags, --json, errors, completion; a running router's drain, reload, restart, top, explain, support bundle, records",
     "go test -count=1 -v -skip 'TestQuickstart$' ./cmd/sluice", have("go")),
    ("quick start", "docs/quickstart.md: its commands in bash, their output compared with the page", "go test -count=1 -run 'TestQuickstart$' ./cmd/sluice", have("go", "bash", "curl")),
    ("request log", "access log and traces, of entries and of whole routers", "go test -count=1 -v ./router/requestlog/... ./router/e2e/requestlog", have("go")),
    ("metrics", "exposition, cardinality, cost of counting, and the series of whole routers", "go test -count=1 -v ./router/obs ./router/e2e/metrics", have("go")),
    ("admin API", "routes, tokens, profiles", "go test -count=1 -v ./router/admin -skip InBrowser", have("go")),
    ("docs", "the site, with links: mkdocs-material", "make --no-print-directory docs", have("npm")),
    ("open webui", "docs/open-webui.md: Open WebUI, which sends a chat", "scripts/open_webui_test.py", have("python3")),
    ("litellm", "docs/litellm.md: the LiteLLM proxy, a request whole and streamed", "scripts/litellm_test.py", have("python3", "curl")),
    ("load clients", "docs/bench-clients.md: vllm bench serve, sglang.bench_serving, aiperf, sluice load", "scripts/bench_clients_test.py", have("python3")),
    ("slurm", "the batch script and the configuration of docs/slurm.md: slurmctld, slurmd, sbatch", "scripts/slurm_test.sh", debian),
    ("compare", "Sluice beside haproxy, nginx, vllm-router, sglang-router and smg, one round; figures for docs/compare.md come from `make compare`", "scripts/compare.py --quick",
     lambda: have("haproxy")() or ("" if (os.cpu_count() or 1) > 1 else "needs two cores")),
    ("documents", "links, commands, yaml and reference of the documents", "scripts/check_docs.py", have("go")),
]


def judge(code, output):
    """Returns the result of a command that ended so, and what the table says of it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1][:150] if lines else ""
    if code:
        return "FAILED", last
    skipped = [line.split(None, 1)[1] for line in lines if re.match(r"(skip|SKIP|--- SKIP:) +\S", line)]
    skipped = [what.removeprefix("SKIP: ") for what in skipped]
    if skipped:
        return "passed, in part", "%d skipped: %s; %s" % (len(skipped), "; ".join(skipped)[:300], last)
    return "passed", last


def run(name, command):
    """Runs the command and judges it."""
    path = os.path.join(OUTPUT, name.replace(" ", "-") + ".txt")
    with open(path, "w") as out:
        code = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT).returncode
    with open(path, errors="replace") as f:
        return judge(code, f.read())


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="comma-separated names of checks")
    ap.add_argument("--list", action="store_true", help="list the checks")
    a = ap.parse_args()
    known = [name for name, _, _, _ in CHECKS]
    only = [n for n in a.only.split(",") if n]
    for n in only:
        if n not in known:
            ap.error("unknown check %r; want one of: %s" % (n, ", ".join(known)))
    os.makedirs(OUTPUT, exist_ok=True)
    rows, failed = [], 0
    for name, shows, command, why_not in CHECKS:
        if only and name not in only:
            continue
        if a.list:
            print("%-14s %s" % (name, shows))
            continue
        began, why = time.monotonic(), why_not()
        if why:
            result, reported = "cannot run", why
        else:
            print("acceptance: %s …" % name, file=sys.stderr, flush=True)
            result, reported = run(name, command)
            failed += result == "FAILED"
        rows.append((name, result, "%d s" % (time.monotonic() - began), shows, reported))
    if a.list:
        return
    print("\n| check | result | time | shows | last line |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print("| %s |" % " | ".join(cell.replace("|", "/") for cell in row))
    if failed:
        sys.exit("acceptance: %d checks failed; their output is in build/acceptance/" % failed)


if __name__ == "__main__":
    main()
