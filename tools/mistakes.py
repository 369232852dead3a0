"""Makes typical mistakes, one command each, and writes a table of what each is answered with.

    python tools/mistakes.py > mistakes.md

Every command is a process of its own, as at a prompt. The table has the seconds until the message,
and tells whether a traceback was shown and whether weights had been read before.
"""

from __future__ import annotations

import json
import os
import re
import shlex
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


def _run(mistake: Mistake, folder: Path, environment: dict[str, str]) -> list[str]:
    """Return the cells of a mistake's row."""
    arguments = arguments_of(mistake, folder)
    (folder / "weights-were-read").unlink(missing_ok=True)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "lrlhf", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seconds, lines = None, []
    assert process.stderr is not None
    for line in process.stderr:
        if seconds is None and line.startswith("error: "):
            seconds = time.monotonic() - started
        lines.append(line.rstrip("\n"))
    status = process.wait()
    at = next((index for index, line in enumerate(lines) if line.startswith("error: ")), 0)
    message = "<br>".join(lines[at:]).replace("|", "\\|").replace(str(folder), ".")
    return [
        mistake.name,
        message,
        str(status),
        "none" if seconds is None else f"{seconds:.1f}",
        "yes" if any(line.startswith("Traceback") for line in lines) else "no",
        "yes" if (folder / "weights-were-read").exists() else "no",
    ]


def main() -> int:
    """Make every mistake, or those whose name has one of the words given."""
    wanted = sys.argv[1:]
    out = sys.stdout
    out.write("| mistake | message | exit status | seconds | traceback | weights read |\n")
    out.write("|---|---|---:|---:|---|---|\n")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        (folder / "model").mkdir()
        _write_model(folder / "model")
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
            cells = _run(mistake, folder, environment)
            early = not mistake.early or cells[-1] == "no"
            said = all(part in cells[1] for part in mistake.says)
            wrong += not (cells[2] == "2" and cells[-2] == "no" and early and said)
            cells[1] = re.sub(_THREE_LINES, r"\1<br>…", cells[1])
            out.write("| " + " | ".join(cells) + " |\n")
            out.flush()
    out.write(f"\n{wrong} of them not as they should be\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
