"""Environments of verifiers, with an endpoint in place of the run's."""

import asyncio
import contextlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lrlhf.environments import adapters

pytest.importorskip("verifiers")


class Policy(BaseHTTPRequestHandler):
    """An endpoint of OpenAI's that streams the answer 6, and refuses a wrong key."""

    asked: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers["Authorization"], body["messages"]))
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        deltas = [({"role": "assistant", "content": "6"}, None), ({}, "stop")]
        events = [
            {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            for delta, reason in deltas
        ]
        lines = [*map(json.dumps, events), "[DONE]"]
        answer = "".join(f"data: {line}\n\n" for line in lines).encode()
        self.send_response(200 if "key" in self.headers["Authorization"] else 401)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="verifiers starts programs with uv")
def test_an_environment_of_verifiers_is_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    agent = adapters.VerifiersAgent(
        {
            "taskset": {"id": "verifiers_doubling"},
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
        }
    )
    assert agent.rows[3] == {"prompt": "Double 3.", "idx": 3}

    async def played(url: str) -> list[Any]:
        both = [agent(url, f"key {idx}", "policy", idx) for idx in (3, 2)]
        refused = agent(url, "no", "policy", 1)
        return await asyncio.gather(*both, refused, return_exceptions=True)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = dict(os.environ)
    with contextlib.closing(server.socket):
        right, wrong, refused = asyncio.run(played(f"http://127.0.0.1:{server.server_port}/v1"))
        server.shutdown()
    assert (right, wrong) == (0.5, 0.0)
    assert isinstance(refused, RuntimeError)
    assert "401" in str(refused)
    asked = dict(Policy.asked)
    assert asked["Bearer key 3"] == [{"role": "user", "content": "Double 3."}]
    assert asked["Bearer key 2"] == [{"role": "user", "content": "Double 2."}]
    assert dict(os.environ) == before
