"""The part of the command line that must answer at once."""

import gzip
import os
import re
import resource
import shlex
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from lrlhf.__main__ import COMMANDS, main
from lrlhf.cli.help_texts import help_text

ROOT = Path(__file__).parents[2]


HEAVY = {"torch", "lightning", "transformers", "jsonargparse", "numpy", "torchmetrics.metric"}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["fit", "--help"], 0),
        (["help", "convert"], 0),
        (["fit", "--config", "nowhere.yaml"], 2),
        (["plan", "--config", "twice.yaml"], 2),
    ],
)
def test_a_command_is_explained_and_a_config_refused_without_torch(
    tmp_path: Path, arguments: list[str], status: int
) -> None:
    (tmp_path / "twice.yaml").write_text("model: {}\nmodel: {}\n")
    command = [sys.executable, "-X", "importtime", "-m", "lrlhf", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert result.returncode == status
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "lrlhf" in imported
    assert not imported & HEAVY
    assert ("error: " in result.stderr) == (status == 2)


@pytest.mark.slow  # loads torch
def test_what_takes_seconds_is_announced_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text("model: RLOO\n")
    (tmp_path / "more.yaml").write_text("trainer: {max_steps: many}\n")
    command = [sys.executable, "-m", "lrlhf", "fit", "--config", "sums.yaml", "--config=more.yaml"]

    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    silent = {**os.environ, "LOCAL_RANK": "1"}
    second = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=silent
    )

    first, answer = result.stderr.splitlines()
    assert first == f"lrlhf {version('lrlhf')}: read sums.yaml, more.yaml; loading torch ..."
    assert answer.startswith("error: more.yaml:1: trainer.max_steps: ")
    assert second.stderr.splitlines() == [answer]
    assert result.stdout == second.stdout == ""


@pytest.mark.parametrize("argument", ["--help", "fti"])
def test_what_needs_no_torch_imports_little_and_is_fast(argument: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "lrlhf", argument]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # 0.1 s, of the processor's time: others take none of it; torch alone would break the bound
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5

    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "lrlhf" in imported
    assert not imported & {*HEAVY, "yaml"}


def test_help_names_every_command_and_there_is_a_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lrlhf.cli.application import Application  # noqa: PLC0415  seconds, for this test only

    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in Application.subcommands():
        assert f"\n  {command} " in shown
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: lrlhf COMMAND")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lrlhf {version('lrlhf')}\n"


@pytest.mark.parametrize("command", sorted(filter(help_text, COMMANDS)))
def test_the_short_help_speaks_of_options_that_the_command_has(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert short.startswith(f"usage: lrlhf {command} ")
    assert len(short.splitlines()) < 45

    assert main([command, "--help.all"]) == 0
    every = capsys.readouterr().out
    named = set(re.findall(r"--[a-z_.-]+[a-z]", short.partition("\nmore:")[0]))
    known = {"--debug", "--model", "--data"}  # of every command; --model.KEY
    known |= {option for option in named if option.startswith(("--model.", "--data."))}
    assert {option for option in named - known if option not in every} == set()


# of models with code of their own that other tests have loaded
@pytest.mark.filterwarnings("ignore:(?s).*transformers_modules")
def test_what_the_help_says_next_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(["fit", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    commands = [re.split(r"  +", line)[0] for line in lines if line.startswith("lrlhf ")]
    assert len(commands) > 5
    for line in commands:
        arguments = shlex.split(line)[1:]
        if "--config" in arguments:
            arguments.append("--print_config")
        assert main(arguments) == 0, line
        assert capsys.readouterr().out.startswith(
            ("usage: ", "# lightning", "seed_everything", "lrlhf.rewards.")
        )


def test_a_class_is_explained_by_its_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "LearnedReward"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lrlhf.rewards.LearnedReward\n\nThe score of a trained reward model")
    assert "\n    chat_template: Jinja text for prompts that are chats" in out
    assert "\n    source: str  (required)\n" in out
    assert "\n    batch_size: int = 8\n" in out

    assert main(["help", "RemoteReward"]) == 0
    out = capsys.readouterr().out
    assert "\n    retries: int = 4\n" in out  # passed on to its base
    assert "\n    service: " not in out.partition("Options and their defaults:")[2]

    # names of packages are imported when they are first used: a process of its own has none yet
    command = [sys.executable, "-m", "lrlhf", "help", "RLOO"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["lrlhf.modules.RLOO"])

    assert main(["help", "lrlhf.rollout.Sampling"]) == 0  # a dataclass
    assert "\n    temperature: float = 1.0\n" in capsys.readouterr().out


def test_a_misspelt_class_is_answered_with_the_nearest_and_one_for_another_option_with_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "LernedReward"]) == 2
    assert "no class 'LernedReward' in lrlhf; did you mean 'LearnedReward'?" in (
        capsys.readouterr().err
    )
    assert main(["help", "fti"]) == 2
    assert "no command 'fti'" in capsys.readouterr().err
    assert main(["fit", "--model.help", "LearnedReward"]) == 2
    assert "`lrlhf help LearnedReward` explains" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fti", "error: no command 'fti'; did you mean 'fit'?\n"),
        (
            "--config",
            "error: no command '--config'; the command comes first: "
            "lrlhf {fit,init,configs,launch,check,audit,plan,validate,test,predict,generate,chat,"
            "compare,inspect,diagnose,reward,verify,export,replay,convert,"
            "serve-reward} --config ...\n",
        ),
    ],
)
def test_a_misspelt_command_is_answered(
    capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("variable", "flags", "shown"), [("1", [], True), ("0", ["--debug"], True), ("0", [], False)]
)
def test_debug_comes_from_the_flag_or_the_environment(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    flags: list[str],
    shown: bool,
) -> None:
    monkeypatch.setenv("LRLHF_DEBUG", variable)

    assert main(["fit", "--config", "nowhere.yaml", *flags]) == 2
    error = capsys.readouterr().err
    assert ("Traceback" in error) == shown
    assert error.endswith("error: nowhere.yaml: no such file\n")


_ENDS = """\
import atexit, gzip, tempfile, threading, time, zipfile
from pathlib import Path
from lrlhf.__main__ import end_process

class Slow:
    def __del__(self):
        Path("freed").touch()

slow = Slow()
text = open("text", "w")
text.write("all of it")
packed = gzip.open("packed", "wt")
packed.write("all of it")
archive = zipfile.ZipFile("archive", "w")
archive.writestr("member", "all of it")
passing = tempfile.NamedTemporaryFile(prefix="passing", dir=".")
threading.Thread(target=lambda: (time.sleep(0.2), Path("thread").touch())).start()
atexit.register(lambda: print("at exit", flush=False))
end_process(3)
"""


def test_a_process_ends_with_all_written_and_nothing_taken_apart(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "at exit\n", "")
    assert (tmp_path / "text").read_text() == "all of it"
    with gzip.open(tmp_path / "packed", "rt") as file:
        assert file.read() == "all of it"  # with its check sum
    with zipfile.ZipFile(tmp_path / "archive") as archive:
        assert archive.read("member") == b"all of it"
    assert not [*tmp_path.glob("passing*")]
    assert (tmp_path / "thread").exists()
    assert not (tmp_path / "freed").exists()
