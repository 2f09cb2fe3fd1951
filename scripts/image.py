#!/usr/bin/env python3
"""Builds the container image of Sluice as an OCI archive, without a registry and without a container engine.

  scripts/image.py [--binary FILE] [--version VERSION] [--out FILE] [--add PACKAGE]... [--licenses FOLDER]

The archive can be imported by podman load, docker load and skopeo copy oci-archive:FILE.

The root has the files of a few Debian packages, unpacked without their scripts: the C library and the
other libraries that NIXL and UCX need where they are mounted into the container, and the certificates
of public authorities. It has no shell and no package manager. The packages are those of
the release that this machine runs, because the binary needs at least the C library that it was linked
with. --add names more of them, such as libucx0; the packages that they depend on must be named too.

The root is one layer, so that it is shared by images of one day; the binary and its configuration are
another. All times are those of the commit or of the packages, so the same commit and packages give
the same archive.
"""
import argparse
import gzip
import hashlib
import io
import json
import os
import posixpath
import re
import subprocess
import sys
import tarfile

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
CACHE = os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice")
PACKAGES = [
    "base-files", "ca-certificates", "libc6", "libgcc-s1", "libstdc++6", "libnuma1",
    "libibverbs1", "ibverbs-providers", "librdmacm1", "libnl-3-200", "libnl-route-3-200",
    "zlib1g", "libgomp1", "libssl3t64|libssl3",  # what libraries of the wheel of NIXL need
]
# Packages that only hold documents, scripts' needs or debconf questions.
NOT_NEEDED = {"adduser", "debconf", "openssl", "awk", "gcc-12-base", "gcc-13-base", "gcc-14-base", "libcrypt1"}
USER = 65532  # numeric, so that Kubernetes can check runAsNonRoot
TITLE = "Sluice"
DESCRIPTION = "Router and data plane for disaggregated LLM serving"
# usr/share/doc keeps only the licences.
KEPT = re.compile(r"^(etc/(debian_version|os-release|host\.conf|libibverbs\.d/|ca-certificates)|usr/(lib|lib64)/|usr/share/(doc/[^/]+/copyright$|ca-certificates/|common-licenses/))")
DROPPED = re.compile(r"^usr/(lib/[^/]+/(gconv|perf)/|lib/[^/]+/audit/|lib/(locale|systemd|udev)/|share/doc/sluice/)")


def run(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def commit():
    """Returns the commit and its time, in seconds and in RFC 3339."""
    return run("git", "rev-parse", "HEAD", cwd=ROOT).strip(), int(run("git", "log", "-1", "--format=%ct", cwd=ROOT)), run("git", "log", "-1", "--format=%cI", cwd=ROOT).strip()


def known(package):
    return subprocess.run(["apt-cache", "show", "--no-all-versions", package], capture_output=True, check=False).returncode == 0


def download(packages):
    """Returns the files of the packages in the cache, in the order of the names. NAME|NAME means the first that exists."""
    packages = [next((name for name in names.split("|") if known(name)), names) for names in packages]
    try:
        lines = run("apt-get", "download", "--print-uris", *packages)
    except subprocess.CalledProcessError:  # the lists of packages are absent
        updated = subprocess.run(["apt-get", "update", "-qq"], capture_output=True, text=True, check=False)
        found = subprocess.run(["apt-get", "download", "--print-uris", *packages], capture_output=True, text=True, check=False)
        if found.returncode != 0:
            sys.exit(f"image: apt-get finds no packages to download; run apt-get update as root\n{updated.stderr}{found.stderr}")
        lines = found.stdout
    folder = os.path.join(CACHE, "image-packages")
    os.makedirs(folder, exist_ok=True)
    wanted = {}
    for line in lines.splitlines():
        # 'URI' NAME_VERSION_ARCH.deb SIZE SHA256:DIGEST
        _, name, _, digest = line.split()
        wanted[name] = digest.partition(":")[2]
    absent = [name for name, digest in wanted.items() if not intact(os.path.join(folder, name), digest)]
    if absent:
        run("apt-get", "download", "-o", "APT::Sandbox::User=root", *(name.split("_")[0] for name in absent), cwd=folder)
    for name, digest in wanted.items():
        if not intact(os.path.join(folder, name), digest):
            sys.exit(f"image: {name} is not the package that the index names")
    return [os.path.join(folder, name) for name in sorted(wanted)]


def intact(path, digest):
    if not os.path.exists(path):
        return False
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest() == digest


class Layer:
    """The entries of a layer by their path, without a leading slash."""

    def __init__(self, time):
        self.entries = {}
        self.time = time

    def add(self, path, data=b"", mode=0o644, type=tarfile.REGTYPE, target="", owner=0, time=None):
        path = path.strip("/")
        if posixpath.dirname(path) and posixpath.dirname(path) not in self.entries:
            self.add(posixpath.dirname(path), mode=0o755, type=tarfile.DIRTYPE)
        info = tarfile.TarInfo(path)
        info.type, info.mode, info.linkname = type, mode, target
        info.uid = info.gid = owner
        info.size, info.mtime = len(data), self.time if time is None else time
        self.entries[path] = (info, data)

    def directory(self, path, mode=0o755, owner=0):
        self.add(path, mode=mode, type=tarfile.DIRTYPE, owner=owner)

    def link(self, path, target):
        self.add(path, mode=0o777, type=tarfile.SYMTYPE, target=target)

    def tar(self):
        """Returns the layer as a tar archive; entries are sorted, so directories precede their content."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for _, (info, data) in sorted(self.entries.items()):
                archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
        return out.getvalue()


def merged(path):
    """Returns where a package's file lies in a root whose /bin, /lib and /sbin are links to /usr."""
    first, _, rest = path.partition("/")
    return f"usr/{path}" if first in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") and rest else path


def base_layer(files):
    """Returns the layer with the packages' files, and a line NAME VERSION for each package."""
    layer, versions, newest, contents = Layer(0), [], 0, []
    for path in files:
        control = dict(line.split(": ", 1) for line in run("dpkg-deb", "-f", path).splitlines() if re.match(r"[A-Za-z-]+: ", line))
        stream = subprocess.run(["dpkg-deb", "--fsys-tarfile", path], check=True, capture_output=True).stdout
        contents.append((control, run("dpkg-deb", "-f", path), stream))
        with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
            newest = max(newest, *(member.mtime for member in archive))
    check_dependencies([control for control, _, _ in contents])
    layer.time = newest
    for name in ("bin", "sbin", "lib", "lib64"):
        layer.directory(f"usr/{name}")
        layer.link(name, f"usr/{name}")
    for control, fields, stream in contents:
        versions.append(f"{control['Package']} {control['Version']}")
        with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
            for member in archive:
                name = merged(posixpath.normpath(member.name).lstrip("./"))
                if member.isdir() or not KEPT.match(name) or DROPPED.match(name):
                    continue
                if member.issym():
                    layer.add(name, mode=0o777, type=tarfile.SYMTYPE, target=member.linkname, time=member.mtime)
                elif member.islnk():
                    layer.add(name, mode=member.mode, type=tarfile.LNKTYPE, target=merged(posixpath.normpath(member.linkname).lstrip("./")), time=member.mtime)
                else:
                    # No file has a set-user-id bit.
                    layer.add(name, archive.extractfile(member).read(), member.mode & 0o777, time=member.mtime)
        # Scanners of images look for the packages of a root without dpkg here.
        layer.add(f"var/lib/dpkg/status.d/{control['Package']}", fields.encode())
    certificates = sorted(path for path in layer.entries if path.startswith("usr/share/ca-certificates/") and path.endswith(".crt"))
    if len(certificates) < 50:
        sys.exit(f"image: only {len(certificates)} certificates of authorities found")
    bundle = b"".join(layer.entries[path][1].rstrip(b"\n") + b"\n" for path in certificates)
    layer.add("etc/ssl/certs/ca-certificates.crt", bundle)
    layer.add("etc/passwd", f"root:x:0:0:root:/:/nonexistent\nsluice:x:{USER}:{USER}:Sluice:/var/lib/sluice:/nonexistent\n".encode())
    layer.add("etc/group", f"root:x:0:\nsluice:x:{USER}:\n".encode())
    layer.add("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    for name in ("dev", "proc", "sys"):
        layer.directory(name)
    layer.directory("tmp", 0o1777)
    return layer, versions


def check_dependencies(controls):
    """Fails if a package depends on one that is not in the image."""
    have = {control["Package"] for control in controls}
    for control in controls:
        have.update(re.sub(r"\s*\(.*?\)", "", name).strip() for name in control.get("Provides", "").split(","))
    for control in controls:
        for depends in filter(None, control.get("Depends", "").split(",")):
            names = [re.sub(r"\s*\(.*?\)|:any", "", name).strip() for name in depends.split("|")]
            if not any(name in have or name in NOT_NEEDED or name.startswith("debconf") for name in names):
                sys.exit(f"image: {control['Package']} needs {' or '.join(names)}; add it with --add")


def program_layer(binary, licenses, time):
    layer = Layer(time)
    with open(binary, "rb") as f:
        layer.add("usr/bin/sluice", f.read(), 0o755)
    with open(os.path.join(ROOT, "scripts/packaging/sluice.yaml"), encoding="utf-8") as f:
        text, changes = re.subn(r"^listen: .*$", "listen: 0.0.0.0:8080", f.read(), flags=re.M)
    if changes != 1:
        sys.exit("image: scripts/packaging/sluice.yaml has no line listen:")
    layer.add("etc/sluice/sluice.yaml", text.encode())
    for source, target in (("LICENSE", "usr/share/doc/sluice/copyright"), ("NOTICE", "usr/share/doc/sluice/NOTICE"), ("router/config/schema.json", "usr/share/sluice/sluice.schema.json")):
        with open(os.path.join(ROOT, source), "rb") as f:
            layer.add(target, f.read())
    tokenizer = os.path.join(os.path.dirname(binary), "lib", "libsluice_tokenizer.so")  # as scripts/packages.sh builds it
    if os.path.exists(tokenizer):
        with open(tokenizer, "rb") as f:
            layer.add("usr/lib/sluice/libsluice_tokenizer.so", f.read(), 0o755)
    if licenses:
        for name in sorted(os.listdir(licenses)):
            with open(os.path.join(licenses, name), "rb") as f:
                layer.add(f"usr/share/doc/sluice/licenses/{name}", f.read())
    layer.directory("run/sluice", 0o700, USER)  # the runtime file, with which commands find the router
    layer.directory("var/lib/sluice", 0o750, USER)
    return layer


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def archive(layers, architecture, created, labels, tag, out):
    """Writes an OCI image layout with one image, as a tar archive."""
    blobs, descriptors, diffs, history = {}, [], [], []

    def blob(data, media_type):
        blobs[digest(data)] = data
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    for comment, layer in layers:
        tar = layer.tar()
        diffs.append(digest(tar))
        descriptors.append(blob(gzip.compress(tar, 9, mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip"))
        history.append({"created": created, "created_by": "scripts/image.py", "comment": comment})
    config = {
        "created": created, "architecture": architecture, "os": "linux",
        "config": {
            "User": f"{USER}:{USER}", "Env": ["PATH=/usr/bin", "XDG_RUNTIME_DIR=/run/sluice", "SLUICE_CONFIG=/etc/sluice/sluice.yaml"],
            "Entrypoint": ["/usr/bin/sluice"], "Cmd": ["serve"], "WorkingDir": "/var/lib/sluice",
            # A container whose root file system is read-only can still write the runtime file.
            "Volumes": {"/run/sluice": {}},
            "ExposedPorts": {"8080/tcp": {}}, "Labels": labels, "StopSignal": "SIGTERM",
            # Not part of OCI's specification; docker and podman apply it.
            "Healthcheck": {"Test": ["CMD", "/usr/bin/sluice", "health"], "Interval": 10_000_000_000, "Timeout": 3_000_000_000, "StartPeriod": 10_000_000_000, "Retries": 3},
        },
        "rootfs": {"type": "layers", "diff_ids": diffs}, "history": history,
    }
    encode = lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    config_descriptor = blob(encode(config), "application/vnd.oci.image.config.v1+json")
    manifest = blob(encode({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config_descriptor, "layers": descriptors, "annotations": labels,
    }), "application/vnd.oci.image.manifest.v1+json")
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [{
        **manifest, "platform": {"architecture": architecture, "os": "linux"},
        "annotations": {"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": f"docker.io/library/sluice:{tag}"},
    }]}
    # manifest.json is what docker load of versions before 25 reads.
    docker = [{"Config": "blobs/sha256/" + config_descriptor["digest"][7:], "RepoTags": [f"sluice:{tag}"], "Layers": ["blobs/sha256/" + d["digest"][7:] for d in descriptors]}]
    layout = Layer(0)
    layout.add("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    layout.add("index.json", encode(index))
    layout.add("manifest.json", encode(docker))
    for name, data in blobs.items():
        layout.add("blobs/sha256/" + name[7:], data)
    with open(out + ".part", "wb") as f:
        f.write(layout.tar())
    os.replace(out + ".part", out)
    return manifest["digest"]


def add_sum(path):
    """Replaces the archive's line of SHA256SUMS, which make packages writes for its files."""
    sums, name = os.path.join(os.path.dirname(os.path.abspath(path)), "SHA256SUMS"), os.path.basename(path)
    lines = []
    if os.path.exists(sums):
        with open(sums, encoding="utf-8") as f:
            lines = [line for line in f if line.split()[-1:] != [name]]
    with open(path, "rb") as f:
        lines.append(f"{hashlib.sha256(f.read()).hexdigest()}  {name}\n")
    with open(sums, "w", encoding="utf-8") as f:
        f.writelines(lines)


def main():
    parser = argparse.ArgumentParser(description="Builds the container image of Sluice as an OCI archive.")
    parser.add_argument("--binary", default=os.path.join(ROOT, "build/packages/sluice"), help="the stripped binary [that of make packages]")
    parser.add_argument("--licenses", default=os.path.join(ROOT, "build/packages/licenses"), help="licences of the libraries linked statically")
    parser.add_argument("--version", help="version of the image [that of the binary]")
    parser.add_argument("--out", help="archive to write [build/dist/sluice-VERSION-linux-ARCH.oci.tar]")
    parser.add_argument("--add", action="append", default=[], metavar="PACKAGE", help="another Debian package")
    options = parser.parse_args()
    if not os.path.exists(options.binary):
        sys.exit(f"image: there is no binary {options.binary}; run make packages, or name one with --binary")
    program = json.loads(run(options.binary, "version", "--json"))
    version = options.version or program["version"]
    architecture = run("go", "env", "GOARCH").strip()
    revision, seconds, created = commit()
    if program.get("commit") != revision:
        sys.exit(f"image: {options.binary} is of commit {program.get('commit')}, the repository at {revision}; run make packages")
    base, versions = base_layer(download(PACKAGES + options.add))
    labels = {
        "org.opencontainers.image.title": TITLE, "org.opencontainers.image.description": DESCRIPTION,
        "org.opencontainers.image.version": version, "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.created": created, "org.opencontainers.image.licenses": "Apache-2.0",
    }
    licenses = options.licenses if os.path.isdir(options.licenses) else None
    # A tag may not contain ~ and +.
    tag = re.sub(r"[^A-Za-z0-9_.-]", "-", version)
    out = options.out or os.path.join(ROOT, f"build/dist/sluice-{version}-linux-{architecture}.oci.tar")
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    name = archive([("Debian packages: " + ", ".join(versions), base), (f"sluice {version}", program_layer(options.binary, licenses, seconds))], architecture, created, labels, tag, out)
    if not options.out:
        add_sum(out)
    print(f"{out}: sluice:{tag}, {name}, {os.path.getsize(out)} bytes")


if __name__ == "__main__":
    main()
