"""Whatever rows are: they are used, or counted as bad, or a message names them."""

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from tests.faults.fuzz_settings import assert_told, fuzzing

ODD_TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(), max_size=8),  # surrogates and NUL among them
    st.sampled_from(
        [
            "",
            " ",
            "\x00",
            "\ud800",
            "\udfff half",
            "<|endoftext|>",
            "<|im_start|>",
            "\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman:\n\nHuman:\n\nAssistant:",
            "{{ prompt }}",
            "a" * 5000,
            "\u202e\u0300" * 9,
            "NaN",
            "1e999",
            "/etc/passwd",
            "data:image/png;base64,AAAA",
            "data:,",
            "file:///",
            "http://[",
            "~nobody/x",
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**30), 1e308, -0.0, True, False, None]),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(ODD_TEXTS, NUMBERS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(ODD_TEXTS, inner, max_size=4)
    ),
    max_leaves=8,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "", "root", None, 3])
PARTS = st.one_of(
    VALUES,
    st.fixed_dictionaries({"type": st.just("text"), "text": VALUES}),
    st.fixed_dictionaries({"type": st.sampled_from(["image", "video", "audio", "image_url"])}),
    st.fixed_dictionaries({"type": st.sampled_from(["image", "video"]), "image": VALUES}),
)
MESSAGES = st.lists(
    st.one_of(
        VALUES,
        st.fixed_dictionaries(
            {"role": ROLES, "content": st.one_of(ODD_TEXTS, VALUES, st.lists(PARTS, max_size=3))}
        ),
        st.fixed_dictionaries({"from": st.one_of(ROLES, VALUES), "value": VALUES}),
    ),
    max_size=4,
)
COLUMNS = [
    "prompt",
    "messages",
    "conversations",
    "chosen",
    "rejected",
    "candidate0",
    "candidate1",
    "answer",
    "margin",
    "label",
    "labels",
    "preference",
    "tools",
    "chat_template_kwargs",
    "image",
    "images",
    "video",
    "image_0",
    "image_1",
    "images_chosen",
    "source",
    "reference",
    "instance_id",
]
GOOD = {
    "prompt": {"prompt": "say a", "answer": "a"},
    "pair": {"prompt": "say ", "chosen": "good", "rejected": "bad"},
}
ROWS = st.one_of(
    VALUES,
    st.just(GOOD["prompt"]),
    st.just(GOOD["pair"]),
    st.dictionaries(st.sampled_from(COLUMNS), st.one_of(VALUES, MESSAGES), max_size=5),
    st.fixed_dictionaries({"prompt": st.one_of(ODD_TEXTS, MESSAGES)}),
    st.fixed_dictionaries(
        {"chosen": st.one_of(ODD_TEXTS, MESSAGES), "rejected": st.one_of(ODD_TEXTS, MESSAGES)}
    ),
)
RAW_LINES = st.one_of(
    st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")),
    st.sampled_from(
        [
            b"",
            b"  ",
            b"\xff\xfe\x00",
            b"\xef\xbb\xbf{}",
            b'{"prompt": "cut',
            b'{"prompt": "a", "prompt": "b"}',
            b'{"prompt": NaN}',
            b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}",
            b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}",
            b"[" * 3000,
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "\xed\xa0\x80"}',
            b'{"prompt": "a"} {"prompt": "b"}',
            b"null",
        ]
    ),
)
LINES = st.one_of(ROWS.map(lambda row: json.dumps(row).encode()), RAW_LINES)


class Told(logging.Handler):
    """Adds up how many rows were said to be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"(\d+) of \d+ rows of the train data cannot be used", record.getMessage())
        self.left_out += int(found[1]) if found else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("lrlhf")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def load(data: Any, told: Told) -> tuple[int, int]:
    """Load and collate every row; returns how many were used, and how many were left out."""
    told.left_out = 0
    data.setup("fit")
    batches = list(data.train_dataloader())
    return len(batches), told.left_out


def rows_in(lines: list[bytes]) -> int:
    """Rows of a .jsonl file: its lines, without empty ones at its end."""
    count = len(lines)
    while count and not lines[count - 1].strip():
        count -= 1
    return count


PAIRS = {"head_names": ["preference"]}


@pytest.mark.parametrize(("kind", "extra"), [(PromptDataModule, {}), (PreferenceDataModule, PAIRS)])
@fuzzing(150)
@given(lines=st.lists(LINES, min_size=1, max_size=6), as_chat=st.booleans())
@example(
    lines=[b'{"prompt": [{"role": "system", "content": [{"type": "text", "text": []}]}]}'],
    as_chat=False,
)
def test_any_lines_are_rows_or_bad_rows(
    tokenizer: Any,
    folder: Path,
    told: Told,
    kind: Any,
    extra: dict[str, Any],
    lines: list[bytes],
    as_chat: bool,
) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    options = {"batch_size": 1, "max_bad_fraction": 1.0, "as_chat": as_chat, **extra}
    try:
        used, left_out = load(kind(str(path), tokenizer=tokenizer, **options), told)
    except ValueError as error:
        assert_told(error, path.name)
    else:
        assert used + left_out == rows_in(lines)


@fuzzing(60)
@given(rows=st.lists(ROWS, min_size=1, max_size=4), template=ODD_TEXTS)
def test_columns_in_templates_patterns_and_texts_of_a_second_stream(
    tokenizer: Any, folder: Path, told: Told, rows: list[Any], template: str
) -> None:
    path = folder / "templated.jsonl"
    path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows))
    try:
        data = PromptDataModule(
            str(path),
            tokenizer=tokenizer,
            batch_size=1,
            max_bad_fraction=1.0,
            prompt_template="{{ prompt }} {{ answer[0] }} " + template,
            column_patterns={"answer -> gold": "(.+)"},
            system_prompt=template,
            deduplicate=True,
        )
        used, _ = load(data, told)
    except ValueError as error:
        assert_told(error, path.name, "prompt_template")
    else:
        assert used >= 1


@fuzzing(100)
@given(
    content=st.binary(max_size=200),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz"]),
    packed=st.booleans(),
)
def test_any_bytes_are_rows_or_a_message_names_the_file(
    tokenizer: Any, folder: Path, told: Told, content: bytes, suffix: str, packed: bool
) -> None:
    path = folder / f"odd{suffix}"
    path.write_bytes(gzip.compress(content) if packed else content)
    options: Any = {"tokenizer": tokenizer, "batch_size": 1, "max_bad_fraction": 1.0}
    try:
        load(PromptDataModule(str(path), **options), told)
    except ValueError as error:
        assert_told(error, path.name)
