# SPDX-License-Identifier: Apache-2.0
"""UCX's active messages to the router, where there is no NIXL to it.

As little of UCP as a sender needs, by ctypes: one context, worker and endpoint,
eager messages, no callback but the endpoint's error handler, which UCP runs
inside of ``ucp_worker_progress`` on the calling thread. ctypes gives the
interpreter's lock back during each call, so nothing here holds the engine up.
The structures are those of UCP 1.13, each of which begins with a mask of the
fields that are filled, so a newer library takes them (native/ucx/api.h, which a
test compares with UCX's own header).

One UCX in a process: the one that is there already, which NIXL brought, is taken;
else that of NIXL's wheel, so that a NIXL that comes later finds its own; a library
of the loader's only where NIXL is not installed at all.
"""

import ctypes
import ctypes.util
import glob
import importlib.util
import os
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

_AM_ID = 7  # native/ucx/worker.h
_NO_ERROR_ABOVE = ctypes.c_size_t(-100).value  # an error in a pointer's clothes lies from here on
_IN_PROGRESS = 1


class UcxError(Exception):
    pass


class _Params(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("features", c_uint64), ("rest", c_uint64 * 16)]


class _WorkerParams(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("thread_mode", c_int), ("rest", c_uint64 * 32)]


_FAILED = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)


class _EpParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_cb", _FAILED),
        ("err_arg", c_void_p),
        ("rest", c_uint64 * 16),
    ]


class _RequestParam(ctypes.Structure):
    _fields_ = [("op_attr_mask", c_uint32), ("flags", c_uint32), ("rest", c_uint64 * 8)]


_FUNCTIONS = {
    "get_version": (None, [POINTER(c_uint)] * 3),
    "config_read": (c_int8, [c_char_p, c_char_p, POINTER(c_void_p)]),
    "config_modify": (c_int8, [c_void_p, c_char_p, c_char_p]),
    "config_release": (None, [c_void_p]),
    "init_version": (c_int8, [c_uint, c_uint, POINTER(_Params), c_void_p, POINTER(c_void_p)]),
    "cleanup": (None, [c_void_p]),
    "worker_create": (c_int8, [c_void_p, POINTER(_WorkerParams), POINTER(c_void_p)]),
    "worker_destroy": (None, [c_void_p]),
    "worker_progress": (c_uint, [c_void_p]),
    "ep_create": (c_int8, [c_void_p, POINTER(_EpParams), POINTER(c_void_p)]),
    "ep_close_nbx": (c_void_p, [c_void_p, POINTER(_RequestParam)]),
    "am_send_nbx": (c_void_p, [c_void_p, c_uint, c_char_p, c_size_t, c_char_p, c_size_t, POINTER(_RequestParam)]),
    "request_check_status": (c_int8, [c_void_p]),
    "request_free": (None, [c_void_p]),
}


def resident() -> list:
    """The files of the libucp that this process holds."""
    found = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line[line.find("/"):].rstrip("\n") if "/" in line else ""
                if os.path.basename(path).startswith(("libucp.", "libucp-")) and path not in found:
                    found.append(path)
    except OSError:
        pass
    return found


def candidates(paths=None) -> list:
    """Where libucp may be, best first."""
    named = os.environ.get("SLUICE_UCX_LIBRARY")
    if named:
        return [named]
    found = []
    for base in paths if paths is not None else sys.path:
        for pattern in ("nixl_cu1[0-9].libs/libucp-*.so*", "libucx/lib/libucp.so.0"):
            found += sorted(glob.glob(os.path.join(glob.escape(base or "."), pattern)), reverse=True)
    return found if found or _has_nixl() else ["libucp.so.0"]


def _has_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None


def _load():
    here = resident()
    if len(here) > 1:
        raise UcxError(f"two UCX are in this process: {', '.join(here)}")
    if not here:
        # Read by UCX as it is loaded, and never set over what the operator set: no
        # signal handlers; and no patches in libc, unless a NIXL may come, which needs them.
        os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
        os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
        if not _has_nixl():
            os.environ.setdefault("UCX_MEM_EVENTS", "n")
    why = "no libucp was found"
    for path in here or candidates():
        try:
            library = ctypes.CDLL(path)
            functions = {}
            for name, (result, arguments) in _FUNCTIONS.items():
                functions[name] = getattr(library, "ucp_" + name)
                functions[name].restype, functions[name].argtypes = result, arguments
        except (OSError, AttributeError) as e:
            why = str(e)
            continue
        return type("Ucp", (), {name: staticmethod(f) for name, f in functions.items()})
    raise UcxError(why)


def _check(status: int, what: str) -> None:
    if status != 0:
        raise UcxError(f"{what}: UCX {status}")


class Sender:
    """Sends active messages to one address. For one thread. Every wait has an end;
    UcxError means that it is of no more use but to be closed."""

    WAIT = 2.0  # seconds that a message may take to leave; the first sets up the connection

    def __init__(self, address: bytes, version: str, header: bytes):
        self._ucp = ucp = _load()
        self._context = self._worker = self._ep = None
        self._failed = 0
        self._header, self._message = header, b""
        a, b, c = c_uint(), c_uint(), c_uint()
        ucp.get_version(byref(a), byref(b), byref(c))
        theirs = [int(n) for n in version.split(".")[:2]]
        # Between 1.21 and 1.22 UCX changed its address, and a message across brought
        # the older process down.
        if a.value != 1 or b.value < 13 or theirs[0] != 1 or (theirs[1] >= 22) != (b.value >= 22):
            raise UcxError(f"UCX here is {a.value}.{b.value}, the router's {version}: they do not fit")
        try:
            self._open(address)
        except UcxError:
            self.close()
            raise

    def _open(self, address: bytes) -> None:
        ucp, config, made = self._ucp, c_void_p(), c_void_p()
        _check(ucp.config_read(None, None, byref(config)), "reading its settings")
        try:
            if "UCX_TLS" not in os.environ:  # a hundred bytes need no GPU and no RDMA
                _check(ucp.config_modify(config, b"TLS", b"tcp"), "setting TLS")
            what = _Params(field_mask=1, features=1 << 6 | 1 << 4)  # active messages, wake-up: as the router's, or addresses do not fit
            _check(ucp.init_version(1, 13, byref(what), config, byref(made)), "making a context")
        finally:
            ucp.config_release(config)
        self._context = made
        self._worker = c_void_p()
        status = ucp.worker_create(self._context, byref(_WorkerParams(field_mask=1, thread_mode=0)), byref(self._worker))
        if status != 0:
            self._worker = None
        _check(status, "making a worker")
        self._on_failed = _FAILED(self._fail)  # must live as long as the endpoint
        self._address = ctypes.create_string_buffer(address, len(address))
        how = _EpParams(field_mask=1 | 2 | 4, address=ctypes.addressof(self._address), err_mode=1, err_cb=self._on_failed)
        self._ep = c_void_p()
        status = ucp.ep_create(self._worker, byref(how), byref(self._ep))
        if status != 0:
            self._ep = None
        _check(status, "making an endpoint")

    def _fail(self, arg, ep, status) -> None:
        self._failed = status or -1

    def progress(self) -> None:
        while self._ucp.worker_progress(self._worker):
            pass
        if self._failed:
            raise UcxError(f"the router is gone: UCX {self._failed}")

    def send(self, message: bytes) -> None:
        """Returns when the message has left."""
        self.progress()
        self._message = message  # UCX may read it as long as the request is not done: until close, at worst
        eager = _RequestParam(op_attr_mask=1 << 4, flags=2)
        request = self._ucp.am_send_nbx(self._ep, _AM_ID, self._header, len(self._header), message, len(message), byref(eager))
        self._finish(request, "a message", self.WAIT)
        self.progress()

    def _finish(self, request, what: str, wait: float) -> None:
        if request is None:
            return
        if request >= _NO_ERROR_ABOVE:
            raise UcxError(f"{what} was refused: UCX {c_int8(request & 0xFF).value}")
        ucp, deadline = self._ucp, time.monotonic() + wait
        status = ucp.request_check_status(request)
        while status == _IN_PROGRESS and time.monotonic() < deadline:
            if not ucp.worker_progress(self._worker):
                time.sleep(50e-6)
            status = ucp.request_check_status(request)
        if status == _IN_PROGRESS:
            raise UcxError(f"{what} did not leave within {wait:g} s")
        ucp.request_free(request)
        _check(status, what)

    def close(self) -> None:
        """Ends the endpoint, without waiting for the other side."""
        ucp = self._ucp
        if self._ep is not None:
            ep, self._ep = self._ep, None
            try:
                self._finish(ucp.ep_close_nbx(ep, byref(_RequestParam(op_attr_mask=1 << 4, flags=1))), "the close", 0.2)
            except UcxError:
                pass
        if self._worker is not None:
            worker, self._worker = self._worker, None
            ucp.worker_destroy(worker)
        if self._context is not None:
            context, self._context = self._context, None
            ucp.cleanup(context)
