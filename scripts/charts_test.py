#!/usr/bin/env python3
"""Checks the Helm chart and the plain manifests; scripts/charts-test.sh runs it and names the tools.

- helm lint and helm template accept the chart with its own values and with those of its folder ci;
- kubeconform accepts what they give, and the plain manifests, with strict schemas made from the OpenAPI
  document of Kubernetes and the definition of ServiceMonitor;
- kubeconform refuses faulty manifests, so that the schemas are known to check something;
- sluice check accepts each configuration, and sluice sidecar the arguments of the example;
- the manifests agree with what the router needs: ports, probes, permissions, user, read-only root;
- router.yaml is what the chart gives.
"""
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import yaml

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
CHART = os.path.join(ROOT, "scripts/packaging/helm/sluice")
PLAIN = os.path.join(ROOT, "scripts/packaging/kubernetes")
SLUICE = os.environ.get("SLUICE", os.path.join(ROOT, "bin/sluice"))
HELM, KUBECONFORM = os.environ["HELM"], os.environ["KUBECONFORM"]
VERSION = os.environ["KUBERNETES_VERSION"]
HEAD = """# The router, for kubectl apply -f; see docs/install.md. The Helm chart has more settings.
# scripts/charts-test.sh --write writes this file from the chart.
"""
failed = False


def check(what, ok, reported=""):
    global failed
    print(("ok    " if ok else "FAIL  ") + what, flush=True)
    if not ok:
        failed = True
        print("      " + str(reported).strip().replace("\n", "\n      "), flush=True)
    return ok


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def strict(schema):
    """Makes objects with declared members refuse others, and resolves the types that OpenAPI adds."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    out = {key: strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes-") and key not in ("description", "default", "format")}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        out.setdefault("additionalProperties", False)
    return out


def reachable(definitions, name, found):
    if name not in found:
        found[name] = definitions[name]
        for other in re.findall(r'"#/definitions/([^"]+)"', json.dumps(definitions[name])):
            reachable(definitions, other, found)
    return found


def write_schemas(folder):
    """Writes a schema for each kind, under the name that kubeconform looks for."""
    with open(os.environ["KUBERNETES_OPENAPI"], encoding="utf-8") as f:
        source = json.load(f)["definitions"]
    definitions = {name: strict(schema) for name, schema in source.items()}
    # A quantity may be written as a number.
    definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"anyOf": [{"type": "string"}, {"type": "number"}]}
    definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    for name, schema in source.items():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            if kind["kind"].endswith("List") or len(schema["x-kubernetes-group-version-kind"]) > 1:
                continue
            group = kind["group"].split(".")[0]
            path = "-".join(filter(None, (kind["kind"].lower(), group, kind["version"]))) + ".json"
            with open(os.path.join(folder, path), "w", encoding="utf-8") as f:
                json.dump({**definitions[name], "required": ["apiVersion", "kind", "metadata"], "definitions": reachable(definitions, name, {})}, f)
    with open(os.environ["SERVICE_MONITOR"], encoding="utf-8") as f:
        versions = yaml.safe_load(f)["spec"]["versions"]
    schema = strict(versions[0]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    schema["definitions"] = reachable(definitions, "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta", {})
    with open(os.path.join(folder, f"servicemonitor-monitoring-{versions[0]['name']}.json"), "w", encoding="utf-8") as f:
        json.dump(schema, f)


def conforms(schemas, text):
    location = os.path.join(schemas, "{{ .ResourceKind }}{{ .KindSuffix }}.json")
    return run(KUBECONFORM, "-strict", "-summary", "-schema-location", location, input=text)


def template(*arguments):
    return run(HELM, "template", "sluice", CHART, "--namespace", "engines", "--kube-version", VERSION, *arguments)


def plain():
    """Returns router.yaml: the chart with its own values, without what only Helm reads."""
    text = template().stdout
    text = "".join(line for line in text.splitlines(True) if not re.match(r"\s*(# Source:|helm\.sh/chart:|app\.kubernetes\.io/managed-by:|app\.kubernetes\.io/version:|checksum/)", line))
    return HEAD + text.replace("      annotations:\n        # A changed configuration gives new pods.\n", "")


def deployment(documents):
    return next(d for d in documents if d["kind"] == "Deployment")


def fits(name, documents, work):
    """Checks what schemas cannot: that the parts of one rendering refer to each other."""
    by = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    spec = deployment(documents)["spec"]["template"]["spec"]
    labels = deployment(documents)["spec"]["template"]["metadata"]["labels"]
    router = spec["containers"][0]
    config = next(d for d in documents if d["kind"] == "ConfigMap")["data"]["sluice.yaml"]
    parsed = yaml.safe_load(config)
    path = os.path.join(work, "sluice.yaml")
    with open(path, "w", encoding="utf-8") as f:
        f.write(config)
    # A kubeconfig replaces the service account, and files of this machine the mounted certificate.
    environment = {"PATH": os.environ["PATH"], "HOME": work}
    if "kube" in parsed:
        environment["SLUICE_KUBE_KUBECONFIG"] = os.path.join(work, "kubeconfig")
    if "tls" in parsed:
        environment.update(SLUICE_TLS_CERT=os.path.join(work, "tls.crt"), SLUICE_TLS_KEY=os.path.join(work, "tls.key"))
    reported = run(SLUICE, "check", "--config", path, env=environment)
    check(f"{name}: sluice check accepts the configuration", reported.returncode == 0, reported.stdout + reported.stderr)
    port = router["ports"][0]
    check(f"{name}: the port is that of the configuration", parsed["listen"] == f"0.0.0.0:{port['containerPort']}")
    probes = {key: router[key]["httpGet"] for key in ("startupProbe", "livenessProbe", "readinessProbe")}
    check(f"{name}: probes ask /livez and /readyz", [p["path"] for p in probes.values()] == ["/livez", "/livez", "/readyz"] and all(p["port"] == port["name"] and (p["scheme"] == "HTTPS") == ("tls" in parsed) for p in probes.values()), probes)
    selectors = [d["spec"]["selector"] if d["kind"] == "Service" else d["spec"]["selector"]["matchLabels"] for d in documents if d["kind"] in ("Service", "Deployment", "PodDisruptionBudget")]
    check(f"{name}: every selector fits the pods", all(selector.items() <= labels.items() for selector in selectors), selectors)
    context = {**spec["securityContext"], **router["securityContext"]}
    check(f"{name}: the restricted pod security standard, and a read-only root", context["runAsNonRoot"] and context["runAsUser"] == 65532 and context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"] and context["capabilities"] == {"drop": ["ALL"]} and context["seccompProfile"] == {"type": "RuntimeDefault"}, context)
    volumes = {v["name"]: v for v in spec["volumes"]}
    mounts = {m["mountPath"]: m for m in router["volumeMounts"]}
    check(f"{name}: every mount has a volume, and the runtime folder is writable", all(m["name"] in volumes for m in mounts.values()) and "emptyDir" in volumes[mounts["/run/sluice"]["name"]], mounts)
    check(f"{name}: the ConfigMap exists", ("ConfigMap", volumes["config"]["configMap"]["name"]) in by)
    grace = spec["terminationGracePeriodSeconds"]
    pause = router.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    check(f"{name}: the grace period is longer than the drain", grace >= 30 + pause + 10, grace)
    if "kube" in parsed:
        everywhere = parsed["kube"].get("namespace") == "*"
        kind = "ClusterRole" if everywhere else "Role"
        role = next(d for d in documents if d["kind"] == kind)
        binding = next(d for d in documents if d["kind"] == kind + "Binding")
        check(f"{name}: the {kind} permits to list and watch pods, and nothing else", role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}] and binding["roleRef"]["name"] == role["metadata"]["name"] and binding["subjects"][0]["name"] == spec["serviceAccountName"] and spec["automountServiceAccountToken"], role)
    else:
        check(f"{name}: no permissions without discovery", not spec["automountServiceAccountToken"] and not [d for d in documents if "Role" in d["kind"]])
    for source in router.get("envFrom", []):
        if "secretRef" in source and source["secretRef"]["name"] != "sluice-secrets":
            secret = by["Secret", source["secretRef"]["name"]]
            known = run(SLUICE, "check", "--config", path, env={**environment, **secret["stringData"]})
            check(f"{name}: the variables of the Secret set fields", known.returncode == 0 and "resembles" not in known.stderr and "SLUICE_" not in known.stderr, known.stderr)
        elif "secretRef" in source:
            check(f"{name}: no Secret of its own beside an existing one", not [d for d in documents if d["kind"] == "Secret"])


def sidecar(path, work):
    """Starts the sidecar of the example with its arguments, at another port."""
    with open(path, encoding="utf-8") as f:
        pod = next(d for d in yaml.safe_load_all(f) if d and d["kind"] == "Pod")
    container = pod["spec"]["initContainers"][0]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = [re.sub(r"^--listen=.*", f"--listen=127.0.0.1:{port}", a) for a in container["args"]]
    process = subprocess.Popen([SLUICE, *arguments], env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": work, "POD_IP": "127.0.0.1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answer, end = None, time.monotonic() + 20
    try:
        while answer is None and process.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{container['livenessProbe']['httpGet']['path']}", timeout=2) as response:
                    answer = response.status
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
    finally:
        process.terminate()
        text = process.communicate(timeout=60)[0]
    check("sidecar.yaml: the sidecar starts with these arguments and answers its liveness probe", answer == 200, text)


def main():
    if sys.argv[1:] == ["--write"]:
        with open(os.path.join(PLAIN, "router.yaml"), "w", encoding="utf-8") as f:
            f.write(plain())
        return
    with tempfile.TemporaryDirectory(prefix="sluice-charts.") as work:
        schemas = os.path.join(work, "schemas")
        os.mkdir(schemas)
        write_schemas(schemas)
        with open(os.path.join(work, "kubeconfig"), "w", encoding="utf-8") as f:
            f.write("{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: k, cluster: {server: 'https://127.0.0.1:1'}}], users: [{name: u, user: {token: t}}], contexts: [{name: c, context: {cluster: k, user: u, namespace: engines}}]}\n")
        made = run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x", "-days", "30", "-keyout", os.path.join(work, "tls.key"), "-out", os.path.join(work, "tls.crt"))
        check("a certificate for the test", made.returncode == 0, made.stderr)
        renderings = {"default values": []}
        for name in sorted(os.listdir(os.path.join(CHART, "ci"))):
            renderings[name] = ["-f", os.path.join(CHART, "ci", name)]
        for name, arguments in renderings.items():
            reported = run(HELM, "lint", "--strict", "--kube-version", VERSION, CHART, *arguments)
            check(f"{name}: helm lint", reported.returncode == 0, reported.stdout + reported.stderr)
            reported = template(*arguments)
            if not check(f"{name}: helm template", reported.returncode == 0, reported.stderr):
                continue
            text = reported.stdout
            reported = conforms(schemas, text)
            check(f"{name}: kubeconform: {reported.stdout.strip()}", reported.returncode == 0 and "Skipped: 0" in reported.stdout, reported.stdout + reported.stderr)
            fits(name, [d for d in yaml.safe_load_all(text) if d], work)
        for what, arguments, message in (
            ("a listen address in config", ["--set", "config.listen=:1"], "config.listen and config.kube are set by"),
            ("no engines", ["--set", "discovery.enabled=false"], "no engines"),
        ):
            reported = template(*arguments)
            check(f"the chart refuses {what}", reported.returncode != 0 and message in reported.stderr, reported.stderr)
        reported = run(HELM, "package", CHART, "--destination", work)
        check("helm package", reported.returncode == 0, reported.stderr)

        # The schemas find faults.
        text = template().stdout
        for what, before, after in (
            ("an unknown field", "  replicas: 2", "  replicaz: 2"), ("a text in place of a number", "  replicas: 2", "  replicas: two"),
            ("an unknown field of a container", "imagePullPolicy:", "imagePullPolice:"), ("an unknown field of metadata", "  namespace: engines", "  namespaze: engines"),
        ):
            reported = conforms(schemas, text.replace(before, after))
            check(f"kubeconform refuses {what}", before in text and reported.returncode != 0, reported.stdout)
        monitor = template("--set", "serviceMonitor.enabled=true").stdout
        reported = conforms(schemas, monitor.replace("interval: 15s", "intervall: 15s"))
        check("kubeconform refuses an unknown field of a ServiceMonitor", "interval: 15s" in monitor and reported.returncode != 0 and "ServiceMonitor" in reported.stdout, reported.stdout)

        # The plain manifests.
        with open(os.path.join(PLAIN, "router.yaml"), encoding="utf-8") as f:
            check("router.yaml is what the chart gives", f.read() == plain(), "run scripts/charts-test.sh --write")
        for name in sorted(os.listdir(PLAIN)):
            with open(os.path.join(PLAIN, name), encoding="utf-8") as f:
                text = f.read()
            reported = conforms(schemas, text)
            check(f"{name}: kubeconform: {reported.stdout.strip()}", reported.returncode == 0 and "Skipped: 0" in reported.stdout, reported.stdout + reported.stderr)
            if name == "router.yaml":
                fits(name, [d for d in yaml.safe_load_all(text) if d], work)
        sidecar(os.path.join(PLAIN, "sidecar.yaml"), work)
    if failed:
        sys.exit("charts-test: some checks failed")
    print("charts-test: all checks passed")


if __name__ == "__main__":
    main()
