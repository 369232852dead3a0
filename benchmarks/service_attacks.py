"""What hostile clients cost a reward service, and what other clients notice of it.

    python benchmarks/service_attacks.py
    python benchmarks/service_attacks.py --only bombs values --seconds 10

Every attack meets ``lrlhf serve-reward`` in a process of its own, with a tiny model. Meanwhile an
honest client asks for ``/health`` and for scores, each time over a new connection. The table says
how much memory the process took on top of what it had, the longest that the honest client waited
(an answer within 30 s), how many of its requests failed, and how the attack was answered.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

_TOKEN = "a-token-for-the-benchmark"
_PROBE_SECONDS = 30.0
_PAUSE = 0.1


class Target(NamedTuple):
    """A service that is attacked."""

    host: str
    port: int
    headers: dict[str, str]
    seconds: float

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=self.seconds)

    def score(self, content: bytes) -> str:
        """Send a body as one that is known to the service, and return how it is answered."""
        headers = {**self.headers, "content-type": "application/json"}
        try:
            answer = httpx.post(
                f"{self.url}/v1/score", content=content, headers=headers, timeout=90
            )
        except httpx.TransportError as error:
            return type(error).__name__
        return str(answer.status_code)

    def head(self, length: int | None, *, known: bool) -> bytes:
        lines = ["POST /v1/score HTTP/1.1", "host: a", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items() if known]
        lines.append(
            "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        )
        return "\r\n".join([*lines, "", ""]).encode()


Attack = Callable[[Target], str]


def headers(target: Target) -> str:
    """100 MB of headers, none of them long."""
    block = b"".join(b"x-%06d: %s\r\n" % (i, b"a" * 80) for i in range(10_000))
    return _pour(target, b"GET /health HTTP/1.1\r\nhost: a\r\n", block, 100_000_000)


def half_heads(target: Target) -> str:
    """1,150 requests whose head never ends."""
    start = b"POST /v1/score HTTP/1.1\r\nhost: a\r\nx-"
    return _hold(target, start, 1150)


def half_bodies(target: Target) -> str:
    """100 requests whose body never ends."""
    return _hold(target, target.head(1000, known=True) + b'{"prompts": [', 100)


def heavy_half_bodies(target: Target) -> str:
    """20 requests that stop in the midst of a body of 31 MB, and a complete heavy one."""
    start = target.head(31_000_000, known=True) + b'{"prompts": [' + b" " * 30_000_000
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(_hold, target, start, 20)
        time.sleep(target.seconds * 2 / 3)
        heavy = target.score(_long_text(1) + b" " * 10_000_000)
        return f"heavy {heavy}; {held.result()}"


def tiny_chunks(target: Target) -> str:
    """Bodies in chunks of one byte, by 16 clients without a token."""
    start = target.head(None, known=False)
    with ThreadPoolExecutor(16) as pool:
        answers = [
            pool.submit(_pour, target, start, b"1\r\na\r\n" * 20_000, 10_000_000) for _ in range(16)
        ]
        return _counted([answer.result() for answer in answers])


def endless_bodies(target: Target) -> str:
    """A body without an end for a path that does not exist, by 4 clients without a token."""
    start = b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n"
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(_pour, target, start, b"a" * 1_000_000, 10**12, first="HTTP/1.1 404")
            for _ in range(4)
        ]
        return _counted([answer.result() for answer in answers])


def bombs(target: Target) -> str:
    """Six small files of 64 million pixels that wait behind a long text."""
    file = io.BytesIO()
    Image.new("1", (8000, 8000)).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    body = json.dumps({"prompts": ["a"], "completions": ["b"], "images": [[image]]}).encode()
    with ThreadPoolExecutor(7) as pool:
        first = pool.submit(target.score, _long_text(40))
        time.sleep(1.0)
        answers = [pool.submit(target.score, body) for _ in range(6)]
        return _counted([answer.result() for answer in (first, *answers)])


def values(target: Target) -> str:
    """32 MB of empty lists."""
    start, end = b'{"prompts": ["a"], "completions": ["a"], "columns": {"a": [[', b"[]]]}}"
    return target.score(start + b"[]," * ((31_999_900 - len(start)) // 3) + end)


def escapes(target: Target) -> str:
    """30 MB of text that is escaped letter by letter."""
    text = b'"' + b"\\n" * 99_000 + b'"'
    rows = b",".join([text] * 150)
    blanks = b",".join([b'""'] * 150)
    return target.score(b'{"prompts": [%s], "completions": [%s]}' % (blanks, rows))


def columns(target: Target) -> str:
    """Columns with the names of Python's own arguments."""
    names = ("self", "cls", "function", "prompts", "log_metric", "__class__", "a b", "columns")
    body = {"prompts": ["a"], "completions": ["b"]}
    found = {
        name: target.score(json.dumps({**body, "columns": {name: [1]}}).encode()) for name in names
    }
    return ", ".join(f"{name} {status}" for name, status in found.items())


def long_text(target: Target) -> str:
    """30 MB of text in one request."""
    return target.score(_long_text(150))


ATTACKS: tuple[Attack, ...] = (
    headers, half_heads, half_bodies, heavy_half_bodies, tiny_chunks, endless_bodies, bombs,
    values, escapes, columns, long_text,
)  # fmt: skip


def _long_text(rows: int) -> bytes:
    texts = ["two words " * 19_900 + str(row) for row in range(rows)]
    return json.dumps({"prompts": [""] * rows, "completions": texts}).encode()


def _counted(answers: list[str]) -> str:
    counts = collections.Counter(answers)
    return ", ".join(f"{count} x {answer}" for answer, count in counts.most_common())


def _pour(target: Target, start: bytes, block: bytes, most: int, *, first: str = "") -> str:
    """Send a start and then blocks until the service closes, and tell what it said before.

    ``first`` begins the answer that the service gives early, whereupon the sending goes on.
    """
    sent = 0
    until = time.monotonic() + target.seconds
    with target.connect() as connection:
        try:
            connection.sendall(start)
            while sent < most and time.monotonic() < until:
                connection.sendall(block)
                sent += len(block)
            connection.settimeout(5)
            answer = connection.recv(4096).split(b"\r\n")[0].decode()
        except OSError as error:
            answer = f"{type(error).__name__}"
    return f"{answer or 'closed'} after {sent // 1_000_000} MB{first and ' or less'}"


def _hold(target: Target, start: bytes, count: int) -> str:
    with contextlib.ExitStack() as stack:
        held: list[socket.socket] = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(stack.enter_context(target.connect()))
                held[-1].sendall(start)
        time.sleep(target.seconds)
        answers: list[str] = []
        for connection in held:
            connection.setblocking(False)
            try:
                told = connection.recv(4096).split(b"\r\n")[0].decode()
                answers.append(told or "closed")
            except BlockingIOError:
                answers.append("still open")
            except OSError as error:
                answers.append(type(error).__name__)
        return _counted(answers)


class Honest:
    """A client that asks for little, again and again, and notes how long it waits."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ended = threading.Event()
        self.longest = {"GET": 0.0, "POST": 0.0}
        self.failed = {"GET": 0, "POST": 0}
        self.asked = {"GET": 0, "POST": 0}
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in self.longest]

    def __enter__(self) -> Honest:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: str) -> None:
        body = {"prompts": ["2 + 2 ="], "completions": [" 4"]}
        path, content = ("/health", None) if kind == "GET" else ("/v1/score", body)
        while not self._ended.wait(_PAUSE):
            started = time.perf_counter()
            try:
                answer = httpx.request(
                    kind, f"{self._target.url}{path}", json=content,
                    headers=self._target.headers, timeout=_PROBE_SECONDS,
                )  # fmt: skip
                self.failed[kind] += answer.status_code != 200
            except httpx.TransportError:
                self.failed[kind] += 1
            self.asked[kind] += 1
            self.longest[kind] = max(self.longest[kind], time.perf_counter() - started)


@contextlib.contextmanager
def service(model: Path, token: str | None, seconds: float) -> Iterator[tuple[int, Target]]:
    """Start ``lrlhf serve-reward``, and wait until it scores."""
    environment = {**os.environ, **({"LRLHF_REWARD_TOKEN": token} if token else {})}
    command = [sys.executable, "-m", "lrlhf", "serve-reward", "--model.source", str(model)]
    with subprocess.Popen(
        [*command, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            while "loading the model" not in line:
                assert line, "the service ended"
                line = process.stderr.readline()
            host, _, port = line.split()[2].removesuffix(":").removeprefix("http://").partition(":")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            headers = {"authorization": f"Bearer {token}"} if token else {}
            target = Target(host, int(port), headers, seconds)
            until = time.monotonic() + 120
            while target.score(b'{"prompts": ["a"], "completions": ["b"]}') != "200":
                assert time.monotonic() < until
                time.sleep(0.1)
            yield process.pid, target
        finally:
            process.kill()


def memory(pid: int, entry: str) -> float:
    """Return a figure of a process in millions of bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"the system does not tell {entry}")


def measured(attack: Attack, model: Path, token: str | None, seconds: float) -> str:
    """Run one attack, and return its row of the table."""
    with service(model, token, seconds) as (pid, target):
        before = memory(pid, "VmRSS")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        with Honest(target) as honest:
            time.sleep(0.3)
            answer = attack(target)
        peak = memory(pid, "VmHWM") - before
    told = "  ".join(
        f"{honest.longest[kind]:6.2f} s {honest.failed[kind]:3d}/{honest.asked[kind]:<4d}"
        for kind in ("GET", "POST")
    )
    return f"{attack.__name__:18}{'yes' if token else 'no':6}{peak:7.0f} MB  {told}  {answer}"


def save_model(folder: Path) -> None:
    """Write a reward model of a few thousand weights with one token per byte."""
    specials = ["<|pad|>", "<|endoftext|>"]
    alphabet = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=specials[0], eos_token=specials[1]
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, pad_token_id=0, num_labels=1,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Print the table."""
    names = [attack.__name__ for attack in ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=15.0, help="that an attack goes on")
    options = parser.parse_args()
    sys.stdout.write(
        f"{'attack':18}{'token':6}{'memory':>10}  longest, failed/asked: health, scores; answers\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for attack in ATTACKS:
            if attack.__name__ in options.only:
                token = None if attack in (headers, half_heads) else _TOKEN
                row = measured(attack, Path(folder), token, options.seconds)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
