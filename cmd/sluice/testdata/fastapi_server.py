"""A plain FastAPI application with an OpenAI-compatible API: /v1/models and
/v1/completions, and neither /health nor /ping. With the argument "metrics" it
has /metrics too. It prints its port."""

import socket
import sys

import fastapi
import fastapi.responses
import uvicorn

app = fastapi.FastAPI()


@app.get("/v1/models")
def models():
    return {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "me"}]}


@app.post("/v1/completions")
def completions(request: dict = fastapi.Body()):
    choice = {"index": 0, "text": "it was " + request["prompt"], "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [choice], "usage": usage}


if "metrics" in sys.argv[1:]:

    @app.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
    def metrics():
        return "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7e9\n"


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
