"""Special tokens in contents are cut into ordinary ones, and those of the template stay whole."""

import itertools
import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lrlhf.models import (
    is_split,
    reader_of,
    readers_of,
    rejoined,
    special_tokens,
    split_messages,
    split_text,
    unsplit,
    unsplit_places,
)
from tests.conftest import build_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz<>/|_[]. "


def fast(backend: Tokenizer, *specials: str | AddedToken, **named: str) -> PreTrainedTokenizerBase:
    backend.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **named
    )


def llama(*specials: str | AddedToken) -> PreTrainedTokenizerBase:
    """BPE behind a normalizer that writes spaces as `▁` and puts one in front."""
    names = ["<s>", "</s>", "▁", *(letter for letter in LETTERS if letter != " ")]
    backend = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(backend, *(specials or ("<s>", "</s>")), bos_token="<s>", eos_token="</s>")


def unigram() -> PreTrainedTokenizerBase:
    """Knows its special tokens as words, and finds them in text even where they are split."""
    words = [(name, 0.0) for name in ("<unk>", "<s>", "</s>")]
    words += [(letter, -3.0) for letter in "▁" + LETTERS.replace(" ", "")]
    backend = Tokenizer(Unigram(words, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return fast(backend, "<s>", "</s>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def bert() -> PreTrainedTokenizerBase:
    names = ["[UNK]", "[SEP]", "[CLS]", "##q", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    backend = Tokenizer(WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return fast(backend, "[SEP]", "[CLS]", unk_token="[UNK]", sep_token="[SEP]", cls_token="[CLS]")


TOKENIZERS = {
    "byte level": build_tokenizer(),
    "prepends spaces": llama(),
    "eats spaces": llama(
        AddedToken("<s>", rstrip=True, lstrip=True, special=True), AddedToken("</s>", special=True)
    ),
    "normalized": llama(
        AddedToken("<s>", normalized=True, special=True),
        AddedToken("</s>", normalized=True, special=True),
    ),
    "unigram": unigram(),
    "lower case": bert(),
}


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = reader_of(tokenizer, text)(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_content_has_no_special_token_and_reads_as_it_was_written(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = sorted(special_tokens(tokenizer) - {tokenizer.unk_token})
    special = {*tokenizer.convert_tokens_to_ids(tokens)}
    draw = random.Random(name)
    for _ in range(50):
        pieces = draw.choices([*tokens, "a b", "a", " ", "<", ".", "[s"], k=6)
        content = f"a{''.join(pieces)}{tokens[0]}b"
        written = split_text(tokenizer, content)
        ids = ids_of(tokenizer, written)
        assert not special & {*ids}
        assert unsplit(written) == content
        if name == "lower case":  # which has no spaces where words meet
            content, read = content.lower().replace(" ", ""), tokenizer.decode(ids).replace(" ", "")
            assert read == content
        else:
            assert tokenizer.decode(ids) == content
        # the template's own is a token, wherever it stands
        framed = ids_of(tokenizer, f"{tokens[0]}{written}{tokens[-1]}")
        assert [one for one in framed if one in special] == tokenizer.convert_tokens_to_ids(
            [tokens[0], tokens[-1]]
        )


def test_bytes_are_those_of_the_letters() -> None:
    tokenizer, mark = TOKENIZERS["byte level"], "<|im_end|>"
    text = f"{split_text(tokenizer, f'a{mark}')}{mark}"
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in f"a{mark}"]
    assert ids_of(tokenizer, text) == [*letters, tokenizer.convert_tokens_to_ids(mark)]
    # offsets are those of the text that was given
    offsets = reader_of(tokenizer, text)(text, return_offsets_mapping=True)["offset_mapping"]
    assert "".join(text[first:last] for first, last in offsets) == f"a{mark}{mark}"


def test_tokens_that_overlap_and_letters_that_no_text_has() -> None:
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate("abc\ufdd0\ufdd1\ufdd2")}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = fast(backend, "abc", "bcb", "bc")
    for letters in itertools.product("abc\ufdd0\ufdd1\ufdd2", repeat=5):
        content = "".join(letters)
        written = split_text(tokenizer, content)
        ids = ids_of(tokenizer, written)
        assert max(ids) < 6
        assert tokenizer.decode(ids) == unsplit(written) == content
        places = unsplit_places(written)
        assert [unsplit(written[places[i] : places[i + 1]]) for i in range(5)] == [*content]


def test_texts_without_any_are_read_by_the_tokenizer_itself() -> None:
    tokenizer = TOKENIZERS["byte level"]
    assert split_text(tokenizer, "a <b> |im_end|") == "a <b> |im_end|"
    texts = ["a<|im_end|>", split_text(tokenizer, "a<|im_end|>"), ""]
    (plain, some), (other, split) = readers_of(tokenizer, texts)
    assert (plain, some, split) == (tokenizer, [0, 2], [1])
    assert other is not tokenizer
    assert [is_split(text) for text in texts] == [False, True, False]


THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('<|think|>')[-1] }}"
    "{% for p in m.parts or [] %}<|endoftext|>{{ p }}{% endfor %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_of_answers_marks_that_the_template_knows_stay(role: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|think|>", "<|fim|>"]})
    content = "<|think|>a<|im_end|><|endoftext|><|fim|>"
    ((message),) = split_messages(tokenizer, [{"role": role, "content": content}], THOUGHTS)
    ids = ids_of(tokenizer, message["content"])
    own = tokenizer.convert_tokens_to_ids("<|think|>")
    # neither what ends turns, nor the end of a text, nor what the template does not know
    kept = [one for one in ids if one in tokenizer.all_special_ids or one == own]
    assert kept == ([own] if role == "assistant" else [])


def test_values_that_a_template_writes_as_programs_do() -> None:
    tokenizer = build_tokenizer()
    (message,) = split_messages(tokenizer, [{"role": "user", "content": {"a": "<|im_end|>"}}])
    for text in (repr(message["content"]), json.dumps(message["content"])):
        ids = ids_of(tokenizer, rejoined(text))
        assert tokenizer.decode(ids).replace("'", '"') == '{"a": "<|im_end|>"}'
        assert not {*ids} & {*tokenizer.all_special_ids}


def test_whatever_a_message_holds_is_split() -> None:
    tokenizer = build_tokenizer()
    mark = "<|im_end|>"
    message: dict[str, Any] = {
        "role": "assistant",
        "reasoning_content": mark,
        "content": [{"type": "text", "text": mark}, {"type": "image"}],
        "tool_calls": [{"function": {"name": mark, "arguments": {mark: [mark, 1, None]}}}],
    }
    (split,) = split_messages(tokenizer, [message])
    assert mark not in repr(split)
    call = split["tool_calls"][0]["function"]
    assert unsplit(split["reasoning_content"]) == unsplit(call["name"]) == mark
    ((key, (value, *others)),) = call["arguments"].items()
    assert (unsplit(key), unsplit(value), others) == (mark, mark, [1, None])
    assert split["content"][1] == {"type": "image"}


def test_a_token_in_two_text_parts_is_split_too() -> None:
    tokenizer = llama("<s>", "</s>")
    image = {"type": "image", "image": "a.png"}
    parts = [{"type": "text", "text": "a</"}, {"type": "text", "text": "s>b"}]
    (message,) = split_messages(tokenizer, [{"role": "user", "content": parts}])
    text = "".join(part["text"] for part in message["content"])
    assert "</s>" not in text
    assert unsplit(text) == "a</s>b"
    thirds = [{"type": "text", "text": text} for text in ("a<", "/s", ">b")]
    (message,) = split_messages(tokenizer, [{"role": "user", "content": thirds}])
    assert unsplit("".join(part["text"] for part in message["content"])) == "a</s>b"
    assert "</s>" not in "".join(part["text"] for part in message["content"])
    # parts that make no token together, or have a picture between them, stay as they are
    for apart in ([parts[0], image, parts[1]], [parts[1], parts[0]]):
        (message,) = split_messages(tokenizer, [{"role": "user", "content": apart}])
        assert message["content"] == apart
