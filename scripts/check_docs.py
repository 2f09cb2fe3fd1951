#!/usr/bin/env python3
"""Checks the documents against the code. It prints each fault and exits with 1 if it found any.

- Every relative link of a Markdown file refers to a file, and its fragment to a heading of that file.
- Every function in a flow of ARCHITECTURE.md exists in the package named there, and the hop counts are right.
- Every source file that a document names exists.
- Every `go test ./PACKAGE -run NAME` of a document matches a test of the package, every `-bench NAME` a benchmark.
- Every folder in ARCHITECTURE.md's package map exists, and every package is in the map.
"""
import functools
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(r"`([a-z][\w/]*)\.((?:[A-Za-z]\w*\.)?[A-Za-z]\w*)`")
faults = []


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


@functools.cache
def anchors(path):
    found, fenced = set(), False
    for line in read(path).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif line.startswith("#") and not fenced:
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def check_links(path):
    for target in LINK.findall(re.sub(r"```.*?```", "", read(path), flags=re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        full = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
        if not os.path.exists(os.path.join(ROOT, full)):
            faults.append(f"{path}: the target of the link {target} does not exist")
        elif fragment and full.endswith(".md") and fragment not in anchors(full):
            faults.append(f"{path}: {full} has no heading #{fragment}")


@functools.cache
def functions(folder):
    """Returns the names of the functions and methods of a package, methods as Type.name."""
    found = set()
    for path in glob.glob(os.path.join(ROOT, folder, "*.go")):
        if path.endswith("_test.go"):
            continue
        with open(path, encoding="utf-8") as f:
            for receiver, name in re.findall(r"^func (?:\((?:\w+ )?\*?(\w+)(?:\[[^\]]*\])?\) )?(\w+)[\(\[]", f.read(), flags=re.M):
                found.add(f"{receiver}.{name}" if receiver else name)
    return found


SOURCE = re.compile(r"`([\w/-]+\.(?:go|py|c|h|sh))(?:: ?\w+)?`")


@functools.cache
def sources():
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [f for f in files if os.path.exists(os.path.join(ROOT, f))]


def check_sources(path):
    for name in SOURCE.findall(re.sub(r"```.*?```", "", read(path), flags=re.S)):
        if "NAME" not in name and not any(f == name or f.endswith("/" + name) for f in sources()):
            faults.append(f"{path}: there is no file {name}")


def package_folders():
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.go"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({os.path.dirname(f) for f in files.split() if not f.endswith("_test.go") and os.path.exists(os.path.join(ROOT, f))})


def check_hops(section):
    """Compares the hop counts of the flow tables with the functions listed."""
    total = 0
    for line in section.splitlines():
        cells = [c.strip(" *") for c in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "stage":
            total = 0
        elif cells[0] == "total":
            if total != int(cells[-1]):
                faults.append(f"ARCHITECTURE.md: a flow has {total} hops, its total says {cells[-1]}")
        elif cells[-1].isdigit():
            total += int(cells[-1])
            if "→" in line and line.count("→") + 1 != int(cells[-1]):
                faults.append(f"ARCHITECTURE.md: {line.count('→') + 1} functions, not {cells[-1]}: {line[:60]}")


def check_architecture():
    text, folders = read("ARCHITECTURE.md"), package_folders()
    section = re.split(r"\n(?:## |### Questions)", text.split("\n## Flows", 1)[1], maxsplit=1)[0]
    for package, name in NAME.findall(section):
        fits = [f for f in folders if f == package or f.endswith("/" + package)]
        if not fits:
            faults.append(f"ARCHITECTURE.md: there is no package {package} (of {package}.{name})")
        elif not any(name in functions(f) for f in fits):
            faults.append(f"ARCHITECTURE.md: package {package} has no function {name}")
    check_hops(section)
    section = text.split("\n## Package map", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"^\| `([\w/]+)`", section, flags=re.M))
    faults.extend(f"ARCHITECTURE.md: there is no package folder {n}" for n in sorted(named - set(folders)) if not os.path.isdir(os.path.join(ROOT, n)))
    faults.extend(f"ARCHITECTURE.md: the package map lacks {f}" for f in folders if f not in named and not any(f.startswith(n + "/") for n in named if n.startswith(("bench", "scripts"))))


COMMAND = re.compile(r"go test ([^`\n]*)")


@functools.cache
def tests(folder):
    """Returns the names of a package's tests and benchmarks."""
    found = []
    for path in glob.glob(os.path.join(ROOT, folder, "*_test.go")):
        with open(path, encoding="utf-8") as f:
            found += re.findall(r"^func ((?:Test|Benchmark|Fuzz)\w*)\(", f.read(), flags=re.M)
    return found


def check_commands(path):
    for command in COMMAND.findall(read(path)):
        folders = [f.strip("./") for f in re.findall(r"\./[\w/]+(?=[\s)]|$)", command)]
        for flag, kind in (("run", "Test"), ("bench", "Benchmark")):
            match = re.search(rf"-{flag} '?([\w|/$=]+)", command)
            if not match or match[1] in ("xx", "xxx") or not folders:
                continue
            for pattern in match[1].split("/")[0].split("|"):
                if not any(re.search(pattern, t) for f in folders for t in tests(f) if t.startswith(kind)):
                    faults.append(f"{path}: go test {command.strip()}: no {kind.lower()} of {', '.join(folders)} matches {pattern}")


def main():
    for path in sorted(glob.glob("*.md", root_dir=ROOT) + glob.glob("docs/**/*.md", root_dir=ROOT, recursive=True)):
        check_links(path)
        check_commands(path)
        check_sources(path)
    check_architecture()
    for fault in faults:
        print("docs: " + fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
