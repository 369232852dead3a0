"""Nothing that a run reads can run code: no pickles, no scripts of data sets or models.

Nor does it take the machine: what a kilobyte of YAML stands for is counted first.
"""

import inspect
import io
import json
import logging
import os
import pkgutil
import re
import shutil
import sys
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from transformers import AutoModelForCausalLM

import lrlhf
from lrlhf.cli import run
from lrlhf.foreign_files import foreign_code, read_yaml
from lrlhf.models.loading.model_sources import locate, warn_of_remote_code
from lrlhf.modules import RLOO

ROOT = Path(lrlhf.__file__).parent
# in code without comments, strings and line breaks
DANGEROUS = re.compile(
    r"\b(?:cPickle|dill|cloudpickle|joblib|marshal|shelve)\b"
    r"|\bfrom (?:pickle|yaml) import\b"  # hides its calls
    r"|\bpickle\.(?:loads?|Unpickler)\b"
    r"|\byaml\.(?:load|load_all|full_load|unsafe_load)\("
    r"|\bos\.(?:system|popen)\(|(?<![\w.])(?:eval|exec)\("
    # handed on by who loads: see the test of checkpoints
    r"|\btorch\.load\((?![^()]*(?:\([^()]*\)[^()]*)*weights_only=(?:True|weights_only)\b)"
    r"|\b(?:np|numpy)\.load\((?![^()]*allow_pickle=False)"
    r"|\bshell=True|\btrust_remote_code=True"
    r"|\bload_dataset\([^()]*trust_remote_code"  # scripts of data sets
    r"|\bextractall\((?![^()]*filter=\S*data)"
)
# module and what it does: why that is harmless
ALLOWED = {
    ("checkpoint_reader", "pickle.Unpickler"): (
        "reads PyTorch's list of tensors; its find_class knows some names, none of which runs code"
    ),
    ("collectives", "pickle.loads"): (
        "reads back what it has just written: whether an error can be sent to the other ranks"
    ),
    ("rewards", "pickle.loads"): (
        "reads what the process that launched the run sends to a reward worker through Ray"
    ),
    ("isolated_child", "pickle.load"): (
        "reads what the process that started it sends through a pipe; what comes back is JSON"
    ),
    ("isolated_child", "pickle.loads"): "reads a function that was sent in the same way",
}


def code(source: str) -> str:
    """Return a module in one line, without comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = [
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT and not token.string.startswith(('"""', 'r"""'))
    ]
    spaced = re.sub(r"\s+", " ", " ".join(said))
    return re.sub(r" ?([.()=\[\],]) ?", r"\1", spaced)


def test_no_module_reads_foreign_data_as_code() -> None:
    modules = sorted(ROOT.rglob("*.py"))
    assert len(modules) > 100
    found = {
        (path.stem, match[0])
        for path in modules
        for match in DANGEROUS.finditer(code(path.read_text()))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "dangerous"),
    [
        ("torch.load(\n    path, map_location=where(),\n)", True),
        ("torch.load(\n    path, map_location=where(),\n    weights_only=True,\n)", False),
        ("import pickle\npickle.loads(data)", True),
        ("pickle.dumps(data)", False),
        ("subprocess.run(command, shell = True)", True),
        ("# eval(x)\nmodel.eval()", False),
        ("np.load(path)", True),
        ("yaml.load(text, Loader=Safe)", True),
    ],
)
def test_what_is_dangerous_is_told_from_what_is_not(source: str, dangerous: bool) -> None:
    assert bool(DANGEROUS.search(code(source))) == dangerous


def callables() -> Iterator[tuple[str, inspect.Signature]]:
    for found in pkgutil.walk_packages(lrlhf.__path__, "lrlhf."):
        # built on vLLM, which need not be there
        beside_vllm = found.name.startswith(("lrlhf.vllm_worker", "lrlhf.rollout.vllm.transfer"))
        if beside_vllm or found.name.endswith("__main__"):
            continue
        for name, member in vars(import_module(found.name)).items():
            inner = inspect.getmembers(member, inspect.isroutine) if inspect.isclass(member) else []
            for label, one in [(name, member), *((f"{name}.{part}", one) for part, one in inner)]:
                own = getattr(one, "__module__", "") == found.name
                if own and inspect.isroutine(one):
                    yield f"{found.name}.{label}", inspect.signature(one)


def test_code_of_models_is_off_unless_asked_for() -> None:
    found = {
        name: signature.parameters["trust_remote_code"].default
        for name, signature in callables()
        if "trust_remote_code" in signature.parameters
    }
    assert len(found) >= 5
    assert {name: default for name, default in found.items() if default is not False} == {}


def test_code_of_models_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_remote_code.cache_clear()
    with caplog.at_level(logging.WARNING, "lrlhf"):
        for _ in range(2):
            warn_of_remote_code("someone/model")
    (said,) = caplog.messages
    assert "trust_remote_code is on" in said
    assert "someone/model" in said


# ---------------------------------------------------------------- what came with a model

MARK = "from pathlib import Path\nPath({!r}).touch()\n"
"""A module that leaves a file where it is run."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that is there once foreign code has run, which the working folder holds."""
    mark = Path("ran").absolute()
    names = ("evil.py", "évil.py", "evil_package/__init__.py", "evil_package/inner/__init__.py")
    for path in names:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(MARK.format(str(mark)) + "def reward(completions): return 0\n")
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.cwd())])
    yield mark
    for name in [name for name in sys.modules if name.startswith(("evil", "évil"))]:
        del sys.modules[name]


def model_with_code(folder: str, mark: Path) -> Path:
    """A model whose config, tokenizer and generation come with modules of its own."""
    copy = Path("coded")
    shutil.copytree(folder, copy)
    (copy / "coded.py").write_text(
        MARK.format(str(mark)) + "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'coded'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    config = json.loads((copy / "config.json").read_text())
    names = {"AutoConfig": "coded.Config", "AutoModelForCausalLM": "coded.Model"}
    (copy / "config.json").write_text(
        json.dumps(config | {"model_type": "coded", "auto_map": names})
    )
    (copy / "custom_generate").mkdir()
    (copy / "custom_generate" / "generate.py").write_text(
        MARK.format(str(mark)) + "def generate(model, **_): pass\n"
    )
    return copy


def run_with_config(model_folder: str, policy: Any, **options: Any) -> Path:
    """A run's folder: a checkpoint, and above it a config that came with it."""
    checkpoints = Path("run/checkpoints")
    checkpoints.mkdir(parents=True)
    state = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    state = {f"policy.{name}": weight for name, weight in state.items()}
    content = {"state_dict": state, "optimizer_states": [], "global_step": 1}
    torch.save(content, checkpoints / "last.ckpt")
    model = {"class_path": "RLOO", "init_args": {"policy": policy, **options}}
    Path("run/config.yaml").write_text(yaml.safe_dump({"model": model}))
    return Path("run")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("attack", "named"),
    [
        ("flag", "policy.trust_remote_code would run Python code that comes with coded"),
        ("text", "policy.trust_remote_code would run Python code that comes with coded"),
        ("class", "policy.class_path would import evil.Policy"),
        ("sampling", "sampling.class_path would import evil.Sampling"),
        ("inside", "policy.init_args.lora.class_path would import evil.LoRA"),
        ("through", "policy.class_path would import lrlhf.foreign_files.sys.exit"),
        ("quoted", "policy.trust_remote_code would run Python code that comes with coded"),
        ("quoted class", "sampling.class_path would import evil.Sampling"),
        ("dotted", "policy.init_args.trust_remote_code would run Python code that comes with"),
        ("letters", "policy.class_path would import évil.Policy"),
        ("file", "sampling would import evil.py:re-ward"),
        ("package", "source 'package:evil_package.inner' holds neither"),
        ("model", "comes with Python code of its own"),
    ],
)
def test_a_run_folder_runs_no_code(
    model_folder: str, ran: Path, capsys: pytest.CaptureFixture[str], command: str,
    attack: str, named: str,
) -> None:  # fmt: skip
    coded = model_with_code(model_folder, ran)
    trusting = {"source": str(coded), "trust_remote_code": "yes" if attack == "text" else True}
    policies = {
        "class": {"class_path": "evil.Policy", "init_args": {"source": model_folder}},
        "inside": {
            "class_path": "CausalLM",
            "init_args": {"source": model_folder, "lora": {"class_path": "evil.LoRA"}},
        },
        "through": {"class_path": "lrlhf.foreign_files.sys.exit", "init_args": {"status": 0}},
        "package": "package:evil_package.inner",
        # YAML inside of a text is read where an object is wanted
        "quoted": f"{{source: {coded}, trust_remote_code: true}}",
        "dotted": {
            "class_path": "CausalLM",
            "init_args.source": str(coded),
            "init_args.trust_remote_code": True,
        },
        "letters": {"class_path": "évil.Policy"},
        **dict.fromkeys(("sampling", "quoted class", "file"), model_folder),
    }
    samplings: dict[str, Any] = {
        "sampling": {"class_path": "evil.Sampling"},
        "quoted class": "class_path: evil.Sampling",
        "file": "evil.py:re-ward",
    }
    options = {"sampling": samplings[attack]} if attack in samplings else {}
    source = run_with_config(model_folder, policies.get(attack, trusting), **options)
    source = coded if attack == "model" else source
    rest = {
        "generate": ["prompts.jsonl", "--output", "answers.jsonl"],
        "chat": [],
    }
    assert run([command, str(source), *rest[command]]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert named in last
    if attack not in {"package", "model"}:
        assert "run/config.yaml: " in last
        assert last.endswith("if you trust it, add --trust_remote_code to this command")
    assert not ran.exists()


@pytest.mark.parametrize("source", ["run", "coded"])
def test_code_of_a_model_runs_with_the_consent_of_the_person(
    model_folder: str, ran: Path, source: str
) -> None:
    coded = model_with_code(model_folder, ran)
    shutil.rmtree(coded / "custom_generate")
    run_with_config(model_folder, {"source": str(coded), "trust_remote_code": True})
    options = ["--output", "answers.jsonl", "--trust_remote_code", "--max_new_tokens", "2"]
    assert run(["generate", source, "prompts.jsonl", *options]) == 0
    assert ran.exists()


def test_a_package_inside_another_is_found_without_running_it(ran: Path) -> None:
    Path("evil_package/inner/config.json").write_text("{}")
    assert locate("package:evil_package.inner") == Path("evil_package/inner").absolute()
    assert not ran.exists()


def test_a_dump_runs_no_code_but_with_consent(
    ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("dump").mkdir()
    shutil.copy("evil.py", "dump/nested_evil.py")
    Path("dump/anomaly.json").write_text('{"format": "lrlhf-dump-4"}')
    rewards = {"class_path": "Rewards", "init_args": {"functions": ["evil.reward"]}}
    for entry in (
        {"model": {"class_path": "evil.Module"}},
        {"model": {"class_path": "RLOO", "init_args": {"rewards": rewards}}},
        {"trainer": {"callbacks": [{"class_path": "evil.Callback"}]}},
        {"data": {"class_path": "McpTools", "init_args": {"command": ["touch", str(ran)]}}},
        {"model": {"init_args": {"function": "evil.py:reward"}}},
    ):
        Path("dump/config.yaml").write_text(yaml.safe_dump(entry))
        assert run(["replay", "dump"]) == 2
        assert "dump/config.yaml: " in (last := capsys.readouterr().err.splitlines()[-1])
        assert last.endswith("add --trust_remote_code to this command")
        assert not ran.exists()
    # a config of this library alone is read; code beside it is nowhere looked for
    Path("dump/config.yaml").write_text("model:\n  class_path: nested_evil.Module\n")
    assert run(["replay", "dump"]) == 2
    assert "nested_evil" in capsys.readouterr().err
    assert not ran.exists()


def test_a_checkpoint_names_no_code_that_is_not_imported(ran: Path) -> None:
    path = Path("model.ckpt")
    rewards = {"class_path": "lrlhf.rewards.Rewards", "init_args": {"functions": ["evil.reward"]}}
    stored = {"_class_path": "lrlhf.modules.RLOO", "policy": "nowhere", "rewards": rewards}
    torch.save({"state_dict": {}, "hyper_parameters": stored}, path)
    with pytest.raises(ValueError, match=r"rewards.*would import evil\.reward"):
        RLOO.load_from_checkpoint(path)
    assert not ran.exists()


def test_what_names_code_is_told_from_what_does_not(ran: Path) -> None:
    plain = [
        "rows.jsonl",
        "model.layers",
        "no_such.module",
        "lrlhf.rewards.ExactMatch",
        "v1.2",
        "a",
    ]
    assert list(foreign_code({"options": plain, "class_path": "lrlhf.modules.RLOO"})) == []
    assert list(foreign_code({"trust_remote_code": False})) == []
    code = ["evil.reward", "evil:reward", "os.system", "folder/evil.py:reward", "evil_package.a"]
    assert len(list(foreign_code({"options": code}))) == len(code)
    # what the user's own program has imported is no news
    assert list(foreign_code("evil.reward", imported={"evil"})) == []
    assert not ran.exists()


class Runs:
    """Would run a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("content", ["code", "garbage", "half"])
def test_pickled_weights_that_cannot_be_read_are_told_in_one_line(
    model_folder: str, ran: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    shutil.copytree(model_folder, "pickled")
    weights = Path("pickled/pytorch_model.bin")
    for path in Path("pickled").glob("*.safetensors"):
        path.unlink()
    state = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    torch.save({"a": Runs()} if content == "code" else state, weights)
    if content == "garbage":
        weights.write_bytes(b"hello" * 100)
    elif content == "half":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert run(["generate", "pickled", "prompts.jsonl", "--output", "answers.jsonl"]) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith("error: source 'pickled'")
    assert "Traceback" not in told
    assert not ran.exists()


@pytest.mark.parametrize("class_path", ["nowhere.Policy", "lrlhf.models.NoSuch", "lrlhf.rewards"])
@pytest.mark.usefixtures("ran")
def test_a_class_that_is_none_of_a_policy_ends_in_one_line(
    model_folder: str, capsys: pytest.CaptureFixture[str], class_path: str
) -> None:
    run_with_config(model_folder, {"class_path": class_path})
    assert run(["generate", "run", "prompts.jsonl", "--output", "answers.jsonl"]) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in told


LAUGHS = "\n".join(
    ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
)
"""Under a kilobyte, and a thousand million values."""
MERGES = "a0: &a0 {x: 1}\n" + "\n".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)
)


@pytest.mark.parametrize("bomb", [LAUGHS, MERGES])
def test_aliases_stand_for_no_more_than_anybody_writes(
    bomb: str, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(bomb) < 1024
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    source = run_with_config(model_folder, model_folder)
    shutil.copytree(source, "other")
    for path in (source / "config.yaml", Path("bomb.yaml")):
        path.write_text(bomb)
        with pytest.raises(ValueError, match=r"aliases .* stand for more than 100,000 values"):
            read_yaml(path)
    for arguments in (
        ["generate", "run", "prompts.jsonl", "--output", "answers.jsonl"],
        ["check", "--config", "bomb.yaml"],
        ["compare", "run", "other", "--config", "bomb.yaml"],
    ):
        assert run(arguments) == 2
        assert "stand for more than" in capsys.readouterr().err.splitlines()[-1]
    # as the text of an option too, which jsonargparse reads as YAML
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--options", type=dict[str, Any])
    with pytest.raises(Exception, match="options"):
        parser.parse_object({"options": bomb})


def test_a_config_of_the_size_of_a_data_set_is_not_read() -> None:
    Path("large.yaml").write_text("a: 1\n" + "# and so on\n" * 100_000)
    with pytest.raises(ValueError, match="more than 1,048,576 bytes"):
        read_yaml(Path("large.yaml"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x: !!bool maybe", "has a value that cannot be read"),
        ("x: !!timestamp 9999-99-99", "has a value that cannot be read"),
        ("x: " + "9" * 5000, "has a value that cannot be read"),
        ("data: {init_args: {chat_template: [1]}}", "chat_template: expected text or null"),
        ("data: {init_args: {chat_template: /etc/passwd}}", "is the file /etc/passwd, and a file"),
        ("data: {init_args: {as_chat: perhaps}}", "as_chat: expected true or false"),
    ],
)
def test_strange_values_of_a_run_end_in_one_line(
    model_folder: str, ran: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    assert not ran.exists()
    folder = run_with_config(model_folder, model_folder)
    with (folder / "config.yaml").open("a") as config:
        config.write(text + "\n")
    assert run(["generate", str(folder), "prompts.jsonl", "--output", "answers.jsonl"]) == 2
    assert "run/config.yaml: " in (last := capsys.readouterr().err.splitlines()[-1])
    assert named in last
