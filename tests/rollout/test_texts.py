"""What a policy wrote becomes text as it stands behind its prompt, without what ended it."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lrlhf.rewards import Completion, Rewards, completion_text
from lrlhf.rollout import Collector, Response, Sampling, TransformersEngine, assemble_rollout
from lrlhf.types import PromptBatch


def sentencepiece(strip: bool) -> PreTrainedTokenizerBase:
    """Words with the space before them; decodes as Llama 2 (strip) or as T5 does."""
    words = ["<pad>", "</s>", "\u2581", "\u25812", "\u2581+", "\u2581=", "\u25814", "4", "\u2581so"]
    backend = Tokenizer(Unigram([(word, -float(index)) for index, word in enumerate(words)]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = (
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        if strip
        else decoders.Metaspace()
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def texts(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | tuple[dict[str, str], ...],
    responses: list[list[str]],
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    *,
    ids: list[int] | None = None,
    truncated: bool = False,
) -> list[str]:
    """Return what the rewards are given, and make sure that the records say the same."""
    tokens = torch.tensor([tokenizer(str(prompt))["input_ids"] if ids is None else ids])
    prompts = PromptBatch(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        prompts=(prompt,),
        columns=({},),
    )
    said = [torch.tensor(tokenizer.convert_tokens_to_ids(response)) for response in responses]
    rollout = assemble_rollout(
        prompts,
        [Response.sampled(s, torch.zeros(len(s)), truncated=truncated) for s in said],
        num_generations=len(said),
        pad_id=0,
    )
    seen: list[str] = []

    def reads(completions: Sequence[Completion]) -> list[float]:
        seen.extend(map(completion_text, completions))
        return [0.0] * len(completions)

    collector = Collector(TransformersEngine(), Rewards([reads]), tokenizer)
    collected = collector.score(prompts, rollout, sampling, step=0, phase=nullcontext)
    assert [record["completion"] for record in collected.records] == seen
    return seen


@pytest.mark.parametrize("strip", [True, False])
def test_the_space_before_an_answer_is_kept_where_the_policy_wrote_one(strip: bool) -> None:
    answers = [["\u25814", "</s>"], ["4"], ["\u2581", "\u25814"], ["\u2581so", "\u25814"], ["</s>"]]
    assert texts(sentencepiece(strip), "2 + 2 =", answers) == [" 4", "4", "  4", " so 4", ""]


def test_a_turn_of_a_chat_and_a_text_without_beginning_start_anew() -> None:
    tokenizer = sentencepiece(strip=True)
    chat = ({"role": "user", "content": "2 + 2 ="},)
    assert texts(tokenizer, chat, [["\u25814"]], ids=[3, 5]) == ["4"]
    assert texts(tokenizer, "", [["\u25814"]], ids=[1]) == ["4"]  # only a special token before


# the two letters that stand for the two bytes of an umlaut
((UMLAUT, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\u00e4")
FIRST, SECOND = UMLAUT


def word_pieces() -> PreTrainedTokenizerBase:
    """Pieces that begin, end and hold stop strings; a letter in two bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<|end|>", "ab", "c#", "##", "#d", SECOND + "#", *letters]
    backend = Tokenizer(BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<|end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<pad>",
        additional_special_tokens=["<|end|>"],
        clean_up_tokenization_spaces=False,
    )


@pytest.mark.parametrize(
    ("stop", "response", "expected"),
    [
        (("##",), ["ab", "##"], "ab"),
        (("#",), ["ab", "##"], "ab"),  # the first of them ends it
        (("##", "#"), ["ab", "##"], "ab"),
        (("##",), ["ab", "c#", "#d"], "abc"),  # over two tokens, and in the midst of both
        (("#",), [FIRST, SECOND + "#"], "\u00e4"),
        (("<|end|>",), ["ab", "<|end|>"], "ab"),
        (("<|end|>#",), ["ab", "<|end|>", "#"], "ab"),
        (("#",), ["ab", "<pad>"], "ab"),  # ended by itself
        (("b#",), ["ab", "#d"], "a"),
    ],
)
def test_the_text_ends_before_the_stop_string(
    stop: tuple[str, ...], response: list[str], expected: str
) -> None:
    tokenizer = word_pieces()
    sampling = Sampling(stop=stop)
    assert texts(tokenizer, "a#", [response], sampling) == [expected]
    chat = ({"role": "user", "content": "a"},)
    assert texts(tokenizer, chat, [response], sampling, ids=[2]) == [expected]


def test_a_stop_string_stays_where_it_ended_nothing_or_is_asked_for() -> None:
    tokenizer = word_pieces()
    kept = Sampling(stop=("##",), stop_in_text=True)
    assert texts(tokenizer, "a", [["ab", "##"]], kept) == ["ab##"]
    assert texts(tokenizer, "a", [["##", "ab"]], Sampling(stop=("##",)), truncated=True) == ["##ab"]
