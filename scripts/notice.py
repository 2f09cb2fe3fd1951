#!/usr/bin/env python3
"""Writes NOTICE: the licences of the modules that are linked into bin/sluice; and
native/tokenizer/NOTICE: those of the crates in libsluice_tokenizer.so.

The texts come from the Go module cache and from cargo's registry; the script needs no network.

  scripts/notice.py           writes NOTICE
  scripts/notice.py --crates  writes native/tokenizer/NOTICE, where cargo is installed
  scripts/notice.py --check   fails if one of them is not current
"""
import hashlib
import json
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
    if "unicode, inc." in flat and "data files and any associated documentation" in flat:
        return "Unicode-3.0"
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
        "It also loads libsluice_tokenizer.so, whose licences are in native/tokenizer/NOTICE.",
        "scripts/notice.py writes this file from the Go module cache.",
        "", *rows,
    ]
    for number, key in enumerate(order, 1):
        text, used_by = users[key]
        out += ["", "=" * 78, f"Text {number}: " + ", ".join(used_by), "=" * 78, "", *(line.rstrip() for line in text.splitlines())]
    return "\n".join(out) + "\n"


TOKENIZER = os.path.join(ROOT, "native", "tokenizer")
CRATES = os.path.join(TOKENIZER, "NOTICE")
ACCEPTED = {"Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Unicode-3.0"}


def lock_line():
    with open(os.path.join(TOKENIZER, "Cargo.lock"), "rb") as f:
        return "Cargo.lock: sha256 " + hashlib.sha256(f.read()).hexdigest()


def crates():
    """Returns {(name, version): (licence expression, folder)} of every crate that is linked."""
    text = subprocess.run(["cargo", "metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", "x86_64-unknown-linux-gnu"],
                          cwd=TOKENIZER, check=True, capture_output=True, text=True).stdout
    data = json.loads(text)
    nodes = {n["id"]: n for n in data["resolve"]["nodes"]}
    packages = {p["id"]: p for p in data["packages"]}
    found, seen, todo = {}, set(), [data["resolve"]["root"]]
    while todo:
        i = todo.pop()
        p = packages[i]
        if i in seen or any("proc-macro" in t["kind"] for t in p["targets"]):
            continue  # a macro runs in the compiler
        seen.add(i)
        todo += [d["pkg"] for d in nodes[i]["deps"] if any(k["kind"] is None for k in d["dep_kinds"])]
        if i != data["resolve"]["root"]:
            found[p["name"], p["version"]] = (p["license"] or "", os.path.dirname(p["manifest_path"]))
    return found


# Licences of code that a crate contains, in files of other names.
CONTAINED = {"fastokens": "NOTICES.txt", "pcre2-sys": os.path.join("upstream", "include", "pcre2.h")}


def contained(name, folder):
    """Returns the licence text of what a crate contains, or ""."""
    if name not in CONTAINED:
        return ""
    with open(os.path.join(folder, CONTAINED[name]), encoding="utf-8") as f:
        text = f.read()
    return text.split("#ifndef")[0].strip() if CONTAINED[name].endswith(".h") else text.strip()


def crates_notice():
    rows, texts = [], {}
    for (name, version), (expression, folder) in sorted(crates().items()):
        files = {}
        for file, text in texts_of(folder):
            files.setdefault(kind(text), (file, text))
        # Of several licences to choose from, the first that we accept and whose text is there.
        need = ["Unicode-3.0", "MIT"] if " AND " in expression else [next((k for k in ["MIT", "Apache-2.0", *sorted(ACCEPTED)] if k in files), "")]
        if not all(k in files and k in ACCEPTED for k in need):
            sys.exit(f"notice: cannot identify the licence of the crate {name} {version} ({expression})")
        if more := contained(name, folder):
            texts.setdefault(" ".join(more.split()), (more, []))[1].append(f"contained in {name}")
        for k in need:
            texts.setdefault(" ".join(files[k][1].split()), (files[k][1], []))[1].append(name)
        rows.append(f"{name} {version}: {' and '.join(need)}")
    out = ["libsluice_tokenizer.so contains the crates below and Rust's standard library (MIT or Apache-2.0).",
           "scripts/notice.py --crates writes this file.", lock_line(), "", *rows]
    for text, users in texts.values():
        out += ["", "=" * 78, ", ".join(users), "=" * 78, "", *(line.rstrip() for line in text.splitlines())]
    return "\n".join(out) + "\n"


def main():
    if sys.argv[1:] == ["--crates"]:
        with open(CRATES, "w", encoding="utf-8") as f:
            f.write(crates_notice())
        return
    if sys.argv[1:] == ["--check"]:
        with open(CRATES, encoding="utf-8") as f:
            if lock_line() not in f.read():
                sys.exit("notice: native/tokenizer/NOTICE is not current; run scripts/notice.py --crates")
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
