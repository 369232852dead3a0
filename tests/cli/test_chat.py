"""`lrlhf chat` and `lrlhf generate` with models, checkpoints and runs of a tiny policy."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lrlhf.__main__ import main
from lrlhf.cli import run
from lrlhf.cli.batch_generation import AnswerFile
from lrlhf.modules.policy.generate import TextGenerator
from tests.conftest import build_language_model

Capture = pytest.CaptureFixture[str]
Talk = Callable[..., tuple[str, str]]


def greedy(folder: str | Path, text: str, length: int) -> str:
    """What transformers itself says."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        said = model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return str(tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def assistant(text: str) -> str:
    return f"<|im_start|>assistant\n{text}<|im_end|>\n"


ASKED = "<|im_start|>assistant\n"


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Talk:
    """Chats with greedy answers; returns what went to standard output and error."""

    def talk(source: object, *lines: str, length: int = 6, flags: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = ["--temperature=0", f"--max_new_tokens={length}", "--device=cpu", *flags]
        assert run(["chat", str(source), *options]) == 0
        return tuple(capsys.readouterr())

    return talk


@pytest.fixture
def a_run(model_folder: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """A run's folder with two checkpoints of other weights than the model that it began with."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    options = {
        "policy": {"source": model_folder},
        "sampling": {"max_new_tokens": 5, "temperature": 0.5},
        "rewards": {"class_path": "nowhere.Reward"},
    }
    data = {"class_path": "PromptDataModule", "init_args": {"as_chat": True, "train": "gone"}}
    model = {"class_path": "lrlhf.modules.PPO", "init_args": options}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    for step, name in ((1, "step=000001"), (2, "last")):
        policy = build_language_model(tokenizer, seed=10 + step)
        state = {f"policy.{name}": value for name, value in policy.state_dict().items()}
        state["critic.weight"] = torch.zeros(2)
        content = {"state_dict": state, "optimizer_states": [], "global_step": step}
        torch.save(content, folder / "checkpoints" / f"{name}.ckpt")
        policy.save_pretrained(folder / f"model {step}")
        tokenizer.save_pretrained(folder / f"model {step}")
    return folder


# ---------------------------------------------------------------- chat


def test_turns_build_on_each_other_until_they_are_forgotten(talk: Talk, model_folder: str) -> None:
    first = greedy(model_folder, user("one") + ASKED, 6)
    before = user("one") + assistant(first)
    second = greedy(model_folder, before + user("two") + ASKED, 6)
    alone = greedy(model_folder, user("two") + ASKED, 6)
    assert len({first, second, alone}) == 3
    out, remarks = talk(model_folder, "one", "two", "/reset", "two")
    assert out == f"{printed(first)}\n{printed(second)}\n{printed(alone)}\n"
    assert "the conversation is forgotten" in remarks
    assert "its chat template" in remarks


def test_a_system_prompt_comes_first(talk: Talk, model_folder: str) -> None:
    start = "<|im_start|>system\nbe brief<|im_end|>\n"
    expected = greedy(model_folder, start + user("one") + ASKED, 6)
    asked, _ = talk(model_folder, "/system be brief", "one")
    given, _ = talk(model_folder, "one", flags=("--system", "be brief"))
    assert asked == given
    assert printed(expected) in asked


def test_without_a_template_the_text_goes_on(talk: Talk, model_folder: str) -> None:
    first = greedy(model_folder, "one", 6)
    second = greedy(model_folder, f"one{first}two", 6)
    out, remarks = talk(model_folder, "one", "two", flags=("--plain",))
    assert out == f"{printed(first)}\n{printed(second)}\n"
    assert "no chat template" in remarks


def printed(text: str) -> str:
    """A text as a terminal is shown it: nothing in it can move the cursor or change colours."""
    return "".join(
        one if one in "\n\t" or category(one) != "Cc" else one.encode("unicode_escape").decode()
        for one in text
    )


def test_the_oldest_turns_go_where_the_model_reads_no_more(talk: Talk, model_folder: str) -> None:
    long = "a" * 120
    out, remarks = talk(model_folder, long, long, "b", "c" * 400)
    assert remarks.count("the oldest turn is forgotten") >= 1
    assert "not said: it has" in remarks
    assert "the model reads 256" in remarks
    assert out


def test_settings_change_and_mistakes_are_answered(talk: Talk, model_folder: str) -> None:
    commands = ["/temperature 0.5", "/temperature x", "/temperature -1", "/tempreature 1", "/exit"]
    out, remarks = talk(model_folder, *commands, "never said")
    assert out == ""
    assert "temperature is 0.5" in remarks
    assert "could not convert" in remarks
    assert "temperature is -1.0; it must be 0 or more" in remarks
    assert "no command /tempreature; did you mean 'temperature'?" in remarks


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    talk: Talk, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lrlhf.apps.serve import conversation  # noqa: PLC0415

    put, shown = conversation._Printer.put, []

    def interrupted(self: Any, value: Any) -> None:
        put(self, value)
        shown.append(value)
        if len(shown) == 3:  # the prompt and two tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(conversation._Printer, "put", interrupted)
    two = greedy(model_folder, user("one") + ASKED, 2)
    after = greedy(model_folder, user("one") + assistant(two) + user("two") + ASKED, 6)
    out, remarks = talk(model_folder, "one", "two")
    assert out == f"{printed(two)}\n{printed(after)}\n"
    assert "[stopped]" in remarks


@pytest.mark.parametrize(
    ("place", "step"), [("", 2), ("checkpoints", 2), ("checkpoints/step=000001.ckpt", 1)]
)
def test_a_run_answers_with_the_weights_of_its_checkpoint(
    talk: Talk, a_run: Path, place: str, step: int
) -> None:
    expected = greedy(a_run / f"model {step}", user("one") + ASKED, 6)
    out, remarks = talk(a_run / place, "one")
    assert out == f"{printed(expected)}\n"
    assert ".ckpt" in remarks


def test_a_run_without_checkpoints_answers_with_its_export(talk: Talk, a_run: Path) -> None:
    shutil.rmtree(a_run / "checkpoints")
    shutil.copytree(a_run / "model 1", a_run / "export" / "final")
    expected = greedy(a_run / "model 1", user("one") + ASKED, 6)
    assert talk(a_run, "one")[0] == f"{printed(expected)}\n"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_help_is_short(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "CHECKPOINT" in told
    assert len(told.splitlines()) < 64


# ---------------------------------------------------------------- generate


def written(path: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def answer(source: object, *flags: str, prompts: str = "in.jsonl") -> int:
    return run(["generate", str(source), prompts, "--output", "out.jsonl", "--device=cpu", *flags])


@pytest.fixture
def prompts() -> list[str]:
    """Texts of different lengths, in ``in.jsonl``."""
    texts = ["one", "two words", "x" * 30, "four", "five"]
    rows = [{"prompt": text, "answer": number} for number, text in enumerate(texts)]
    Path("in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return texts


def test_every_row_is_answered_in_order(
    model_folder: str, prompts: list[str], capsys: Capture
) -> None:
    flags = ("--temperature=0", "--max_new_tokens=6", "--batch_size=2")
    assert answer(model_folder, *flags) == 0
    lines = written()
    assert [line["completion"] for line in lines] == [greedy(model_folder, p, 6) for p in prompts]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["columns"] for line in lines] == [{"answer": number} for number in range(5)]
    cut = sum(line["finish_reason"] == "length" for line in lines)
    said = capsys.readouterr().out
    assert said.startswith("wrote 5 lines to out.jsonl")
    assert (f"{cut} cut off at 6 tokens" in said) == bool(cut)
    assert {path.name for path in Path().iterdir()} == {"in.jsonl", "out.jsonl"}


def test_plain_texts_for_a_model_that_chats_are_noted_unless_they_were_chosen(
    model_folder: str, a_run: Path, capsys: Capture
) -> None:
    def remarks(source: object, prompt: object, *flags: str) -> str:
        Path("in.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        Path("out.jsonl").unlink(missing_ok=True)
        short = "--max_new_tokens=2"
        assert answer(source, short, *flags) == 0
        said = capsys.readouterr()
        assert said.out.startswith("wrote 1 line to out.jsonl")
        return said.err

    assert "--as_chat makes each the user's turn" in remarks(model_folder, "one")
    for flag in ("--as_chat", "--no-as_chat"):
        assert "--as_chat" not in remarks(model_folder, "one", flag)
    assert "--as_chat" not in remarks(model_folder, [{"role": "user", "content": "one"}])
    assert "--as_chat" not in remarks(a_run, "one")


def test_a_run_reads_and_samples_as_it_was_trained(a_run: Path, prompts: list[str]) -> None:
    del prompts
    Path("in.txt").write_text("one\n\ntwo\n")
    assert answer(a_run, "--temperature=0", prompts="in.txt") == 0
    expected = greedy(a_run / "model 2", user("one") + ASKED, 5)
    first, second = written()
    assert (first["row"], first["completion"]) == (1, expected)
    assert first["length"] <= 5
    assert second["row"] == 3


def test_a_run_from_python_answers_with_its_export_and_says_so(
    a_run: Path, prompts: list[str], capsys: Capture
) -> None:
    (a_run / "config.yaml").unlink()
    (a_run / "export").mkdir()
    (a_run / "model 1").rename(a_run / "export" / "final")
    assert answer(a_run, "--temperature=0", "--max_new_tokens=6") == 0
    export = a_run / "export" / "final"
    assert [line["completion"] for line in written()] == [greedy(export, p, 6) for p in prompts]
    assert f"no config.yaml, as of a run from Python: takes {export}" in capsys.readouterr().err


@pytest.mark.parametrize("half", [b"", b'{"row": 3, "samp'])
def test_a_broken_run_goes_on_and_ends_as_one_that_was_not(
    model_folder: str,
    prompts: list[str],
    half: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    flags = ("--n=2", "--max_new_tokens=6", "--batch_size=2", "--seed=4")
    assert answer(model_folder, *flags) == 0
    whole = Path("out.jsonl").read_bytes()
    Path("out.jsonl").unlink()

    respond, calls = TextGenerator.answer, []

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return respond(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TextGenerator, "answer", interrupted)
        assert answer(model_folder, *flags) == 130
    assert not Path("out.jsonl").exists()
    assert len(written("out.jsonl.partial")) == 4
    with Path("out.jsonl.partial").open("ab") as stream:
        stream.write(half)

    capsys.readouterr()
    assert answer(model_folder, "--n=2", "--max_new_tokens=7", "--batch_size=2", "--seed=4") == 2
    assert "was begun with another sampling; remove it" in capsys.readouterr().err
    # with another n the lines are other rows
    assert answer(model_folder, "--n=8", *flags[1:]) == 2
    assert "was begun with another n; remove it" in capsys.readouterr().err
    assert answer(model_folder, *flags) == 0
    assert Path("out.jsonl").read_bytes() == whole
    assert len({line["completion"] for line in written()}) > len(prompts)


def test_two_processes_do_not_write_one_file() -> None:
    from lrlhf.cli import ConfigError  # noqa: PLC0415

    with AnswerFile(Path("out.jsonl"), 1), pytest.raises(ConfigError, match="another process"):
        AnswerFile(Path("out.jsonl"), 1).__enter__()


def test_a_prompt_that_leaves_no_room_has_a_line_without_a_completion(
    model_folder: str, capsys: Capture
) -> None:
    Path("in.txt").write_text(f"one\n{'a' * 250}\n")
    assert answer(model_folder, "--max_new_tokens=10", prompts="in.txt") == 0
    first, second = written()
    assert first["completion"] is not None
    assert (second["completion"], second["finish_reason"]) == (None, "prompt_too_long")
    assert "1 without a completion" in capsys.readouterr().out


# ---------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99"])
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_device_that_is_not_there_is_refused_before_weights_are_loaded(
    capsys: Capture, device: str, command: str
) -> None:
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    given = ["in.jsonl", "--output=out.jsonl"] if command == "generate" else []
    assert run([command, "no/model", *given, f"--device={device}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: device: there is no '{device}' on this machine; give auto")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["in.txt", "in.jsonl", "in.csv"])
def test_prompts_in_another_encoding_are_refused(
    model_folder: str, capsys: Capture, name: str
) -> None:
    Path(name).write_bytes('prompt\n{"prompt": "caf\xe9"}\n'.encode("latin-1"))
    assert answer(model_folder, prompts=name) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {name}")
    assert error.count("\n") == 1


def _damage(folder: Path) -> None:
    path = folder / "run" / "checkpoints" / "last.ckpt"
    path.write_bytes(path.read_bytes()[:2000])


def _reward_run(folder: Path) -> None:
    path = folder / "run" / "config.yaml"
    path.write_text("model: {class_path: lrlhf.modules.RewardModel, init_args: {model: tiny}}\n")


def _no_config(folder: Path) -> None:
    (folder / "run" / "config.yaml").unlink()


def _reward_folder(folder: Path) -> None:
    (folder / "run" / "model 1" / "reward_head.json").write_text("{}")


def _no_tokenizer(folder: Path) -> None:
    for path in (folder / "run" / "model 1").glob("*token*"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "source", "message"),
    [
        (None, "nowhere/at/all", "source 'nowhere/at/all': no such file or folder"),
        (None, "run/last.ckpt", "no checkpoint run/last.ckpt"),
        (None, "empty", "empty has neither a checkpoint (looked in empty) nor a config.json"),
        (_damage, "run/checkpoints/last.ckpt", "last.ckpt is damaged"),
        (_reward_run, "run", "is a reward model, which scores texts and writes none"),
        (_no_config, "run", "no config.yaml beside it"),
        (_reward_folder, "run/model 1", "`lrlhf serve-reward --model.source run/model 1`"),
        (_no_tokenizer, "run/model 1", "tokenizer"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_what_generates_nothing_is_refused_in_one_line(
    a_run: Path,
    capsys: Capture,
    change: Callable[[Path], None] | None,
    source: str,
    message: str,
    command: str,
) -> None:
    Path("empty").mkdir()
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    if change is not None:
        change(a_run.parent)
    given = ["in.jsonl", "--output=out.jsonl"] if command == "generate" else []
    assert run([command, source, *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("error: ")
    assert not list(Path().glob("out.jsonl*"))


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('{"question": "a"}\n', (), "in.jsonl:1: no column 'prompt'"),
        ('{"prompt": "a"}\n', ("--prompt_column=promt",), "in.jsonl:1: no column 'promt'; did you"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', (), "in.jsonl:2: column 'prompt' is empty"),
        ('{"prompt": "a"\n', (), "in.jsonl:1: "),
        ("", (), "in.jsonl: it has no rows"),
        ('{"prompt": "a"}\n', ("--temperature=-1",), "temperature is -1.0; it must be 0 or more"),
        ('{"prompt": "a"}\n', ("--n=0",), "n is 0; it must be 1 or more"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(
    model_folder: str, capsys: Capture, content: str, flags: tuple[str, ...], message: str
) -> None:
    Path("in.jsonl").write_text(content)
    assert answer(model_folder, *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not Path("out.jsonl").exists()


def test_a_file_that_is_there_is_not_replaced(
    model_folder: str, prompts: list[str], capsys: Capture
) -> None:
    del prompts
    Path("out.jsonl").write_text("mine")
    assert answer(model_folder) == 2
    assert "out.jsonl exists; choose another name" in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == "mine"
