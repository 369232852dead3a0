"""A reward service in a thread of the tests, which misbehaves when it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]


class Server(ThreadingHTTPServer):
    """Scores a response by the length of its prompt and completion, `expected_score`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script: list[Behaviour] = []
        """What the next requests meet; afterwards they are answered well."""
        self.always: Behaviour | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.under_way = self.most_under_way = 0
        self.version = "v1"
        self.models: list[str] | None = None
        """Of an endpoint of OpenAI's kind."""
        self.card: dict[str, Any] = {}
        """What such an endpoint tells of each model beside its name."""
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients hang up on purpose."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply({"status": "ok"})
        elif self.path == "/v1/models" and self.server.models is not None:
            self.reply({"data": [{"id": name, **self.server.card} for name in self.server.models]})
        elif self.path == "/version":
            self.reply({"model": "fake", "version": self.server.version})
        else:
            self.reply({"detail": "no such page"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers))
            act = self.server.script.pop(0) if self.server.script else self.server.always
        self.body = body
        (act or score)(self)

    def reply(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.raw(json.dumps(value).encode(), status, headers)

    def raw(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *parts: Any) -> None:
        """Say nothing."""


def expected_score(prompt: str, completion: str) -> float:
    return 100.0 * len(prompt) + len(completion)


def score(handler: Handler) -> None:
    body, version = handler.body, handler.server.version
    if handler.path == "/v1/score":
        pairs = zip(body["prompts"], body["completions"], strict=True)
        scores = [expected_score(*pair) for pair in pairs]
        handler.reply({"scores": scores, "model": "fake", "version": version})
    elif handler.path == "/get_reward":
        handler.reply({"rewards": [float(len(query)) for query in body["queries"]]})
    else:
        handler.reply({"detail": "no such page"}, 404)


def says(value: Any, status: int = 200, **headers: str) -> Behaviour:
    return sends(json.dumps(value).encode(), status, **headers)


def sends(content: bytes, status: int = 200, **headers: str) -> Behaviour:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return lambda handler: handler.raw(content, status, named)


def hangs(handler: Handler) -> None:
    handler.server.stopped.wait(20)


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True


def drips(handler: Handler) -> None:
    """Send a correct reply, one byte every 50 ms: no single read takes long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(400):
        handler.wfile.write(b" ")
        if handler.server.stopped.wait(0.05):
            return


def floods(handler: Handler) -> None:
    """Send a gigabyte, without saying how long it is."""
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    megabyte = b" " * 2**20
    for _ in range(1024):
        handler.wfile.write(megabyte)


def breaks_off(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [1')
    handler.close_connection = True


def slowly(seconds: float) -> Behaviour:
    def act(handler: Handler) -> None:
        server = handler.server
        with server.lock:
            server.under_way += 1
            server.most_under_way = max(server.under_way, server.most_under_way)
        time.sleep(seconds)
        with server.lock:
            server.under_way -= 1
        score(handler)

    return act


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    with Server(port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            server.shutdown()
            thread.join()
