#!/usr/bin/env python3
"""Checks the documents against the code. It prints each fault and exits with 1 if it found any.

- Every relative link of a Markdown file refers to a file, and its fragment to a heading of that file.
- Every function in a flow of ARCHITECTURE.md exists in the package named there, and the hop counts are right.
- Every source file that a document names exists.
- Every `go test ./PACKAGE -run NAME` of a document matches a test of the package, every `-bench NAME` a benchmark.
- Every folder in ARCHITECTURE.md's package map exists, and every package is in the map.
- Every `sluice ...` command, in a block or within a sentence, has subcommands and flags that bin/sluice has,
  and every `--set PATH=` a path of the configuration.
- Every yaml block is a configuration that `sluice check` accepts. A block whose first line is a comment
  that names a file other than sluice.yaml or workers.yaml is another program's, as is one of Kubernetes.
- Every haproxy and nginx block is a configuration that haproxy -c or nginx -t accepts, where that is installed.
- docs/headers.md has every X-Sluice header and every reason of the code, with its status; docs/api.md has every
  route; every log message that the pages quote exists.
- Every page of docs/ is in the navigation of mkdocs.yml, or listed there as left out of it.

The checks that need bin/sluice are left out, with a message, where it is missing or out of date; make lint builds it.
"""
import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

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
    """Compares the hop counts of the flow tables with the functions listed, and those of the prose before them."""
    total, stated = 0, None
    for line in section.splitlines():
        cells = [c.strip(" *") for c in line.strip("|").split("|")]
        stated = next(iter(re.findall(r"\b(\d+) hops\b", line)), stated)
        if not line.startswith("|") or cells[0] == "stage":
            total = 0
        elif cells[0] == "total":
            if total != int(cells[-1]):
                faults.append(f"ARCHITECTURE.md: a flow has {total} hops, its total says {cells[-1]}")
            if stated != cells[-1]:
                faults.append(f"ARCHITECTURE.md: the text before a flow of {cells[-1]} hops says {stated}")
            stated = None
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


SLUICE = os.path.join(ROOT, "bin", "sluice")
BLOCK = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^ *```", re.M | re.S)
INLINE = re.compile(r"`((?:bin/)?sluice [^`\n]+)`")
HIDDEN = {"agent-host"}  # commands that the router runs itself and the help leaves out
# Pages about former releases, and output of runs.
HISTORY = re.compile(r"^(CHANGELOG|docs/upgrading|docs/e2e-.*|docs/soaks)\.md$")


def sluice(*arguments):
    # The router's own variables must not change what is checked.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    environment["SLUICE_REGISTRATION_TOKEN"] = "a-token-of-the-examples"  # which they leave to the environment
    return subprocess.run([SLUICE, *arguments], capture_output=True, text=True, env=environment, timeout=60)


@functools.cache
def subcommands(*command):
    """Returns the names of the subcommands of sluice, or of one of its commands."""
    text = sluice(*command, "--help").stdout.split("\nExamples:")[0].split("\nFlags:")[0]
    return set(re.findall(r"^  ([a-z][\w-]*)  +\S", text, flags=re.M))


@functools.cache
def flags(*command):
    found = set(re.findall(r"^ +(?:-\w, )?--([\w-]+)", sluice(*command, "--help").stdout.split("\nFlags:")[-1], flags=re.M))
    return found | set(re.findall(r"^ +-(\w), ", sluice(*command, "--help").stdout, flags=re.M))


@functools.cache
def schema():
    return json.loads(sluice("config", "schema").stdout)


def has_setting(path):
    """Reports whether the configuration has a field with a dotted path."""
    node = schema()
    for part in path.split("."):
        while "$ref" in node:
            node = schema()["$defs"][node["$ref"].rpartition("/")[2]]
        node = node.get("properties", {}).get(part) or node.get("additionalProperties")
        if not isinstance(node, dict):
            return False
    return True


def command_lines(language, block):
    """Yields the words of every call of sluice in a block."""
    if language not in ("", "sh", "bash", "shell", "console", "ini"):
        return
    lines = block.replace("\\\n", " ").splitlines()
    if any(line.lstrip().startswith("$ ") for line in lines):  # a transcript: the other lines are output
        lines = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
    for line in lines:
        yield from calls(line)


def calls(line):
    for part in re.split(r"\|\||&&|[|;&](?=\s|$)|\$\(", re.sub(r"(^|\s)#.*", "", line)):
        try:
            words = shlex.split(part)
        except ValueError:  # a quote that closes on another line
            words = part.split()
        for i, word in enumerate(words):
            if i and words[i - 1] == "-u":
                continue
            if re.fullmatch(r"(?:ExecStart=)?(?:[\w./~-]*/)?sluice", word):
                yield words[i + 1 :]
                break
            # Before the command may be variables, and programs that run it.
            if not re.match(r"\w+=|sudo$|nice$|-[un]$|\d+$", word):
                break


def check_call(path, words):
    command = []
    while words and not words[0].startswith("-") and words[0] in (subcommands(*command) if not command or command == ["config"] else ()):
        command.append(words.pop(0))
    shown = " ".join(["sluice", *command, *words])
    if not command:
        # Placeholders and text: sluice COMMAND, sluice ..., a lone `sluice`.
        if words and re.match(r"[a-z]", words[0]) and words[0] not in HIDDEN:
            faults.append(f"{path}: {shown}: sluice has no command {words[0]}")
        return
    for i, word in enumerate(words):
        name = re.match(r"--?([A-Za-z][\w-]*)", word)
        if not name:
            continue
        if name[1] not in flags(*command):
            faults.append(f"{path}: {shown}: sluice {' '.join(command)} has no flag {name[0]}")
        elif name[1] == "set" and command != ["replay"]:
            value = word.partition("=")[2] if "=" in word else (words[i + 1] if i + 1 < len(words) else "")
            setting = value.partition("=")[0]
            if setting and re.match(r"[a-z]", setting) and not has_setting(setting):
                faults.append(f"{path}: {shown}: the configuration has no field {setting}")


def check_yaml(path, block):
    first = block.lstrip().partition("\n")[0]
    named = re.match(r"# *(?:\S*/)?([\w.-]+\.(?:ya?ml|json|toml))\b", first)
    if first.startswith("apiVersion:") or named and named[1] not in ("sluice.yaml", "workers.yaml"):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "sluice.yaml")
        with open(file, "w", encoding="utf-8") as f:
            f.write(re.sub(r": …", ": left-out-of-the-page", block))
        done = sluice("check", "--config", file)
    # The files and folders of an example need not exist here.
    lines = [line for line in done.stderr.splitlines() if line.strip() and not re.search(r": (certs: cannot (stat|read|open)|accesslog: cannot write) ", line)]
    if done.returncode and lines:
        faults.append(f"{path}: sluice check refuses the yaml block that begins with {first!r}: {lines[0].replace(file, 'line')}")


def check_proxies(path):
    """Checks the configurations of other proxies, without their certificates and with a socket of their own."""
    for _, language, block in BLOCK.findall(read(path)):
        if language not in ("haproxy", "nginx"):
            continue
        if not shutil.which(language):
            print(f"skip  {path}, a configuration of {language}: no {language}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, language)
            if language == "haproxy":
                text, command = re.sub(r" ssl crt \S+", "", block), ["haproxy", "-c", "-f", file]
            else:
                text = re.sub(r"ssl_certificate\w* [^;]+;", "", re.sub(r"listen \d+ ssl;", f"listen unix:{folder}/socket;", block))
                text = f"pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {text} }}"
                command = ["nginx", "-t", "-p", folder, "-c", file]
            with open(file, "w", encoding="utf-8") as f:
                f.write(text)
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            faults.append(f"{path}: {language} refuses the block that begins with {block.splitlines()[0]!r}: {(done.stderr + done.stdout).strip()[:400]}")


def check_sluice(path):
    """Checks the commands and configurations of one document with bin/sluice."""
    text = read(path)
    for indent, language, block in BLOCK.findall(text):
        block = re.sub(rf"^{indent}", "", block, flags=re.M)
        for words in command_lines(language, block):
            check_call(path, words)
        if language == "yaml":
            check_yaml(path, block)
    for line in INLINE.findall(BLOCK.sub("", text)):
        for words in calls(line):
            check_call(path, words)


def go_sources(*folders):
    return [f for f in sources() if f.endswith(".go") and not f.endswith("_test.go") and f.startswith(folders)]


def check_headers(text):
    """Compares the tables of docs/headers.md with the headers of the code, by section."""
    tables = {}
    for title, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S):
        cells = "\n".join(re.findall(r"^\| (`.*?) \|", section, flags=re.M))
        tables[title] = {re.split(r"[:…]", name)[0].rstrip("-").lower() for name in re.findall(r"`([^`]+)`", cells)}
    code = "".join(read(f) for f in go_sources("router/", "dataplane/", "cmd/") if not f.startswith("router/e2e/"))
    constants = dict(re.findall(r'(\w+) += "([A-Za-z][\w-]*-[\w-]+)"', code))
    own = {n.lower() for n in re.findall(r'"(X-Sluice-[A-Za-z-]+)"', code)}
    # Those that the router sets on its answers, by a name or a constant; CORS and HTTP itself apart.
    set_ = re.findall(r'\bSetHeader\((?:"([A-Za-z-]+)"|(header\w+)),', "".join(read(f) for f in go_sources("router/pd/", "router/apikey/")))
    answers = {(name or constants.get(constant, constant)).lower() for name, constant in set_} | {"x-sluice-reason", "x-request-id", "x-ratelimit"}
    # Those that it reads: of sessions, of classes, and what else dataplane/headerrules names as its own.
    reads = {n.lower() for f in ("router/session/recognise.go", "router/pd/classes.go") for n in re.findall(r'"([A-Za-z]+-[A-Za-z-]+|session_id)"', read(f))}
    reads |= {n for n in re.findall(r'^\t"(x-[a-z-]+)": +Router,', read("dataplane/headerrules/headerrules.go"), flags=re.M)}
    requests, responses, engines = (tables.get(title, set()) for title in ("Request headers", "Response headers", "Header to engines"))
    if len(own) < 15 or len(answers) < 8 or len(reads) < 15:
        faults.append("check_docs.py does not find the headers in the code")
    faults.extend(f"docs/headers.md: the request headers lack {n}" for n in sorted(reads - requests))
    faults.extend(f"docs/headers.md: the response headers lack {n}" for n in sorted(answers - responses))
    faults.extend(f"docs/headers.md: lacks {n}" for n in sorted(own - requests - responses - engines))
    known = code.lower()
    faults.extend(f"docs/headers.md: the code has no header {n}" for n in sorted(requests | responses | engines) if f'"{n}' not in known)


def check_reference():
    """Compares the reference pages that people write with the code."""
    text = read("docs/headers.md")
    check_headers(text)
    code = read("dataplane/front/reason.go")
    status = dict(re.findall(r"^\t(\w+): +\{(\d+),", code, flags=re.M))
    reasons = {word: status.get(name) for name, word in re.findall(r'^\t(\w+) +Reason = "(\w+)"', code, flags=re.M)}
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d{3}) \|", text, flags=re.M))
    if len(reasons) < 30:
        faults.append("check_docs.py does not find the reasons in the code")
    for word in sorted(reasons.keys() | rows.keys()):
        if reasons.get(word) != rows.get(word):
            faults.append(f"docs/headers.md: the reason {word} has the status {rows.get(word)}, in dataplane/front/reason.go {reasons.get(word)}")
    code = "".join(read(f) for f in go_sources("router/", "dataplane/", "cmd/", "nixl/"))
    for path in sources():
        if not re.match(r"docs/.*\.md$", path) or HISTORY.match(path):
            continue
        for line in read(path).splitlines():
            for quoted in re.findall(r"\blogs? (?:says?|line(?: is)?|warns?) \(?`([a-z][^`]*(?: [^`]+)+)`", line):
                if quoted not in code:
                    faults.append(f"{path}: the router logs no {quoted!r}")
    for quoted in re.findall(r"`([a-z][^`]*(?: [^`]+){4,})`", re.sub(r"```.*?```", "", read("docs/troubleshooting.md"), flags=re.S)):
        if not re.match(r"(sluice|curl|sudo|ss|journalctl) ", quoted) and quoted not in code:
            faults.append(f"docs/troubleshooting.md: the router has no message {quoted!r}")


def check_navigation():
    text = read("mkdocs.yml")
    for path in sorted(glob.glob("docs/**/*.md", root_dir=ROOT, recursive=True)):
        name = {"docs/README.md": "index.md", "docs/index.md": "kv-index.md"}.get(path, path.removeprefix("docs/"))
        if not re.search(rf"(?<![\w/-]){re.escape(name)}\b", text):
            faults.append(f"{path}: mkdocs.yml does not have {name} in its navigation")


def is_current():
    """Reports whether bin/sluice is there and has the commands of docs/commands.md, which a Go test compares with the code."""
    if not os.access(SLUICE, os.X_OK):
        return False
    named = set(re.findall(r"^\| `sluice ([\w-]+)", read("docs/commands.md"), flags=re.M))
    return named == subcommands()


def main():
    built = is_current()
    if not built:
        print("skip  commands and configurations: bin/sluice is missing or older than docs/commands.md (make build)", file=sys.stderr)
    for path in sorted(glob.glob("*.md", root_dir=ROOT) + glob.glob("docs/**/*.md", root_dir=ROOT, recursive=True)):
        check_links(path)
        check_commands(path)
        check_sources(path)
        check_proxies(path)
        if built and not HISTORY.match(path):
            check_sluice(path)
    check_reference()
    check_navigation()
    check_architecture()
    for fault in faults:
        print("docs: " + fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
