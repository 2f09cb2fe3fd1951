"""Copies the repository's Markdown files into the folder from which mkdocs builds the site.

usage: stage.py FOLDER

mkdocs wants all pages in one folder, and index.md as the start page. So the files of docs/ keep their
names, except docs/README.md, which becomes the start page, and docs/index.md, which is about the KV index;
pages from elsewhere in the repository get the names in PAGES. Links are changed to fit; of a link to a source
file, which the site does not have, the text stays, and a link whose text is the name of a page gets its title.
"""

import os
import posixpath
import re
import shutil
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PAGES = {
    "docs/README.md": "index.md",
    "docs/index.md": "kv-index.md",
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELIABILITY.md": "reliability.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.txt",
    "NOTICE": "notice.txt",
    "nixl/connector/README.md": "connector.md",
    "router/engineapi/python/README.md": "engine-api-python.md",
}
FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.M | re.S)
LINK = re.compile(r"(\[[^\]]*)\]\(([^)\s]+)\)")


def files():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "docs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return sorted({f for f in listed if f.endswith((".md", ".svg", ".png")) and os.path.exists(os.path.join(ROOT, f))} | set(PAGES))


def staged(path):
    """Returns the path in the site of a file of the repository."""
    return PAGES.get(path) or posixpath.relpath(path, "docs")


def title(path, fragment):
    """Returns the heading of a page to which a link leads: that of the fragment, else the first."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        headings = [m.strip() for m in re.findall(r"^#+ (.*)", FENCE.sub("", f.read()), flags=re.M)]
    for heading in headings:
        if re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") == fragment:
            return heading
    return headings[0]


def with_links(path, text, known):
    def changed(match):
        name, hash_sign, fragment = match[2].partition("#")
        if re.match(r"[a-z]+:", match[2]) or not name:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if target not in known:
            exists = os.path.exists(os.path.join(ROOT, target))
            return match[1][1:] if exists else match[0]  # mkdocs reports a link to nothing
        shown = match[1]
        if shown[1:] in (name, posixpath.basename(name)) and target.endswith(".md"):  # a file name means nothing to a reader of the site
            shown = "[" + title(target, fragment)
        return f"{shown}]({posixpath.relpath(staged(target), posixpath.dirname(staged(path)) or '.')}{hash_sign}{fragment})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(changed, part) for part in parts)


def main():
    folder = sys.argv[1]
    shutil.rmtree(folder, ignore_errors=True)
    known = set(files())
    for path in sorted(known):
        to = os.path.join(folder, staged(path))
        os.makedirs(os.path.dirname(to), exist_ok=True)
        if not path.endswith(".md"):
            shutil.copy(os.path.join(ROOT, path), to)
            continue
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            text = f.read()
        with open(to, "w", encoding="utf-8") as f:
            f.write(with_links(path, text, known))


if __name__ == "__main__":
    main()
