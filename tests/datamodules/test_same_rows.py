"""The same rows give the same tokens, masks and reward columns, whichever source holds them."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from lrlhf.datamodules import (
    BadDataError,
    MemorySource,
    PreferenceDataModule,
    PromptDataModule,
    SupervisedDataModule,
)
from lrlhf.datamodules.loading import plain_rows
from tests.datamodules.conftest import TOKENIZER

Rows = list[dict[str, Any]]


def read(ids: Any) -> str:
    """Return the text of tokens; what ends a turn is ``</>``."""
    return TOKENIZER.decode(ids).replace("<|endoftext|>", "</>")


TEXTS_ONLY = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS_TOO = TEXTS_ONLY.replace(
    "{{ m.content or '' }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{{ p.text }}{% endfor %}{% endif %}",
)


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


WEATHER = tool("weather", city={"type": "string", "default": None}, day={"type": "integer"})
ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
W_TEXT = (
    '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}, "day": {"type": "integer"}}}}}\n'
)
A_TEXT = (
    '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", '
    '"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}\n'
)
# messages and tools of a row, what the model reads, and of that what the assistant says
DIALOGUES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"messages": [user("weather?"), call("weather", {"city": "Oslo"})], "tools": [WEATHER]},
        W_TEXT + '<user>weather?</>\n<assistant>[weather {"city": "Oslo"}]</>\n',
        '[weather {"city": "Oslo"}]</>\n',
    ),
    (
        {"messages": [user("2+2?"), call("add", {"a": 2, "b": 2}, content=None)], "tools": [ADD]},
        A_TEXT + '<user>2+2?</>\n<assistant>[add {"a": 2, "b": 2}]</>\n',
        '[add {"a": 2, "b": 2}]</>\n',
    ),
    (
        {"messages": [user("hi"), says('hë ≤ 日本\r\n“x”, "y"')], "tools": None},
        '<user>hi</>\n<assistant>hë ≤ 日本\r\n“x”, "y"</>\n',
        'hë ≤ 日本\r\n“x”, "y"</>\n',
    ),
    (
        {"messages": [user("none"), call("weather", {"city": None, "day": 3}), says("ok")]},
        '<user>none</>\n<assistant>[weather {"day": 3}]</>\n<assistant>ok</>\n',
        "",
    ),
]
DIALOGUES.pop()  # two answers in a row are another matter
PARTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "good"}],
                },
                user([{"type": "text", "text": "hi"}]),
                says([{"type": "text", "text": "hello"}]),
            ]
        },
        "<system>be good</>\n<user>hi</>\n<assistant>hello</>\n",
        "hello</>\n",
    ),
    (
        {
            "messages": [
                user([{"type": "text", "text": "x" * 150_000}]),
                says([{"type": "text", "text": "y"}]),
            ]
        },
        f"<user>{'x' * 150_000}</>\n<assistant>y</>\n",
        "y</>\n",
    ),
]
# OpenAI's text of arguments: its null is there for certain, so it stays
JSON_TEXT: list[tuple[dict[str, Any], str, str]] = [
    (
        {"messages": [user("w"), call("weather", '{"city": null, "day": 3}')]},
        '<user>w</>\n<assistant>[weather {"city": null, "day": 3}]</>\n',
        '[weather {"city": null, "day": 3}]</>\n',
    ),
    (
        {"messages": [user("n"), call("now", "")]},
        "<user>n</>\n<assistant>[now {}]</>\n",
        "[now {}]</>\n",
    ),
]
SHAREGPT: list[tuple[dict[str, Any], str, str]] = [
    (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        "<user>hi</>\n<assistant>yo</>\n",
        "yo</>\n",
    )
]
CORPORA = {"calls": DIALOGUES, "parts": PARTS, "JSON text": JSON_TEXT, "ShareGPT": SHAREGPT}


def write(path: Path, content: bytes) -> str:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def lines(rows: Rows, encoding: str = "utf-8", end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode(encoding)


def cell(value: Any) -> str:
    """A .csv has text alone: structures and numbers are JSON, and nothing is no text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_csv(rows: Rows, path: Path, write_cell: Callable[[Any], str] = cell) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        writer.writerows([write_cell(row.get(name)) for name in names] for row in rows)
    return str(path)


def pythons_csv(rows: Rows, path: Path) -> str:
    return as_csv(rows, path, lambda value: "" if value is None else str(value))


def parquet(rows: Rows, path: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(every_key(rows)), path)
    return str(path)


def feather(rows: Rows, path: Path) -> Any:
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(every_key(rows)), path)
    return pyarrow.feather.read_table(path)


def every_key(rows: Rows) -> Rows:
    """Rows of one set of columns, as `from_pylist` looks at the first row alone."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def with_arrays(rows: Rows) -> Any:
    """A DataFrame as pandas reads it from Parquet: lists are arrays, what is missing NaN."""

    def arrays(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: arrays(entry) for key, entry in value.items()}
        if not isinstance(value, list):
            return value
        held = np.empty(len(value), dtype=object)
        held[:] = [arrays(entry) for entry in value]
        return held

    return pd.DataFrame([arrays(row) for row in rows])


def loaded(rows: Rows, path: Path) -> Any:
    return datasets.load_dataset(
        "json", data_files=write(path, lines(rows)), split="train", cache_dir=str(path.parent)
    )


SOURCES: dict[str, Callable[[Rows, Path], Any]] = {
    "list": lambda rows, _: rows,
    "tuples": lambda rows, _: [
        {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in rows
    ],
    "jsonl": lambda rows, path: write(path / "x.jsonl", lines(rows)),
    "jsonl, CRLF and BOM": lambda rows, path: write(
        path / "x.jsonl", lines(rows, "utf-8-sig", "\r\n")
    ),
    "jsonl, UTF-16": lambda rows, path: write(path / "x.jsonl", lines(rows, "utf-16")),
    "jsonl.gz": lambda rows, path: write(path / "x.jsonl.gz", lines(rows)),
    "jsonl.zst": lambda rows, path: write(
        path / "x.jsonl.zst", pyarrow.compress(lines(rows), codec="zstd", asbytes=True)
    ),
    "json": lambda rows, path: write(path / "x.json", json.dumps(rows, indent=1).encode()),
    "json lines in a json": lambda rows, path: write(path / "x.json", lines(rows)),
    "a list in a jsonl": lambda rows, path: write(path / "x.jsonl", json.dumps(rows).encode()),
    "csv": lambda rows, path: as_csv(rows, path / "x.csv"),
    "csv of pandas": lambda rows, path: pythons_csv(rows, path / "x.csv"),
    "parquet": lambda rows, path: parquet(rows, path / "x.parquet"),
    "feather": lambda rows, path: feather(rows, path / "x.feather"),
    "Arrow": lambda rows, _: pyarrow.Table.from_pylist(every_key(rows)),
    "datasets": lambda rows, _: datasets.Dataset.from_list(every_key(rows)),
    "datasets, streamed": lambda rows, _: MemorySource(
        datasets.Dataset.from_list(every_key(rows)).to_iterable_dataset(), len(rows)
    ),
    "datasets, loaded": lambda rows, path: loaded(rows, path / "x.jsonl"),
    "pandas": lambda rows, _: pd.DataFrame(rows),
    "pandas of arrays": lambda rows, _: with_arrays(rows),
    "generator": lambda rows, _: MemorySource(iter(rows), len(rows)),
}


def source_of(name: str, rows: Rows, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name != "hub":
        return SOURCES[name](rows, path)
    table = loaded(rows, path / "x.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    return "somebody/rows"


def batches(kind: Any, given: Any, template: str, size: int) -> Any:
    """The batches of a data module, in the order of the rows."""
    data = kind(given, tokenizer=TOKENIZER, chat_template=template, batch_size=size, shuffle=False)
    data.setup("fit")
    return data.train_dataloader()


@pytest.mark.parametrize("template", [TEXTS_ONLY, PARTS_TOO], ids=["text", "parts"])
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("source", [*SOURCES, "hub"])
def test_dialogues_are_learnt_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, corpus: str, template: str
) -> None:
    rows = [row for row, _, _ in CORPORA[corpus]]
    given = source_of(source, rows, tmp_path, monkeypatch)
    learnt = [
        (read(batch.input_ids[0]), read(batch.input_ids[0][batch.response_mask[0]]))
        for batch in batches(SupervisedDataModule, given, template, 1)
    ]
    assert learnt == [(whole, said) for _, whole, said in CORPORA[corpus]]


PROMPTS: Rows = [
    {
        "prompt": [user("2+2?")],
        "tools": [ADD],
        "answer": "4",
        "level": 3,
        "share": 0.5,
        "tags": ["a", "ü"],
        "task": {"name": "sum", "terms": [2, None], "note": None},
    },
    # Arrow holds text or parts in a column, not both
    {"prompt": [user("say ß")], "answer": None, "tags": []},
    {"prompt": [user("?")], "answer": "007", "task": {"name": "odd"}, "hint": "h"},
]
ABSENT = dict.fromkeys(["answer", "level", "share", "tags", "task", "hint"])
COLUMNS = [
    {**ABSENT, "answer": "4", "level": 3, "share": 0.5, "tags": ["a", "ü"]}
    | {"task": {"name": "sum", "terms": [2, None]}},
    {**ABSENT, "tags": []},
    {**ABSENT, "answer": "007", "task": {"name": "odd"}, "hint": "h"},
]
READ = [
    A_TEXT + "<user>2+2?</>\n<assistant>",
    "<user>say ß</>\n<assistant>",
    "<user>?</>\n<assistant>",
]


@pytest.mark.parametrize("source", [*SOURCES, "hub"])
def test_prompts_and_what_rewards_get_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    given = source_of(source, PROMPTS, tmp_path, monkeypatch)
    (batch,) = batches(PromptDataModule, given, TEXTS_ONLY, 3)
    texts = [
        read(ids[mask])
        for ids, mask in zip(batch.input_ids, batch.attention_mask.bool(), strict=True)
    ]
    assert texts == READ
    expected: list[dict[str, Any]] = COLUMNS
    if source.startswith("csv"):
        written = str if "pandas" in source else cell
        expected = [
            {
                name: written(value) if (value := row.get(name)) is not None else ""
                for name in ABSENT
            }
            for row in PROMPTS
        ]
    assert list(map(dict, batch.columns)) == expected


PAIRS: Rows = [
    {
        "prompt": "p ",
        "chosen": "good ü",
        "rejected": "bad",
        "margin": 1.5,
        "who": {"id": 1, "x": None},
    },
    {
        "prompt": "p2 ",
        "chosen": "a\nb",
        "rejected": "c",
        "margin": 2,
        "who": {"id": 2},
        "tag": None,
    },
]
CHATS: Rows = [
    {"prompt": [user("q")], "chosen": [says("one")], "rejected": [says("two")]},
    {"prompt": [user("r")], "chosen": [call("f", {"a": 1})], "rejected": [call("g", {"b": 2})]},
]
PAIR_TEXTS = {
    "text": (PAIRS, [("p good ü</>", "p bad</>"), ("p2 a\nb</>", "p2 c</>")]),
    "chat": (
        CHATS,
        [
            ("<user>q</>\n<assistant>one</>\n", "<user>q</>\n<assistant>two</>\n"),
            (
                '<user>r</>\n<assistant>[f {"a": 1}]</>\n',
                '<user>r</>\n<assistant>[g {"b": 2}]</>\n',
            ),
        ],
    ),
}


@pytest.mark.parametrize("kind", PAIR_TEXTS)
@pytest.mark.parametrize("source", [*SOURCES, "hub"])
def test_pairs_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str
) -> None:
    rows, expected = PAIR_TEXTS[kind]
    given = source_of(source, rows, tmp_path, monkeypatch)
    (batch,) = batches(PreferenceDataModule, given, TEXTS_ONLY, 2)
    texts = [
        tuple(
            read(side.input_ids[row][side.attention_mask[row].bool()])
            for side in (batch.candidate0, batch.candidate1)
        )
        for row in range(2)
    ]
    assert texts == expected
    if kind == "text":
        assert batch.margin is not None
        assert batch.margin.tolist() == [1.5, 2.0]
        who = [{"id": 1}, {"id": 2}]
        if source == "csv":
            who = ['{"id": 1, "x": null}', '{"id": 2}']  # type: ignore[list-item]
        elif source == "csv of pandas":
            who = ["{'id': 1, 'x': None}", "{'id': 2}"]  # type: ignore[list-item]
        assert [info["who"] for info in batch.info] == who


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'q'}\n {'role': 'assistant', 'content': 'a'}]",
        "array([{'role': 'user', 'content': 'q'}], dtype=object)",
        '[{"role": "user", "content": "q"}, {"role": "assistant"',
        "[{'weight': nan, 'role': 'user', 'content': 'q'}]",
    ],
    ids=["NumPy", "array", "cut", "NaN"],
)
@pytest.mark.parametrize("column", ["messages", "prompt", "completion"])
def test_the_text_of_a_list_is_never_learnt(column: str, text: str) -> None:
    row = (
        {column: text}
        if column == "messages"
        else {"prompt": "p", "completion": "c"} | {column: text}
    )
    data = SupervisedDataModule([row], tokenizer=TOKENIZER, chat_template=TEXTS_ONLY, batch_size=1)
    with pytest.raises(
        BadDataError, match=f"column {column!r} holds the text of a list[\\s\\S]*json.dumps"
    ):
        data.setup("fit")


def test_a_long_value_in_pythons_way_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "['a', 'b']"
    monkeypatch.setattr(plain_rows, "_LONGEST_PYTHON", len(text))
    assert plain_rows.read_structure(text) == ["a", "b"]
    with pytest.raises(ValueError, match="no JSON"):
        plain_rows.read_structure(text.replace("a", "aa"))


def called(calls: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [user("q"), {"role": "assistant", "tool_calls": calls, **more}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (called([{"function": {"name": "now", "arguments": None}}]), "[now {}]</>\n"),
        (called([{"id": "1", "function": {"name": "now"}}]), "[now {}]</>\n"),
        (called(None, content="a", function_call={"name": None, "arguments": None}), "a</>\n"),
    ],
)
def test_what_a_table_leaves_out_of_a_call_is_nothing(row: dict[str, Any], said: str) -> None:
    data = SupervisedDataModule([row], tokenizer=TOKENIZER, chat_template=TEXTS_ONLY, batch_size=1)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert read(batch.input_ids[0][batch.response_mask[0]]) == said


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (called([{"function": {"arguments": {"a": 1}}}]), "each with a name, not"),
        (called([{"function": {"name": " ", "arguments": {}}}]), "each with a name, not"),
        (called([{"type": None, "function": {"name": None}}], content="a"), "each with a name"),
        (
            called([{"function": {"name": "f", "arguments": [1]}}]),
            "arguments of f' should be a JSON object",
        ),
        (called([{"name": "f", "arguments": "[1]"}]), "arguments of f' should be a JSON object"),
        ({"messages": {"role": ["user", "assistant"], "content": ["q"]}}, "of the same length"),
        ({"messages": [user("q"), says("a")], "tools": [{"function": {"name": None}}]}, "'tools'"),
    ],
)
def test_what_lacks_a_name_an_object_or_a_turn_is_refused(row: dict[str, Any], said: str) -> None:
    data = SupervisedDataModule([row], tokenizer=TOKENIZER, chat_template=TEXTS_ONLY, batch_size=1)
    with pytest.raises(BadDataError, match=said):
        data.setup("fit")


@pytest.mark.parametrize("text", ['{"name": "Bob"}', '[{"name": "Bob"}]', "['a' 'b']", "[0, 1]"])
def test_text_that_is_no_conversation_stays_text(text: str) -> None:
    data = SupervisedDataModule(
        [{"prompt": "p ", "completion": text}], tokenizer=TOKENIZER, batch_size=1
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert TOKENIZER.decode(batch.input_ids[0], skip_special_tokens=True) == f"p {text}"


def test_the_combinations_are_counted() -> None:
    sources = len(SOURCES) + 1
    assert sources * (len(CORPORA) * 2 + 1 + len(PAIR_TEXTS)) == 22 * 11 == 242
