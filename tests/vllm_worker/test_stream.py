import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lrlhf.vllm_worker.fingerprint import fingerprint
from lrlhf.vllm_worker.stream import Sender, StreamError, receive

HOST = "127.0.0.1"
Named = list[tuple[str, Tensor]]


def assorted() -> Named:
    base = torch.randn(6, 10)
    return [
        ("float", torch.randn(3, 4)),
        ("bfloat16", torch.randn(7).bfloat16()),
        ("integers", torch.arange(5)),
        ("flags", torch.tensor([True, False])),
        ("scalar", torch.tensor(2.5)),
        ("no numbers", torch.tensor([float("nan"), -0.0, float("inf")])),
        ("empty", torch.empty(0, 3)),
        ("whole", base),
        ("same memory, other shape", base.view(10, 6)),
        ("transposed", base.T),
        ("part", base[2:4, 1:]),
        ("expanded", torch.tensor([3.0]).expand(4)),
        ("large", torch.randn(100, 100)),
    ]


def start(
    sender: Sender, count: int = 1, *, token: str | None = None, timeout: float = 10.0
) -> list[Future[Named]]:
    threads = ThreadPoolExecutor(count)
    shown = sender.token if token is None else token
    futures = [
        threads.submit(lambda: list(receive(HOST, sender.port, shown, timeout=timeout)))
        for _ in range(count)
    ]
    threads.shutdown(wait=False)
    return futures


def assert_same(arrived: Named, sent: Named) -> None:
    assert [name for name, _ in sorted(arrived)] == [name for name, _ in sorted(sent)]
    expected = dict(sent)
    for name, tensor in arrived:
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        assert fingerprint(tensor) == fingerprint(expected[name]), name  # bits, not values


@pytest.mark.parametrize("workers", [1, 2])
def test_every_tensor_arrives_at_every_worker_as_it_was(workers: int) -> None:
    for sent in (assorted(), []):
        with Sender(HOST, receivers=workers, timeout=10.0) as sender:
            arrived = start(sender, workers)
            sender.send(sent)
            for future in arrived:
                assert_same(future.result(10), sent)
        assert len(sender.token) == 64
        with pytest.raises(StreamError, match="the sender of weights is gone"):
            next(receive(HOST, sender.port, sender.token, timeout=1.0))


def test_a_tensor_is_asked_for_only_when_those_before_it_are_on_their_way() -> None:
    # a worker that takes nothing, as one that hangs: what fits into the sockets' buffers leaves
    asked = []

    def many() -> Iterator[tuple[str, Tensor]]:
        for index in range(100):
            asked.append(index)
            yield str(index), torch.zeros(2**20)

    with Sender(HOST, receivers=1, timeout=0.5) as sender, connected(sender.port) as idle:
        show(idle, sender.token)
        with pytest.raises(StreamError, match="stopped taking weights"):
            sender.send(many())
    # the buffers of both sides hold a few MiB at most
    assert len(asked) < 20


# ------------------------------------------------------------------ strangers


def connected(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=10.0)


def show(connection: socket.socket, token: str) -> None:
    connection.sendall(struct.pack(">Q", len(token)) + token.encode())


def test_a_wrong_token_is_turned_away_and_the_right_one_served() -> None:
    sent = assorted()
    with Sender(HOST, receivers=1, timeout=10.0) as sender:
        wrong = start(sender, token="0" * 64)[0]
        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(sender.send, sent)
            with pytest.raises(StreamError, match="ended in the middle"):
                wrong.result(10)
            assert not sending.done()
            right = start(sender)[0]
            assert_same(right.result(10), sent)
            sending.result(10)


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def breaks_off(connection: socket.socket) -> None:
    connection.sendall(struct.pack(">Q", 64) + b"half")
    connection.close()


STRANGERS = {
    "says http": lambda one: one.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"),
    "resets": resets,
    "breaks off": breaks_off,
    "claims much": lambda one: one.sendall(struct.pack(">Q", 2**40)),
    "is silent": lambda one: None,
}


@pytest.mark.parametrize("behave", STRANGERS)
def test_a_stranger_keeps_no_worker_out(behave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrlhf.vllm_worker.stream._TOKEN_SECONDS", 0.2)
    sent = assorted()
    with Sender(HOST, receivers=1, timeout=10.0) as sender, connected(sender.port) as stranger:
        STRANGERS[behave](stranger)
        arrived = start(sender)[0]
        sender.send(sent)
        assert_same(arrived.result(10), sent)


# ------------------------------------------------------------------ ends


def test_a_sender_that_ends_in_the_middle_is_told() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "first", torch.ones(1)
        yield "second", torch.ones(1)
        raise ValueError("no more")

    with Sender(HOST, receivers=1, timeout=10.0) as sender:
        arrived = start(sender)[0]
        with pytest.raises(ValueError, match="no more"):
            sender.send(broken())
    with pytest.raises(StreamError, match="ended in the middle of a message"):
        arrived.result(10)
    with (
        Sender(HOST, receivers=1, timeout=10.0) as silent,
        pytest.raises(StreamError, match=r"no weights came for 0\.2 s"),
    ):
        start(silent, timeout=0.2)[0].result(10)


def test_waiting_for_workers_ends_when_none_will_come() -> None:
    with Sender(HOST, receivers=2, timeout=60.0) as sender, connected(sender.port) as one:
        show(one, sender.token)
        begun = time.monotonic()
        with pytest.raises(StreamError, match="1 of 2 vLLM workers came"):
            sender.send([], give_up=lambda: time.monotonic() - begun > 0.3)
    assert time.monotonic() - begun < 3
