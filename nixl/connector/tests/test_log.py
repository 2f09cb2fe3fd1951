# SPDX-License-Identifier: Apache-2.0
"""What the connector says reaches vLLM's log, whose configuration gives handlers to
the logger "vllm" alone."""

import io
import logging.config
import unittest
import unittest.mock

from sluice_connector import handles, reporter, watch

# As vllm/logger.py configures logging, without its formatter.
CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"vllm": {"class": "logging.StreamHandler", "level": "INFO", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
}


class LogTest(unittest.TestCase):
    def test_lines_reach_the_handlers_of_vllm(self):
        vllm = logging.getLogger("vllm")
        before = (vllm.handlers[:], vllm.level, vllm.propagate)
        try:
            with unittest.mock.patch("sys.stdout", io.StringIO()) as out:
                logging.config.dictConfig(CONFIG)
            for module in (reporter, watch):
                module.logger.info("sluice: %s says so", module.__name__)
                self.assertIn(f"sluice: {module.__name__} says so", out.getvalue())
        finally:
            vllm.handlers, vllm.level, vllm.propagate = before


class HandlesTest(unittest.TestCase):
    """The order of calls is that of vLLM 0.32: update_state_after_alloc takes
    do_remote_prefill back, request_finished tells prefill where it is still there."""

    def setUp(self):
        self.handles = handles.Handles()

    @staticmethod
    def params(request="r", engine="e"):
        return {"do_remote_prefill": True, "remote_request_id": request, "remote_engine_id": engine}

    def tells(self, params):
        self.handles.finished(params)
        return params["do_remote_prefill"]

    def test_a_request_that_never_had_blocks_is_reported_once(self):
        self.assertTrue(self.tells(self.params()))
        self.assertFalse(self.tells(self.params()))

    def test_a_rejection_behind_a_read_is_not_reported(self):
        self.handles.allocated(self.params())
        self.assertFalse(self.tells(self.params()))

    def test_others_are_reported(self):
        self.handles.allocated(self.params())
        for other in (self.params("s"), self.params("r", "f")):
            self.assertTrue(self.tells(other))

    def test_requests_without_a_handle(self):
        self.handles.allocated({"do_remote_decode": True})
        for params in (None, {}, {"do_remote_decode": True}, {"do_remote_prefill": False, "remote_request_id": "r"}):
            before = dict(params or {})
            self.handles.finished(params)
            self.assertEqual(params or {}, before)

    def test_memory_is_bounded(self):
        with unittest.mock.patch.object(handles, "MOST", 3):
            for i in range(10):
                self.handles.allocated(self.params(str(i)))
        self.assertEqual(len(self.handles._reported), 3)


if __name__ == "__main__":
    unittest.main()
