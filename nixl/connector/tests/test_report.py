# SPDX-License-Identifier: Apache-2.0
import json
import os
import struct
import tempfile
import unittest

from sluice_connector import endpoint, settings
from sluice_connector.report import EXPIRED, FAILED, MAX_BYTES, RECV, CompletionSlot, Origin, Report, encode, message, record, slot_of

ORIGIN = Origin("d0", 1, 0, 2)


class ReportTest(unittest.TestCase):
    def test_line(self):
        line = encode(Report(RECV, "chatcmpl-r1-0f0f0f0f", FAILED, 1048576, 8123, CompletionSlot(17, 5, 0xC0FFEE, 31)), ORIGIN)
        self.assertEqual(line, b"SLUICE1 recv failed 17 0000000000c0ffee 1048576 8123 1/0/2 d0 chatcmpl-r1-0f0f0f0f")

    def test_line_without_slot(self):
        self.assertEqual(encode(Report(EXPIRED, "r"), Origin("p")), b"SLUICE1 expired ok - - 0 0 0/0/1 p r")

    def test_what_does_not_fit_is_refused(self):
        for request in ("", "a b", "a\nb", "x" * MAX_BYTES):
            with self.assertRaises(ValueError):
                encode(Report(RECV, request), ORIGIN)
        with self.assertRaises(ValueError):
            encode(Report(RECV, "r"), Origin("two words"))

    def test_completion_slots(self):
        good = {"slot": 3, "sequence": "5", "nonce": "ff", "request": "1f"}
        self.assertEqual(slot_of({"sluice": good}), CompletionSlot(3, 5, 255, 31))
        for bad in (None, {}, {"sluice": None}, {"sluice": "x"}, {"sluice": {**good, "slot": -1}}, {"sluice": {"slot": 1}},
                    {"sluice": {**good, "nonce": "zz"}}, {"sluice": {**good, "nonce": "1" * 17}}, {"sluice": {**good, "slot": 1 << 20}},
                    json.loads('{"sluice": {"slot": 1e999, "sequence": "5", "nonce": "ff", "request": "1f"}}'), {"sluice": {**good, "board": float("-inf")}}):
            self.assertIsNone(slot_of(bad), bad)

    def test_record(self):
        slot = CompletionSlot(17, 5, 0x1122334455667788, 31)
        got = record(Report(RECV, "r", FAILED, 4096, 250, slot), Origin("d", 3))
        words = struct.unpack("<8Q", got)
        self.assertEqual(words[:6] + words[7:], (0x101424C53, 0x1122334455667788, 31, 4096, 250, 3 << 32, 5))
        check = 0
        for word in words:
            check ^= word
        self.assertEqual(check, 0)
        self.assertEqual(message(slot, got)[:8], b"SLB1\x11\0\0\0")
        self.assertIsNone(record(Report(RECV, "r", slot=slot), ORIGIN), "two processes report it, a slot holds one record")
        self.assertIsNone(record(Report(RECV, "r"), Origin("d")))


class SettingsTest(unittest.TestCase):
    def test_config_before_environment(self):
        s = settings.read({"router": "http://r:1"}, {"SLUICE_ROUTER": "http://other:2", "SLUICE_WORKER": "d3", "SLUICE_TOKEN": "t"})
        self.assertEqual(s, settings.Settings("http://r:1", None, "d3", "auto", "t"))
        self.assertFalse(s.off)
        self.assertTrue(settings.read(None, {}).off)

    def test_token_file(self):
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("secret\n")
        self.addCleanup(os.unlink, file.name)
        self.assertEqual(settings.read({"token_file": file.name}, {}).token, "secret")

    def test_a_token_that_no_header_takes_is_not_repeated(self):
        self.assertEqual(settings.read({}, {"SLUICE_TOKEN": " secret\n"}).token, "secret")
        self.assertIsNone(settings.read({}, {"SLUICE_TOKEN": "\n"}).token)
        for token in ("sec\nret", "sec ret", "secrét", "sec\x00ret"):
            with self.assertRaisesRegex(ValueError, "SLUICE_TOKEN") as caught:
                settings.read({}, {"SLUICE_TOKEN": token})
            self.assertNotIn("sec", str(caught.exception))

    def test_errors_name_the_member(self):
        for extra, name in (({"ruoter": "x"}, "ruoter"), ({"router": "r:1"}, "sluice.router"), ({"zmq": "udp://x"}, "sluice.zmq"),
                            ({"channel": "smoke"}, "smoke"), ({"router": 5}, "sluice.router"), ("x", "object")):
            with self.assertRaisesRegex(ValueError, name):
                settings.read(extra, {})


class EndpointTest(unittest.TestCase):
    def test_document(self):
        e = endpoint.parse(json.dumps({"version": 1, "epoch": "e", "zmq": {"endpoint": "tcp://h:1"}, "nixl": {"agent": "a", "metadata": "AAE=", "version": "1.5.1"}}).encode())
        self.assertEqual(e, endpoint.Endpoint("e", "tcp://h:1", endpoint.Nixl("a", b"\x00\x01", "1.5.1")))
        e = endpoint.parse(b'{"version":1,"nixl":{"agent":"a","metadata":"","board":{"address":4096,"slots":64,"slot_bytes":64,"device":0}}}')
        self.assertEqual(e.nixl.board, endpoint.Board(4096, 64))
        self.assertEqual(endpoint.parse(b'{"version":1,"zmq":null}'), endpoint.Endpoint("", None, None))

    def test_other_documents_are_refused(self):
        for body, why in ((b"<html>", "not a connector document"), (b"[]", "not a connector document"), (b'{"version":2}', "version 2"),
                          (b'{"version":1,"nixl":{"agent":"a"}}', "metadata")):
            with self.assertRaisesRegex(ValueError, why):
                endpoint.parse(body)


if __name__ == "__main__":
    unittest.main()
