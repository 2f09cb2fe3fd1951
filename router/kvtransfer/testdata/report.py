# SPDX-License-Identifier: Apache-2.0
"""Reports as an engine's connector does, by the connector's own package.

usage: report.py ROUTER TOKEN CHANNEL < lines of "EVENT STATUS BYTES MICROS REQUEST [PARAMS]"

PARAMS is the kv_transfer_params that the engine was given, as JSON. A line with the
channel's name is written once it is open, and "sent N" after each report.
"""

import json
import sys
import time

from sluice_connector import report as reports
from sluice_connector.reporter import Reporter
from sluice_connector.settings import Settings

router, token, channel = sys.argv[1:4]
reporter = Reporter(Settings(router=router, token=token, channel=channel), reports.Origin("d0"))
for line in sys.stdin:
    event, status, size, micros, request, *params = line.split(" ", 5)
    slot = reports.slot_of(json.loads(params[0])) if params else None
    before = reporter.sent
    reporter.put(reports.Report(event, request.strip(), status, int(size), int(micros), slot))
    end = time.monotonic() + 30
    while reporter.sent == before and time.monotonic() < end:
        time.sleep(0.002)
    print("sent", reporter.sent, reporter.channel, flush=True)
reporter.close()
