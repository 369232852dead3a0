import asyncio
import base64
import contextlib
import gc
import io
import itertools
import json
import logging
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI
from PIL import Image

from lrlhf import web
from lrlhf.environments import agents
from lrlhf.environments.agents import ChatAnswer, ChatEndpoint, PendingRequest, call_ids
from lrlhf.environments.session import TurnPrompt, TurnTokens
from lrlhf.media import MediaOptions
from tests.environments.agents.policy import ADD, serving
from tests.forked import run

HI: Any = [{"role": "user", "content": "hi"}]
SAYS = {"role": "assistant", "content": "ho"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
BROKEN = {"name": "f", "arguments": "["}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}


class Answers:
    """Answers every question at once, and remembers it."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.asked: list[TurnPrompt] = []
        self._answer = answer

    def __call__(self, question: PendingRequest) -> None:
        assert question.start()
        self.asked.append(question.prompt)
        question.answer(self._answer)


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with serving() as endpoint:
        yield endpoint


def client_of(endpoint: ChatEndpoint, answers: Any) -> OpenAI:
    base_url, key = endpoint.enter(answers)
    return OpenAI(base_url=base_url, api_key=key, max_retries=0)


def post(endpoint: ChatEndpoint, body: Any, answers: Any = None) -> httpx.Response:
    base_url, key = endpoint.enter(answers or Answers(ChatAnswer(SAYS)))
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{base_url}/chat/completions", content=content, headers=headers)


def test_a_stream_has_the_whole_turn_its_end_and_the_tokens(endpoint: ChatEndpoint) -> None:
    answers = Answers(ChatAnswer(SAYS, TurnTokens(prompt=7, written=2, cut_off=True)))
    with client_of(endpoint, answers) as client:
        options: Any = {"model": "mine", "messages": HI, "stream": True}
        first, end = client.chat.completions.create(**options)
        assert first.object == "chat.completion.chunk"
        assert (first.model, first.choices[0].delta.content) == ("mine", "ho")
        assert (first.choices[0].delta.role, first.choices[0].finish_reason) == ("assistant", None)
        assert (end.choices[0].delta.content, end.choices[0].finish_reason) == (None, "length")
        options["stream_options"] = {"include_usage": True}
        *_, last = client.chat.completions.create(**options)
        assert last.choices == []
        assert last.usage.total_tokens == 9


def test_a_stream_of_calls(endpoint: ChatEndpoint) -> None:
    with (
        client_of(endpoint, Answers(ChatAnswer(CALLS))) as client,
        client.chat.completions.stream(model="any", messages=HI, tools=[ADD]) as stream,  # type: ignore[list-item]
    ):
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or ()
    assert (call.id, call.function.name) == ("call00001", "add")
    assert json.loads(call.function.arguments) == {"a": 1}
    assert choice.finish_reason == "tool_calls"


def test_a_stream_ends_as_the_format_has_it(endpoint: ChatEndpoint) -> None:
    answer = post(endpoint, {"messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("data: {")
    assert answer.text.endswith("}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("answer", "reason", "usage"),
    [
        (ChatAnswer(SAYS), "stop", None),
        (ChatAnswer(SAYS, TurnTokens(5, 2, cut_off=False)), "stop", (5, 2, 7)),
        (ChatAnswer(SAYS, TurnTokens(5, 2, cut_off=True)), "length", (5, 2, 7)),
        (ChatAnswer(CALLS, TurnTokens(5, 2, cut_off=False)), "tool_calls", (5, 2, 7)),
    ],
)
def test_an_answer_tells_why_it_ended_and_what_it_took(
    endpoint: ChatEndpoint, answer: ChatAnswer, reason: str, usage: tuple[int, ...] | None
) -> None:
    with client_of(endpoint, Answers(answer)) as client:
        told = client.chat.completions.create(model="any", messages=HI)
    assert told.choices[0].finish_reason == reason
    assert told.choices[0].message.content == ("ho" if answer.message is SAYS else None)
    counted = told.usage
    assert (counted and (*counted.model_dump(exclude_none=True).values(),)) == (
        usage and (usage[1], usage[0], usage[2])
    )


@pytest.mark.parametrize("key", ["sk-guess", "Bearer", "ключ"])
def test_a_wrong_key_is_told_in_the_format_of_the_api(endpoint: ChatEndpoint, key: str) -> None:
    base_url, _ = endpoint.enter(Answers(ChatAnswer(SAYS)))
    headers = {"Authorization": f"Bearer {key}".encode()}
    for answer in (
        httpx.post(f"{base_url}/chat/completions", json={"messages": HI}, headers=headers),
        httpx.get(f"{base_url}/models", headers=headers),
        httpx.get(f"{base_url}/models"),
    ):
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "no such API key" in answer.json()["error"]["message"]
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=base_url, api_key="wrong").models.list()


def test_a_question_that_was_given_up_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    question = PendingRequest(TurnPrompt(()))
    question.give_up()
    assert not question.start()
    question.answer(ChatAnswer(SAYS))
    assert caplog.messages == []


def test_an_unforeseen_error_is_told_in_the_format_of_the_api(endpoint: ChatEndpoint) -> None:
    answer = post(endpoint, {"messages": HI}, lambda _: 1 / 0)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("declared", "media", "megabytes"),
    [(True, None, 8), (False, None, 8), (True, MediaOptions(), 64)],
)
def test_a_body_that_is_too_large_is_refused(
    endpoint: ChatEndpoint, declared: bool, media: MediaOptions | None, megabytes: int
) -> None:
    endpoint.media = media
    base_url, key = endpoint.enter(Answers(ChatAnswer(SAYS)))
    start = json.dumps({"messages": HI}).encode()

    def ask(size: int) -> httpx.Response:
        body = start.ljust(size)
        content = body if declared else (body[at : at + 2**16] for at in range(0, size, 2**16))
        headers = {"Authorization": f"Bearer {key}"}
        return client.post(f"{base_url}/chat/completions", content=content, headers=headers)

    with httpx.Client() as client:
        told = ask(megabytes * 10**6 + 1)
        # the length of chunks is not known before they have come
        statuses = (413, 200) if declared else (411, 411)
        assert (told.status_code, ask(megabytes * 10**6).status_code) == statuses
    if declared:
        message = told.json()["error"]["message"]
        assert message.startswith(f"the body has more than {megabytes} MB")


@contextlib.contextmanager
def connected(endpoint: ChatEndpoint, sends: bytes = b"") -> Iterator[socket.socket]:
    base_url, _ = endpoint.enter(Answers(ChatAnswer(SAYS)))
    url = urlsplit(base_url)
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        connection.sendall(sends)
        yield connection


def test_strangers_with_half_a_request_make_room_for_those_who_are_known(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_MAX_CONNECTIONS", 20)
    with client_of(endpoint, Answers(ChatAnswer(SAYS))) as client, contextlib.ExitStack() as held:
        assert client.chat.completions.create(model="any", messages=HI).choices
        half = b"POST /v1/chat/comp"
        strangers = [held.enter_context(connected(endpoint, half)) for _ in range(60)]
        assert client.chat.completions.create(model="any", messages=HI).choices
        # those that came first have gone, by an end or, with what they sent unread, by a reset
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        assert post(endpoint, {"messages": HI}).status_code == 200


def test_half_a_head_and_half_a_body_are_waited_for_so_long(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(agents, "_BODY_SECONDS", 0.3)
    with connected(endpoint, b"POST /v1/chat/comp") as slow:
        assert slow.recv(1) == b""
    _, key = endpoint.enter(Answers(ChatAnswer(SAYS)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
    with connected(endpoint, f"{head}content-length: 100\r\n\r\n{{".encode()) as slow:
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_body_of_many_values_is_refused_before_it_is_parsed(endpoint: ChatEndpoint) -> None:
    body = b'{"messages": [' + b"[]," * 300_000 + b"[]]}"
    answer = post(endpoint, body)
    assert answer.status_code == 413
    assert "more than 200000 values" in answer.json()["error"]["message"]


def test_the_log_has_no_line_for_every_request(
    endpoint: ChatEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lrlhf")
    for number in range(120):
        post(endpoint, {"messages": HI, f"option{number}\x1b": 1})
    assert len(caplog.messages) == 20
    assert "option0\\x1b" in caplog.messages[0]
    caplog.clear()
    for _ in range(12):
        assert post(endpoint, {"messages": HI}, lambda _: 1 / 0).status_code == 500
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("10 times by now")


def test_images_of_two_agents_are_read_at_once(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.media = MediaOptions()
    both = threading.Barrier(2)

    def read(*_: Any) -> Image.Image:
        both.wait(10.0)
        return Image.new("RGB", (9, 9))

    monkeypatch.setattr(agents, "read_image", read)
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    with ThreadPoolExecutor(2) as clients:
        replies = [*clients.map(partial(post, endpoint), [body, body])]
    assert [reply.status_code for reply in replies] == [200, 200]


def test_ids_of_calls_keep_their_length() -> None:
    assert list(itertools.islice(call_ids(), 99_998, 100_000)) == ["call99999", "call00000"]


def test_the_list_of_models(endpoint: ChatEndpoint) -> None:
    with client_of(endpoint, None) as client:
        assert [model.id for model in client.models.list()] == ["policy"]


BAD: list[tuple[Any, str]] = [
    (b"{", "body: it is no JSON: EOF while parsing an object at line 1 column 1"),
    (b"\xff", "body: it is no JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "body: it is no JSON"),
    (b'{"messages": NaN}', "body: it is no JSON"),
    ([], "the body: Input should be"),
    ({}, "messages: Field required"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "king"}]}, "messages[0].role: Input should be 'developer'"),
    ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content: this endpoint reads text, and no image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content: a part of type 'text' has no text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "image": "x"}]}]},
        "messages[0].content: a part of type 'text' has an image too",
    ),
    (
        {"messages": [{**CALLS, "tool_calls": [{**CALL, "function": BROKEN}]}]},
        "messages[0].tool_calls: the arguments of f are no object in JSON",
    ),
    ({"messages": HI, "n": 2}, "n: this endpoint does not have that; it takes 1"),
    ({"messages": HI, "logprobs": True}, "logprobs: this endpoint does not have that; it takes"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format: this"),
    ({"messages": HI, "tool_choice": "required"}, 'it takes "auto" or "none"'),
    (
        {"messages": HI, "functions": [{}]},
        "functions: this endpoint does not have that; leave it out",
    ),
    ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0].type: Input should be"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"messages": HI, "stream": "yes"}, "stream: Input should be a valid boolean"),
]


@pytest.mark.parametrize(("body", "told"), BAD, ids=range(len(BAD)))
def test_a_bad_body_is_told_what_is_wrong(endpoint: ChatEndpoint, body: Any, told: str) -> None:
    answers = Answers(ChatAnswer(SAYS))
    answer = post(endpoint, body, answers)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answers.asked == []


def test_other_paths_are_told_of(endpoint: ChatEndpoint) -> None:
    with client_of(endpoint, None) as client, pytest.raises(openai.NotFoundError) as told:
        client.responses.create(model="any", input="hi")
    assert "POST /v1/responses is not served; there are POST /v1/chat" in str(told.value)


def test_messages_become_what_chat_templates_take(endpoint: ChatEndpoint) -> None:
    answers = Answers(ChatAnswer(SAYS))
    written = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}, "index": 0}
    bare = {**CALL, "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [written], "refusal": None},
        {"role": "tool", "tool_call_id": "call00001", "content": "1"},
        {"role": "assistant", "content": "ho", "reasoning_content": "hm", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [bare]},
    ]
    body = {"messages": messages, "tools": [ADD], "max_tokens": 9, "max_completion_tokens": 8}
    body["functions"] = []
    assert post(endpoint, body, answers).status_code == 200
    assert answers.asked == [
        TurnPrompt(
            (
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "ab"},
                CALLS,
                {"role": "tool", "tool_call_id": "call00001", "content": "1"},
                {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
                {**CALLS, "tool_calls": [{**bare, "function": {"name": "f", "arguments": {}}}]},
            ),
            (ADD,),
            8,
        )
    ]


def test_options_without_effect_are_named_once(
    endpoint: ChatEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lrlhf")
    options = {"temperature": 0.2, "top_p": None, "stop": "x", "user": "u"}
    for _ in range(2):
        post(endpoint, {"messages": HI, **options})
    (told,) = caplog.messages
    assert told.startswith("an agent's requests set stop, temperature, which has no effect here")


def test_only_this_machine_reaches_it(endpoint: ChatEndpoint) -> None:
    base_url, _ = endpoint.enter(Answers(ChatAnswer(SAYS)))
    assert urlsplit(base_url).hostname == "127.0.0.1"
    port = urlsplit(base_url).port
    assert port
    # another address of this machine, on which a server at 0.0.0.0 would answer
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def port_is_free(base_url: str) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", urlsplit(base_url).port or 0), timeout=5).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was closed while it took this connection
            continue
        time.sleep(0.02)
    return False


def test_closing_answers_who_waits_and_frees_the_port(endpoint: ChatEndpoint) -> None:
    asked = threading.Event()
    base_url, key = endpoint.enter(lambda _: asked.set())
    statuses: list[int] = []

    def waits() -> None:
        with OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            try:
                client.chat.completions.create(model="any", messages=HI)
            except openai.APIStatusError as error:
                statuses.append(error.status_code)

    thread = threading.Thread(target=waits)
    thread.start()
    assert asked.wait(10)
    endpoint.close()
    thread.join(10)
    assert statuses == [410]
    assert port_is_free(base_url)
    assert post(endpoint, {"messages": HI}).status_code == 200  # it can be used again


def test_it_ends_with_the_object() -> None:
    endpoint = ChatEndpoint()
    base_url, _ = endpoint.enter(Answers(ChatAnswer(SAYS)))
    assert httpx.get(f"{base_url}/models").status_code == 401
    del endpoint
    gc.collect()
    assert port_is_free(base_url)


def test_nobody_is_there_to_answer(endpoint: ChatEndpoint) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    answer = post(endpoint, {"messages": HI}, lambda _: loop.call_soon_threadsafe(print))
    assert answer.status_code == 410


def test_a_copy_serves_nobody_yet(endpoint: ChatEndpoint) -> None:
    base_url, _ = endpoint.enter(Answers(ChatAnswer(SAYS)))
    copy: ChatEndpoint = pickle.loads(pickle.dumps(endpoint))
    assert copy.enter(Answers(ChatAnswer(SAYS)))[0] != base_url
    copy.close()


PROGRAM = """
import threading
from openai import OpenAI
from lrlhf.background import in_background
from lrlhf.environments.agents import ChatEndpoint

endpoint = ChatEndpoint()
asked = threading.Event()
base_url, key = endpoint.enter(lambda question: asked.set())
client = OpenAI(base_url=base_url, api_key=key)
hi = [{"role": "user", "content": "hi"}]
in_background(lambda: client.chat.completions.create(model="any", messages=hi), name="agent")
assert asked.wait(30)
print("the end")
"""


def test_it_does_not_keep_the_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ended = run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the end\n", "")
