"""Each format is read as what it says; own runs are verified in and after training."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lrlhf.apps.verify import VerifyRollouts
from lrlhf.apps.verify.formula_checks import batches, check_advantages
from lrlhf.apps.verify.rollout_rows import Padding, Row, read_rollouts
from lrlhf.apps.verify.verify_command import run_verify
from lrlhf.callbacks import RolloutLog
from lrlhf.guard.dump import StepBundle, write_dump
from lrlhf.models import CausalLM
from lrlhf.modules import RLOO, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.rollout.storage import save_rollout
from lrlhf.types import Rollout
from tests.conftest import build_language_model, build_tokenizer
from tests.modules.policy_runs import Watcher, fit, letters

PROMPTS, COMPLETIONS = [[5, 6, 7], [8, 9]], [[10, 11, 2], [12, 2]]
LOGPROBS, SCORES, ADVANTAGES = [[-0.5, -0.25, -1.0], [-2.0, -0.125]], [1.0, 0.0], [1.5, -1.5]


def padded(values: list[list[Any]], *, left: bool = False, by: Any = 0) -> torch.Tensor:
    most = max(map(len, values))
    return torch.tensor(
        [[by] * (most - len(v)) + v if left else v + [by] * (most - len(v)) for v in values]
    )


def plain(path: Path) -> Path:
    path = path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    return path


def rows() -> Iterator[dict[str, Any]]:
    columns = zip(PROMPTS, COMPLETIONS, LOGPROBS, SCORES, ADVANTAGES, strict=True)
    for prompt, completion, logprobs, score, advantage in columns:
        yield {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "loss_mask": [1] * len(completion),
            "sampling_logprobs": logprobs,
            "score": score,
            "advantage": advantage,
        }


def parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist([*rows()]), path / "rows.parquet")
    return path


def trl(path: Path) -> Path:
    batch = {
        "prompt_ids": padded(PROMPTS, left=True),
        "prompt_mask": padded([[1] * len(p) for p in PROMPTS], left=True),
        "completion_ids": padded(COMPLETIONS),
        "completion_mask": padded([[1] * len(c) for c in COMPLETIONS]),
        "sampling_per_token_logps": padded(LOGPROBS, by=0.0),
        "advantages": torch.tensor(ADVANTAGES),
        "score": torch.tensor(SCORES),
    }
    torch.save(batch, path / "rollouts_4.pt")
    return path / "rollouts_4.pt"


def verl(path: Path) -> Path:
    masks = [
        padded([[1] * len(v) for v in part], left=left)
        for part, left in ((PROMPTS, True), (COMPLETIONS, False))
    ]
    batch = {
        "prompts": padded(PROMPTS, left=True),
        "responses": padded(COMPLETIONS),
        "response_mask": masks[1],
        "attention_mask": torch.cat(masks, dim=1),
        "rollout_log_probs": padded(LOGPROBS, by=0.0),
        "advantages": torch.tensor(ADVANTAGES)[:, None] * masks[1],
        # at the last token of the response, as its reward managers put it
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    }
    torch.save(batch, path / "step_7.pt")
    return path / "step_7.pt"


def openrlhf(path: Path) -> Path:
    ids = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    # all columns but the ids begin with the second token
    mask = [[0] * (len(p) - 1) + [1] * len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    values = [[0.0] * (len(p) - 1) + v for p, v in zip(PROMPTS, LOGPROBS, strict=True)]
    batch = {
        "sequences": padded(ids),
        "attention_mask": padded([[1] * len(row) for row in ids]),
        "action_mask": padded(mask),
        "rollout_log_probs": padded(values, by=0.0),
        "advantages": padded(mask) * torch.tensor(ADVANTAGES)[:, None],
        "rewards": torch.tensor(SCORES),
    }
    torch.save(batch, path / "step_7.pt")
    return path


def prime_rl(path: Path) -> Path:
    file = path / "token_exports" / "step_7" / "rank_0.jsonl"
    file.parent.mkdir(parents=True)
    lines = []
    for row in rows():
        before, count = len(row["prompt_ids"]), len(row["completion_ids"])
        line = {
            "token_ids": row["prompt_ids"] + row["completion_ids"],
            "mask": [False] * before + [True] * count,
            "inference_logprobs": [0.0] * before + row["sampling_logprobs"],
            "advantages": [0.0] * before + [row["advantage"]] * count,
            "rewards": [row["score"]] * (before + count),
        }
        lines.append(json.dumps(line))
    file.write_text("\n".join(lines))
    return path / "token_exports"


def stored(path: Path) -> Path:
    ids = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    ones = [[True] * len(row) for row in ids]
    mask = [[False] * len(p) + [True] * len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    values = [[0.0] * len(p) + v for p, v in zip(PROMPTS, LOGPROBS, strict=True)]
    rollout = Rollout(
        input_ids=padded(ids),
        attention_mask=padded(ones, by=False),
        response_mask=padded(mask, by=False),
        sampling_logprobs=padded(values, by=0.0),
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([False, False]),
    )
    (path / "rollouts").mkdir()
    file = path / "rollouts" / "step_000007.rank_0.safetensors"
    save_rollout(file, rollout, torch.tensor(SCORES), [{"advantage": a} for a in ADVANTAGES])
    return path


@pytest.mark.parametrize("write", [plain, parquet, trl, verl, openrlhf, prime_rl, stored])
def test_a_format_is_read(write: Callable[[Path], Path], tmp_path: Path) -> None:
    found = read_rollouts(write(tmp_path), Padding(0))
    assert [row.ids.tolist() for row in found] == [[5, 6, 7, 10, 11, 2], [8, 9, 12, 2]]  # type: ignore[union-attr]
    assert [row.start for row in found] == [3, 2]
    assert [row.score for row in found] == SCORES
    for row, logprobs, advantage in zip(found, LOGPROBS, ADVANTAGES, strict=True):
        own = row.response
        assert row.loss_mask is not None
        assert torch.equal(row.loss_mask, own)
        assert row.tokens["sampling"][own].tolist() == logprobs
        assert row.tokens["advantages"][own].tolist() == [advantage] * len(logprobs)
        assert row.flaws == []


def test_texts_of_verl_are_read_with_the_step_of_their_file(tmp_path: Path) -> None:
    line = {"input": "one?", "output": "1", "score": 0.5}
    for step in (7, 10):
        (tmp_path / f"{step}.jsonl").write_text(json.dumps(line))
    found = read_rollouts(tmp_path)
    assert [(row.step, row.prompt, row.completion, row.score) for row in found] == [
        (7, "one?", "1", 0.5),
        (10, "one?", "1", 0.5),
    ]


def response(number: int, group: str, score: float, advantage: float) -> Row:
    return Row(place=str(number), group=group, score=score, advantage=advantage)


def test_groups_of_unequal_size_are_checked() -> None:
    # leave-one-out by hand: 1 - 0, 0 - 1/2, 0 - 1/2, and 1 - 0, 0 - 1
    values = [("a", 1, 1), ("a", 0, -0.5), ("a", 0, -0.5), ("b", 1, 1), ("b", 0, -1)]
    made = [response(n, *value) for n, value in enumerate(values)]
    (answer,) = check_advantages([*batches(made, None, 0.0)], "rloo", penalized=False)
    assert answer.text == "the advantages of 5 of 5 responses are those of rloo"
    made[4].advantage = -0.5
    (answer,) = check_advantages([*batches(made, None, 0.0)], "rloo", penalized=False)
    assert (answer.verdict, answer.rows) == ("fault", ["4"])
    made[4].advantage = math.nan
    (answer,) = check_advantages([*batches(made, None, 0.0)], "rloo", penalized=False)
    assert answer.text == "the advantages of 4 of 5 responses are those of rloo"


# of a log-ratio of ln 2: ln 2, (ln 2)²/2, 1/2 - 1 + ln 2
KL = {"k1": 0.69314718, "k2": 0.24022651, "k3": 0.19314718}


def pair(advantage: float) -> list[Row]:
    """Two responses of one token with scores 1 and 0, the first with a log-ratio of ln 2."""
    made = []
    for sign, ref in ((1, -2 * math.log(2)), (-1, -math.log(2))):
        columns = {"old": -math.log(2), "ref": ref, "advantages": sign * advantage}
        row = Row(place=str(sign), group="a", score=float(sign > 0), start=1)
        row.ids, row.written = torch.tensor([1, 2]), torch.tensor([False, True])
        row.tokens = {name: torch.tensor([0.0, v]).double() for name, v in columns.items()}
        made.append(row)
    return made


@pytest.mark.parametrize("form", KL)
def test_a_penalty_is_found_where_it_is_and_nowhere_else(form: str) -> None:
    def verdict(advantage: float, named: str, *, penalized: bool) -> tuple[str, str]:
        found = [*batches(pair(advantage), named, 0.5)]
        (answer,) = check_advantages(found, "rloo", penalized=penalized)
        return answer.verdict, answer.text

    inside = 1 - 0.5 * KL[form]
    assert verdict(inside, form, penalized=True)[0] == "sound"
    assert verdict(1.0, form, penalized=False)[0] == "sound"
    for other in KL.keys() - {form}:
        assert verdict(inside, other, penalized=True)[0] == "fault"
    kind, text = verdict(inside, form, penalized=False)
    assert kind == "fault"
    assert "with the KL penalty fits" in text
    kind, text = verdict(1.0, form, penalized=True)
    assert kind == "fault"
    assert "without the KL penalty fits" in text


class Planted(VerifyRollouts):
    """Checks a wrong mask, weights that did not sample, or a response of older weights."""

    def __init__(self, fault: str) -> None:
        super().__init__(every=1, algorithm="rloo", stop=True)
        self.fault = fault

    def on_rollout(self, trainer: Any, module: Any, experience: Any, records: Any) -> None:
        if self.fault == "mask":
            shifted = experience.loss_mask.roll(-1, dims=1)
            experience = replace(experience, loss_mask=shifted)
        if self.fault == "older":
            version = torch.zeros(len(experience), dtype=torch.int64)
            version[:1] = -1
            experience = replace(experience, weight_version=version)
        if self.fault == "weights":
            with torch.no_grad():
                module.policy.get_input_embeddings().weight.mul_(1.5)
        super().on_rollout(trainer, module, experience, records)


class Dumps(Watcher):
    """Writes a dump of the first iteration."""

    def on_rollout(self, trainer: Any, module: Any, experience: Any, records: Any) -> None:
        folder = Path(trainer.default_root_dir) / "dump"
        bundle = StepBundle(
            stage="policy", batches={"experience": experience}, seeds=(), context={}
        )
        if not folder.exists():
            assert write_dump(module, folder, bundle, []) == ""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Trains RLOO for two iterations in ``run``; start and reference are beside it."""
    tokenizer = build_tokenizer()
    for name, seed in (("start", 0), ("reference", 9)):
        build_language_model(tokenizer, seed=seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {word}"}) for word in "abcdefgh"))

    def train(*callbacks: Any, steps: int = 2, top_p: float = 1.0, **reference: Any) -> Any:
        settings = {"kl_coef": 0.5, "model": CausalLM(source=str(tmp_path / "reference"))}
        module = RLOO(
            CausalLM(source=str(tmp_path / "start")),
            Rewards([letters]),
            num_generations=4,
            sampling=Sampling(max_new_tokens=6, temperature=0.8, top_p=top_p),
            allow_truncated_sampling=top_p < 1,
            optimizer=OptimizerConfig(lr=1e-3),
            reference=Reference(**(settings | reference)),
        )
        options = {"limit_val_batches": 0, "steps": steps}
        return fit(module, prompts, tmp_path / "run", callbacks=[*callbacks], **options)

    return train


@pytest.mark.parametrize(
    "reference",
    [{}, {"kl_estimator": "k3"}, {"placement": "loss"}, {"top_p": 0.8}],
    ids=["k1 in the reward", "k3 in the reward", "in the loss", "top-p"],
)
def test_a_sound_run_has_no_fault(run: Callable[..., Any], reference: dict[str, Any]) -> None:
    trainer = run(VerifyRollouts(every=1, algorithm="rloo", stop=True), **reference)
    assert float(trainer.callback_metrics["verify/faults"]) == 0


@pytest.mark.parametrize(
    ("fault", "named"), [("mask", "shifted by one token"), ("weights", "none of the weights")]
)
def test_a_planted_fault_stops_a_run(run: Callable[..., Any], fault: str, named: str) -> None:
    with pytest.raises(RuntimeError, match=f"iteration 1: .*{named}"):
        run(Planted(fault))


def test_the_group_of_a_response_of_earlier_weights_is_left_out(run: Callable[..., Any]) -> None:
    trainer = run(Planted("older"), steps=1)
    assert float(trainer.callback_metrics["verify/faults"]) == 0


def test_files_of_a_run_are_verified_with_its_penalty(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(RolloutLog(save_tensors=True, print_every=None), Dumps())
    names = [f"--weights={name}={tmp_path / name}" for name in ("start", "reference")]
    base = [*names, "--algorithm", "rloo", "--kl_in", "reward", "--temperature", "0.8"]
    file = str(tmp_path / "run" / "rollouts" / "step_000001.rank_0.safetensors")
    known = ["--reference", "reference", "--kl_coef"]
    for path, options in ((file, known), (str(tmp_path / "run" / "dump"), ["--kl_coef"])):
        run_verify([path, *base, *options, "0.5"])
        assert "16 of 16 responses are those of rloo" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="3"):
            run_verify([path, *base, *options, "0.4"])
        assert "advantages are not those of rloo" in capsys.readouterr().out
    run_verify([file, *base, "--kl_coef", "0.5"])
    assert "name --reference" in capsys.readouterr().out
