#!/usr/bin/env python3
"""Runs the tests that show what the router survives and writes RELIABILITY.md from
what they print: make reliability. With --soak the long ones run their length (hours).

A figure is a line that a test logs as "reliability N: …", or one that matches the
pattern given beside the test's name below.
"""
import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
FRONT, RELAY, UP = "./dataplane/front", "./dataplane/relay", "./dataplane/upstream"
CMD, FLEET = "./cmd/sluice", "./router/fleet"

# Each point: what must be survived, what happens, and the tests: package, name, and,
# where the test does not say "reliability N:" itself, a pattern of the line to show.
POINTS = [
    ("HTTP/1 requests that two readers could read differently (lengths, encodings, chunks, line ends, hosts, names), each with a request behind it",
     "400 or 413 and the connection is closed, or exactly one request is served; the engine sees one request in the router's own framing. A request that comes before the answer to the one before it is told so behind that answer, and the connection ends",
     [(FRONT, "TestRawCorpus"), (FRONT, "TestEngineSeesOurFraming"), (FRONT, "TestPathsAgree"), (FRONT, "TestChunkedSmugglesNothing"), (FRONT, "TestChunkedKeepsItsConnection"), (FRONT, "TestTruncatedRequests"), (FRONT, "TestPipelinedIsRefused"), (FRONT, "TestPipelinedAfterStream"), (FRONT, "TestQuickReuseIsNotPipelining")]),
    ("Slow clients: heads and bodies that trickle or stop",
     "a head has 10 s; a body 30 s and its size at 256 KiB/s, and 15 s without a byte of it; memory is taken for bytes that came, never for those announced",
     [(FRONT, "TestSlowloris"), (FRONT, "TestStalledBodiesUseLittleMemory"), (FRONT, "TestSlowHeadTimesOut"), (FRONT, "TestSlowBodyTimesOut"), (FRONT, "TestChunkedBodyTimeouts"), (FRONT, "TestStalledBodyTimesOut")]),
    ("Heads over 16 KiB, 1,000 lines, deep JSON, bodies over the limit, text that is none, prompts of a million tokens",
     "431, 400, 413; a body holds at most 2.25 times its size",
     [(FRONT, "TestHeadTooLarge"), (FRONT, "TestBodyLimit"), (FRONT, "TestBadJSON"), (FRONT, "TestLargePrompt"), ("./dataplane/jsonscan", "TestDepthLimit"), ("./dataplane/jsonscan", "TestValidUTF8")]),
    ("Many streams, slow and stopped readers among them",
     "a client is given what its socket holds (256 KiB as the kernel counts), then its engine waits; a reader that takes nothing for 30 s is cut (3 s in the short test); nobody else waits for it",
     [(FRONT, "TestManyStreams"), ("./dataplane/eventloop", "TestSlowReader", r"KiB taken"), (RELAY, "TestBackPressure"), (FRONT, "TestStalledClientIsDisconnected")]),
    ("Engines that reset, end, stall at any byte of a stream, inside of a character too",
     "an error event in the client's protocol behind the last whole event (cut off without one in an event beyond 32 KiB, and in a chunk of which more than 64 KiB are missing), or the stream goes on from another engine; the slot is free",
     [(RELAY, "TestEngineDiesAnywhere"), (RELAY, "TestEngineResets"), (RELAY, "TestEngineStalled"), (CMD, "TestStreamMigrates"), (CMD, "TestStreamFailsMidway"), (FRONT, "TestEngineFailsAfterFinalEvent"), ("./dataplane/eventloop", "TestStarvedLoop"), (CMD, "TestStoppedProcess")]),
    ("Clients that leave before prefill is done, between the legs, while decode runs",
     "both legs are cut within 100 ms, where that leaves no KV pinned; else when it does not, or the handle is given back",
     [(FRONT, "TestClientGoneDuringStream", r"engine cut after"), (CMD, "TestClientAbortsDuringPrefill", r"after the client left"), (CMD, "TestClientAbortsBetweenLegs", r"after the client left"),
      (CMD, "TestClientAbortsStream", r"after the client left"), (CMD, "TestAbortStorm", r"\d+ left|all was quiet")]),
    ("An engine killed and started anew at the same address",
     "its old blocks are gone from the index before it is chosen again",
     [(CMD, "TestRestartDropsOldBlocks"), (FLEET, "TestRestartLeavesAndJoins")]),
    ("KV events dropped, doubled, out of order, reset, damaged, cut short, beyond the high-water mark; a dead replay socket",
     "after it the index is what the engine holds; each cause has a counter",
     [("./router/kvevents", "TestChurn", r"steps, map"), ("./router/kvevents", "TestOverflow"), ("./router/kvevents", "TestDeadReplay")]),
    ("The KV index under every interleaving",
     "equal to a plain model, linearizable; 10^6 operations of 64 seeds under the race detector by make soak",
     [("./router/kvindex", "TestMetamorphic"), ("./router/kvindex", "TestLinearizable")]),
    ("File descriptors that run out",
     "streams go on, idle connections make room, others get 503, the reserve serves admin and probes, no engine pays for it (docs/operations.md)",
     [(CMD, "TestOutOfDescriptors"), (FRONT, "TestAcceptWaitsOutExhaustion")]),
    ("SIGTERM with many streams; a hot restart under load",
     "/readyz is 503 first, no stream is cut before the deadline, the process ends within a second after it; a restart loses no request",
     [(CMD, "TestDrainOfManyStreams"), (CMD, "TestServeDrainsStreams"), (CMD, "TestRestartLosesNothing", r"restarts, \d+ requests"), (FRONT, "TestRetireServesStartedRequests"), (FRONT, "TestRetireEnds")]),
    ("A thousand reloads under load, bad ones among them",
     "a bad file is refused whole, with its line; goroutines and series stay as they are",
     [(CMD, "TestThousandReloads"), (CMD, "TestReloadOfABadFile")]),
    ("Strangers at the admin listener; secrets in what is shown",
     "loopback only, each route closed by a token compared in constant time, foreign hosts and origins refused; planted secrets show nowhere",
     [("./router/admin", "TestRoutesNeedToken"), ("./router/admin", "TestForeignHostsAndOriginsAreRefused"), ("./router/admin", "TestConfigIsMasked"), (CMD, "TestServeProcess"), ("./router/config", "TestSecretsAreHidden")]),
    ("Workers and requests that name hosts: link-local, redirects, names that change",
     "an address must lie in the networks allowed; a name is resolved once, and what was checked is dialled",
     [("./router/discovery/registration", "TestAddressesMustLieInTheNetworks"), ("./router/discovery/header", "TestRebinding"), ("./router/discovery/header", "TestRefused"), (CMD, "TestOverrideHeadersAreDropped"), (CMD, "TestForbiddenFieldsInside")]),
    ("Strangers at ZMQ sockets: frames too large, foreign, of other languages' serializers",
     "loopback by default; sizes are capped; what is not understood is dropped and counted, nothing is unpickled. CURVE is not spoken: no engine's publisher takes keys (docs/events.md)",
     [("./router/kvevents", "TestOversize"), ("./router/kvevents", "TestFarOversize"), ("./router/kvevents", "TestStrangersAtABoundFeed"), ("./router/kvtransfer/notify", "TestHostileFrames"), ("./dataplane/zmtp", "TestMessageWithoutEnd"), ("./dataplane/zmtp", "TestNetworksAtAccept")]),
    ("A transfer library that answers every status, nothing, or hangs; one that crashes",
     "the tier falls and comes back; no request is lost",
     [("./nixl", "TestFakeBehaviours"), ("./nixl", "TestTierGivesUpOnHangs"), (CMD, "TestIsolatedAgentsCrash", r"crashed, \d+ has its place")]),
    ("Engines that attack: lengths doubled or mixed with chunks, floods of 1xx, heads and chunk extensions without end",
     "502 with memory bounded; the connection is closed",
     [(UP, "TestMalformedResponses"), (UP, "TestMalformedHeads"), (UP, "TestBrokenBodies"), (UP, "TestChunksRefuse"), (CMD, "TestEngineAnswersGarbage")]),
    ("All of it for long: engines that fail in every way, clients that leave",
     "goroutines, descriptors and memory are as before (an hour by make soak)",
     [(CMD, "TestMixedFaults"), (FRONT, "TestMixedTraffic")]),
    ("Bodies that are decoded, cut, joined, compressed or converted, over memory that other clients' requests have used",
     "each byte is what a plain implementation makes of it; pooled memory is filled with a pattern on release and checked when it is lent again (tests, race detector)",
     [("./dataplane/compression", "TestDecodeContent"), (FRONT, "TestBodiesByteForByte"), (FRONT, "TestRelayByteForByte"), (RELAY, "TestConversionByReference"), (CMD, "TestRetriesByteForByte"), (CMD, "TestResumedByteForByte")]),
    ("Engines and clients whose certificate is another's, of another CA, expired, revoked by a reload",
     "refused in the handshake, by name, IPv4 and IPv6, with a CA of the configuration and of the system, resumed sessions too",
     [(UP, "TestTLSMatrix"), ("./dataplane/certs", "TestClientCertificateMatrix"), (CMD, "TestEngineCertificateForOtherAddress"), ("./router/discovery/registration", "TestCertificates")]),
    ("Clients that go on from, read or delete another key's stored response, by any spelling",
     "404 unknown_response, and no engine is asked",
     [(CMD, "TestStoredResponses"), (CMD, "TestKeyModelsApplyToAdapters"), (CMD, "TestStatePagesWithoutAKey"), (FRONT, "TestClientHeaders")]),
    ("Clients that name hosts, files or request ids to engines, in any member that an engine release reads",
     "400 that names the member; media only as data: URLs or from media_hosts",
     [(FRONT, "TestClientCannotNamePeer"), (FRONT, "TestEngineFieldsAreReviewed"), (FRONT, "TestMediaOfAnyHost")]),
    ("Many large bodies, decompression bombs, slow bodies, in a sidecar of 512 MiB",
     "it lives on within the limit, answers small requests meanwhile, and gives the memory back",
     [(CMD, "TestSidecarMemory", r"MiB at the most|MiB at rest")]),
    ("Engines that freeze: the process is stopped, its core alone is, its host has vanished",
     "found within 10 s, 30 s and 10 s of no sign of life (1.5 s in the tests); streams go on elsewhere, other requests are run again, late bytes reach nobody; a busy engine is left alone",
     [(CMD, "TestFrozenEngine", r"(process|core) of (aggregated|prefill|decode): all answered"), (CMD, "TestVanishedHost", r"host vanished: all answered"), (CMD, "TestBusyEngineIsNotFrozen", r"the answer came"),
      (CMD, "TestFrozenEngineWakesUp"), ("./router/liveness", "TestVerdicts"), (UP, "TestAbandon")]),
    ("Engines that restart under load, and a fleet that changes while a request is retried",
     "a retry uses the fleet as it is, within timeouts.pool_wait, the deadline and the retry budget; no request is lost over restarts",
     [(CMD, "TestRestartsLoseNoRequest", r"of \d+ requests failed over \d+ restarts"), (CMD, "TestRetryUsesCurrentFleet"), (CMD, "TestRetryWaitsForARestart"), (CMD, "TestMigrationWaitsForAWorker")]),
    ("No healthy prefill worker; a family that falls back for long",
     "decode does it alone at once where pd.decode_only_fallback allows it; a warning, a metric, /readyz and X-Sluice-Plan show a fall-back that lasts",
     [(CMD, "TestDecodeOnlyFallbackWithoutPrefill"), (CMD, "TestLastingFallbackIsReported"), (CMD, "TestLLMDSimHandle"), ("./router/kvevents", "TestLLMDSimEvents")]),
    ("Clients that leave while prefill answers",
     "the answer is read and its blocks are given back within a second",
     [(CMD, "TestClientAbortsWhilePrefillAnswers", r"abandoned prefills were free"), (CMD, "TestLateAbortsLeaveNothingPinned", r"all blocks were free after"), (CMD, "TestAbandonedDecodeEndsByItself")]),
    ("Hot restarts under clients that keep connections",
     "idle connections are passed to the new process; no POST is lost",
     [(CMD, "TestRestartKeepsIdleConnections"), (CMD, "TestRestartLosesNoPost", r"restarts, \d+ POSTs"), (FRONT, "TestHandOffLosesNothing", r"requests answered")]),
    ("A thousand workers, and a thousand KV feeds",
     "idle workers cost little, a dead one is found within 5 s; feeds share a few threads and take one descriptor each; after all engines restart the feeds recover beside requests",
     [(FLEET, "TestDeadAmongMany", r"workers; .*: out after"), (FLEET, "TestCPUOfManyWorkers", r"% of a core"), ("./router/kvevents", "TestFeedsOfAFleet", r"feeds \d+, \d+ messages/s each"), ("./router/kvevents", "TestAllEnginesRestart", r"restart of \d+ engines"), ("./dataplane/zmtp", "TestHostileStreams")]),
]


def run(package, names, soak):
    env = dict(os.environ)
    if soak:
        env.setdefault("SLUICE_SOAK", "1")  # or how long the longest one is to be: 20m
    pattern = "^(" + "|".join(names) + ")$"
    cmd = ["go", "test", "-json", "-count=1", "-timeout", "4h" if soak else "15m", "-run", pattern, package]
    print("reliability:", " ".join(cmd), file=sys.stderr, flush=True)
    lines, result, took = {}, {}, {}
    out = subprocess.run(cmd, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    for text in out.stdout.splitlines():
        try:
            e = json.loads(text)
        except ValueError:
            continue
        test = e.get("Test", "").split("/")[0]
        if e["Action"] == "output":
            lines.setdefault(test, []).append(e["Output"].rstrip("\n"))
        elif e["Action"] in ("pass", "fail", "skip") and e.get("Test") == test:
            result[test], took[test] = e["Action"], e.get("Elapsed", 0)
    for name in names:
        if result.get(name) is None:
            result[name] = "missing"
        if result[name] in ("fail", "missing"):
            print("\n".join(lines.get(name, lines.get("", []))[-60:]), file=sys.stderr)
    return lines, result, took


def figures(number, lines, pattern):
    found = []
    for line in lines:
        text = re.sub(r"^\s*[a-z_0-9]+_test\.go:\d+: ", "", line)
        if text == line:
            continue
        own = re.match(r"reliability %d: (.*)" % number, text)
        if own:
            found.append(own.group(1))
        elif pattern and re.search(pattern, text):
            found.append(text)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--soak", action="store_true", help="the long ones at their length")
    p.add_argument("--only", type=int, action="append", help="a point's number; prints, and writes nothing")
    p.add_argument("--report", default=os.path.join(ROOT, "RELIABILITY.md"))
    args = p.parse_args()
    wanted = [(i, pt) for i, pt in enumerate(POINTS, 1) if not args.only or i in args.only]
    packages = {}
    for _, (_, _, tests) in wanted:
        for t in tests:
            packages.setdefault(t[0], []).append(t[1])
    results = {pkg: run(pkg, sorted(set(names)), args.soak) for pkg, names in packages.items()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()
    out = ["# What the router survives", "",
           "Written by `make reliability`%s from what the tests print; `make soak` runs the long ones at their length. Machine: %d CPUs, load %.0f at the end, %s; commit %s, %s."
           % (" (`--soak`)" if args.soak else "", os.cpu_count(), os.getloadavg()[0], platform.machine(), head, time.strftime("%Y-%m-%d")),
           "Figures are of that machine and hour: the bounds that hold anywhere stand in the tests. Long runs: [docs/soaks.md](docs/soaks.md).", ""]
    bad = 0
    for i, (what, happens, tests) in wanted:
        out += ["## %d. %s" % (i, what), "", happens[0].upper() + happens[1:] + ".", "", "| test | result | figures |", "| --- | --- | --- |"]
        for t in tests:
            lines, result, took = results[t[0]]
            word = {"pass": "passed", "fail": "FAILED", "skip": "skipped", "missing": "NOT RUN"}[result[t[1]]]
            bad += result[t[1]] in ("fail", "missing")
            shown = figures(i, lines.get(t[1], []), t[2] if len(t) > 2 else None)
            if len(shown) > 4:
                shown = shown[:4] + ["… (%d lines)" % (len(shown))]
            out.append("| `%s` `%s` | %s, %.1f s | %s |" % (t[0][2:], t[1], word, took.get(t[1], 0), "<br>".join(s.replace("|", "\\|") for s in shown)))
        out.append("")
    text = "\n".join(out)
    if args.only:
        print(text)
    else:
        with open(args.report, "w") as f:
            f.write(text)
    if bad:
        print("reliability: %d tests failed or were not there" % bad, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
