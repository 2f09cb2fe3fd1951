# SPDX-License-Identifier: Apache-2.0
"""The connector's logger.

vLLM gives handlers to the logger "vllm" and to no other: a logger outside of its
hierarchy has none, and what it says below WARNING is lost.
"""

import logging

logger = logging.getLogger("vllm.sluice_connector")
