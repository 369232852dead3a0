"""Histories that are rewritten: each turn is trained on as the policy saw it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.environments.session import Reaction, TurnPrompt
from lrlhf.models import sequence_logprobs
from lrlhf.rollout import RolloutEngine, Sampling, TransformersEngine
from lrlhf.rollout.dynamic_sampling import _with_equal_fields
from lrlhf.rollout.episodes.dialogue import DialogueTokenizer
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.responses import token_prompts
from lrlhf.rollout.storage import load_rollout, save_rollout
from lrlhf.types import Media, PromptBatch, Rollout
from tests.conftest import build_tokenizer
from tests.rollout.scripted_engine import ScriptedEngine

FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that shows answers without the reasoning before them."""


def forgetful() -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template = FORGETFUL
    return tokenizer


TOKENIZER = forgetful()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def chats(*texts: str) -> PromptBatch:
    chat = ChatFormat(TOKENIZER)
    prompts = tuple(({"role": "user", "content": text},) for text in texts)
    rows = token_prompts([ids(chat.render(one, {}, prompt=True)) for one in prompts])
    return PromptBatch(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask,
        prompts=prompts,
        columns=({},) * len(texts),
    )


class Counts(TextEnvironment):
    """Asks for three turns, and pays for each."""

    def reset(self) -> None:
        self.turns = 0

    def step(self, action: str) -> str | None:
        self.turns += 1
        return f"more {self.turns}" if self.turns < 3 else None

    def reward(self) -> float:
        return float(self.turns)


def play(
    engine: RolloutEngine,
    prompts: PromptBatch,
    *,
    policy: Any = None,
    environment: Any = Counts,
    num_generations: int = 1,
    tokens: int = 100,
    **options: Any,
) -> Rollout:
    options = {"history": "template", **options}
    episodes = EpisodeEngine(engine, Episodes(environment=environment, **options))
    episodes.attach(policy, TOKENIZER)
    episodes.use_chat(ChatFormat(TOKENIZER))
    count = len(prompts) * num_generations
    sampling = Sampling(max_new_tokens=tokens)
    return episodes.generate(prompts, sampling, num_generations=num_generations, seeds=range(count))


def contexts(rollout: Rollout, row: int) -> Iterator[tuple[list[int], list[int]]]:
    """What stood before every sampled token of a row, by following the forks one by one."""
    own, mask = rollout.input_ids[row].tolist(), rollout.attention_mask[row].tolist()
    forks = [0] * len(own) if rollout.forks is None else rollout.forks[row].tolist()
    assert mask == sorted(mask, reverse=True)
    for column in rollout.response_mask[row].nonzero()[:, 0].tolist():
        before: list[int] = []
        place = column - 1 - forks[column]
        while place >= 0:
            before.append(own[place])
            place = place - 1 - forks[place]
        yield before[::-1], [own[column]]


def turns(rollout: Rollout, row: int) -> list[tuple[str, str]]:
    """The text before every turn of the policy's, and the turn."""
    found: list[tuple[list[int], list[int]]] = []
    for before, token in contexts(rollout, row):
        if found and before == [*found[-1][0], *found[-1][1]]:
            found[-1][1].extend(token)
        else:
            found.append((before, token))
    return [(str(TOKENIZER.decode(one)), str(TOKENIZER.decode(two))) for one, two in found]


def thoughts(text: str) -> str:
    number = text.count("<|im_start|>assistant")
    return f"hm{number}</think>a{number}<|im_end|>"


def test_the_policy_sees_what_the_template_shows_and_is_trained_on_that() -> None:
    engine = ScriptedEngine(thoughts)
    rollout = play(engine, chats("go"))
    first = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    second = first + "a1<|im_end|>\n<|im_start|>user\nmore 1<|im_end|>\n<|im_start|>assistant\n"
    third = second + "a2<|im_end|>\n<|im_start|>user\nmore 2<|im_end|>\n<|im_start|>assistant\n"
    assert turns(rollout, 0) == [
        (first, "hm1</think>a1<|im_end|>"),
        (second, "hm2</think>a2<|im_end|>"),
        (third, "hm3</think>a3<|im_end|>"),
    ]
    # the engine's own tokens, all of them
    sampled = rollout.input_ids[0][rollout.response_mask[0]]
    assert sampled.tolist() == [token for turn in engine.wrote for token in turn]
    assert torch.equal(rollout.sampling_logprobs[0][rollout.response_mask[0]], -sampled.float())
    # what was seen before stands in the row once
    written = "".join((first, *("hm1</think>a1<|im_end|>",)))
    behind_first = second.removeprefix(first) + "hm2</think>a2<|im_end|>"
    behind_second = third.removeprefix(second) + "hm3</think>a3<|im_end|>"
    assert TOKENIZER.decode(rollout.input_ids[0]) == written + behind_first + behind_second
    assert rollout.turn_rewards is not None
    assert rollout.turn_rewards[0][rollout.turn_rewards[0] != 0].tolist() == [1.0, 2.0, 3.0]


def test_what_the_template_keeps_is_no_fork() -> None:
    rewritten = play(ScriptedEngine(lambda text: f"a{len(text)}<|im_end|>"), chats("go"))
    kept = play(
        ScriptedEngine(lambda text: f"a{len(text)}<|im_end|>"), chats("go"), history="tokens"
    )
    assert rewritten.forks is None
    assert torch.equal(rewritten.input_ids, kept.input_ids)
    assert torch.equal(rewritten.response_mask, kept.response_mask)


class Agent:
    """Asks what a script says; the interface of a session."""

    has_rewards = True
    tools: tuple[Any, ...] = ()
    environment = None

    def __init__(self, *asked: TurnPrompt) -> None:
        self.asked = list(asked)

    async def open(self, row: Any) -> TurnPrompt:
        return self.asked.pop(0)

    async def react(self, text: str, raw: str, tokens: Any) -> Reaction:
        if not self.asked:
            return Reaction((), (), 0.0, "stop")
        return Reaction((), (), 1.0, None, self.asked.pop(0))

    async def outcome(self) -> float:
        return 5.0

    async def close(self) -> None:
        return None


def ask(*contents: str, **options: Any) -> TurnPrompt:
    """A prompt of which every second message is the policy's."""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[place % 2], "content": content} for place, content in enumerate(contents)
    ]
    return TurnPrompt(tuple(messages), **options)


def agents(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Agent]) -> None:
    sessions = "lrlhf.rollout.episodes.episode_engine.Session"
    monkeypatch.setattr(sessions, lambda *_, **__: make())


def test_an_agent_may_ask_anything_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        ask("one"),
        ask("one", "w1", "two"),  # goes on
        ask("other"),  # something else, with nothing but the format in common
        ask("one", "w1", "three"),  # goes on from the first answer again
        ask("one", "w1", "three"),  # the same once more: another sample
        ask("one", "rewritten", "four"),
    ]
    agents(monkeypatch, lambda: Agent(*asked))
    numbers = iter(range(1, 9))
    rollout = play(ScriptedEngine(lambda _: f"w{next(numbers)}<|im_end|>"), chats("x"), tokens=900)
    chat = ChatFormat(TOKENIZER)
    expected = [
        (chat.render(one.messages, {}, prompt=True), f"w{number}<|im_end|>")
        for number, one in enumerate(asked, 1)
    ]
    assert turns(rollout, 0) == expected
    (episode,) = rollout.episodes or ()
    assert episode.finish_reason == "stop"
    assert episode.rewards == (1.0, 1.0, 1.0, 1.0, 1.0, 5.0)
    assert episode.prompt == asked[0].messages


def test_a_turn_has_the_tokens_that_the_policy_wrote() -> None:
    vocabulary = {token: place for place, token in enumerate([*"abcu:", "ab", "<e>"])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.add_special_tokens(["<e>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<e>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    a, b, c, user, colon, ab, end = (vocabulary[token] for token in vocabulary)
    dialogue = DialogueTokenizer(tokenizer, ChatFormat(tokenizer))
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "c"},
    ]
    first, last = [user, colon, ab, end, a, colon], [end, user, colon, c, end, a, colon]
    assert dialogue.conversation_tokens(messages, {}, []).ids == [*first, ab, *last]
    # letter by letter, which the tokenizer would not do; not what the user said
    for ending in (("<e>", [end]), ("", [])):
        wrote = ("ab" + ending[0], [a, b, *ending[1]])
        assert dialogue.conversation_tokens(messages, {}, [wrote]).ids == [*first, a, b, *last]
        assert dialogue.conversation_tokens(messages, {}, [("c", [c]), wrote, ("", [])]).ids == [
            *first,
            a,
            b,
            *last,
        ]
    # what does not stand there as it was written is tokenised
    for other in ("ba<e>", "a", "ab:", ""):
        assert dialogue.conversation_tokens(messages, {}, [(other, [b, a, end])]).ids == [
            *first,
            ab,
            *last,
        ]


def test_a_template_may_want_results_behind_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # as Mistral's, which count only the turns without calls
    strict = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}" + FORGETFUL.partition("%}")[2]
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", strict)
    called = {"role": "assistant", "content": "w", "tool_calls": [{"function": {"name": "f"}}]}
    asked = (
        ask("one"),
        TurnPrompt((ask("one").messages[0], called, {"role": "tool", "content": "2"})),
    )
    agents(monkeypatch, lambda: Agent(*asked))
    rollout = play(ScriptedEngine(lambda _: "w<|im_end|>"), chats("x"))
    (episode,) = rollout.episodes or ()
    assert (episode.finish_reason, episode.turns) == ("stop", 2)


def test_results_that_the_template_leaves_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = FORGETFUL.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", silent)
    told = (*ask("one", "w").messages, {"role": "tool", "content": "2"})
    agents(monkeypatch, lambda: Agent(ask("one"), TurnPrompt(told)))
    with pytest.raises(ValueError, match="leaves out what the role 'tool' says"):
        play(ScriptedEngine(lambda _: "w<|im_end|>"), chats("x"))


def test_the_limit_of_a_turn_is_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    agents(monkeypatch, lambda: Agent(ask("one", max_tokens=2), ask("two", max_tokens=3)))
    rollout = play(ScriptedEngine(lambda _: "abcdefgh"), chats("x"))
    assert [len(ids(turn)) for _, turn in turns(rollout, 0)] == [2, 3]


def test_a_full_context_ends_an_episode(language_model: PreTrainedModel) -> None:
    class Endless(TextEnvironment):
        def step(self, action: str) -> str | None:
            return "more"

    longest = language_model.config.max_position_embeddings
    for history in ("tokens", "template"):
        rollout = play(
            TransformersEngine(),
            chats("one"),
            policy=language_model,
            environment=Endless,
            max_turn_tokens=20,
            max_turns=100,
            tokens=1000,
            history=history,
        )
        (episode,) = rollout.episodes or ()
        assert episode.finish_reason == "length"
        lengths = [len(before) + len(token) for before, token in contexts(rollout, 0)]
        assert longest - 60 < max(lengths) <= longest


def test_every_response_of_a_batch_stays_within_the_context() -> None:
    class Endless(TextEnvironment):
        def step(self, action: str) -> str | None:
            return "more"

    # which knows no position behind its last one
    config = GPT2Config(
        vocab_size=len(TOKENIZER),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=160,
        bos_token_id=None,
    )
    policy = GPT2LMHeadModel(config).eval()
    rollout = play(
        TransformersEngine(),
        chats("a" * 100, "b", "c" * 200),
        policy=policy,
        environment=Endless,
        max_turn_tokens=40,
        max_turns=100,
        tokens=1000,
        num_generations=2,
    )
    episodes = rollout.episodes or ()
    assert [one.finish_reason for one in episodes] == ["length"] * 4 + ["failed"] * 2
    assert episodes[4].failure == "the prompt has 219 tokens, and the model reads 160"
    for row in range(4):
        assert max(len(before) + 1 for before, _ in contexts(rollout, row)) <= 160


def test_what_cannot_be_rendered_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(lambda _: "a<|im_end|>")
    plain = replace(chats("go"), prompts=("go",))
    with pytest.raises(ValueError, match="some prompts are plain text"):
        play(engine, plain)
    assert engine.calls == []
    films = replace(chats("go"), media=(Media(tensors={}, tokens={"video": 1}),))
    with pytest.raises(ValueError, match="prompts with videos or audio are not rendered twice"):
        play(engine, films)
    deaf = FORGETFUL.replace(
        "{% for m in messages %}", "{% for m in messages if m.content != 'more 1' %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", deaf.replace("!= 'more 1'", "== 'go'"))
    with pytest.raises(ValueError, match="leaves out what the role 'user' says"):
        play(engine, chats("go"))


def test_calls_that_special_tokens_mark_are_not_lost_silently() -> None:
    def tool(word: str) -> str:
        """Repeat.

        Args:
            word: What.
        """
        return word

    marked = '{"name": "tool", "arguments": {"word": "x"}}'
    engine = ScriptedEngine(lambda _: f"<|im_start|>{marked}")
    with pytest.raises(ValueError, match="special tokens mark the calls of this model"):
        play(engine, chats("go"), environment=None, tools=[tool], tool_calls="llama3_json")


def test_what_others_said_in_the_policys_name_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [ask("one"), ask("other", "not mine", "two", "nor this", "three")]
    agents(monkeypatch, lambda: Agent(*asked))
    rollout = play(ScriptedEngine(lambda _: "w<|im_end|>"), chats("x"))
    (episode,) = rollout.episodes or ()
    assert episode.turns == 2
    assert [one["content"] for one in episode.messages] == ["w", "other", "two", "three", "w"]


def test_a_long_conversation_with_many_forks_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 20_000
    agents(monkeypatch, lambda: Agent(*(ask(long, f"{number}", "on") for number in range(60))))
    started = time.process_time()
    rollout = play(ScriptedEngine(lambda _: "w<|im_end|>"), chats("x"), tokens=10_000, max_turns=99)
    assert rollout.forks is not None
    assert int((rollout.forks != 0).sum()) == 59
    assert time.process_time() - started < 20


SHOUTS = FORGETFUL.replace(
    "m.content.split('</think>')[-1]", "m.content | upper if m.role == 'assistant' else m.content"
)
"""Rewrites whatever the policy wrote."""


@pytest.fixture
def shouting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", SHOUTS)


def sampled(policy: PreTrainedModel, **options: Any) -> Rollout:
    return play(
        TransformersEngine(),
        chats("one", "and two"),
        policy=policy,
        num_generations=2,
        tokens=150,
        max_turn_tokens=5,
        **options,
    )


@pytest.mark.usefixtures("shouting")
@torch.no_grad()
def test_forked_rows_have_the_policys_probabilities(language_model: PreTrainedModel) -> None:
    rollout = sampled(language_model)
    assert rollout.forks is not None
    assert (rollout.forks != 0).sum() > 3
    own = sequence_logprobs(language_model, rollout)
    mask = rollout.response_mask
    assert (own - rollout.sampling_logprobs).abs()[mask].max() < 1e-4
    expected = []
    for row in range(len(rollout)):
        for before, token in contexts(rollout, row):
            logits = language_model(torch.tensor([before])).logits[0, -1]
            expected.append(logits.log_softmax(dim=0)[token[0]])
    assert (own[mask] - torch.stack(expected)).abs().max() < 1e-4


@pytest.mark.usefixtures("shouting")
def test_forks_are_stored_and_merged(language_model: PreTrainedModel, tmp_path: Path) -> None:
    forked = sampled(language_model)
    assert forked.forks is not None
    save_rollout(tmp_path / "one", forked, torch.zeros(4), [{}] * 4)
    again = load_rollout(tmp_path / "one").rollout
    assert again.forks is not None
    assert torch.equal(again.forks, forked.forks)
    plain = sampled(language_model, history="tokens")
    assert plain.forks is None
    alike = _with_equal_fields([plain, forked])
    assert alike[0].forks is not None
    assert not alike[0].forks.any()
    assert alike[1] is forked
