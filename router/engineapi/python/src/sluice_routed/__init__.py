"""Former name of sluice_engineapi, kept for one release."""

import importlib
import sys
import warnings

import sluice_engineapi
from sluice_engineapi import *  # noqa: F403
from sluice_engineapi import EngineAPIError as RoutedError
from sluice_engineapi import EngineClient as RoutedEngine

warnings.warn("sluice_routed is now named sluice_engineapi, RoutedEngine EngineClient and RoutedError EngineAPIError", DeprecationWarning, stacklevel=2)

__all__ = [*sluice_engineapi.__all__, "RoutedEngine", "RoutedError"]  # noqa: PLE0604

# The modules are those of the new package, so that isinstance works across both names.
for _name in ("connection", "context", "engine", "errors", "frames", "item", "request", "stream"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"sluice_engineapi.{_name}")
