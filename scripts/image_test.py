#!/usr/bin/env python3
"""Checks the image archive of scripts/image.py, and runs it as a container engine would.

  scripts/image_test.py [ARCHIVE]    [the newest of build/dist]

It verifies every digest and size, the configuration and the labels, imports it with skopeo, unpacks the layers, and starts the
image's command in that root: as its user, with a read-only root file system and no capabilities. Needs
root, for chroot and mount. With the libraries of scripts/nixl-wheel.sh in the cache it also loads NIXL there.
"""
import glob
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time

import image as builder

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
failed = False
skipped = []


def skip(what, why):
    skipped.append(what)
    print(f"skip  {what}: {why}", flush=True)


def check(what, ok, detail=""):
    global failed
    print(("ok    " if ok else "FAIL  ") + what, flush=True)
    if not ok:
        failed = True
        print("      " + str(detail).strip().replace("\n", "\n      "), flush=True)
    return ok


def sha(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Image:
    """The archive's manifest, configuration and layers, each verified against its descriptor."""

    def __init__(self, path):
        with tarfile.open(path) as archive:
            self.files = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
        check("the archive is an OCI layout", json.loads(self.files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"})
        index = json.loads(self.files["index.json"])
        check("the index names one image", index["schemaVersion"] == 2 and len(index["manifests"]) == 1, index)
        self.used = set()
        self.manifest = json.loads(self.blob(index["manifests"][0]))
        self.config = json.loads(self.blob(self.manifest["config"]))
        self.layers = [gzip.decompress(self.blob(d)) for d in self.manifest["layers"]]
        check("the layers are those of the configuration", [sha(t) for t in self.layers] == self.config["rootfs"]["diff_ids"])
        blobs = {name for name in self.files if name.startswith("blobs/")}
        check("every blob is used", blobs == self.used, blobs - self.used)
        docker = json.loads(self.files["manifest.json"])
        names = [docker[0]["Config"], *docker[0]["Layers"]]
        check("manifest.json, for docker load, names the same blobs", len(docker) == 1 and names == ["blobs/sha256/" + d["digest"][7:] for d in (self.manifest["config"], *self.manifest["layers"])], docker)

    def blob(self, descriptor):
        name = "blobs/" + descriptor["digest"].replace(":", "/")
        data = self.files[name]
        self.used.add(name)
        check(f"{descriptor['mediaType']}: digest and size", sha(data) == descriptor["digest"] and len(data) == descriptor["size"], descriptor)
        return data


def imports(path, image, work):
    """Imports the archive with skopeo, as an OCI archive and as docker load reads it."""
    if not shutil.which("skopeo"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "skopeo"], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, check=False)
    if not shutil.which("skopeo"):
        skip("skopeo", "it is not installed, and apt-get cannot install it")
        return
    for kind in ("oci-archive", "docker-archive"):
        target = os.path.join(work, kind)
        result = subprocess.run(["skopeo", "--insecure-policy", "copy", "-q", f"{kind}:{path}", f"dir:{target}"], capture_output=True, text=True, check=False)
        config = image.manifest["config"]["digest"].partition(":")[2]
        check(f"skopeo reads it as {kind}, with the same configuration", result.returncode == 0 and os.path.exists(os.path.join(target, config)), result.stderr)


def unpack(layers, root):
    for layer in layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            bad = [m.name for m in archive if m.name.startswith(("/", "..")) or m.isdev() or m.mode & 0o6000 or os.path.basename(m.name).startswith(".wh.")]
            check(f"a layer of {len(archive.getnames())} files has no device, set-user-id file or absolute path", not bad, bad)
            archive.extractall(root, numeric_owner=True)


class Container:
    """Runs commands in a root as a container engine does with a read-only root file system."""

    def __init__(self, image, root):
        self.root, self.config = root, image.config["config"]

    def command(self, arguments, writable=(), binds=(), environment=()):
        user, _, group = self.config["User"].partition(":")
        setup = ["set -e", 'mount --make-rprivate /', 'mount --bind "$1" "$1"', 'mount -t proc proc "$1/proc"', 'mount --bind /sys "$1/sys"', 'mount --bind /dev "$1/dev"', 'mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"']
        for source, target in binds:
            setup.append(f'mount --bind "{source}" "$1{target}"')
        setup.append('mount -o remount,bind,ro "$1"')
        for folder in writable:
            setup.append(f'mount -t tmpfs -o uid={user},gid={group},mode=0700 tmpfs "$1{folder}"')
        # chroot needs these capabilities itself, and loses them with its user.
        setup.append(f'root=$1; shift; cd /; exec setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid --inh-caps=-all {shutil.which("chroot")} --userspec={user}:{group} --groups={group} "$root" "$@"')
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "env", "-i", *self.config["Env"], *environment, "/bin/bash", "-c", "\n".join(setup), "-", self.root, *arguments]

    def run(self, arguments, **options):
        return subprocess.run(self.command([*self.config["Entrypoint"], *arguments], **options), capture_output=True, text=True, timeout=60)

    def start(self, arguments, log, **options):
        return subprocess.Popen(self.command([*self.config["Entrypoint"], *arguments], **options), stdout=log, stderr=subprocess.STDOUT)


def containerfile(config, packages):
    """Returns how the last stage of the Containerfile differs from the image: its settings and packages."""
    with open(os.path.join(ROOT, "scripts/packaging/Containerfile"), encoding="utf-8") as f:
        lines = f.read().replace("\\\n", " ").split("FROM ")[-1].splitlines()
    found = dict(line.split(" ", 1) for line in lines if line[:1].isupper() and " " in line)
    checked, _, command = found["HEALTHCHECK"].partition("CMD ")
    seconds = lambda key: f"{config['Healthcheck'][key] // 10**9}s"
    pairs = {
        "USER": (found["USER"], config["User"]), "WORKDIR": (found["WORKDIR"], config["WorkingDir"]),
        "ENV": (set(found["ENV"].split()), {v for v in config["Env"] if not v.startswith("PATH=")}),
        "ENTRYPOINT": (json.loads(found["ENTRYPOINT"]), config["Entrypoint"]), "CMD": (json.loads(found["CMD"]), config["Cmd"]),
        "VOLUME": ([found["VOLUME"]], list(config["Volumes"])), "EXPOSE": ([found["EXPOSE"]], list(config["ExposedPorts"])),
        "HEALTHCHECK": (["CMD", *json.loads(command)], config["Healthcheck"]["Test"]),
        "HEALTHCHECK's times": (checked.split(), [f"--interval={seconds('Interval')}", f"--timeout={seconds('Timeout')}", f"--start-period={seconds('StartPeriod')}", f"--retries={config['Healthcheck']['Retries']}"]),
    }
    # What debian:…-slim has or apt-get adds by itself need not be named.
    implied = {"base-files", "libc6", "libgcc-s1", "libnl-3-200", "libnl-route-3-200"}
    installed = set(found["RUN"].partition("--no-install-recommends ")[2].partition("&&")[0].split())
    pairs["packages"] = (installed | implied, {names.split("|")[-1] for names in packages})
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def libraries(container, root, info):
    """Checks that the image has what the native tokenizer is linked with, and that the program loads it there."""
    path = "/usr/lib/sluice/libsluice_tokenizer.so"
    if not os.path.exists(root + path):
        skip("the native tokenizer", "the image was built without cargo")
        return
    needed = re.findall(r"\(NEEDED\) +Shared library: \[(.+?)\]", subprocess.run(["readelf", "-d", root + path], capture_output=True, text=True, check=True).stdout)
    absent = [name for name in needed if not glob.glob(f"{root}/usr/lib*/**/{name}", recursive=True)]
    check("the image has the libraries of the native tokenizer: " + ", ".join(needed), needed and not absent, absent)
    state = {item["name"]: item for item in info.get("optional_libraries", [])}.get("tokenizer", {})
    check("version --json finds the native tokenizer: " + state.get("detail", "")[:100], state.get("state") == "ok" and path in state["detail"], info)
    result = container.run(["doctor", "--json"])
    found = [f for f in json.loads(result.stdout).get("findings", []) if f["name"] == "tokenizer"] if result.stdout else []
    check("doctor loads the native tokenizer and passes its self-test", len(found) == 1 and found[0]["state"] == "ok", result.stdout + result.stderr)


def get(port, path):
    with socket.create_connection(("127.0.0.1", port), timeout=2) as s:
        s.settimeout(2)
        s.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while chunk := s.recv(4096):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def wait(port, process, seconds=20):
    """Waits until the port answers; returns whether it did."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            return get(port, "/livez")
        except OSError:
            time.sleep(0.05)
    return None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stop(process):
    """Sends SIGTERM to the program in the container: unshare does not pass it on."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in children:
        os.kill(int(pid), 15)
    return process.wait(timeout=60)


def serves(container, work, what, writable, admin="127.0.0.1:0"):
    port = free_port()
    path = os.path.join(work, "log")
    # The image's own command and configuration; the port may be taken on this machine.
    environment = [f"SLUICE_LISTEN=0.0.0.0:{port}", f"SLUICE_ADMIN_LISTEN={admin}"]
    with open(path, "w+") as log:
        process = container.start(container.config["Cmd"], log, writable=writable, environment=environment)
        try:
            answer = wait(port, process)
            log.seek(0)
            text = log.read()
            if not check(f"{what}: /livez", answer == (200, b"ok\n"), f"{answer}\n{text}"):
                return
            check(f"{what}: /readyz says what it waits for", get(port, "/readyz")[0] == 503)
            health = container.config["Healthcheck"]["Test"]
            asked = subprocess.run(container.command(health[1:], environment=environment), capture_output=True, text=True, timeout=30)
            check(f"{what}: the health check", health[0] == "CMD" and asked.returncode == 0, asked.stdout + asked.stderr)
            pid = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()[0]
            with open(f"/proc/{pid}/status") as f:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
            check(f"{what}: it runs as user {status['Uid'].split()[0]}, without capabilities", status["Uid"].split() == ["65532"] * 4 and int(status["CapEff"], 16) == 0, status)
            if not writable:
                written = subprocess.run(["nsenter", "-t", pid, "-m", "touch", os.path.join(container.root, "tmp/x")], capture_output=True, text=True)
                check(f"{what}: nothing can be written to its root", written.returncode != 0 and "Read-only" in written.stderr, written.stderr)
        finally:
            code = stop(process) if process.poll() is None else process.returncode
            log.seek(0)
            check(f"{what}: it ends at SIGTERM", code == 0, f"{code}\n{log.read()}")
    asked = subprocess.run(container.command(container.config["Healthcheck"]["Test"][1:], environment=environment), capture_output=True, text=True, timeout=30)
    check(f"{what}: the health check fails after that", asked.returncode == 1, asked.stdout + asked.stderr)


def main():
    if os.getuid() != 0:
        sys.exit("image_test: needs root, for chroot and mount")
    archives = sys.argv[1:] or sorted(glob.glob(os.path.join(ROOT, "build/dist/*.oci.tar")), key=os.path.getmtime)
    if not archives:
        sys.exit("image_test: no archive; run make image")
    path = archives[-1]
    image = Image(path)
    config, labels = image.config["config"], image.config["config"]["Labels"]
    revision, created = (subprocess.run(["git", "log", "-1", f"--format={f}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() for f in ("%H", "%cI"))
    with open(os.path.join(os.path.dirname(os.path.abspath(path)), "SHA256SUMS"), encoding="utf-8") as f, open(path, "rb") as archive:
        check("SHA256SUMS names the archive", f"{hashlib.sha256(archive.read()).hexdigest()}  {os.path.basename(path)}\n" in f.read())
    check("a numeric user", config["User"] == "65532:65532")
    check("labels: revision, licences, version, time", labels["org.opencontainers.image.revision"] == revision and labels["org.opencontainers.image.licenses"] == "Apache-2.0" and labels["org.opencontainers.image.version"] and labels["org.opencontainers.image.created"] == image.config["created"] == created, labels)
    check("the Containerfile has the same settings and packages", not (other := containerfile(config, builder.PACKAGES)), other)
    work = tempfile.mkdtemp(prefix="sluice-image.")
    root = os.path.join(work, "root")
    os.mkdir(root, 0o755)
    os.chmod(work, 0o755)
    try:
        imports(path, image, work)
        unpack(image.layers, root)
        check("the licences of packages and of libraries linked statically", all(os.path.getsize(os.path.join(root, "usr/share/doc", name)) for name in ("libc6/copyright", "sluice/NOTICE", "sluice/copyright", "sluice/licenses/libzmq")))
        check("no shell", not glob.glob(os.path.join(root, "usr/bin/*sh")))
        container = Container(image, root)
        version = container.run(["version", "--json"])
        info = json.loads(version.stdout) if version.returncode == 0 else {}
        check("version --json: version, commit, date", info.get("version") == labels["org.opencontainers.image.version"] and info.get("commit") == revision and info.get("date") == created, version.stdout + version.stderr)
        libraries(container, root, info)
        check("check accepts the configuration", (result := container.run(["check"])).returncode == 0, result.stdout + result.stderr)
        result = container.run(["sidecar", "--listen", "256.0.0.1:1", "--engine", "http://127.0.0.1:1"])
        check("the sidecar's command reads its flags, not the router's file", result.returncode != 0 and "256.0.0.1" in result.stderr and "sluice.yaml" not in result.stderr, result.stdout + result.stderr)
        serves(container, work, "read-only root with the image's volume", list(config["Volumes"]))
        serves(container, work, "read-only root, nothing writable, no admin listener", [], admin="off")
        wheels = sorted(glob.glob(os.path.join(os.environ.get("SLUICE_CACHE") or os.path.expanduser("~/.cache/sluice"), "nixl-*")))
        if wheels:
            os.makedirs(os.path.join(root, "opt/nixl"))
            library = "/opt/nixl/" + os.path.relpath(glob.glob(wheels[-1] + "/.nixl*.libs/libnixl_capi.so")[0], wheels[-1])
            result = container.run(["version", "--json"], binds=[(wheels[-1], "/opt/nixl")], environment=["SLUICE_NIXL_LIBRARY=" + library])
            state = {item["name"]: item for item in json.loads(result.stdout)["optional_libraries"]}
            check("NIXL loads where it is mounted: " + state["nixl"]["detail"][:100], state["nixl"]["state"] in ("ok", "limited"), result.stdout)
        else:
            skip("NIXL in the image", "no wheel in the cache (scripts/nixl-wheel.sh)")
    finally:
        shutil.rmtree(work)
    again = path + ".again"
    subprocess.run([os.path.join(ROOT, "scripts/image.py"), "--out", again], check=True, capture_output=True)
    with open(path, "rb") as a, open(again, "rb") as b:
        check("a second build has the same bytes", a.read() == b.read())
    os.remove(again)
    if failed:
        sys.exit("image_test: some checks failed")
    print("image_test: all checks passed" + (f" but {len(skipped)} skipped: {', '.join(skipped)}" if skipped else ""))


if __name__ == "__main__":
    main()
