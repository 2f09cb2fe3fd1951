# SPDX-License-Identifier: Apache-2.0
"""What can be said of UCX without a router; with one, router/kvtransfer tests it."""

import os
import tempfile
import unittest
from unittest import mock

from sluice_connector import channels, endpoint, ucx


def libucp():
    """A libucp that is installed here, or None."""
    found = ucx.candidates()
    return found[0] if found and os.path.exists(found[0]) else None


class UcxTest(unittest.TestCase):
    def test_nixls_own_comes_first(self):
        with tempfile.TemporaryDirectory() as base:
            for path in ("libucx/lib/libucp.so.0", "nixl_cu12.libs/libucp-1a.so.0.0.0", "nixl_cu13.libs/libucp-2b.so.0.0.0"):
                os.makedirs(os.path.dirname(os.path.join(base, path)))
                open(os.path.join(base, path), "w").close()
            with mock.patch.dict(os.environ, {"SLUICE_UCX_LIBRARY": ""}):
                got = [os.path.relpath(p, base) for p in ucx.candidates([base])]
            self.assertEqual(got, ["nixl_cu13.libs/libucp-2b.so.0.0.0", "nixl_cu12.libs/libucp-1a.so.0.0.0", "libucx/lib/libucp.so.0"])
        with mock.patch.dict(os.environ, {"SLUICE_UCX_LIBRARY": "/x/libucp.so"}):
            self.assertEqual(ucx.candidates(), ["/x/libucp.so"])

    def test_a_second_ucx_is_refused(self):
        with mock.patch.object(ucx, "resident", lambda: ["/a/libucp.so.0", "/b/libucp-1.so.0"]):
            with self.assertRaisesRegex(ucx.UcxError, "two UCX"):
                ucx.Sender(b"x", "1.23", b"s")

    def test_no_library_is_a_reason(self):
        with mock.patch.object(ucx, "resident", list), mock.patch.object(ucx, "candidates", lambda: ["/nonexistent/libucp.so.0"]):
            with self.assertRaisesRegex(channels.Dead, "nonexistent"):
                channels.UcxChannel(endpoint.Ucx(b"x", "1.23", "s"))

    @unittest.skipIf(libucp() is None, "there is no libucp here")
    def test_versions_that_do_not_fit(self):
        for version in ("1.21", "2.0", "nonsense", ""):
            with self.assertRaises(channels.Dead, msg=version):
                channels.UcxChannel(endpoint.Ucx(b"x" * 100, version, "s"))

    def test_the_document(self):
        got = endpoint.parse(b'{"version":1,"ucx":{"address":"AAE=","version":"1.23","secret":"s"}}')
        self.assertEqual(got.ucx, endpoint.Ucx(b"\x00\x01", "1.23", "s"))
        with self.assertRaisesRegex(ValueError, "secret"):
            endpoint.parse(b'{"version":1,"ucx":{"address":"AAE=","version":"1.23"}}')


if __name__ == "__main__":
    unittest.main()
