#!/usr/bin/env python3
"""Runs the image archive of scripts/image.py with podman, and builds and runs the Containerfile.

  scripts/container_test.py [--archive FILE] [--only archive,containerfile]

The Containerfile is built as it is. Its base images come from a registry where one can be reached.
Elsewhere they are made here, under the same names and only for this test: from the Debian root of
scripts/packages-test.sh, with the packages that the real images have, and with the Go and Rust of this machine.
Then what the Containerfile does is tested, and not that the real base images would do.

Both images are run with a read-only root file system and no capabilities. The test uses a store of images
of its own, and needs root and podman; it prints what it could not do.
"""
import argparse
import glob
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
CACHE = os.environ.get("SLUICE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sluice")
# Without CAP_SYS_RESOURCE podman cannot raise the limits to its defaults.
LIMITS = [f"--ulimit={name}={hard}:{hard}" for name, limit in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)) for hard in (min(resource.getrlimit(limit)[1] % (1 << 63), 1 << 15),)]
failed = False


def check(what, ok, detail=""):
    global failed
    print(("ok    " if ok else "FAIL  ") + what, flush=True)
    if not ok:
        failed = True
        print("      " + str(detail).strip().replace("\n", "\n      "), flush=True)
    return ok


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


class Podman:
    """podman with a store of its own."""

    def __init__(self, work):
        runtime = ["--runtime", "runc"] if shutil.which("runc") else []  # crun refuses both versions of cgroups at once
        self.command = ["podman", *runtime, "--root", os.path.join(work, "store"), "--runroot", os.path.join(work, "run"), "--cgroup-manager", "cgroupfs"]

    def run(self, *arguments, timeout=120, **options):
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout, **options)

    def must(self, *arguments, **options):
        done = self.run(*arguments, **options)
        if done.returncode != 0:
            sys.exit(f"container_test: podman {' '.join(arguments)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout.strip()


def debian_root():
    path = os.path.join(CACHE, "debian-root.tar")
    if not os.path.exists(path):
        sys.exit("container_test: no Debian root in the cache; run make packages-test once")
    return path


def base_images(podman, work):
    """Pulls the base images, or makes images of the same names; returns the options of podman build for these."""
    with open(os.path.join(ROOT, "scripts/packaging/Containerfile"), encoding="utf-8") as f:
        names = [line.split()[1].replace("${DEBIAN}", "bookworm") for line in f if line.startswith("FROM ")]
    refused = [done for name in names if (done := podman.run("pull", "-q", f"docker.io/library/{name}", timeout=600)).returncode != 0]
    if not refused:
        print("      the base images are those of the registry")
        return []
    print("      base images made from Debian packages: " + refused[0].stderr.strip().splitlines()[-1][-200:])
    podman.must("import", debian_root(), "docker.io/library/debian:bookworm-slim", timeout=300)
    go, rust = output("go", "env", "GOROOT"), output("rustc", "--print", "sysroot")
    # What buildpack-deps, on which the two images stand, has of what the build uses.
    packages = "gcc g++ libc6-dev make pkg-config git ca-certificates"
    for name, environment in (("golang:1.26-bookworm", "GOPATH=/go GOTOOLCHAIN=local PATH=/go/bin:/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
                                     ("rust:1-bookworm", "CARGO_HOME=/usr/local/cargo PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")):
        file = os.path.join(work, "Base")
        with open(file, "w", encoding="utf-8") as f:
            f.write(f"FROM docker.io/library/debian:bookworm-slim\nRUN apt-get update && apt-get install -y --no-install-recommends {packages} && rm -rf /var/lib/apt/lists/*\nENV {environment}\n")
        podman.must("build", "--pull=never", "--layers", "--isolation=chroot", *LIMITS, "--network", "host", "-t", f"docker.io/library/{name}", "-f", file, work, timeout=600)
    volumes = [f"{go}:/usr/local/go:ro", f"{rust}:/usr/local/rust:ro"]
    # Modules and crates that this machine has; others are fetched as usual.
    modules, crates = output("go", "env", "GOMODCACHE"), os.path.join(os.environ.get("CARGO_HOME") or os.path.expanduser("~/.cargo"), "registry")
    for folder, target in ((modules, "/go/pkg/mod"), (output("go", "env", "GOCACHE"), "/root/.cache/go-build"), (crates, "/usr/local/cargo/registry"), (os.path.join(ROOT, "build/tokenizer"), "/src/build/tokenizer")):
        if os.path.isdir(folder):
            volumes.append(f"{folder}:{target}:O")  # what the build writes there does not come back
    options = ["--pull=never", "--network", "host"]
    for volume in volumes:
        options += ["--volume", volume]
    return options


def settings(podman, image):
    """Returns the settings of an image that users see; PATH is the base image's."""
    config = json.loads(podman.must("image", "inspect", image))[0]["Config"]
    found = {name: config.get(name) for name in ("User", "Entrypoint", "Cmd", "WorkingDir", "ExposedPorts", "Volumes")}
    found["Env"] = sorted(v for v in config["Env"] if v.startswith(("SLUICE_", "XDG_")))
    return found, config.get("Labels", {})


def runs(podman, image, what, expected):
    """Runs an image as docs/install.md says, with a read-only root file system."""
    # Without systemd podman has no timers for health checks.
    hardened = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges", *LIMITS, "--network", "host", "--pull=never"]
    result = podman.run("run", "--rm", "--no-healthcheck", *hardened, image, "version", "--json")
    info = json.loads(result.stdout) if result.returncode == 0 else {}
    check(f"{what}: version --json has the version and the commit", {"version": info.get("version"), "commit": info.get("commit"), "date": info.get("date")} == expected, result.stdout + result.stderr)
    tokenizer = {item["name"]: item for item in info.get("optional_libraries", [])}.get("tokenizer", {})
    if not shutil.which("cargo"):
        print(f"skip  {what}, the native tokenizer: no cargo", flush=True)
    else:
        check(f"{what}: the native tokenizer loads: {tokenizer.get('detail', '')[:80]}", tokenizer.get("state") == "ok", info)
    result = podman.run("run", "--rm", "--no-healthcheck", *hardened, image, "check")
    check(f"{what}: check accepts its configuration", result.returncode == 0, result.stdout + result.stderr)
    port = output(sys.executable, "-c", "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
    name = "sluice-container-test"
    result = podman.run("run", "-d", "--name", name, "--health-interval=disable", *hardened, "-e", f"SLUICE_LISTEN=127.0.0.1:{port}", "-e", "SLUICE_ADMIN_LISTEN=127.0.0.1:0", image)
    if not check(f"{what}: podman run --read-only", result.returncode == 0, result.stderr):
        return
    try:
        end, health = time.monotonic() + 20, None
        while time.monotonic() < end:
            health = podman.run("exec", name, "/usr/bin/sluice", "health")
            if health.returncode == 0:
                break
            time.sleep(0.2)
        if not check(f"{what}: the health check", health.returncode == 0, health.stdout + health.stderr + podman.run("logs", name).stderr):
            return
        if podman.run("image", "inspect", "--format", "{{.HealthCheck}}", image).stdout.strip() not in ("", "<nil>"):
            result = podman.run("healthcheck", "run", name)
            check(f"{what}: podman healthcheck run", result.returncode == 0, result.stdout + result.stderr)
        result = podman.run("exec", name, "/usr/bin/sluice", "reload", "--dry-run")
        check(f"{what}: a command in the container finds the router by its volume", result.returncode == 0, result.stdout + result.stderr)
        pid = podman.must("inspect", "--format", "{{.State.Pid}}", name)
        with open(f"/proc/{pid}/status", encoding="utf-8") as f:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
        check(f"{what}: user 65532 without capabilities", status["Uid"].split() == ["65532"] * 4 and int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0, status)
        began = time.monotonic()
        podman.run("stop", "-t", "20", name)
        code = podman.must("inspect", "--format", "{{.State.ExitCode}}", name)
        check(f"{what}: podman stop ends it, in {time.monotonic() - began:.1f} s", code == "0", code + podman.run("logs", name).stderr)
    finally:
        podman.run("rm", "-f", name)


def archive(podman, path):
    result = podman.run("pull", "-q", "docker-archive:" + path, timeout=300)
    if not check("podman pull docker-archive", result.returncode == 0, result.stderr):
        return
    image = result.stdout.strip().splitlines()[-1]
    _, labels = settings(podman, image)
    expected = {"version": labels.get("org.opencontainers.image.version"), "commit": output("git", "rev-parse", "HEAD"), "date": output("git", "log", "-1", "--format=%cI")}
    runs(podman, image, "archive", expected)
    return image


def containerfile(podman, work, other):
    options = base_images(podman, work)
    expected = {"version": "0-containerfile-test", "commit": output("git", "rev-parse", "HEAD"), "date": output("git", "log", "-1", "--format=%cI")}
    began = time.monotonic()
    result = podman.run("build", "--isolation=chroot", *options, *LIMITS, "-f", "scripts/packaging/Containerfile", "--ignorefile", "scripts/packaging/Containerfile.dockerignore", "--format", "docker", "-t", "sluice-containerfile-test",
                      *(word for name, value in expected.items() for word in ("--build-arg", f"{name.upper()}={value}")), ".", cwd=ROOT, timeout=1500)
    if not check(f"podman build of the Containerfile, in {time.monotonic() - began:.0f} s", result.returncode == 0, (result.stdout + result.stderr)[-3000:]):
        return
    image = "localhost/sluice-containerfile-test"
    if other:
        ours, labels = settings(podman, image)
        theirs, _ = settings(podman, other)
        check("its settings are those of the archive", ours == theirs, f"{ours}\n{theirs}")
        check("its labels have the version and the commit", labels.get("org.opencontainers.image.version") == expected["version"] and labels.get("org.opencontainers.image.revision") == expected["commit"], labels)
    libraries = podman.run("run", "--rm", "--no-healthcheck", *LIMITS, "--pull=never", "--network", "none", "--entrypoint", "/usr/bin/ldd", image, "/usr/bin/sluice", "/usr/lib/sluice/libsluice_tokenizer.so")
    check("nothing that the binary and the tokenizer link is missing", libraries.returncode == 0 and "not found" not in libraries.stdout, libraries.stdout + libraries.stderr)
    licences = podman.run("run", "--rm", "--no-healthcheck", *LIMITS, "--pull=never", "--network", "none", "--entrypoint", "/bin/ls", image, "/usr/share/doc/sluice/licenses")
    check("it has the licences of what is linked statically", {"libzmq", "libsodium", "libstdc++", "libsluice_tokenizer"} <= set(licences.stdout.split()), licences.stdout + licences.stderr)
    runs(podman, image, "containerfile", expected)


def main():
    parser = argparse.ArgumentParser(description="Runs the image archive with podman, and builds and runs the Containerfile.")
    parser.add_argument("--archive", help="archive of scripts/image.py [the newest of build/dist]")
    parser.add_argument("--only", default="archive,containerfile", help="what to test, comma-separated")
    options = parser.parse_args()
    only = options.only.split(",")
    if set(only) - {"archive", "containerfile"}:
        parser.error(f"unknown part in --only {options.only!r}; want archive or containerfile")
    if os.getuid() != 0 or not shutil.which("podman"):
        sys.exit("container_test: needs root and podman")
    if not shutil.which("runc"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "runc"], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, check=False)
    work = tempfile.mkdtemp(prefix="sluice-container.", dir="/var/tmp")
    podman = Podman(work)
    image = None
    try:
        if "archive" in only:
            archives = [options.archive] if options.archive else sorted(glob.glob(os.path.join(ROOT, "build/dist/*.oci.tar")), key=os.path.getmtime)
            if not archives:
                sys.exit("container_test: no archive; run make image")
            image = archive(podman, archives[-1])
        if "containerfile" in only:
            containerfile(podman, work, image)
    finally:
        podman.run("rm", "-fa")
        subprocess.run(["umount", os.path.join(work, "store/overlay")], capture_output=True, check=False)
        # Never into a folder of this machine that is still mounted there.
        subprocess.run(["rm", "-rf", "--one-file-system", work], check=False)
    if failed:
        sys.exit("container_test: some checks failed")
    print("container_test: all checks passed")


if __name__ == "__main__":
    main()
