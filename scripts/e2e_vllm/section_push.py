"""vLLM's push mode: prefill writes the KV into decode's blocks, and Sluice's connector in the
decode engine reports it to the router."""

import json

import prompts
import section_transfers
from section_transfers import CHAT


class Section(section_transfers.Section):
    engines_of = (("p1", "kv_producer", True), ("p2", "kv_producer", True), ("d1", "kv_consumer", True))
    kind = "NixlPushConnector"

    def check(self):
        self.begin()
        for tier, env in self.tiers("nixl", "zmq"):
            self.report.section(f"Push mode, reported over {tier.upper()}")
            self.report.note("all three engines run NixlPushConnector; router: pd.family nixl-push")
            with self.router("push-" + tier, {**env, "SLUICE_PD_FAMILY": "nixl-push"}) as router:
                self.found(router, tier)
                self.pushed(router, 6)

    def pushed(self, router, count):
        report, states, same = self.report, [], 0
        received = self.engines["d1"].metrics().source("external_kv_transfer")
        for i in range(count):
            request, streamed = f"{router.process.name}-{i}", i % 2 == 1
            body = prompts.chat(prompts.text(40 + 20 * i))
            answer = router.ask(CHAT, {**body, "stream": streamed}, {"X-Request-Id": request})
            same += prompts.generated(CHAT, answer, streamed) == self.alone(CHAT, body)
            account = self.account(router, request)
            states.append((account["outcome"].get("transfer") or {}).get("state"))
        report.equal(f"{count} answers have the text of decode alone", count, same)
        report.equal("hand-overs reported done", count, states.count("done"))
        seen = int(self.engines["d1"].metrics().source("external_kv_transfer") - received)
        report.row("prompt tokens that decode received from prefill", "more than 0", seen, seen > 0)
        view = self.admin(router, "/admin/v1/transfers").json()
        report.note("reports: " + json.dumps({k: v for k, v in view["reports"].items() if v}))
        report.equal("malformed reports", 0, view["reports"]["malformed"])
        # The report of an attempt that was abandoned when its lease expired comes too late for its slot.
        late, refused = view["reports"]["expired_ok"], view["reports"]["refused"]
        report.row("refused reports: only of abandoned attempts", f"at most {late}", refused, refused <= late)
