#!/usr/bin/env python3
"""Adds to the SBOM of the Go modules (CycloneDX, JSON) what the packages contain besides: the
C and C++ libraries that are linked statically, and the crates of the native tokenizer.

  scripts/sbom.py FILE [--archives LIST] [--crates]

LIST is what scripts/static-zmq.sh wrote: a line for each library, with its name and the Debian
package, version and architecture that it comes from. --crates adds every crate of
native/tokenizer/Cargo.lock; those that only the build needs have the scope "excluded". FILE is
changed in place; its time becomes that of the commit, and its serial number follows from the content.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import uuid
from urllib.parse import quote

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENIZER = os.path.join(ROOT, "native", "tokenizer")


def purl(kind, name, version, **qualifiers):
    """Returns a package URL."""
    tail = "&".join(f"{k}={quote(v, safe='.-~')}" for k, v in sorted(qualifiers.items()))
    return f"pkg:{kind}/{quote(name, safe='/.-~')}@{quote(version, safe='.-~')}" + ("?" + tail if tail else "")


def distribution():
    """Returns the name of the Linux distribution whose archives are linked, such as debian."""
    with open("/etc/os-release", encoding="utf-8") as f:
        return re.search(r'^ID="?([a-z]+)', f.read(), re.MULTILINE)[1]


def archives(path):
    """Returns the components of a list that scripts/static-zmq.sh wrote."""
    found = []
    with open(path, encoding="utf-8") as f:
        for line in f:
            name, package, version, arch = line.split()
            url = purl(f"deb/{distribution()}", package, version, arch=arch)
            found.append({"bom-ref": url, "type": "library", "name": name, "version": version, "scope": "required", "purl": url,
                          "description": f"linked statically, from the package {package}",
                          "licenses": [{"license": {"name": f"see licenses/{name}"}}]})
    return found


def locked():
    """Returns the crates of Cargo.lock as dictionaries of name, version, checksum and dependencies."""
    with open(os.path.join(TOKENIZER, "Cargo.lock"), encoding="utf-8") as f:
        blocks = f.read().split("[[package]]\n")[1:]
    crates = []
    for block in blocks:
        crate = dict(re.findall(r'^(\w+) = "(.*)"$', block, re.MULTILINE))
        crate["dependencies"] = re.findall(r'^ "(.*)",$', block, re.MULTILINE)
        crates.append(crate)
    return crates


def linked():
    """Returns {(name, version): licence} of the crates in the library, from its NOTICE."""
    with open(os.path.join(TOKENIZER, "NOTICE"), encoding="utf-8") as f:
        head = f.read().split("=" * 78)[0]
    rows = re.findall(r"^(\S+) (\d\S*): (.+)$", head, re.MULTILINE)
    return {(name, version): licence.replace(" and ", " AND ") for name, version, licence in rows}


def crates():
    """Returns the components of the native tokenizer, what each depends on, and its own reference."""
    components, edges, licences, refs = [], [], linked(), {}
    packages = locked()
    for p in packages:
        refs[p["name"], p["version"]] = purl("cargo", p["name"], p["version"])
    if missing := set(licences) - set(refs):
        sys.exit(f"sbom: native/tokenizer/NOTICE has crates that Cargo.lock does not have: {sorted(missing)}")
    std = subprocess.run(["rustc", "--version"], cwd=TOKENIZER, check=True, capture_output=True, text=True).stdout.split()[1]
    std_ref = purl("generic", "rust-std", std)
    own = ""
    for p in packages:
        ref = refs[p["name"], p["version"]]
        c = {"bom-ref": ref, "type": "library", "name": p["name"], "version": p["version"], "scope": "required", "purl": ref}
        needs = [refs[tuple(d.split()[:2])] if " " in d else next(r for (name, _), r in refs.items() if name == d) for d in p["dependencies"]]
        if "checksum" not in p:  # the library itself
            own, c["description"] = ref, "libsluice_tokenizer.so"
            c["licenses"] = [{"license": {"id": "Apache-2.0"}}]
            needs.append(std_ref)
        else:
            c["hashes"] = [{"alg": "SHA-256", "content": p["checksum"]}]
            if licence := licences.get((p["name"], p["version"])):
                c["licenses"] = [{"expression": licence}] if " " in licence else [{"license": {"id": licence}}]
            else:
                c["scope"] = "excluded"
        components.append(c)
        edges.append({"ref": ref, "dependsOn": sorted(needs)})
    components.append({"bom-ref": std_ref, "type": "library", "name": "rust-std", "version": std, "scope": "required", "purl": std_ref,
                       "description": "Rust's standard library", "licenses": [{"expression": "MIT OR Apache-2.0"}]})
    edges.append({"ref": std_ref})
    return components, edges, own


def main():
    parser = argparse.ArgumentParser(description="Adds statically linked libraries and crates to an SBOM of Go modules.")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--archives", metavar="LIST", help="list of the libraries that are linked statically")
    parser.add_argument("--crates", action="store_true", help="add the crates of the native tokenizer")
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as f:
        sbom = json.load(f)
    main_ref = sbom["metadata"]["component"]["bom-ref"]
    direct = next(d for d in sbom["dependencies"] if d["ref"] == main_ref)
    added, edges = [], []
    if options.archives:
        libraries = archives(options.archives)
        added += libraries
        edges += [{"ref": c["bom-ref"]} for c in libraries]
        direct["dependsOn"] += [c["bom-ref"] for c in libraries]
    if options.crates:
        components, more, own = crates()
        added += components
        edges += more
        direct["dependsOn"].append(own)
    sbom["components"] += added
    sbom["dependencies"] += edges
    refs = [c["bom-ref"] for c in sbom["components"]]
    if len(set(refs)) != len(refs):
        sys.exit(f"sbom: components with the same reference: {sorted(r for r in set(refs) if refs.count(r) > 1)}")
    time = subprocess.run(["git", "log", "-1", "--format=%cI"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if time:
        sbom["metadata"]["timestamp"] = time
    sbom.pop("serialNumber", None)
    sbom["serialNumber"] = "urn:uuid:" + str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(sbom, sort_keys=True)))
    with open(options.file, "w", encoding="utf-8") as f:
        json.dump(sbom, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
