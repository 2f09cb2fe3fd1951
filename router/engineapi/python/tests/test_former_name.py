"""The former name of the package."""

import importlib
import sys
import unittest

import sluice_engineapi


class FormerNameTest(unittest.TestCase):
    def test_former_name(self) -> None:
        for name in [n for n in sys.modules if n.split(".")[0] == "sluice_routed"]:
            del sys.modules[name]
        with self.assertWarnsRegex(DeprecationWarning, "sluice_engineapi"):
            former = importlib.import_module("sluice_routed")
        self.assertIs(former.RoutedEngine, sluice_engineapi.EngineClient)
        self.assertIs(former.RoutedError, sluice_engineapi.EngineAPIError)
        for name in sluice_engineapi.__all__:
            self.assertIs(getattr(former, name), getattr(sluice_engineapi, name))
        self.assertIs(importlib.import_module("sluice_routed.stream"), importlib.import_module("sluice_engineapi.stream"))


if __name__ == "__main__":
    unittest.main()
