"""A TCP relay in front of an engine that delays, drops or refuses connections on demand, as
a slow network, a busy host or a dead host does."""

import contextlib
import socket
import threading
import urllib.parse

from processes import free_port


class Gate:
    """Relays bytes between clients and an engine.

    hold() accepts connections but delays the bytes that clients send, so that a request
    counts as sent. drop() leaves connection attempts unanswered, as if the host had
    vanished. release() ends both and passes the delayed bytes on. shut() closes the
    connections and refuses new ones, as a host does on which nothing listens; open() ends
    that.
    """

    def __init__(self, target):
        parts = urllib.parse.urlsplit(target)
        self.target = (parts.hostname, parts.port)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.through = threading.Event()
        self.through.set()
        self.delayed = 0  # number of delayed reads, one or more per request
        self._stuffed = []
        self._lock = threading.Lock()
        self._pairs = set()  # connected pairs; None while the gate is shut
        self._listen()

    def _listen(self):
        self.listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def hold(self):
        self.delayed = 0
        self.through.clear()

    def drop(self):
        """Replaces the listener by one that accepts nothing and whose backlog is full, so that
        the kernel leaves further connection attempts unanswered. Open connections end."""
        self._end(self.listener)
        self.listener = socket.create_server(("127.0.0.1", self.port), backlog=0)
        for _ in range(4):
            stuffing = socket.socket()
            stuffing.settimeout(0.1)
            with contextlib.suppress(OSError):
                stuffing.connect(("127.0.0.1", self.port))
            self._stuffed.append(stuffing)

    def release(self):
        for stuffing in self._stuffed:
            stuffing.close()
        if self._stuffed:
            self._stuffed = []
            self.listener.close()
            self._listen()
        self.through.set()

    def shut(self):
        with self._lock:
            pairs, self._pairs = self._pairs or (), None
        self._end(self.listener)
        for pair in pairs:
            self._cut(pair)

    def open(self):
        with self._lock:
            if self._pairs is not None:
                return
            self._pairs = set()
        self._listen()

    def close(self):
        self.release()
        self._end(self.listener)

    @staticmethod
    def _end(listener):
        # close() alone does not wake a thread that waits in accept().
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    def _accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                engine = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            for side in (client, engine):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._pairs is not None:
                    self._pairs.add((client, engine))
                else:
                    self._cut((client, engine))
            threading.Thread(target=self._pump, args=(client, engine, self.through), daemon=True).start()
            threading.Thread(target=self._pump, args=(engine, client, None), daemon=True).start()

    def _pump(self, source, sink, through):
        try:
            while data := source.recv(1 << 16):
                if through and not through.is_set():
                    self.delayed += 1
                    through.wait()
                sink.sendall(data)
        except OSError:
            pass
        with self._lock:
            for pair in ((source, sink), (sink, source)):
                if self._pairs:
                    self._pairs.discard(pair)
        self._cut((source, sink))

    @staticmethod
    def _cut(pair):
        for side in pair:
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
