import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lrlhf.rewards import RemoteReward, RewardResult, Rewards


class Service:
    """Answers with the lengths of the queries, after the given statuses."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.statuses: list[int] = []
        self.reply: bytes | None = None
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append(body)
                service.authorizations.append(self.headers["Authorization"])
                status = service.statuses.pop(0) if service.statuses else 200
                lengths = {"rewards": [len(query) for query in body["queries"]]}
                self.send_response(status)
                self.end_headers()
                self.wfile.write(service.reply or json.dumps(lengths).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


def score(function: RemoteReward, **rewards: Any) -> RewardResult:
    return Rewards([function], max_unscorable_fraction=1.0, **rewards).score(
        ["ab", ({"role": "user", "content": "xyz"},), "q"],
        ["c", [{"role": "assistant", "content": "de"}], ""],
        [[1]] * 3,
        [{"solution": str(row)} for row in range(3)],
    )


def test_prompts_and_responses_are_sent_and_rewards_come_back(service: Service) -> None:
    result = score(RemoteReward(service.url))
    assert service.requests == [
        {"queries": ["abc", "xyz\nde", "q"], "prompts": ["ab", "xyz\n", "q"]}
    ]
    assert result.scores.tolist() == [3.0, 6.0, 1.0]


def test_references_are_sent_where_a_column_is_named(service: Service) -> None:
    score(RemoteReward(service.url, reference_column="solution"))
    assert service.requests[0]["references"] == ["0", "1", "2"]
    with pytest.raises(ValueError, match="no column 'solutions'; did you mean 'solution'"):
        score(RemoteReward(service.url, reference_column="solutions"))


def test_a_batch_is_split_into_requests(service: Service) -> None:
    result = score(RemoteReward(service.url, batch_size=2))
    assert [len(request["queries"]) for request in service.requests] == [2, 1]
    assert result.scores.tolist() == [3.0, 6.0, 1.0]


def test_a_token_is_sent_from_the_environment(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = RemoteReward(service.url, token_variable="SCORE_TOKEN")
    with pytest.raises(ValueError, match="SCORE_TOKEN is not set"):
        function.prepare()
    monkeypatch.setenv("SCORE_TOKEN", "s3cret")
    score(function)
    assert service.authorizations == ["Bearer s3cret"]


def test_passing_failures_are_tried_again(service: Service) -> None:
    service.statuses = [503, 429]
    result = score(RemoteReward(service.url, retries=2, wait=0.01))
    assert result.scores.tolist() == [3.0, 6.0, 1.0]
    assert len(service.requests) == 3


def test_tries_end(service: Service) -> None:
    service.statuses = [503] * 9
    result = score(RemoteReward(service.url, retries=1, wait=0.01))
    assert len(service.requests) == 2
    assert "did not answer in 2 tries; the last: HTTP Error 503" in result.failures[0]


def test_a_refusal_is_not_tried_again(service: Service) -> None:
    service.statuses = [401]
    result = score(RemoteReward(service.url, wait=0.01))
    assert len(service.requests) == 1
    assert "refuses the request: HTTP Error 401" in result.failures[0]


def test_waiting_between_tries_grows(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("lrlhf.rewards.remote.time.sleep", waits.append)
    service.statuses = [503] * 3
    score(RemoteReward(service.url, wait=0.5))
    assert waits == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    "reply", [b"no json", b"[1, 2, 3]", b'{"scores": [1]}', b'{"rewards": [1]}', b'{"rewards": 1}']
)
def test_a_reply_of_another_form_is_shown(service: Service, reply: bytes) -> None:
    service.reply = reply
    (failure,) = score(RemoteReward(service.url)).failures
    assert f"{service.url} returned {reply.decode()!r}" in failure


def test_null_is_no_opinion(service: Service) -> None:
    service.reply = b'{"rewards": [1.5, null, 2]}'
    result = score(RemoteReward(service.url))
    assert result.scores[[0, 2]].tolist() == [1.5, 2.0]
    assert result.scores[1].isnan()


def test_a_service_that_does_not_answer_is_given_up(service: Service) -> None:
    silent = threading.Event()
    original = service.server.RequestHandlerClass.do_POST  # type: ignore[attr-defined]

    def late(handler: Any) -> None:
        silent.wait(5)
        try:
            original(handler)
        except OSError:  # the client has gone
            handler.close_connection = True

    service.server.RequestHandlerClass.do_POST = late  # type: ignore[attr-defined]
    result = score(RemoteReward(service.url, retries=0, request_timeout=0.1))
    silent.set()
    assert "did not answer in 1 tries; the last: timed out" in result.failures[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "file:///etc/passwd"}, "must begin with http"),
        ({"url": "localhost:8000"}, "must begin with http"),
        ({"url": "http://h", "batch_size": 0}, "batch_size is 0"),
        ({"url": "http://h", "retries": -1}, "retries is -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteReward(**options)
