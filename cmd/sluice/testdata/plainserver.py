"""An OpenAI-compatible server as small ones are: it has /v1/models and
/v1/completions, and neither /health nor /ping. With the argument "metrics" it
has /metrics too. It prints its port."""

import http.server
import json
import sys

METRICS = "metrics" in sys.argv[1:]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            models = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "me"}]}
            self.answer(200, json.dumps(models).encode())
        elif self.path == "/metrics" and METRICS:
            self.answer(200, b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7e9\n", "text/plain")
        else:
            self.answer(404, b'{"detail":"Not Found"}')

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.answer(404, b'{"detail":"Not Found"}')
            return
        choice = {"index": 0, "text": "it was " + request["prompt"], "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        completion = {"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [choice], "usage": usage}
        self.answer(200, json.dumps(completion).encode())

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
