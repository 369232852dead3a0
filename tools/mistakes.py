"""Makes typical mistakes by both doors, and writes a table of what each is answered with.

    python tools/mistakes.py > mistakes.md

Every command and every Python program is a process of its own, as at a prompt. The table has the
seconds until the message, and the last column what is not as it should be: the wording, an exit
status other than 2, a traceback of a command, weights that a command has read before.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CONFIGS = {
    "rloo": """\
seed_everything: 1
model:
  class_path: RLOO
  init_args:
    policy: model
    num_generations: 2
    sampling: {max_new_tokens: 4}
    reference: {kl_coef: 0.0}
    rewards:
      class_path: Rewards
      init_args:
        functions: [numeric_answer]
data:
  class_path: PromptDataModule
  init_args:
    train: questions.jsonl
    batch_size: 4
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 1
""",
    "reward_model": """\
seed_everything: 1
model:
  class_path: RewardModel
  init_args:
    model: model
data:
  class_path: PreferenceDataModule
  init_args:
    train: pairs.jsonl
    batch_size: 4
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 1
""",
}
REWARDS = """\
def brevity(completions, **columns):
    return [-float(len(text)) for text in completions]


def right(completions, solution):
    return [float(text == one) for text, one in zip(completions, solution)]
"""
"""Of the user's, beside the config."""


PROGRAM = """\
from lrlhf import Trainer
from lrlhf.datamodules import *
from lrlhf.modules import *

model = {model}
data = {data}
{trainer}.fit(model, datamodule=data{fit})
"""


class Mistake(NamedTuple):
    """What is done wrong, and what the answer has to say.

    Attributes:
        name: In a few words.
        says: Parts of the message.
        flags: Added to ``lrlhf fit --config run.yaml``; or, where it begins with ``lrlhf``, the
            command.
        old: What is replaced in the config.
        new: By what.
        config: That is changed, by its name.
        early: It can be known before weights are loaded.
        python: Parts of the message of the same mistake from Python; None: those of ``says`` that
            name no place; empty: only a config can have the mistake.
    """

    name: str
    says: Sequence[str]
    flags: str = ""
    old: str = ""
    new: str = ""
    config: str = "rloo"
    early: bool = True
    python: Sequence[str] | None = None

    @property
    def says_in_python(self) -> list[str]:
        """Parts of the message from Python."""
        if self.python is not None:
            return [*self.python]
        return [
            part for part in self.says if not part.startswith(("run.yaml:", "data.", "trainer."))
        ]


MISTAKES = tuple(
    Mistake(**entry)
    for entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["mistake"]
)


def prepare(folder: Path) -> None:
    """Write what the configs name, but for the model."""
    rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(40)]
    pairs = [{"prompt": row["prompt"], "chosen": "yes", "rejected": "no"} for row in rows]
    for name, written in (("questions", rows), ("pairs", pairs), ("texts", [{"text": "a b"}])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, written)) + "\n")
    (folder / "broken.jsonl").write_text('{"prompt": \n' * 3)
    (folder / "empty.jsonl").write_text("")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")


def program_of(mistake: Mistake) -> str | None:
    """Return the program that makes a mistake from Python; None: only a config can have it."""
    if mistake.python is not None and not mistake.python:
        return None
    config = yaml.safe_load(CONFIGS[mistake.config].replace(mistake.old, mistake.new, 1))
    words = shlex.split(mistake.flags)
    fit: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        section, *keys = flag.removeprefix("--").split(".")
        group = config.get(section, fit)
        group = group.get("init_args", group)
        keys = keys or [section]
        for key in keys[:-1]:
            group = group.setdefault(key, {})
            group = group.get("init_args", group)
        # what begins with two braces is a template
        group[keys[-1]] = value if value.startswith("{{") else yaml.safe_load(value)
    model, data = config["model"], config["data"]
    return PROGRAM.format(
        model=f"{model['class_path']}(**{model['init_args']!r})",
        data=f"{data['class_path']}(**{data['init_args']!r})",
        trainer=f"Trainer(**{config['trainer']!r})",
        fit="".join(f", {name}={value!r}" for name, value in fit.items()),
    )


def arguments_of(mistake: Mistake, folder: Path) -> list[str]:
    """Write the config of a mistake, and return the arguments of its command."""
    changed = CONFIGS[mistake.config]
    assert mistake.old in changed, mistake.name
    if mistake.old:
        changed = changed.replace(mistake.old, mistake.new, 1)
    (folder / "run.yaml").write_text(changed)
    command = shlex.split(mistake.flags)
    if command[:1] == ["lrlhf"]:
        return command[1:]
    return ["fit", "--config", "run.yaml", *command]


_WATCHES = """\
import sys
from pathlib import Path


def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith("pytorch_model.bin"):
        Path("weights-were-read").touch()


sys.addaudithook(note)
"""
"""Python runs it at the start of every process."""


_REFUSED = 2
"""Exit status of a command that cannot be right."""
_THREE_LINES = r"(.*?<br>.*?<br>.*?)<br>.*"
"""All of a message that a table has room for."""


def _write_model(folder: Path) -> None:
    import torch  # noqa: PLC0415  only the model needs these
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    marks = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*marks, *map(chr, range(32, 127)), "\n"]
    letters = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), marks, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=letters, **names).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    # not safetensors, which is read where Python does not notice
    torch.save(LlamaForCausalLM(config).state_dict(), folder / "pytorch_model.bin")


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint of another module, but for its weights."""
    import torch  # noqa: PLC0415  a command at a prompt does not write it

    torch.save(
        {
            "hyper_parameters": {"_class_path": "lrlhf.modules.SFT"},
            "pytorch-lightning_version": "2.6.0",
            **{"epoch": 0, "global_step": 1, "state_dict": {}, "loops": {}, "callbacks": {}},
            **{"optimizer_states": [], "lr_schedulers": []},
        },
        folder / "sft.ckpt",
    )


class Answer(NamedTuple):
    """What a mistake is answered with.

    Attributes:
        message: The error and what follows it.
        seconds: Until its first line; None: there is none.
        faults: What is not as it should be.
    """

    message: str
    seconds: float | None
    faults: list[str]


def _answer(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    *,
    begins: str,
    status: int,
    says: Sequence[str],
    early: bool,
) -> Answer:
    """Run a process, and time the first line of its error.

    Args:
        command: To be run by Python.
        folder: Where it runs.
        environment: Its variables.
        begins: Pattern of that line.
        status: Exit status that it should have.
        says: What the message should have.
        early: Whether weights should not be read before.
    """
    (folder / "weights-were-read").unlink(missing_ok=True)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds, message = None, []
    assert process.stderr is not None
    for line in process.stderr:
        if re.match(begins, line):
            # of several exceptions, the last is what the user reads
            seconds, message = time.monotonic() - started, []
        message.append(line.rstrip("\n"))
    text = "<br>".join(message).replace("|", "\\|").replace(str(folder), ".")
    faults = {
        f"status {process.wait()}": process.returncode != status,
        "wording": not all(part in text for part in says),
        "traceback": status == _REFUSED and "Traceback" in text,
        "weights read": early and (folder / "weights-were-read").exists(),
        "no message": seconds is None,
    }
    return Answer(text, seconds, [fault for fault, is_so in faults.items() if is_so])


def main() -> int:
    """Make every mistake, or those whose name has one of the words given."""
    wanted = sys.argv[1:]
    out = sys.stdout
    out.write("| mistake | command line | s | Python | s | not as it should be |\n")
    out.write("|---|---|---:|---|---:|---|\n")
    seconds: dict[str, list[float]] = {"command line": [], "Python": []}
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        (folder / "model").mkdir()
        _write_model(folder / "model")
        write_checkpoint(folder)
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(_WATCHES)
        # a home without accounts, and no hub
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WANDB_")},
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(folder / "site"), str(Path(__file__).parents[1]), str(folder)]
            ),
        }
        for mistake in MISTAKES:
            if wanted and not any(word in mistake.name for word in wanted):
                continue
            arguments = ["-m", "lrlhf", *arguments_of(mistake, folder)]
            expected = {"begins": "error: ", "status": _REFUSED, "says": mistake.says}
            answers = {
                "command line": _answer(
                    arguments, folder, environment, **expected, early=mistake.early
                )
            }
            if program := program_of(mistake):
                (folder / "program.py").write_text(program)
                expected = {"begins": r"[\w.]+: ", "status": 1, "says": mistake.says_in_python}
                answers["Python"] = _answer(
                    ["program.py"], folder, environment, **expected, early=False
                )
            cells = [mistake.name]
            for door, times in seconds.items():
                answer = answers.get(door)
                message = "a config's only" if answer is None else answer.message
                taken = None if answer is None else answer.seconds
                times += [] if taken is None else [taken]
                cells.append(re.sub(_THREE_LINES, r"\1<br>…", message))
                cells.append("" if taken is None else f"{taken:.1f}")
            faults = [f"{door}: {', '.join(a.faults)}" for door, a in answers.items() if a.faults]
            wrong += bool(faults)
            out.write("| " + " | ".join([*cells, "; ".join(faults)]) + " |\n")
            out.flush()
    for door, times in seconds.items():
        if times:
            middle, most = statistics.median(times), max(times)
            out.write(f"\n{door}: {len(times)}, median {middle:.1f} s, slowest {most:.1f} s\n")
    out.write(f"\n{wrong} of them not as they should be\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
