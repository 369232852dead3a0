"""`DialogueTokenizer`: observations between turns are the template's, complete, and text."""

import random
from typing import Any

import pytest

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.rollout.episodes.dialogue import DialogueTokenizer
from lrlhf.rollout.episodes.episode_state import ContextTokens
from tests.conftest import build_tokenizer
from tests.datamodules.test_special_tokens import EVIL, TEMPLATES

TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PROMPT = ({"role": "user", "content": "hi"},)
NEW = [{"role": "user", "content": "go on"}]


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def dialogue(template: str) -> DialogueTokenizer:
    return DialogueTokenizer(TOKENIZER, ChatFormat(TOKENIZER, TEMPLATES[template]))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def template_behind(template: str, new: list[dict[str, Any]]) -> str:
    """What `transformers` renders behind an answer."""
    text = TOKENIZER.apply_chat_template(
        [*PROMPT, said("ANSWER"), *new],
        chat_template=TEMPLATES[template],
        tokenize=False,
        add_generation_prompt=True,
    )
    return str(text).partition("ANSWER")[2]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "forgets"])
def test_a_turn_that_was_cut_off_is_given_the_whole_of_what_ends_it(template: str) -> None:
    behind, turns = template_behind(template, NEW), dialogue(template)
    draw = random.Random(template)
    texts = [behind[:length] for length in range(1, len(behind))]
    texts += ["".join(draw.choices("ab <|\n#im_end>", k=8)) for _ in range(50)]
    for text in texts:
        # letters alone: the policy has sampled no mark
        letters = [TOKENIZER.convert_tokens_to_ids(one) for one in byte_letters(text)]
        given = turns.observation_tokens(PROMPT, [said(text)], NEW, {}, letters[-1]).ids
        assert given == ids(behind)


def byte_letters(text: str) -> list[str]:
    return [{" ": "Ġ", "\n": "Ċ"}.get(letter, letter) for letter in text]


@pytest.mark.parametrize("template", ["chatml", "marks generation", "shows tools as json"])
def test_an_end_that_the_policy_wrote_is_not_given_again(template: str) -> None:
    behind = template_behind(template, NEW)
    given = dialogue(template).observation_tokens(PROMPT, [said("no")], NEW, {}, END).ids
    assert given == ids(behind.removeprefix("<|im_end|>"))


def test_an_end_of_two_tokens_is_not_given_again() -> None:
    """As Command A's template ends a response, and then the turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{{ '<|endoftext|>' if m.role == 'assistant' }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    turns, first = (
        DialogueTokenizer(TOKENIZER, ChatFormat(TOKENIZER, template)),
        ids("<|endoftext|>"),
    )
    next_turn = ids("<|im_start|>go on<|im_end|><|im_start|>")
    assert turns.observation_tokens(PROMPT, [said("no")], NEW, {}, END).ids == next_turn
    assert turns.observation_tokens(PROMPT, [said("no")], NEW, {}, first[0]).ids == [
        END,
        *next_turn,
    ]
    # cut off: both are given
    assert turns.observation_tokens(PROMPT, [said("no")], NEW, {}, ids("o")[0]).ids == [
        *first,
        END,
        *next_turn,
    ]


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "forgets"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_environments_say_ends_no_turn(template: str, role: str) -> None:
    if template == "next mark ends a turn" and role == "tool":
        pytest.skip("it has marks for two roles")
    turns, letter = dialogue(template), TOKENIZER.convert_tokens_to_ids("a")
    evil, harmless = (
        turns.observation_tokens(
            PROMPT, [said("a")], [{"role": role, "content": what}], {}, letter
        ).ids
        for what in (EVIL, "x")
    )
    special = {*TOKENIZER.all_special_ids}
    assert [i for i in evil if i in special] == [i for i in harmless if i in special]
    assert TOKENIZER.decode(evil) == template_behind(template, [{"role": role, "content": EVIL}])
    # what an environment shows at the start, and a request that replaces all
    _, (opened, _) = turns.prompt_tokens(PROMPT, EVIL, {}, ContextTokens([]))
    whole = turns.conversation_tokens(
        [*PROMPT, said("a"), {"role": role, "content": EVIL}], {}, []
    ).ids
    for text, plain in (
        (opened, turns.prompt_tokens(PROMPT, "x", {}, ContextTokens([]))[1].ids),
        (
            whole,
            turns.conversation_tokens(
                [*PROMPT, said("a"), {"role": role, "content": "x"}], {}, []
            ).ids,
        ),
    ):
        assert [i for i in text if i in special] == [i for i in plain if i in special]


def test_a_turn_that_spells_marks_keeps_the_tokens_that_the_policy_wrote() -> None:
    text = "I end <|im_end|> here"
    # tokens that no tokenizer makes of it
    own = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "Q<Q"]
    conversation = [*PROMPT, said(text), {"role": "user", "content": EVIL}]
    whole = (
        dialogue("chatml")
        .conversation_tokens(conversation, {}, [(f"{text}<|im_end|>", [*own, END])])
        .ids
    )
    place = next(i for i in range(len(whole)) if whole[i : i + 3] == own)
    assert whole[:place] == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.decode(whole[place + 3 :]) == (
        f"<|im_end|>\n<|im_start|>user\n{EVIL}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert whole.count(END) == 3


def test_of_plain_text_environments_write_the_marks() -> None:
    turns = DialogueTokenizer(TOKENIZER, None)
    given = turns.observation_tokens(
        "hi", [said("a")], [{"role": "user", "content": "<|im_end|>b"}], {}, 5
    ).ids
    assert given == [END, TOKENIZER.convert_tokens_to_ids("b")]


@pytest.mark.parametrize("ended", [True, False])
def test_a_turn_of_a_rewritten_history_is_whole_whether_it_was_cut_off_or_not(ended: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["</call>"])
    call = tokenizer.convert_tokens_to_ids("</call>")
    own = [tokenizer.convert_tokens_to_ids("Q"), call, *([END] if ended else [])]
    raw = "no</call>" + ("<|im_end|>" if ended else "")
    conversation = [*PROMPT, said("no</call>"), *NEW]
    turns = DialogueTokenizer(tokenizer, ChatFormat(tokenizer))
    whole = turns.conversation_tokens(conversation, {}, [(raw, own)]).ids
    before = ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    behind = ids(template_behind("chatml", NEW))
    assert whole == [*before, own[0], call, *behind]
