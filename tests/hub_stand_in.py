"""The endpoints of the Hugging Face hub that an upload asks for, on this machine."""

import base64
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub.constants
import pytest

TOKEN = "hf_" + "t" * 20


@dataclass
class Hub:
    """What has arrived, and what goes wrong."""

    url: str = ""
    repos: list[dict[str, Any]] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)
    commits: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    """Files of each commit, by repository and branch."""
    messages: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    """That it was asked to validate."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files, by hash."""
    refused: str = ""
    """Requests whose path has this get status 403."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.hub.refused and self.hub.refused in self.path:
            self._answer({"error": "no space left on the hub"}, 403)
        else:
            for pattern, answer in _ANSWERS.items():
                if found := re.fullmatch(pattern, self.path):
                    self._answer(answer(self.hub, body, *found.groups()))
                    return
            self._answer({"error": f"the stand-in has no {self.path}"}, 404)


def _create(hub: Hub, body: bytes) -> Any:
    hub.repos.append(json.loads(body))
    return {"url": f"{hub.url}/{hub.repos[-1]['organization']}/{hub.repos[-1]['name']}"}


def _validated(hub: Hub, body: bytes) -> Any:
    hub.cards.append(json.loads(body)["content"])
    return {"errors": [], "warnings": []}


def _places(hub: Hub, body: bytes, *_: str) -> Any:
    objects = [
        {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
        for one in json.loads(body)["objects"]
    ]
    return {"transfer": "basic", "objects": objects}


def _branch(hub: Hub, _: bytes, repo: str, branch: str) -> Any:
    hub.branches.append(f"{repo}@{branch}")
    return {}


def _modes(_: Hub, body: bytes, *__: str) -> Any:
    modes = {True: "lfs", False: "regular"}
    files = [
        {
            "path": one["path"],
            "uploadMode": modes[one["path"].endswith(".safetensors")],
            "shouldIgnore": False,
        }
        for one in json.loads(body)["files"]
    ]
    return {"files": files}


def _commit(hub: Hub, body: bytes, repo: str, branch: str) -> Any:
    files = {}
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.objects[value["oid"]]
        else:
            hub.messages.append(value["summary"])
    hub.commits.setdefault(f"{repo}@{branch}", []).append(files)
    address = f"{hub.url}/{repo}/commit/1"
    return {"success": True, "commitOid": "1" * 40, "commitUrl": address}


_ANSWERS: dict[str, Callable[..., Any]] = {
    "/api/repos/create": _create,
    "/api/validate-yaml": _validated,
    r"/(\S+)\.git/info/lfs/objects/batch": _places,
    r"/api/models/(\S+)/branch/(\S+)": _branch,
    r"/api/models/(\S+)/preupload/(\S+)": _modes,
    r"/api/models/(\S+)/commit/(\S+)": _commit,
}


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve a hub until the body ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process reaches, with a token for it in the environment."""
    with running_hub() as running:
        # what the variables of these names are read into when the package is imported
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running
