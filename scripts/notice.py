#!/usr/bin/env python3
"""Writes NOTICE: the licences of the modules that are linked into bin/sluice.

The texts come from the Go module cache; the script needs no network.

  scripts/notice.py           writes NOTICE
  scripts/notice.py --check   fails if NOTICE is not current
"""
import hashlib
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PATH = os.path.join(ROOT, "NOTICE")
LICENCE_FILE = re.compile(r"^(licen[cs]e|copying|notice)([._-].*)?$", re.IGNORECASE)


def modules():
    """Returns {(path, version): folder} of every linked module."""
    found = {}
    template = "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Version}}\t{{.Dir}}{{end}}{{end}}"
    text = subprocess.run(
        ["go", "list", "-deps", "-f", template, "./cmd/sluice"],
        cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "GOPROXY": "off", "GOOS": "linux", "GOARCH": "amd64", "CGO_ENABLED": "1"},
    ).stdout
    for line in text.splitlines():
        if line:
            path, version, folder = line.split("\t")
            found[path, version] = folder
    return found


# Files that are not Go modules and are embedded into the binary: {(name, version): folder}.
EMBEDDED = {("uPlot (github.com/leeoniya/uPlot)", "v1.6.32"): os.path.join(ROOT, "router/admin/console/uplot")}


def kind(text):
    """Returns the SPDX identifier of a licence text."""
    flat = " ".join(text.split()).lower()
    if "apache license" in flat and "version 2.0" in flat:
        return "Apache-2.0"
    if "mozilla public license" in flat and "2.0" in flat:
        return "MPL-2.0"
    if "redistribution and use in source and binary forms" in flat:
        return "BSD-3-Clause" if "endorse or promote" in flat else "BSD-2-Clause"
    if "permission is hereby granted, free of charge" in flat:
        return "MIT"
    if "permission to use, copy, modify, and" in flat and "distribute this software" in flat:
        return "ISC"
    return ""


def texts_of(folder):
    """Yields (file name, text) of the licence and notice files at the top of a module."""
    for name in sorted(os.listdir(folder)):
        full = os.path.join(folder, name)
        if LICENCE_FILE.match(name) and os.path.isfile(full):
            with open(full, encoding="utf-8", errors="replace") as f:
                yield name, f.read().strip()


def notice():
    rows, users, order = [], {}, []
    for (path, version), folder in [*sorted(modules().items()), *EMBEDDED.items()]:
        kinds, numbers = [], []
        for name, text in texts_of(folder):
            k = kind(text)
            if k and k not in kinds:
                kinds.append(k)
            key = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
            if key not in users:
                users[key] = (text, [])
                order.append(key)
            users[key][1].append(f"{path} ({name})")
            numbers.append(order.index(key) + 1)
        if not kinds:
            sys.exit(f"notice: cannot identify the licence of {path} {version}; read its licence file and extend kind()")
        rows.append(f"{path} {version}: {' and '.join(kinds)}, texts {', '.join(map(str, numbers))}")
    out = [
        "Sluice is licensed under the Apache License, Version 2.0 (see LICENSE).",
        "",
        "The binary contains the Go standard library (BSD-3-Clause, https://go.dev/LICENSE), the modules below and, in the console, uPlot.",
        "It is linked dynamically with libzmq (MPL-2.0) and loads NIXL, UCX and CUDA at run time when these are installed.",
        "scripts/notice.py writes this file from the Go module cache.",
        "", *rows,
    ]
    for number, key in enumerate(order, 1):
        text, used_by = users[key]
        out += ["", "=" * 78, f"Text {number}: " + ", ".join(used_by), "=" * 78, "", *(line.rstrip() for line in text.splitlines())]
    return "\n".join(out) + "\n"


def main():
    want = notice()
    if sys.argv[1:] == ["--check"]:
        with open(PATH, encoding="utf-8") as f:
            if f.read() != want:
                sys.exit("notice: NOTICE is not current; run scripts/notice.py")
        return
    with open(PATH, "w", encoding="utf-8") as f:
        f.write(want)


if __name__ == "__main__":
    main()
