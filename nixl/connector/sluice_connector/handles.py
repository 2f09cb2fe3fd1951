# SPDX-License-Identifier: Apache-2.0
"""Keeps a decode engine from notifying prefill twice that a request's blocks may be freed.

From 0.21 on vLLM's API server reports a request to the core as rejected when it
ends without an answer, so that the connector frees the blocks on prefill. It does
so too when the client left a request that was not streamed and that the core had
taken in. Prefill then gets a notification for blocks that it has freed, logs
"Potentially invalid KV blocks for unrecognized request" and counts a notification
after expiry.
"""

import collections

MOST = 65536  # handles remembered; the oldest go first


class Handles:
    """The handles of which this engine has notified prefill, or will. It belongs to
    the scheduler's thread."""

    def __init__(self):
        self._reported = collections.OrderedDict()

    def allocated(self, params) -> None:
        """A request with these kv_transfer_params has its blocks: what reads them notifies prefill."""
        self._first(params)

    def finished(self, params) -> None:
        """A request with these kv_transfer_params is about to finish. Where it never had
        blocks vLLM notifies prefill now, unless its do_remote_prefill is reset."""
        if params and params.get("do_remote_prefill") and not self._first(params):
            params["do_remote_prefill"] = False

    def _first(self, params) -> bool:
        """Whether the handle was not met before."""
        if not params or not params.get("do_remote_prefill") or not params.get("remote_request_id"):
            return True
        handle = (params.get("remote_engine_id"), params["remote_request_id"])
        if handle in self._reported:
            return False
        self._reported[handle] = None
        if len(self._reported) > MOST:
            self._reported.popitem(last=False)
        return True
