"""What is read of an episode: what the policy read and wrote, the same of a text as of a chat."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.apps.lab.reward_lab.response_inputs import read_response_inputs
from lrlhf.apps.lab.reward_lab.scoring import score_responses
from lrlhf.apps.serve.score_request import RequestLimits, read_score_request
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.environments import Episodes, TextEnvironment, ToolCall
from lrlhf.environments.session import Reaction, TurnPrompt
from lrlhf.rewards import (
    ExactMatch,
    IsolatedReward,
    LengthPenalty,
    NumericAnswer,
    OverlongPenalty,
    ProcessReward,
    RegexFormat,
    RepetitionPenalty,
    Rewards,
    VerdictCorrect,
    VerdictFormat,
    completion_segments,
    completion_text,
)
from lrlhf.rewards.judge.comparisons import JudgePrompts
from lrlhf.rewards.learned import full_text
from lrlhf.rewards.lookup import BUILTINS
from lrlhf.rewards.remote.remote_reward import LightrftProtocol, LrlhfProtocol, Responses
from lrlhf.rollout import Collected, Collector, Sampling
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.records import written_text
from lrlhf.types import PromptBatch
from tests.conftest import build_tokenizer
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.test_episodes import prompt_batch
from tests.rollout.test_forks import TOKENIZER as FORGETFUL
from tests.rollout.test_forks import chats, thoughts

TOKENIZER = build_tokenizer()
QUESTION = "What is it? "
KINDS: list[Any] = [QUESTION, ({"role": "user", "content": QUESTION},)]
"""A plain text and a chat."""
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Search(TextEnvironment):
    """Says something at the start, and an answer that is not the policy's."""

    def reset(self) -> str:
        self.turns = 0
        return "Use the search. "

    def step(self, action: str) -> str | None:
        self.turns += 1
        return "\n[search] the answer is 42\n" if self.turns == 1 else None

    def reward(self) -> float:
        return float(self.turns)


def two_turns(text: str) -> str:
    last = "I do not know 7.\nVerdict: A" if "[search]" in text else "look it up"
    return f"{last}<|endoftext|>"


def collect(
    prompts: PromptBatch,
    functions: Sequence[Any],
    *,
    script: Callable[[str], str] = two_turns,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    session: Any = None,
    copies: int = 1,
    stop: tuple[str, ...] = (),
    **episodes: Any,
) -> Collected:
    engine = EpisodeEngine(ScriptedEngine(script), Episodes(**episodes))
    if session is not None:
        engine._new_session = lambda *_, **__: session  # type: ignore[method-assign]
    engine.attach(None, tokenizer)  # type: ignore[arg-type]
    engine.use_chat(ChatFormat(tokenizer))
    collector = Collector(
        engine, Rewards({f"r{n}": one for n, one in enumerate(functions)}), tokenizer
    )
    seeds = range(len(prompts) * copies)
    sampling = Sampling(max_new_tokens=900, stop=stop)
    return collector.collect(prompts, sampling, seeds=seeds, step=1, phase=lambda _: nullcontext())


class Keeps:
    """A reward function that remembers what it was given."""

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any) -> list[float]:
        self.prompts, self.completions = prompts, completions
        self.ids = completion_ids
        return [0.0] * len(prompts)


class Agent:
    """Asks something else than the data."""

    environment = None
    tools: tuple[Any, ...] = ()
    has_rewards = False

    async def open(self, row: Any) -> TurnPrompt:
        return TurnPrompt(
            ({"role": "system", "content": "A clerk."}, {"role": "user", "content": "Sum up."})
        )

    async def react(self, *_: Any) -> Reaction:
        return Reaction((), (), 0.0, "stop")

    async def outcome(self) -> float:
        return 0.0

    async def close(self) -> None:
        return None


def test_rewards_read_the_prompt_that_the_policy_read() -> None:
    keeps = Keeps()
    for prompt in KINDS:
        collected = collect(prompt_batch(prompt), [keeps], environment=Search)
        shown = f"{QUESTION}Use the search. "
        (read,) = keeps.prompts
        assert (read if isinstance(prompt, str) else read[-1]["content"]) == shown
        assert shown in collected.records[0]["prompt"]
    for prompt in KINDS:
        collect(prompt_batch(prompt), [keeps], session=Agent(), agent=lambda: None)
        (read,) = keeps.prompts
        assert [turn["content"] for turn in read] == ["A clerk.", "Sum up."]
        assert completion_text(keeps.completions[0]) == "look it up"


@pytest.mark.parametrize("stop", [(), ("#",)])
@pytest.mark.parametrize("prompt", KINDS, ids=["text", "chat"])
def test_what_the_policy_wrote_is_told_from_what_it_was_given(
    prompt: Any, stop: tuple[str, ...]
) -> None:
    keeps = Keeps()

    def script(text: str) -> str:
        return two_turns(text).replace("<|endoftext|>", "#" if stop else "<|endoftext|>")

    collected = collect(prompt_batch(prompt), [keeps], script=script, stop=stop, environment=Search)
    own = ["look it up", "I do not know 7.\nVerdict: A"]
    (completion,), record = keeps.completions, collected.records[0]
    segments = completion_segments(completion)
    assert [one.text for one in segments if one.sampled] == own
    assert "".join(one.text for one in segments if not one.sampled).strip("#\n") == (
        "[search] the answer is 42"
    )
    assert completion_text(completion) == "\n".join(own)
    if isinstance(prompt, str):  # prompt and response are all that was read
        row = collected.rollout.input_ids[0][collected.rollout.attention_mask[0]]
        read = str(TOKENIZER.decode(row, skip_special_tokens=True))
        assert read == keeps.prompts[0] + completion + ("#" if stop else "")
    rollout = collected.rollout
    sampled = rollout.input_ids[0][rollout.response_mask[0]].tolist()
    assert keeps.ids == [sampled]
    assert [one["text"] for one in record["segments"] if one["sampled"]] == own
    assert record["length"] == len(sampled) < len(record["token_ids"])


def test_a_turn_behind_which_nothing_was_given_is_a_turn() -> None:
    class Silent(Search):
        def step(self, action: str) -> str | None:
            self.turns += 1
            return "" if self.turns < 3 else None

    numbers = iter("12345")
    keeps = Keeps()
    collect(prompt_batch(QUESTION), [keeps], script=lambda _: next(numbers), environment=Silent)
    assert completion_text(keeps.completions[0]) == "1\n2\n3"
    assert str(keeps.completions[0]) == "123"


COMPARED: dict[str, Callable[[], Any]] = {
    "environment_reward": BUILTINS["environment_reward"],
    "exact_match": lambda: ExactMatch(extract=r"know (\d+)"),
    "exact_match whole": ExactMatch,
    "length_penalty": lambda: LengthPenalty(target=3, slope=0.001),
    "length_penalty words": lambda: LengthPenalty(target=1, slope=0.001, unit="words"),
    "length_penalty characters": lambda: LengthPenalty(1, slope=0.001, unit="characters"),
    "numeric_answer": NumericAnswer,
    "numeric_answer first": lambda: NumericAnswer(which="first"),
    "overlong_penalty": lambda: OverlongPenalty(max_new_tokens=100, buffer=90),
    "regex_format": lambda: RegexFormat(r"look.*Verdict: A"),
    "regex_format given": lambda: RegexFormat(r".*search.*"),
    "repetition_penalty": lambda: RepetitionPenalty(ngram=2, unit="characters"),
    "repetition_penalty tokens": lambda: RepetitionPenalty(ngram=2, unit="tokens"),
    "verdict_correct": VerdictCorrect,
    "verdict_format": lambda: VerdictFormat(reasoning=True),
    "isolated": lambda: IsolatedReward("numeric_answer"),
    "isolated format": lambda: IsolatedReward(RegexFormat(r".*search.*")),
}


def test_every_built_in_reward_gives_a_text_what_it_gives_the_same_chat() -> None:
    # what needs a model or another package is compared below, or reads `completion_text` as these
    known = {name.split(maxsplit=1)[0] for name in COMPARED}
    assert {*BUILTINS} - known == {"learned_reward", "process_reward", "reasoning_gym_score"}
    found = []
    for prompt in KINDS:
        prompts = prompt_batch(prompt, answer=["7"], gold=["A"])
        functions = [make() for make in COMPARED.values()]
        collected = collect(prompts, functions, environment=Search)
        values = collected.rewards.per_function[0].tolist()
        found.append(dict(zip(COMPARED, values, strict=True)))
        for function in functions:
            function.close()
    assert found[0] == found[1]
    assert not any(map(math.isnan, found[0].values()))
    expected = {"numeric_answer": 1.0, "exact_match": 1.0, "regex_format given": 0.0}
    expected |= {"isolated": 1.0, "isolated format": 0.0, "environment_reward": 3.0}
    assert {name: found[0][name] for name in expected} == expected


def test_a_judge_reads_and_compares_the_policys_words_on_what_it_read() -> None:
    asker = JudgePrompts("pairwise", "line", template=None, rubric=None, opponents=None,
                  reference_column=None, samples=1)  # fmt: skip
    texts = []
    for prompt in KINDS:
        keeps = Keeps()
        collect(prompt_batch(prompt), [keeps], environment=Search, copies=2)
        batch = asker.batch(keeps.prompts, keeps.completions, [None, None], {})
        texts.append({asker.text(batch, one) for one in asker.questions(batch)})
        other = asker.batch([prompt, keeps.prompts[0]], keeps.completions, [None, None], {})
        assert len(other.groups()) == 2  # they have not read the same
    assert texts[0] == texts[1]
    (text,) = texts[0]
    assert "search]" not in text
    assert "Use the search." in text


def test_models_read_all_that_was_said_of_texts_as_of_chats() -> None:
    read, steps = [], []
    for prompt in KINDS:
        keeps = Keeps()
        collect(prompt_batch(prompt), [keeps], environment=Search)
        (asked,), (completion,) = keeps.prompts, keeps.completions
        read.append(full_text(TOKENIZER, PLAIN, asked, completion, source="rm"))
        pieces = [(one.text.strip(), one.sampled) for one in completion_segments(completion)]
        steps.append(pieces)
    assert read[0] == read[1]
    assert read[0] == (
        f"{QUESTION}Use the search. look it up\n[search] the answer is 42\n"
        "I do not know 7.\nVerdict: A"
    )
    assert steps[0] == steps[1]


def test_process_rewards_are_those_of_the_steps_that_the_policy_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def judge(_: Any, _prompts: Any, answers: Any) -> list[list[float]]:
        asked.append(answers)
        return [[0.5 + 0.1 * place for place in range(len(one))] for one in answers]

    monkeypatch.setattr(ProcessReward, "judge", judge)
    monkeypatch.setattr(ProcessReward, "prepare", lambda self: None)
    ends = []
    for prompt in KINDS:
        reward = ProcessReward("unused", aggregate="sum", steps="separator", split_at="\n")
        collected = collect(prompt_batch(prompt), [reward], environment=Search)
        rollout = collected.rollout
        assert rollout.turn_rewards is not None
        columns = rollout.turn_rewards[0].nonzero()[:, 0].tolist()
        decoded = (
            str(TOKENIZER.decode(rollout.input_ids[0, : column + 1], skip_special_tokens=True))
            for column in columns
        )
        ends.append([text.split("\n")[-1] or text.split("\n")[-2] for text in decoded])
        assert all(rollout.response_mask[0, columns])
        assert rollout.turn_rewards[0, columns].tolist() == pytest.approx([0.5, 0.7, 0.8])
    assert asked[0] == asked[1]
    assert asked[0][0] == [
        "look it up",
        "[search] the answer is 42",
        "I do not know 7.",
        "Verdict: A",
    ]
    assert [[one[-6:] for one in own] for own in ends] == [[" it up", "now 7.", "ict: A"]] * 2


def test_services_are_told_which_words_are_the_policys() -> None:
    for prompt in KINDS:
        keeps = Keeps()
        collect(prompt_batch(prompt), [keeps], environment=Search)
        given = Responses(keeps.prompts, keeps.completions, [()], [()], {})
        body = json.loads(LrlhfProtocol().encoded(given))
        request = read_score_request(body, RequestLimits())
        (told,) = request.completions
        assert completion_text(told) == completion_text(keeps.completions[0])
        assert told == keeps.completions[0]
        query = LightrftProtocol(PLAIN).body(given)["queries"][0]
        assert query == full_text(
            TOKENIZER, PLAIN, keeps.prompts[0], keeps.completions[0], source=""
        )


def test_a_rewritten_history_is_read_once() -> None:
    keeps = Keeps()

    class Asks(TextEnvironment):
        def reset(self) -> None:
            self.turns = 0

        def step(self, action: str) -> str | None:
            self.turns += 1
            return f"more {self.turns}" if self.turns < 3 else None

    for history in ("tokens", "template"):
        collected = collect(
            chats("go"),
            [keeps],
            script=thoughts,
            tokenizer=FORGETFUL,
            environment=Asks,
            history=history,
        )
        assert (collected.rollout.forks is None) == (history == "tokens")
        turns = [f"hm{n}</think>a{n}" for n in (1, 2, 3)]
        assert completion_text(keeps.completions[0]) == "\n".join(turns)
        whole = "hm1</think>a1\nmore 1\nhm2</think>a2\nmore 2\nhm3</think>a3"
        assert collected.records[0]["completion"] == whole
        assert len(keeps.ids[0]) == int(collected.rollout.response_mask.sum())


SHOWS_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b


@pytest.mark.parametrize(
    ("call", "form"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "hermes"),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "mistral"),
        ("<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>", "python"),
    ],
)
@pytest.mark.parametrize("template", [SHOWS_CALLS, None], ids=["shows calls", "does not"])
def test_each_call_is_read_once(call: str, form: str, template: str | None) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    keeps = Keeps()

    def says(text: str) -> str:
        return f"Let me see. {call} Wait.<|im_end|>" if "\n3<" not in text else "3.<|im_end|>"

    collected = collect(
        prompt_batch(({"role": "user", "content": "1+2?"},)),
        [keeps],
        script=says,
        tokenizer=tokenizer,
        tools=[add],
        tool_calls=form,
    )
    (completion,) = keeps.completions
    if form != "mistral":
        assert completion[0]["content"].split() == ["Let", "me", "see.", "Wait."]
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert completion[0]["tool_calls"] == [{"type": "function", "function": function}]
    text = full_text(tokenizer, template, keeps.prompts[0], completion, source="rm")
    assert text.count('"name": "add"') == text.count("<tool_call>") == 1
    assert completion_text(completion).count("add") == 1
    assert json.dumps(collected.records[0]["episode"]).count("add") == 2  # the tool's name too


def test_a_format_that_tells_no_places_leaves_calls_in_the_words() -> None:
    keeps = Keeps()

    def reads(text: str) -> list[ToolCall]:
        return [ToolCall("add", {"a": 1, "b": 2})] if "go" in text else []

    collect(
        prompt_batch(({"role": "user", "content": "?"},)),
        [keeps],
        script=lambda text: "go<|im_end|>" if "\n3<" not in text else "3.<|im_end|>",
        tools=[add],
        tool_calls=reads,
    )
    assert keeps.completions[0][0] == {"role": "assistant", "content": "go"}


def test_recorded_episodes_are_scored_again_as_they_were(tmp_path: Path) -> None:
    for prompt in KINDS:
        prompts = prompt_batch(prompt, answer=["7"])
        functions = {"number": NumericAnswer(), "length": LengthPenalty(target=3)}
        collected = collect(prompts, [*functions.values()], environment=Search)
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join(f"{json.dumps(one)}\n" for one in collected.records))
        again = score_responses(read_response_inputs(path), Rewards(functions), None)
        parts = again.responses[0].parts
        assert [*parts.values()] == collected.rewards.per_function[0].tolist()


def test_votes_are_of_the_policys_words() -> None:
    for prompt in KINDS:
        collected = collect(prompt_batch(prompt), [Keeps()], environment=Search)
        said = written_text(collected.records[0])
        assert NumericAnswer().answer_of(said) == "7"
        assert NumericAnswer(which="first").answer_of(said) == "7"
