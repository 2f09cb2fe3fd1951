#!/usr/bin/env python3
"""Runs the reliability tests and writes RELIABILITY.md from their output (make reliability).

With --soak the long tests run at full length (hours). A figure is a line that a test logs as
"reliability N: …", or a line that matches the pattern after the test's name below.
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
FLEET, E2E = "./router/fleet", "./router/e2e/"

# Each point has the condition, the behaviour of the router, and the tests: package, name,
# and a pattern of the line to show if the test does not log "reliability N:" itself.
POINTS = [
    ("Ambiguous HTTP/1 requests (lengths, encodings, chunks, line ends, hosts, names), each followed by another request",
     "the router answers 400 or 413 and closes the connection, or serves exactly one request; the engine sees one request in the router's own framing. A pipelined request gets an error after the answer to the request before it, and the connection ends",
     [(FRONT, "TestRawCorpus"), (FRONT, "TestBareLineEndAtOnce"), (FRONT, "TestEngineSeesOurFraming"), (FRONT, "TestPathsAgree"), (FRONT, "TestChunkedSmugglesNothing"), (FRONT, "TestChunkedKeepsItsConnection"), (FRONT, "TestTruncatedRequests"), (FRONT, "TestPipelinedIsRefused"), (FRONT, "TestPipelinedAfterStream"), (FRONT, "TestQuickReuseIsNotPipelining")]),
    ("Slow clients: heads and bodies that trickle or stop",
     "a head has 10 s; a body has 30 s and its size at 256 KiB/s, and 15 s without a byte; the router takes memory for bytes that arrived, never for those announced",
     [(FRONT, "TestSlowloris"), (FRONT, "TestStalledBodiesUseLittleMemory"), (FRONT, "TestSlowHeadTimesOut"), (FRONT, "TestSlowBodyTimesOut"), (FRONT, "TestChunkedBodyTimeouts"), (FRONT, "TestStalledBodyTimesOut")]),
    ("Heads over 16 KiB, 1,000 header lines, deep JSON, bodies over the limit, invalid UTF-8, prompts of a million tokens",
     "the router answers 431, 400 or 413; a body holds at most 2.25 times its size",
     [(FRONT, "TestHeadTooLarge"), (FRONT, "TestBodyLimit"), (FRONT, "TestBadJSON"), (FRONT, "TestLargePrompt"), ("./dataplane/jsonscan", "TestDepthLimit"), ("./dataplane/jsonscan", "TestValidUTF8")]),
    ("Many streams, slow and stopped readers among them",
     "a client gets what its socket holds (256 KiB as the kernel counts), then its engine waits; the router disconnects a reader that reads nothing for 30 s (3 s in the short test); no other stream waits for it",
     [(FRONT, "TestManyStreams"), ("./dataplane/eventloop", "TestSlowReader", r"KiB taken"), (RELAY, "TestBackPressure"), (FRONT, "TestStalledClientIsDisconnected")]),
    ("Engines that reset, end or stall at any byte of a stream, also inside a character",
     "the client gets an error event of its protocol after the last whole event, or the stream continues on another engine; the slot is free. The stream breaks off without an error event inside an event beyond 32 KiB, and inside a chunk of which more than 64 KiB are missing",
     [(RELAY, "TestEngineDiesAnywhere"), (RELAY, "TestEngineResets"), (RELAY, "TestEngineStalled"), (E2E + "migration", "TestStreamMigrates"), (E2E + "faults", "TestStreamFailsMidway"), (FRONT, "TestEngineFailsAfterFinalEvent"), ("./dataplane/eventloop", "TestStarvedLoop"), (E2E + "liveness", "TestStoppedProcess")]),
    ("Clients that leave before prefill is done, between the legs, or while decode runs",
     "the router cancels both legs within 100 ms where that leaves no KV pinned; otherwise as soon as it does not, or it releases the handle",
     [(FRONT, "TestClientGoneDuringStream", r"engine cut after"), (E2E + "abort", "TestClientAbortsDuringPrefill", r"after the client left"), (E2E + "abort", "TestClientAbortsBetweenLegs", r"after the client left"),
      (E2E + "abort", "TestClientAbortsStream", r"after the client left"), (E2E + "abort", "TestAbortStorm", r"\d+ left|all was quiet")]),
    ("An engine killed and restarted at the same address",
     "the index drops its old blocks before the router chooses it again",
     [(E2E + "liveness", "TestRestartDropsOldBlocks"), (FLEET, "TestRestartLeavesAndJoins")]),
    ("KV events dropped, duplicated, reordered, reset, damaged, truncated, or beyond the high-water mark; a dead replay socket",
     "afterwards the index equals what the engine holds; each cause has a counter",
     [("./router/kvevents", "TestChurn", r"steps, map"), ("./router/kvevents", "TestOverflow"), ("./router/kvevents", "TestDeadReplay")]),
    ("The KV index under every interleaving",
     "the index equals a plain model and is linearizable; make soak runs 10^6 operations of 64 seeds under the race detector",
     [("./router/kvindex", "TestMetamorphic"), ("./router/kvindex", "TestLinearizable")]),
    ("File descriptors that run out",
     "streams continue, idle connections are closed, other requests get 503, the reserve serves admin and status requests, no engine's breaker is affected (docs/operations.md)",
     [(E2E + "limits", "TestOutOfDescriptors"), (FRONT, "TestAcceptWaitsOutExhaustion")]),
    ("SIGTERM with many streams; a hot restart under load",
     "/readyz is 503 first, no stream ends before the deadline, the process ends within a second after it; a restart loses no request",
     [(E2E + "limits", "TestDrainOfManyStreams"), (E2E + "restart", "TestServeDrainsStreams"), (E2E + "restart", "TestRestartLosesNothing", r"restarts, \d+ requests"), (FRONT, "TestRetireServesStartedRequests"), (FRONT, "TestRetireEnds")]),
    ("A thousand reloads under load, some with errors",
     "a file with an error is refused as a whole, with its line; goroutines and series do not grow",
     [(E2E + "restart", "TestThousandReloads"), (E2E + "restart", "TestReloadOfABadFile")]),
    ("Unauthorized callers of the admin listener; secrets in its output",
     "the listener is on loopback only, every route requires a token compared in constant time, foreign hosts and origins are refused; planted secrets appear nowhere",
     [("./router/admin", "TestRoutesNeedToken"), ("./router/admin", "TestForeignHostsAndOriginsAreRefused"), ("./router/admin", "TestConfigIsMasked"), (E2E + "restart", "TestServeProcess"), ("./router/config", "TestSecretsAreHidden")]),
    ("Workers and requests that name hosts: link-local, redirects, names that change",
     "an address must lie in the allowed networks; a name is resolved once, and the router dials the address that it checked",
     [("./router/discovery/registration", "TestAddressesMustLieInTheNetworks"), ("./router/discovery/header", "TestRebinding"), ("./router/discovery/header", "TestRefused"), (E2E + "access", "TestOverrideHeadersAreDropped"), (E2E + "access", "TestForbiddenFieldsInside")]),
    ("Unknown peers at ZMQ sockets: frames that are too large, foreign, or from other languages' serializers",
     "the sockets are on loopback by default; sizes are bounded; unknown messages are dropped and counted, nothing is unpickled. The router does not speak CURVE, because no engine's publisher accepts keys (docs/events.md)",
     [("./router/kvevents", "TestOversize"), ("./router/kvevents", "TestFarOversize"), ("./router/kvevents", "TestStrangersAtABoundFeed"), ("./router/kvtransfer/notify", "TestHostileFrames"), ("./dataplane/zmtp", "TestMessageWithoutEnd"), ("./dataplane/zmtp", "TestNetworksAtAccept")]),
    ("A transfer library that returns any status, nothing, hangs, or crashes",
     "the tier goes down and comes back; no request is lost",
     [("./nixl", "TestFakeBehaviours"), ("./nixl", "TestTierGivesUpOnHangs"), (E2E + "faults", "TestIsolatedAgentsCrash", r"crashed, \d+ has its place")]),
    ("Malicious engines: duplicate lengths, lengths mixed with chunks, floods of 1xx, endless heads and chunk extensions",
     "the client gets 502, memory is bounded, and the connection is closed",
     [(UP, "TestMalformedResponses"), (UP, "TestMalformedHeads"), (UP, "TestBrokenBodies"), (UP, "TestChunksRefuse"), (E2E + "access", "TestEngineAnswersGarbage")]),
    ("Long runs: engines that fail in every way, clients that leave",
     "goroutines, descriptors and memory do not grow (make soak runs an hour)",
     [(E2E + "faults", "TestMixedFaults"), (FRONT, "TestMixedTraffic")]),
    ("Bodies that are decompressed, split, joined, compressed or converted in memory that other clients' requests have used",
     "each byte equals that of a plain implementation; pooled memory is filled with a pattern on release and checked when it is reused (tests, race detector)",
     [("./dataplane/compression", "TestDecodeContent"), (FRONT, "TestBodiesByteForByte"), (FRONT, "TestRelayByteForByte"), (RELAY, "TestConversionByReference"), (E2E + "faults", "TestRetriesByteForByte"), (E2E + "migration", "TestResumedByteForByte")]),
    ("Engines and clients with a certificate of another host, of another CA, expired, or revoked by a reload",
     "the handshake fails, by name, IPv4 and IPv6, with a CA of the configuration and of the system, also for resumed sessions",
     [(UP, "TestTLSMatrix"), ("./dataplane/certs", "TestClientCertificateMatrix"), (E2E + "access", "TestEngineCertificateForOtherAddress"), ("./router/discovery/registration", "TestCertificates")]),
    ("Clients that continue, read or delete another key's stored response, in any spelling",
     "the client gets 404 unknown_response, and no engine is asked",
     [(E2E + "access", "TestStoredResponses"), (E2E + "access", "TestKeyModelsApplyToAdapters"), (E2E + "access", "TestStatePagesWithoutAKey"), (FRONT, "TestClientHeaders")]),
    ("Clients that name hosts, files or request ids to engines, in any member that an engine release reads",
     "the client gets a 400 that names the member; media may only be data: URLs or come from media_hosts",
     [(FRONT, "TestClientCannotNamePeer"), ("./dataplane/fieldrules", "TestEngineFieldsAreReviewed"), (FRONT, "TestMediaOfAnyHost")]),
    ("Many large bodies, decompression bombs, slow bodies, in a sidecar of 512 MiB",
     "it stays within the limit, answers small requests meanwhile, and returns the memory",
     [(E2E + "limits", "TestSidecarMemory", r"MiB at most|MiB at rest")]),
    ("Engines that freeze: the process is stopped, its core alone is stopped, or its host has vanished",
     "the router detects this after 10 s, 30 s and 10 s without a sign of life (1.5 s in the tests); streams continue elsewhere, other requests run again, late bytes reach nobody; a busy engine keeps its work",
     [(E2E + "liveness", "TestFrozenEngine", r"(process|core) of (aggregated|prefill|decode): all answered"), (E2E + "liveness", "TestVanishedHost", r"host vanished: all answered"), (E2E + "liveness", "TestBusyEngineIsNotFrozen", r"the answer came"),
      (E2E + "liveness", "TestFrozenEngineWakesUp"), ("./router/liveness", "TestVerdicts"), (UP, "TestAbandon")]),
    ("Engines that restart under load, and a fleet that changes while a request is retried",
     "a retry uses the current fleet, within timeouts.pool_wait, the deadline and the retry budget; restarts lose no request",
     [(E2E + "faults", "TestRestartsLoseNoRequest", r"of \d+ requests failed over \d+ restarts"), (E2E + "faults", "TestRetryUsesCurrentFleet"), (E2E + "faults", "TestRetryWaitsForARestart"), (E2E + "faults", "TestMigrationWaitsForAWorker")]),
    ("No healthy prefill worker; a family that falls back for long",
     "decode serves the request alone at once where pd.decode_only_fallback allows it; a warning, a metric, /readyz and X-Sluice-Plan show a lasting fall-back",
     [(E2E + "families", "TestDecodeOnlyFallbackWithoutPrefill"), (E2E + "families", "TestLastingFallbackIsReported"), (E2E + "families", "TestLLMDSimHandle"), ("./router/kvevents", "TestLLMDSimEvents")]),
    ("Clients that leave while prefill answers",
     "the router reads the answer and releases its blocks within a second",
     [(E2E + "abort", "TestClientAbortsWhilePrefillAnswers", r"abandoned prefills were free"), (E2E + "abort", "TestLateAbortsLeaveNothingLeased", r"all blocks were free after"), (E2E + "abort", "TestAbandonedDecodeEndsByItself")]),
    ("Hot restarts under clients that keep connections",
     "the new process receives idle connections; no POST is lost",
     [(E2E + "restart", "TestRestartKeepsIdleConnections"), (E2E + "restart", "TestRestartLosesNoPost", r"restarts, \d+ POSTs"), (FRONT, "TestPassedConnectionsLoseNothing", r"requests answered")]),
    ("A thousand workers, and a thousand KV feeds",
     "idle workers cost little, a dead one is detected within 5 s; feeds share a few threads and take one descriptor each; after all engines restart the feeds recover beside requests. The CPU of a message differs between the rates by more than the goal of 20 %, which is not met: a message that is read alone costs a system call of its own (docs/events.md)",
     [(FLEET, "TestDeadAmongMany", r"workers; .*: out after"), (FLEET, "TestCPUOfManyWorkers", r"% of a core"), ("./router/kvevents", "TestFeedsOfAFleet", r"feeds \d+, \d+ messages/s each|CPU per message differs by"), ("./router/kvevents", "TestAllEnginesRestart", r"restart of \d+ engines"), ("./dataplane/zmtp", "TestHostileStreams")]),
    ("Requests whose fields, lists or nesting cost more than their bytes",
     "the checks take one linear pass; long adapter, label and host lists take no memory outside the budget",
     [("./dataplane/fieldrules", "TestFieldCheckIsLinear"), (FRONT, "TestAdapterListTakesNoMemory"), ("./router/pd", "TestLongSteeringListCostsNothing"), ("./router/engineapi", "TestHostsCheckIsLinear"), ("./router/engineapi", "TestHostsInsideAllowedValues")]),
    ("Engines whose refusals, errors or last events echo the request's KV handle",
     "the client gets the answer without the handle, in every status and at any split; in an error event of more than 32 KiB only words are overwritten, not members",
     [(RELAY, "TestRefusalEchoes"), (RELAY, "TestLongErrorEvents"), (RELAY, "TestBareErrors")]),
    ("Event streams with any mixture of line ends, with large events, and in reads that end anywhere inside an event",
     "every event is found where it ends; an engine that keeps its response open after the last event is waited for 1 s",
     [(RELAY, "TestMixedLineEnds"), (RELAY, "TestReadsThatEndInsideEvents"), (RELAY, "TestHoldsAfterLongEvent"), (RELAY, "TestLastChunkAfterLargeEvent"), (RELAY, "TestEngineKeepsOpen"), (RELAY, "TestEngineOmitsDone")]),
    ("Answers that break off, are empty, or are aborted by their engine",
     "an answer that is not a stream is held until it is complete, up to 1 MiB, and the request runs again",
     [(E2E + "faults", "TestBrokenAnswersRunAgain"), (E2E + "faults", "TestLongChunkedAnswers"), (E2E + "families", "TestAbortedGenerateIsRunAgain")]),
    ("A prefill engine that stays silent while decode answers, or fails beside it",
     "its leg ends 3 s after decode's, and the client's answer does not wait for it",
     [(E2E + "families", "TestSilentPrefillEndsWithDecode"), (E2E + "families", "TestPrefillFailsDuringDecode"), (E2E + "families", "TestPrefillFailsInMidStream"), (E2E + "families", "TestLMCacheOnlyDecodeWorkerSilent"), (E2E + "families", "TestLMCachePrefillRefuses"), (E2E + "faults", "TestExpiredHandleIsReleased")]),
    ("Engines that clear all their blocks again and again",
     "a clear of a rank without blocks in flight costs a look-up",
     [("./router/schedule", "TestInFlightRemoveOfUnusedSlotIsCheap")]),
    ("A router whose worker is itself, or a ring of routers",
     "the request gets 508 loop_detected at the first router that it meets again",
     [(FRONT, "TestLoopIsDetected"), (FRONT, "TestHops")]),
    ("Keys that store many responses, or run them in the background",
     "each key has its share of the table and loses only its own oldest entries; background responses count against the key's tokens",
     [("./router/pd", "TestStoredResponsesAreSharedFairly"), (E2E + "access", "TestStoredResponseIsNotRedirected"), (E2E + "access", "TestBackgroundResponsesAreCharged")]),
    ("More events than a core can relay",
     "an event loop that has had work for 100 ms without a break pauses up to 5 ms at a time and relays more events by each read and write; otherwise no event waits (docs/relay-cost.md)",
     [("./dataplane/eventloop", "TestOverloadPause"), ("./dataplane/eventloop", "TestBehindLoopPauses", r"waits in \d+ sweeps")]),
]


def run(package, names, soak):
    env = dict(os.environ)
    if soak:
        env.setdefault("SLUICE_SOAK", "1")  # the user can set the duration of the longest test instead, for example 20m
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


def merge(report, sections):
    """The text before the points of an existing page, and its points with sections in their place."""
    with open(report) as f:
        intro, *rest = re.split(r"^(?=## \d+\. )", f.read(), flags=re.M)
    points = {int(re.match(r"## (\d+)", text).group(1)): text.removesuffix("\n") + "\n" * (text is rest[-1]) for text in rest}
    return intro.removesuffix("\n"), {**points, **sections}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--soak", action="store_true", help="run the soak tests at full length")
    p.add_argument("--only", type=int, action="append", help="run only the point of this number and print the result without writing the page")
    p.add_argument("--update", action="store_true", help="with --only: replace or append the points in the page, with the commit at which they ran")
    p.add_argument("--report", default=os.path.join(ROOT, "RELIABILITY.md"))
    args = p.parse_args()
    wanted = [(i, pt) for i, pt in enumerate(POINTS, 1) if not args.only or i in args.only]
    packages = {}
    for _, (_, _, tests) in wanted:
        for t in tests:
            packages.setdefault(t[0], []).append(t[1])
    results = {pkg: run(pkg, sorted(set(names)), args.soak) for pkg, names in packages.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()
    head = ["# Reliability", "",
            "This page lists what the router survives, point by point, with the tests that show it.\n`make reliability`%s writes it from what the tests print; `make soak` runs the long tests at full length.\nMachine: %d CPUs, load %.0f at the end, %s; commit %s, %s."
            % (" (`--soak`)" if args.soak else "", os.cpu_count(), os.getloadavg()[0], platform.machine(), commit, time.strftime("%Y-%m-%d")),
            "Figures are of that machine and hour; the tests hold the bounds that apply anywhere. Long runs are in [docs/soaks.md](docs/soaks.md).", "",
            "`scripts/reliability.py --only N` runs one point.", ""]
    ran = "\nRun by itself at commit %s, %s." % (commit, time.strftime("%Y-%m-%d")) if args.update else ""
    bad, sections = 0, {}
    for i, (what, happens, tests) in wanted:
        out = sections[i] = ["## %d. %s" % (i, what), "", happens[0].upper() + happens[1:] + "." + ran, "", "| test | result | figures |", "| --- | --- | --- |"]
        for t in tests:
            lines, result, took = results[t[0]]
            word = {"pass": "passed", "fail": "FAILED", "skip": "skipped", "missing": "NOT RUN"}[result[t[1]]]
            bad += result[t[1]] in ("fail", "missing")
            shown = figures(i, lines.get(t[1], []), t[2] if len(t) > 2 else None)
            if len(shown) > 4:
                shown = shown[:4] + ["… (%d lines)" % (len(shown))]
            out.append("| `%s` `%s` | %s, %.1f s | %s |" % (t[0][2:], t[1], word, took.get(t[1], 0), "<br>".join(s.replace("|", "\\|") for s in shown)))
        out.append("")
    sections = {i: "\n".join(lines) for i, lines in sections.items()}
    if args.only and not args.update:
        print("\n".join(sections.values()))
    else:
        intro = "\n".join(head)
        if args.only:
            intro, sections = merge(args.report, sections)
        with open(args.report, "w") as f:
            f.write("\n".join([intro, *(text for _, text in sorted(sections.items()))]))
    if bad:
        print("reliability: %d tests failed or did not run" % bad, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
