"""What is checked before weights are loaded, and what is left alone."""

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator
from transformers import (
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from lrlhf.cli import run
from lrlhf.cli.application import Application, ConfigObjects
from lrlhf.cli.checks import models, run_checks
from lrlhf.cli.checks.data_rows import (
    CheckedRows,
    check_reward_columns,
    check_sources,
    shown_rows,
    try_rewards,
)
from lrlhf.cli.checks.models import TrainedModel, check_main_memory, check_models
from lrlhf.cli.checks.run_checks import check_engine, check_observations
from lrlhf.cli.checks.trainer_options import (
    check_accelerator,
    check_devices,
    check_length,
    check_replaced,
    check_strategy,
    check_wandb,
)
from lrlhf.cli.config_entries import processes
from lrlhf.datamodules import Source
from lrlhf.datamodules.loading.splits import FirstRows
from lrlhf.datamodules.rows.collate import Candidate, PairRow, PromptRow
from lrlhf.datamodules.rows.supervised_rows import SupervisedRow
from lrlhf.functional import ALGORITHMS
from lrlhf.models import CausalLM, ScoreModel
from lrlhf.models.loading.deferred_weights import is_deferred
from lrlhf.modules.policy.iteration import Quantity
from lrlhf.options.errors import MistakeError
from lrlhf.rewards import RewardFunction
from lrlhf.strategies import FSDP2
from tests.cli import toys
from tests.cli.experiment import experiment
from tests.hearing import save_hearing
from tests.vlms import save_vlm

ROOT = Path(__file__).parents[2]
REWARD = f"{__name__}.by_length"
NEEDS_GOLD = f"{__name__}.by_gold"


def by_length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def by_gold(completions: list[str], gold: list[str]) -> list[float]:
    return [float(text == one) for text, one in zip(completions, gold, strict=True)]


def by_others(rewards: dict[str, list[float]], gold: list[str]) -> list[float]:
    return [len(one) * value for one, value in zip(gold, rewards["by_length"], strict=True)]


class OwnRows(Source):
    """A source of a user's: a check must not make one, it may cost anything."""

    made = 0

    def __init__(self, column: str = "prompt") -> None:
        type(self).made += 1
        self.column = column

    @property
    def name(self) -> str:
        return "own"

    def rows(self) -> Iterable[dict[str, Any]]:
        return [{self.column: f"say {number}"} for number in range(8)]


def _write(model_folder: str, data: dict[str, Any], reward: str = REWARD, **trainer: Any) -> None:
    config = experiment("RLOO", {"policy": model_folder}, data, reward=reward, **trainer)
    Path("run.yaml").write_text(yaml.safe_dump(config))


def _questions(count: int, **columns: str) -> dict[str, Any]:
    rows = [{"prompt": f"say {number}", **columns} for number in range(count)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"train": "rows.jsonl", "batch_size": 2}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    for spec in (CausalLM, ScoreModel):
        monkeypatch.setattr(spec, "load", load)


@pytest.mark.usefixtures("no_weights")
def test_check_names_what_nothing_reads(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = {"role": "user", "content": "say 1", "name": "me"}
    Path("chats.jsonl").write_text((json.dumps({"prompt": [ask], "gold": "1"}) + "\n") * 2)
    _write(model_folder, {"train": "chats.jsonl", "batch_size": 2}, NEEDS_GOLD)
    assert run(["check", "--config", "run.yaml"]) == 0
    told = "neither the model nor the task reads `name` of turns of the user of 2 rows"
    assert told in capsys.readouterr().out


@pytest.mark.usefixtures("no_weights")
def test_check_says_what_it_looked_at_and_writes_nothing(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(model_folder, _questions(300, gold="1"), NEEDS_GOLD)
    before = sorted(Path().rglob("*"))

    assert run(["check", "--config", "run.yaml"]) == 0

    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("run      1 step on 1 process: ")
    assert out[1] == "batches  2 prompts × 2 responses; 1 optimizer step of 4 responses"
    assert "(llama, 256 tokens)" in out[2]
    assert out[3] == ("data     train: the first 100 rows looked at, 100 can be used; columns gold")
    assert out[4] == "rewards  read gold"
    # one token per byte: "say 99"
    assert out[5] == "row 1    5 tokens, a prompt: 'say 0'"
    assert out[6] == "lengths  the longest prompt looked at 6 + max_new_tokens 3, of 256 tokens"
    assert out[7:] == ["found no mistake in what was looked at"]
    assert sorted(Path().rglob("*")) == before


def test_rows_are_shown_with_what_is_in_the_loss(model_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = np.array(tokenizer.encode("abcd", add_special_tokens=False), dtype=np.int32)
    learnt = np.array([False, True, True, False])
    answer = SupervisedRow(input_ids=ids, trained=learnt, key="")
    pair = Candidate(input_ids=ids, start=3), Candidate(input_ids=ids, start=1, trained=learnt)
    rows = [answer, PairRow(texts=pair, labels=(1.0,), margin=None, keys=(), info={})]
    trained: Any = SimpleNamespace(tokenizer=lambda: tokenizer)

    def shown(rows: list[Any], in_full: int) -> list[str]:
        seen = CheckedRows([FirstRows("train", rows, len(rows), complete=True)], frozenset(), 4)
        return shown_rows(seen, trained, in_full)

    assert shown(rows, 0) == ["row 1    4 tokens, 2 in the loss: 'a⟦bc⟧d'"]
    assert shown(rows[1:], 0) == [
        "row 1    4 tokens, 1 in the loss: 'abc⟦d⟧'",
        "row 1    4 tokens, 2 in the loss: 'a⟦bc⟧d'",
    ]
    full = shown(rows, 1)
    assert full[0] == "row 1    4 tokens, 2 in the loss"
    assert [line.split() for line in full[1:]] == [
        [str(ids[0]), "'a'"],
        [str(ids[1]), "loss", "'b'"],
        [str(ids[2]), "loss", "'c'"],
        [str(ids[3]), "'d'"],
    ]


def one_number(completions: list[str]) -> float:
    return float(len(completions))


def one_for_all(**_: object) -> list[float]:
    return [1.0]


def words(completions: list[str]) -> list[Any]:
    return completions


def strict(**_: object) -> list[float]:
    raise KeyError("no answer")


async def awaited(**_: object) -> list[float]:
    raise AssertionError("it would be called in another event loop than in the run")


class Remote(RewardFunction):
    ends_by_itself = True

    def __call__(self, **_: Any) -> list[float]:
        raise AssertionError("it would ask a server")


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (one_number, "returned float 2.0, not a list of 2 numbers"),
        (one_for_all, "returned 1 values for 2 responses"),
        (words, "no finite float32 number"),
        (by_length, ""),
        (strict, ""),
        (Remote(), ""),
        (awaited, ""),  # it may keep the event loop that it was first called in
    ],
)
def test_rewards_of_a_wrong_shape_are_found_on_made_responses(
    function: Any, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = PromptRow(input_ids=np.array([1], dtype=np.int32), prompt="say", columns={"gold": "1"})
    seen = CheckedRows([FirstRows("train", [prompt], 1, complete=True)], frozenset({"gold"}), 1)
    if refused:
        with pytest.raises(MistakeError, match=re.escape(refused)):
            try_rewards({"mine": function}, seen, 2)
        return
    left_out = try_rewards({"mine": function}, seen, 2)
    assert left_out == (["mine"] if isinstance(function, Remote) or function is awaited else [])
    told = "cannot score a made response: KeyError: 'no answer'"
    assert (told in caplog.text) == (function is strict)


@pytest.mark.usefixtures("no_weights")
def test_rewards_of_rewards_are_no_columns_and_mistakes_in_them_are_found(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(**options: Any) -> tuple[int, str]:
        data = _questions(8, gold="1")
        config = experiment("RLOO", {"policy": model_folder}, data, reward=REWARD)
        rewards = config["model"]["init_args"]["rewards"]["init_args"]
        rewards |= {"functions": [REWARD, f"{__name__}.by_others"], **options}
        Path("run.yaml").write_text(yaml.safe_dump(config))
        code, told = run(["check", "--config", "run.yaml"]), capsys.readouterr()
        return code, told.out + told.err

    code, text = checked()
    assert (code, "rewards  read gold" in text) == (0, True), text
    for options, message in (
        ({"inputs": {"by_others": ["by_lenght"]}}, "no reward 'by_lenght'; did you mean"),
        ({"inputs": {"by_others": ["by_others"]}}, "inputs go in a circle"),
        ({"functions": [f"{__name__}.by_others"]}, "takes 'rewards', the values of the functions"),
    ):
        code, text = checked(**options)
        assert (code, message in text) == (2, True), text
        assert "Traceback" not in text


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("algorithm", "num_generations", "problem"),
    [
        (
            "reinforce",
            1,
            "num_generations: 1, and the reward 'judge_reward' compares the responses",
        ),
        ("reinforce", 2, ""),
        ("remax", 2, "(greedy) scored alone, and the reward 'judge_reward' compares responses"),
    ],
)
def test_a_judge_that_compares_responses_is_found_where_there_is_one_of_each(
    algorithm: str,
    num_generations: int,
    problem: str,
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = experiment("RLOO", {"policy": model_folder}, _questions(8), reward=REWARD)
    options = config["model"]["init_args"]
    options |= {"algorithm": algorithm, "num_generations": num_generations}
    judge = {"urls": "http://127.0.0.1:1/v1", "mode": "pairwise"}
    options["rewards"]["init_args"]["functions"] = [
        {"class_path": "JudgeReward", "init_args": judge}
    ]
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["check", "--config", "run.yaml"]) == (2 if problem else 0)
    told = capsys.readouterr().err
    assert problem in told


@pytest.mark.usefixtures("no_weights")
def test_evaluations_of_single_responses_by_a_comparing_judge_are_found(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(data: dict[str, Any], limit: float = 1.0, **evaluation: Any) -> str:
        config = experiment(
            "RLOO", {"policy": model_folder}, data, reward=REWARD, limit_val_batches=limit
        )
        options = config["model"]["init_args"]
        options["rewards"]["init_args"]["functions"] = [judge]
        options["evaluation"] = evaluation
        Path("run.yaml").write_text(yaml.safe_dump(config))
        code, told = run(["check", "--config", "run.yaml"]), capsys.readouterr().err
        assert code == (2 if "model.init_args.evaluation" in told else 0), told
        return told

    judge = {
        "class_path": "JudgeReward",
        "init_args": {"urls": "http://127.0.0.1:1/v1", "mode": "pairwise"},
    }
    metrics = {"absolute": {"class_path": "JudgeReward", "init_args": {"urls": "http://x/v1"}}}
    with_val = {**_questions(8), "val": "rows.jsonl"}
    for beside in ({}, {"metrics": metrics}):
        assert "num_samples is 1, and samples are taken in rou" in checked(with_val, **beside)
        assert not checked(with_val, num_samples=4, **beside)
    assert not checked(_questions(8))  # nothing is evaluated
    assert not checked(with_val, limit=0)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("kind", ["LearnedReward", "ProcessReward", "GenerativeReward"])
def test_a_reward_model_without_a_template_is_found_before_it_is_to_read_chats(
    kind: str, model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder, judge := tmp_path / "judge")
    (judge / "chat_template.jinja").unlink()
    path = f"lrlhf.{'rollout' if kind == 'GenerativeReward' else 'rewards'}.{kind}"

    def checked(*, as_chat: bool = True, **options: str) -> tuple[int, str]:
        data = {**_questions(8), "as_chat": as_chat}
        config = experiment("RLOO", {"policy": model_folder}, data, reward=REWARD)
        entry = {"class_path": path, "init_args": {"source": str(judge), **options}}
        config["model"]["init_args"]["rewards"]["init_args"]["functions"] = [entry]
        Path("run.yaml").write_text(yaml.safe_dump(config))
        code, told = run(["check", "--config", "run.yaml"]), capsys.readouterr()
        return code, told.out + told.err

    code, text = checked()
    assert code == 2, text
    # a text that RewardModel trains on ends with the end token; the others go on
    end = "<|endoftext|>" if kind == "LearnedReward" else ""
    line = "{% for m in messages %}{{ m.content }}{% endfor %}" + end
    assert "has no chat template: give chat_template; for a model that was trained on" in text
    assert f"chat_template: '{line}'" in text
    assert checked(chat_template=line)[0] == 0
    assert checked(tokenizer=model_folder)[0] == 0
    # what a generative reward model is asked is a chat whatever the prompts are
    assert checked(as_chat=False)[0] == (2 if kind == "GenerativeReward" else 0)


@pytest.mark.usefixtures("no_weights")
def test_prompts_alone_are_not_enough_for_a_reward_that_reads_more(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(model_folder, _questions(8), NEEDS_GOLD)
    assert run(["check", "--config", "run.yaml"]) == 2
    assert "reads the column 'gold'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("{{ prompt", "teacher.context is no jinja2 template"),
        ("no.such.path", "teacher.context 'no.such.path' cannot be imported"),
        ("{{ gould }} {{ prompt }}", "no column 'gould'; did you mean 'gold'"),
        ("{{ gold + 1 }} {{ prompt }}", "teacher.context failed: TypeError"),
        ("{{ gold }} {{ prompt }}", ""),
    ],
)
def test_a_context_of_a_teacher_is_filled_from_the_first_rows(
    model_folder: str, capsys: pytest.CaptureFixture[str], context: str, message: str
) -> None:
    model = {"policy": model_folder, "teacher": {"context": context}}
    config = experiment("RLOO", model, _questions(8, gold="1"))
    config["model"]["init_args"].pop("rewards", None)
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["check", "--config", "run.yaml"]) == (2 if message else 0)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("new_tokens", "status"), [(250, 0), (251, 2)])
def test_prompt_and_response_fill_the_context_and_no_more(
    model_folder: str, capsys: pytest.CaptureFixture[str], new_tokens: int, status: int
) -> None:
    _write(model_folder, _questions(300))
    flags = [f"--model.sampling.max_new_tokens={new_tokens}"]
    assert run(["check", "--config", "run.yaml", *flags]) == status
    assert ("257 together" in capsys.readouterr().err) == bool(status)


@pytest.mark.usefixtures("no_weights")
def test_what_the_model_lacks_is_said_before_weights_are_read(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(policy: Any, data: dict[str, Any]) -> str:
        Path("run.yaml").write_text(
            yaml.safe_dump(experiment("RLOO", {"policy": policy}, data, reward=REWARD))
        )
        assert run(["check", "--config", "run.yaml"]) == 2
        return capsys.readouterr().err

    added = shutil.copytree(model_folder, tmp_path / "added")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(added)
    Path("calls.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b<call>"}\n')
    data = {"train": "calls.jsonl", "batch_size": 2}
    told = refused(str(added), data)
    assert "calls.jsonl:2 has the token" in told
    assert "'<call>'" in told
    assert f"has {rows} rows, and the tokenizer has {rows + 1} tokens" in told
    # a token that no row has may be there
    _write(str(added), _questions(4))
    assert run(["check", "--config", "run.yaml"]) == 0
    capsys.readouterr()
    for options in ({"target_modules": ["q_proj", "v_prj"]}, {"modules_to_save": ["v_prj"]}):
        policy = {
            "class_path": "lrlhf.models.CausalLM",
            "init_args": {"source": model_folder, "lora": options},
        }
        assert "'v_prj' is the name of no module" in refused(policy, _questions(4))
    policy = {
        "class_path": "lrlhf.models.CausalLM",
        "init_args": {"source": model_folder, "freeze": ["layerz.*"]},
    }
    assert "'layerz.*' matches no module" in refused(policy, _questions(4))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("role", ["reference", "critic"])
def test_a_model_beside_the_policy_may_read_less(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    short = shutil.copytree(model_folder, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    options = {"policy": model_folder, role: {"model": {"source": str(short)}}}
    whole = experiment("PPO", options, _questions(4), reward=REWARD)
    Path("run.yaml").write_text(yaml.safe_dump(whole))
    flags = ["--model.sampling.max_new_tokens=16"]
    assert run(["check", "--config", "run.yaml", *flags]) == 2
    assert f"{short} reads at most 20 tokens" in capsys.readouterr().err
    assert run(["check", "--config", "run.yaml", "--model.sampling.max_new_tokens=15"]) == 0


def test_a_class_of_the_users_is_not_made_for_a_check(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    monkeypatch.setattr(OwnRows, "made", 0)
    own = {"class_path": f"{__name__}.OwnRows"}
    _write(model_folder, {"train": own, "batch_size": 2})
    assert run(["check", "--config", "run.yaml"]) == 0
    assert OwnRows.made == 0

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was built")

    for cls in (toys.ToyModule, toys.ToyData):
        monkeypatch.setattr(cls, "training_step", None, raising=False)
    assert run(["check", "--config", config.name]) == 0


@pytest.mark.parametrize(
    ("column", "reward", "message"),
    [
        ("question", REWARD, "no column 'prompt'"),
        ("prompt", NEEDS_GOLD, "takes an argument 'gold', and the data has no such column"),
    ],
)
def test_what_only_the_run_can_tell_is_the_users_mistake_as_well(
    model_folder: str, capsys: pytest.CaptureFixture[str], column: str, reward: str, message: str
) -> None:
    own = {"class_path": f"{__name__}.OwnRows", "init_args": {"column": column}}
    _write(model_folder, {"train": own, "batch_size": 2}, reward)

    assert run(["fit", "--config", "run.yaml"]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


REFUSED = [
    (["--model.sampling.max_new_tokens=0"], "max_new_tokens is 0"),
    (["--model.sampling.temperature=-1"], "temperature"),
    (["--model.num_generations=1"], "num_generations is 1"),
    (["--model.rewards.functions=[numeric_anser]"], "did you mean 'numeric_answer'?"),
    (["--model.rewards.weights=[1, 2]"], "weights"),
    (["--trainer.callbacks=RLCheckpoint", "--trainer.callbacks.save_top_k=-5"], "save_top_k"),
    (["--trainer.devices=[]"], "trainer.devices"),
    (["--trainer.callbacks=KLControl", "--model.reference.kl_coef=0"], "kl_coef is 0"),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_constructors_refuse_is_refused_by_check(
    model_folder: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    _write(model_folder, _questions(8))
    assert run(["check", "--config", "run.yaml", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        ("error: command line: --", "error: run.yaml:12: model.init_args.rewards")
    )
    assert message in error


@pytest.mark.usefixtures("no_weights")
def test_sounds_that_dpo_cannot_learn_to_write_are_found_by_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_hearing("hearing")
    row = {"prompt": "a cat", "audio_0": "a.wav", "audio_1": "b.wav", "preference": "A"}
    Path("pairs.jsonl").write_text(json.dumps(row))
    config = experiment("DPO", {"policy": "hearing"}, {"train": "pairs.jsonl"})
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["check", "--config", "run.yaml"]) == 2
    assert "(audio_0, audio_1), which a policy cannot learn to write" in capsys.readouterr().err


def test_what_goes_wrong_in_a_check_does_not_end_the_run(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check_folders(_: object) -> None:
        raise KeyError("not thought of")

    monkeypatch.setattr(run_checks.trainer_options, "check_folders", check_folders)
    _write(model_folder, _questions(8))
    with caplog.at_level("DEBUG", logger=run_checks.__name__):
        assert run(["check", "--config", "run.yaml"]) == 0
    assert "check_folders could not look" in caplog.text


def test_sizes_of_training_do_not_matter_to_validation(model_folder: str) -> None:
    # 4 responses are no multiple of 3, and 2 rows are fewer than a batch
    data = {**_questions(2), "val": "rows.jsonl", "batch_size": 4, "val_batch_size": 1}
    _write(model_folder, data)
    flags = ["--config", "run.yaml", "--model.update.minibatch_size=3"]
    assert run(["check", *flags]) == 2
    assert run(["validate", *flags]) == 0


def test_a_class_for_accelerator_and_strategy_is_not_looked_at() -> None:
    own = {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"}
    trainer = {"accelerator": own, "strategy": own, "devices": "auto", "num_nodes": 1}
    check_strategy(trainer)
    check_accelerator(trainer)
    check_devices(trainer)
    assert processes(trainer).number == 1


def test_a_users_source_with_an_option_source_is_not_unwrapped() -> None:
    own = {"class_path": f"{__name__}.OwnRows", "init_args": {"source": "nowhere.jsonl"}}
    data = {"class_path": "lrlhf.datamodules.PromptDataModule", "init_args": {"train": own}}
    check_sources(data)
    weighted = {"class_path": "lrlhf.datamodules.Weighted", "init_args": {"source": "no.jsonl"}}
    for entry in (weighted, {"source": "no.jsonl"}):
        data["init_args"] = {"train": [entry]}
        with pytest.raises(MistakeError, match=r"no\.jsonl"):
            check_sources(data)


def test_rewards_and_modules_of_the_users_are_not_read_as_ours(model_folder: str) -> None:
    own = {"class_path": f"{__name__}.OwnRows", "init_args": {"recipe": "r", "functions": 3}}
    options = {"policy": model_folder, "rewards": own, "num_generations": 2, "update": {}}
    assert check_models({"class_path": "lrlhf.modules.RLOO", "init_args": options}) is not None
    model = {"class_path": f"{__name__}.OwnRows", "init_args": options}
    assert check_reward_columns(model, frozenset()) is None
    check_replaced({"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}, model)


@pytest.mark.parametrize(("group", "kind"), [("reference", "CausalLM"), ("critic", "ValueModel")])
def test_models_beside_the_policy_are_read_with_their_own_options(
    monkeypatch: pytest.MonkeyPatch, group: str, kind: str
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(models, "_look_at", lambda key, spec: read.append((key, spec)))
    entry = {"source": "a/b", "trust_remote_code": True, "revision": "v2"}
    options = {group: {"model": entry}}
    check_models({"class_path": "lrlhf.modules.PPO", "init_args": options})
    [(key, spec)] = read
    assert key == ("model", group, "model")
    assert type(spec).__name__ == kind
    assert (spec.trust_remote_code, spec.revision) == (True, "v2")


def test_rows_after_a_hundred_bad_ones_are_good_enough(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "?"}] * 100 + [{"prompt": "say"}] * 100
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": "rows.jsonl", "batch_size": 2, "max_bad_fraction": 0.5}
    _write(model_folder, data)
    assert run(["check", "--config", "run.yaml"]) == 0
    assert "all 200 rows looked at, 100 can be used" in capsys.readouterr().out


def test_findings_are_fit_for_a_terminal(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(model_folder, _questions(8, **{"\x1b[31mred": "1"}))
    assert run(["check", "--config", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "columns \\x1b[31mred" in out
    assert "\x1b" not in out


def test_the_first_rows_may_be_bad_where_others_are_good(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "?"}] * 50 + [{"prompt": "say"}] * 200
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": "rows.jsonl", "batch_size": 2, "max_bad_fraction": 0.5}
    _write(model_folder, data)
    assert run(["check", "--config", "run.yaml"]) == 0
    assert "100 rows looked at, 50 can be used" in capsys.readouterr().out
    # of few rows all are seen, and the share of the bad ones is known
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows[:80])))
    assert run(["check", "--config", "run.yaml"]) == 2
    assert "62.50%, more than max_bad_fraction=0.5" in capsys.readouterr().err


CONTEXTS = [
    (LlamaConfig(max_position_embeddings=100), 100),
    (
        LlamaConfig(
            max_position_embeddings=100,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        ),
        400,
    ),
    (GPT2Config(n_positions=64), 64),
    # its first position is number 2, behind that of the padding token
    (RobertaConfig(max_position_embeddings=66, pad_token_id=1), 64),
    (MptConfig(max_seq_len=64), 64),
    (MambaConfig(), None),
]


@pytest.mark.parametrize(("config", "context"), CONTEXTS)
def test_the_context_is_what_the_config_says(config: PreTrainedConfig, context: int | None) -> None:
    spec = CausalLM(source="somewhere")
    assert TrainedModel(("model", "policy"), spec, config).context == context


@pytest.mark.parametrize(("processes", "fits"), [(4, True), (3, False), (1, False), (None, True)])
def test_an_engine_is_shared_by_as_many_processes_as_divide_all(
    monkeypatch: pytest.MonkeyPatch, processes: int | None, fits: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    engine = {"class_path": "lrlhf.rollout.VLLMEngine", "init_args": {"tensor_parallel_size": 2}}
    model = {"class_path": "lrlhf.modules.RLOO", "init_args": {"engine": engine}}
    ranks = Quantity("processes", processes, "trainer.devices")
    if fits:
        check_engine(model, ranks)
        return
    with pytest.raises(MistakeError, match=r"tensor_parallel_size is 2, and the number of train"):
        check_engine(model, ranks)


@pytest.mark.parametrize(
    ("devices", "fits"), [(2, True), (3, False), ("auto", True), ([0, 1], True), ([2], False)]
)
def test_no_more_gpus_than_there_are(
    monkeypatch: pytest.MonkeyPatch, devices: Any, fits: bool
) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 2))
    trainer = {"accelerator": "gpu", "devices": devices, "num_nodes": 4}
    if fits:
        check_devices(trainer)
        return
    with pytest.raises(MistakeError, match=r"this machine has 2 GPU\(s\)"):
        check_devices(trainer)
    check_devices({**trainer, "accelerator": "cpu", "devices": 3})


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({}, False),
        ({"max_steps": 3}, True),
        ({"max_epochs": 1}, True),
        ({"max_epochs": -1}, True),
        ({"max_time": "00:01:00:00"}, True),
        ({"fast_dev_run": True}, True),
        ({"max_steps": 3, "min_steps": 4}, False),
        ({"max_steps": 3, "min_steps": 3}, True),
        ({"max_steps": -1, "max_epochs": 2, "min_epochs": 3}, False),
        ({"max_steps": -2}, False),
    ],
)
def test_a_run_has_one_length(options: dict[str, Any], fits: bool) -> None:
    names = ("min_steps", "max_epochs", "min_epochs", "max_time")
    trainer = {**dict.fromkeys(names), "max_steps": -1, "fast_dev_run": False, **options}
    if fits:
        check_length(trainer)
        return
    with pytest.raises(MistakeError):
        check_length(trainer)


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in anywhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def _logger(**options: Any) -> dict[str, Any]:
    path = "lightning.pytorch.loggers.WandbLogger"
    return {"logger": [{"class_path": path, "init_args": options}]}


@pytest.mark.usefixtures("nobody")
def test_wandb_wants_an_account_unless_it_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MistakeError, match="wandb login"):
        check_wandb(_logger())
    check_wandb({"logger": None})
    check_wandb({"logger": True})
    check_wandb(_logger(offline=True))
    check_wandb({"logger": {**_logger()["logger"][0], "dict_kwargs": {"mode": "disabled"}}})
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        check_wandb(_logger())
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "0" * 40)
        check_wandb(_logger())


@pytest.mark.usefixtures("nobody")
def test_wandb_login_and_offline_leave_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nmode = offline\n")
    check_wandb(_logger())
    (tmp_path / "wandb/settings").unlink()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    check_wandb(_logger())
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(MistakeError, match="wandb login"):
        check_wandb(_logger())


GAME = """
from lrlhf.environments import TextEnvironment

class Game(TextEnvironment):
    def reset(self, target):
        pass
    def step(self, action):
        return None
    def get_reward(self):
        return 1.0

class Desk:
    def add(self, a, b):
        return a + b

def solve(base_url, api_key, model, target, tries=3):
    return 1.0

def quick(episodes):
    return [1.0 / one.turns for one in episodes]
"""


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("columns", "episodes", "reward", "says"),
    [
        ({"target": "1"}, {"environment": "game.Game"}, "environment_reward", None),
        ({"target": "1"}, {"environment": "game.Game"}, "game.quick", None),
        (
            {"goal": "1"},
            {"environment": "game.Game"},
            "environment_reward",
            "game.Game.reset() reads the column 'target', and the data has none",
        ),
        ({"target": "1"}, {"agent": "game.solve"}, "environment_reward", None),
        (
            {"goal": "1"},
            {"agent": "game.solve"},
            "environment_reward",
            "game.solve() reads the column 'target', and the data has none",
        ),
        ({}, {"agent": "game.gone"}, "environment_reward", "'game.gone' cannot be imported"),
        (
            {},
            None,
            "game.quick",
            "the reward function game.quick reads 'episodes', which only episodes have: set "
            "model.episodes",
        ),
        ({}, {"environment": "game.Gone"}, "environment_reward", "'game.Gone' cannot be imported"),
        ({}, {"environment": "game.Desk"}, "environment_reward", "Desk.add"),
        ({}, {"max_turns": 3}, "environment_reward", "neither an environment nor tools"),
        (
            {},
            {"environment": "game.Game", "max_turns": 0},
            "environment_reward",
            "episodes.max_turns is 0; it must be 1 or more",
        ),
    ],
)
def test_episodes_are_looked_at(
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: dict[str, str],
    episodes: dict[str, Any] | None,
    reward: str,
    says: str | None,
) -> None:
    monkeypatch.delitem(sys.modules, "game", raising=False)
    Path("game.py").write_text(GAME)
    options = {"policy": model_folder, **({} if episodes is None else {"episodes": episodes})}
    config = experiment("RLOO", options, _questions(8, **columns), reward=reward)
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert run(["check", "--config", "run.yaml"]) == (0 if says is None else 2)
    printed = capsys.readouterr()
    if says is not None:
        assert says in printed.err
        assert "Traceback" not in printed.err


SIGHT = """
from lrlhf.environments import TextEnvironment

class Looks(TextEnvironment):
    def reset(self, images):
        self.image = images[0]
    def step(self, action):
        return [self.image]

class Blind(TextEnvironment):
    def step(self, action):
        return None

def reds(images):
    return [1.0 for _ in images]
"""


def test_turns_behind_images_are_not_compared() -> None:
    blank = {"input_ids": np.arange(3, dtype=np.int32), "prompt": "p", "columns": {}}
    rows: list[Any] = [PromptRow(**blank), PromptRow(**blank, deferred=object())]
    for algorithm, number, refused in (("gigpo", 2, True), ("gigpo", 1, False), ("grpo", 2, False)):
        settings: Any = SimpleNamespace(algorithm=ALGORITHMS[algorithm])
        own = [FirstRows("train", rows[:number], number, complete=True)]
        check = partial(check_observations, settings, CheckedRows(own, frozenset(), 3))
        if refused:
            with pytest.raises(MistakeError, match="these rows show images"):
                check()
        else:
            check()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("family", "chat", "reads", "says"),
    [
        # 84 of 512 pixels a side: 6 x 6 patches of 14 pixels, of which 4 are a token, and 2 marks
        ("qwen2_vl", True, True, "of 512 x 512 pixels has 9 tokens, in the prompt if `reset`"),
        ("qwen2_vl", False, True, "episodes cannot show images: the prompts are plain text"),
        ("", True, False, "episodes cannot show images: the policy reads text only"),
        (
            "",
            True,
            True,
            "sight.Looks.reset() reads the column 'images', and the policy reads text",
        ),
        (
            "",
            True,
            None,
            "the reward function sight.reds reads 'images', and the policy reads text",
        ),
    ],
)
def test_a_check_says_whether_episodes_can_show_images(
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    chat: bool,
    reads: bool | None,
    says: str,
) -> None:
    monkeypatch.delitem(sys.modules, "sight", raising=False)
    Path("sight.py").write_text(SIGHT)
    if family:
        save_vlm(family, "vlm")
    prompt = [{"role": "user", "content": "say"}] if chat else "say"
    Path("rows.jsonl").write_text((json.dumps({"prompt": prompt}) + "\n") * 2)
    options = {
        "policy": "vlm" if family else model_folder,
        "episodes": {"environment": "sight.Looks" if reads else "sight.Blind"},
    }
    data = {"train": "rows.jsonl", "batch_size": 2}
    config = experiment("RLOO", options, data, reward="sight.reds" if reads is None else REWARD)
    Path("run.yaml").write_text(yaml.safe_dump(config))
    status = run(["check", "--config", "run.yaml"])
    printed = capsys.readouterr()
    assert says in (printed.err if status else printed.out)
    assert status == (2 if not family and reads is not False else 0)
    if says.startswith("of 512"):
        # the last of which the policy's turn has to be
        for room, warned in ((9, True), (10, False)):
            config["model"]["init_args"]["sampling"] = {"max_new_tokens": room}
            Path("run.yaml").write_text(yaml.safe_dump(config))
            caplog.clear()
            assert run(["check", "--config", "run.yaml"]) == 0
            assert ("no image of 512 x 512 pixels fits" in caplog.text) is warned


def test_deepspeed_must_have_room_for_a_copy_in_every_process(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = check_models(
        {"class_path": "lrlhf.modules.RLOO", "init_args": {"policy": model_folder}}
    )
    # 260 embeddings of 32; a layer: 2 norms, 3 matrices of 32 x 64, and 32 x (32 + 16 + 16 + 32)
    # for attention; the last norm
    weights = 260 * 32 + 2 * (2 * 32 + 3 * 32 * 64 + 32 * 96) + 32
    trainer = {"accelerator": "cpu", "devices": 2, "num_nodes": 3, "strategy": "deepspeed_zero3"}
    for total, fits in ((2 * weights * 4, True), (2 * weights * 4 - 1, False)):
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda total=total: SimpleNamespace(total=total)
        )
        if fits:
            check_main_memory(trainer, trained)
            continue
        with pytest.raises(MistakeError, match=r"2 times 0\.0 GiB .*take fsdp2"):
            check_main_memory(trainer, trained)
        own = {"class_path": "lrlhf.strategies.DeepSpeed", "init_args": {"stage": 3}}
        with pytest.raises(MistakeError, match="take fsdp2"):
            check_main_memory({**trainer, "strategy": own}, trained)
        check_main_memory({**trainer, "strategy": "fsdp2"}, trained)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["--trainer.strategy=fsdp2"], FSDP2),
        (["--trainer.strategy=FSDP2", "--trainer.strategy.start_method=fork"], FSDP2),
        (["--trainer.strategy=ddp"], None),
        (["--trainer.strategy=DDPStrategy"], None),
        ([], None),
    ],
)
def test_a_strategy_of_this_library_is_made_before_the_models(
    flags: list[str], kind: type | None, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    unread: list[bool] = []

    def look(self: Application) -> None:
        made.append(ConfigObjects(self.config[self.subcommand]).strategy())
        with self._reading_parts():
            unread.append(is_deferred(CausalLM(source=model_folder).load()))

    monkeypatch.setattr(Application, "before_instantiate_classes", look)
    monkeypatch.setattr(Application, "instantiate_classes", lambda _: None)
    monkeypatch.setattr(Application, "run_command", lambda *_: None)
    config = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
    assert run(["fit", config, f"--model.policy={model_folder}", *flags]) == 0
    assert [type(one) for one in made] == [kind or type(None)]
    assert unread == [kind is not None and "start_method" not in str(flags)]


@pytest.mark.usefixtures("no_weights")
def test_check_counts_rows_whose_turns_hold_special_tokens(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["hi", "a<|im_end|>", "<|im_start|>", "ho"]
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _write(model_folder, {"train": "rows.jsonl", "batch_size": 2})
    assert run(["check", "--config", "run.yaml"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "special" in line]
    assert len(lines) == 1
    assert lines[0].startswith("data     train: 2 rows have special tokens in what turns say")
