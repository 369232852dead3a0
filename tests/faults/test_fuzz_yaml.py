"""Whatever a config file is: it works, or one line says what is wrong, with status 1 or 2."""

import contextlib
import copy
import io
import json
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lrlhf.cli import run
from tests.cli.experiment import experiment
from tests.faults.fuzz_settings import fuzzing

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("quickstart.yaml", "ppo_text.yaml", "reward_text.yaml", "rloo_vl.yaml")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder to work in; log and signal handlers are put back."""
    path = tmp_path_factory.mktemp("yaml")
    before = Path.cwd()
    logger = logging.getLogger("lrlhf")
    handlers, level = logger.handlers, logger.level
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    os.chdir(path)
    yield path
    os.chdir(before)
    logger.handlers, logger.level = handlers, level
    for number, handler in kept.items():
        signal.signal(number, handler)


def ended(*arguments: str) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(list(arguments))
    return Ended(status, out.getvalue(), err.getvalue())


def check(result: Ended) -> None:
    if result.status != 0:
        assert result.status in (1, 2), result
        assert "\nerror: " in f"\n{result.err}", result
    assert "Traceback" not in result.err, result.err


# ---- mutations of what a config holds

ODD: list[Any] = [
    None, "", "null", "text", "tëxt\u202e\U0001f600", -1, 0, 0.5, True, float("nan"), float("inf"),
    [], {}, [[]], ["a", None], [1, "2", {"a": 1}], {"a": {"b": [None]}},
    {"class_path": "no.such.Class"},
    {"class_path": "lrlhf.rewards.Rewards"},
    {"class_path": "torch.nn.Linear", "init_args": {"in_features": "x"}},
    {"class_path": 3},
    {"class_path": None, "init_args": None},
    {"class_path": "RLOO", "init_args": []},
    {"class_path": "os.system", "init_args": {"command": "false"}},
    "lrlhf.modules.RLOO", "os:path", "%(a)s {b} ${c}", "/nowhere/at/all", "a\x07b",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path of keys and indices that leads to something."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [p for key, child in children for p in [(*path, key), *places(child, (*path, key))]]


def mutate(config: Any, path: Sequence[Any], how: str, new: Any) -> None:
    *parents, last = path
    holder = config
    for key in parents:
        holder = holder[key]
    if how == "drop":
        del holder[last]
    elif how == "wrap":
        holder[last] = [holder[last]]
    elif how == "rename" and isinstance(holder, dict):
        holder[new if isinstance(new, str | int | float | None) else "x"] = holder.pop(last)
    elif how == "add" and isinstance(holder, dict):
        holder["extra" if not isinstance(new, str) else new] = new
    else:
        holder[last] = new


@st.composite
def mutations(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    for _ in range(draw(st.integers(1, 2))):
        everywhere = places(changed)
        if everywhere:
            how = draw(st.sampled_from(["set", "set", "set", "drop", "wrap", "rename", "add"]))
            place, new = draw(st.sampled_from(everywhere)), draw(st.sampled_from(ODD))
            mutate(changed, place, how, copy.deepcopy(new))
    return changed


SHIPPED = {name: yaml.safe_load((CONFIGS / name).read_text()) for name in NAMES}


@fuzzing(25)
@given(config=st.sampled_from(NAMES).flatmap(lambda name: mutations(SHIPPED[name])))
def test_shipped_configs_with_anything_in_any_place(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    check(ended("fit", "--config", "config.yaml", "--print_config"))


def tiny(model_folder: str) -> dict[str, Any]:
    """A run of one iteration, with something of everything in it."""
    options = {
        "policy": {"source": model_folder, "dtype": "float32"},
        "reference": {"kl_coef": 0.1},
        "update": {"loss": "sequence_clip", "minibatch_size": 4},
        "optimizer": {"lr": 0.001, "betas": [0.9, 0.99]},
    }
    data = {
        "train": [{"source": "prompts.jsonl", "weight": 1.0}],
        "batch_size": 2,
        "val_size": 1,
        "column_patterns": {"answer": "(.+)"},
    }
    callbacks = [
        {"class_path": f"lrlhf.callbacks.{name}", "init_args": {"dirpath": "out"}}
        for name in ("RolloutLog", "RLCheckpoint")
    ]
    return experiment("RLOO", options, data, reward="exact_match", callbacks=callbacks)


# whatever became of the config: one iteration, on one process, into this folder
BOUNDS = (
    "--trainer.max_steps=1", "--trainer.devices=1", "--trainer.num_nodes=1",
    "--trainer.default_root_dir=out", "--trainer.logger=false",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.exhaustive
@fuzzing(25)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:.*")
def test_a_tiny_run_with_anything_in_any_place(
    folder: Path, model_folder: str, data: st.DataObject
) -> None:
    config = data.draw(mutations(tiny(model_folder)))
    rows = [{"prompt": f"say {word}", "answer": word} for word in "abcde"]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    check(ended("fit", "--config", "config.yaml", *BOUNDS))


# ---- mutations of the text

SNIPPETS = [
    b"\t", b"\x00", b"\xff\xfe", b"\r", b"\x1b[31m", b"{", b"[", b": ", b"- ", b"'", b"&a ", b"*a ",
    b"*nowhere", b"!!binary x", b"!!int x", b"? ", b"| ", b"<<: *a", b"<<: 3", b"---\n", b"...\n",
    b"!!python/object/apply:os.system ['false']",
    b"%YAML 9.9\n---\n",
    b"model: &a {b: *a}\n",
    b"a: " + b"[" * 200 + b"]" * 200 + b"\n",
    b"a: " + b"{b: " * 3000 + b"1" + b"}" * 3000 + b"\n",
    b"a: " + b"9" * 5000 + b"\n",
    b"a: 2026-99-99\n", b"a: 1:2:3\n", b"\xe2\x80\xa8", b"[1, 2]: 3\n", b"? {a: 1}\n: 2\n",
    b"null: 2\n", b'"\\ud800": "\\udfff"\n',
]  # fmt: skip


@st.composite
def spoiled_texts(draw: st.DrawFn) -> bytes:
    lines = (CONFIGS / draw(st.sampled_from(NAMES))).read_bytes().splitlines(keepends=True)
    lines = [line for line in lines if not line.startswith(b"#")]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        line = lines[place]
        column = draw(st.integers(0, len(line)))
        odd = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=4))
        lines[place] = draw(
            st.sampled_from(
                [
                    line[:column] + odd + line[column:],
                    odd + b"\n" + line,
                    line + line,
                    b"",
                    b" " * draw(st.integers(1, 5)) + line,
                    line[:column],
                ]
            )
        )
    return b"".join(lines)


@fuzzing(40)
@given(text=spoiled_texts())
def test_shipped_configs_with_spoiled_text(folder: Path, text: bytes) -> None:
    (folder / "spoiled.yaml").write_bytes(text)
    check(ended("fit", "--config", "spoiled.yaml", "--print_config"))


@fuzzing(40)
@given(text=st.one_of(st.binary(max_size=60), st.sampled_from(SNIPPETS)))
def test_any_bytes_for_a_config(folder: Path, text: bytes) -> None:
    (folder / "bytes.yaml").write_bytes(text)
    result = ended("fit", "--config", "bytes.yaml")
    check(result)
    assert result.status == 2
