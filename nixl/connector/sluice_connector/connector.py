# SPDX-License-Identifier: Apache-2.0
"""The connector classes that vLLM loads: its own, with a Watch beside the worker.

On the scheduler's side the completion slots in requests (kv_transfer_params'
member ``sluice``) are put on the metadata that goes to the workers; on a
worker's side each poll's results are passed to the reporter. Everything of Sluice's
is caught here: an error costs the report, never the request.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as stock
except ImportError:  # before vLLM 0.20 it was one module
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl_connector as stock

from .handles import Handles
from .log import logger
from .report import Origin, slot_of
from .reporter import Reporter
from .settings import read
from .watch import Watch

_SLOTS = "_sluice_slots"  # on the connector's metadata, which is pickled with it


class _Reporting:
    """Mixed in before vLLM's connector."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        if kv_cache_config is None:
            super().__init__(vllm_config, role)  # before vLLM 0.12
        else:
            super().__init__(vllm_config, role, kv_cache_config)
        self._sluice = None  # the Watch of a worker
        self._sluice_reporter = None
        self._sluice_slots = {}
        self._sluice_handles = Handles()
        try:
            self._sluice_start(vllm_config, role)
        except Exception as e:
            logger.error("sluice: transfers will not be reported to the router: %s", e)

    def _sluice_start(self, vllm_config, role):
        config = vllm_config.kv_transfer_config
        settings = read((config.kv_connector_extra_config or {}).get("sluice"))
        if settings.off:
            if role == KVConnectorRole.WORKER:
                logger.warning('sluice: no router is named; set kv_connector_extra_config {"sluice": {"router": "http://HOST:PORT"}} or SLUICE_ROUTER')
            return
        if role != KVConnectorRole.WORKER:
            return
        parallel, worker = vllm_config.parallel_config, self.connector_worker
        origin = Origin(
            worker=settings.worker or config.engine_id,
            dp_rank=getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", 0) or 0,
            tp_rank=getattr(worker, "tp_rank", 0),
            tp_size=parallel.tensor_parallel_size,
        )
        self._sluice_reporter = Reporter(settings, origin)
        self._sluice = Watch(worker, self._sluice_reporter.put)

    # The scheduler's side.

    def update_state_after_alloc(self, request, *args, **kwargs):
        params = getattr(request, "kv_transfer_params", None)
        if params and params.get("sluice") is not None:
            slot = slot_of(params)
            if slot is not None and len(self._sluice_slots) < 65536:
                self._sluice_slots[request.request_id] = slot
        if params:
            self._sluice_handles.allocated(params)
        return super().update_state_after_alloc(request, *args, **kwargs)

    def build_connector_meta(self, *args, **kwargs):
        meta = super().build_connector_meta(*args, **kwargs)
        if self._sluice_slots:
            slots, self._sluice_slots = self._sluice_slots, {}
            try:
                setattr(meta, _SLOTS, slots)
            except AttributeError:
                pass  # a class with slots of its own: reports go without ours
        return meta

    # A worker's side.

    def start_load_kv(self, *args, **kwargs):
        if self._sluice is not None:
            slots = getattr(getattr(self, "_connector_metadata", None), _SLOTS, None)
            if slots:
                self._sluice.expect(slots)
        return super().start_load_kv(*args, **kwargs)

    def get_finished(self, *args, **kwargs):
        watch = self._sluice
        if watch is None:
            return super().get_finished(*args, **kwargs)
        overdue = watch.overdue()
        sent, received = super().get_finished(*args, **kwargs)
        if sent or received:
            self._sluice_report(sent or (), received or (), None, overdue)
        return sent, received

    def _sluice_report(self, *args):
        try:
            self._sluice.ended(*args)
        except Exception as e:
            logger.error("sluice: a transfer was not reported: %s", e)

    def shutdown(self):
        if self._sluice_reporter is not None:
            self._sluice_reporter.close()
        return super().shutdown()


def _once(base, name):
    """vLLM's method of that name, without a second notification of one handle."""
    finished = getattr(base, name)

    def request_finished(self, request, *args, **kwargs):
        self._sluice_handles.finished(getattr(request, "kv_transfer_params", None))
        return finished(self, request, *args, **kwargs)

    return request_finished


def _reporting(base):
    """vLLM's class with ours mixed in, under vLLM's name for it."""
    members = {"__module__": __name__, "__doc__": base.__doc__}
    if "Push" not in base.__name__:  # there decode requests blocks from prefill, and sends it nothing else
        for name in ("request_finished", "request_finished_all_groups"):
            if hasattr(base, name):
                members[name] = _once(base, name)
    if hasattr(base, "get_transfer_results"):  # since vLLM 0.31

        def get_transfer_results(self, *args, **kwargs):
            results = super(cls, self).get_transfer_results(*args, **kwargs)
            if self._sluice is not None:
                sent, received = results.finished_sending, results.finished_recving
                if sent or received:
                    self._sluice_report(sent or (), received or (), results.failed_recving or ())
            return results

        members["get_transfer_results"] = get_transfer_results
    cls = type(base.__name__, (_Reporting, base), members)
    return cls


NixlPullConnector = _reporting(getattr(stock, "NixlPullConnector", stock.NixlConnector))
NixlConnector = NixlPullConnector
if hasattr(stock, "NixlPushConnector"):
    NixlPushConnector = _reporting(stock.NixlPushConnector)
