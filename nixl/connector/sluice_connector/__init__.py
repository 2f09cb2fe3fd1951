# SPDX-License-Identifier: Apache-2.0
"""vLLM's NixlConnector, with a word to the router when a transfer ends.

vLLM loads it in place of its own::

    --kv-transfer-config '{"kv_connector": "NixlConnector",
      "kv_connector_module_path": "sluice_connector", "kv_role": "kv_consumer",
      "kv_connector_extra_config": {"sluice": {"router": "http://10.0.0.1:8090"}}}'

The classes keep vLLM's names: vLLM asks for some of them by name when it
checks its configuration. They are made when first asked for, because the other
modules here are of use, and are tested, without vLLM.
"""

__version__ = "0.1.0"
__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]


def __getattr__(name):
    if name in __all__:
        from . import connector

        found = getattr(connector, name, None)
        if found is not None:
            return found
        raise AttributeError(f"this vLLM has no {name}: it came with vLLM 0.24")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
