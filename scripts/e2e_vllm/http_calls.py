"""HTTP calls with the standard library, each over a connection of its own."""

import http.client
import json
import urllib.parse


class Answer:
    """Status, headers (case-insensitive) and body of a finished response."""

    def __init__(self, response, body):
        self.status = response.status
        self.headers = response.headers
        self.body = body

    def text(self):
        return self.body.decode("utf-8", "replace")

    def json(self):
        return json.loads(self.body)

    def events(self):
        """Returns the payloads of an SSE body, including "[DONE]"."""
        return [e[len("data: "):] for e in self.text().split("\n\n") if e.startswith("data: ")]  # fmt: skip


def _connect(url, timeout):
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


def get(url, path, headers=None, timeout=120):
    connection = _connect(url, timeout)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return Answer(response, response.read())
    finally:
        connection.close()


def post(url, path, body, headers=None, timeout=300):
    with Open(url, path, body, headers, timeout) as stream:
        return Answer(stream.response, stream.response.read())


def send(url, path, body, headers=None, timeout=300):
    """Sends a request without waiting for the answer and returns the connection."""
    connection = _connect(url, timeout)
    data = json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
    return connection


class Open:
    """A request whose response head has arrived; the caller reads the body or not."""

    def __init__(self, url, path, body, headers=None, timeout=300):
        self.connection = send(url, path, body, headers, timeout)
        self.response = self.connection.getresponse()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()
        self.response.close()


class Later:
    """A request that is sent immediately; lines() waits for its answer."""

    def __init__(self, url, path, body, headers=None, timeout=300):
        self.connection = send(url, path, body, headers, timeout)
        self.response = None

    def lines(self, count):
        self.response = self.connection.getresponse()
        return [self.response.readline() for _ in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()
        if self.response:
            self.response.close()
