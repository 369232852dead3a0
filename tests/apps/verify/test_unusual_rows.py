"""Sound rows of unusual kinds raise no alarm; faults in them are found; unusable rows are named."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lrlhf.apps.verify import Verification, verify
from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.rollout_rows import Padding, read_rollouts, rows_of_batch
from lrlhf.apps.verify.verify_command import run_verify
from lrlhf.options.errors import ConfigError
from lrlhf.types import Rollout
from tests import vlms
from tests.apps.verify.test_verify import (
    ALONE,
    END,
    PLAIN,
    TOKENIZER,
    TURNS,
    Run,
    all_trained,
    each,
    kept_top_p,
    logprobs_of,
    nothing,
    pad,
    sound_run,
)

LOGPROBS = ("sampling_logprobs", "old_logprobs", "ref_logprobs")


def checked(run: Run, folder: Path, padding: Padding | None = None) -> Verification:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in run.rows))
    padding = padding or Padding(TOKENIZER.pad_token_id)
    return verify(read_rollouts(path, padding), run.candidates, run.settings)


def recomputed(run: Run, row: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[float]:
    """The log-probabilities of a completion, by a plain pass of the expected weights."""
    model = copy.deepcopy(run.candidates[0].model).to(dtype)  # type: ignore[arg-type]
    ids = row["prompt_ids"] + row["completion_ids"]
    return logprobs_of(model, [ids], 1.0)[0, len(row["prompt_ids"]) :].tolist()


def four_digits(row: dict[str, Any]) -> None:
    for name in (*LOGPROBS, "kl"):
        row[name] = [round(value, 4) for value in row[name]]
    row["advantage"] = round(row["advantage"], 4)


def bfloat16_numbers(row: dict[str, Any]) -> None:
    for name in LOGPROBS:
        row[name] = torch.tensor(row[name]).bfloat16().tolist()


def left_out(run: Run) -> None:
    """Rows that were cut off are masked, and so is their KL."""
    for row in run.rows:
        if row["finish_reason"] == "length":
            row["loss_mask"] = [False] * len(row["loss_mask"])
            row["kl"] = [0.0] * len(row["kl"])


def padded_with_an_end(run: Run) -> None:
    """One end token pads, responses end with the other."""
    for row in run.rows:
        row["completion_ids"][-1], row["finish_reason"] = END, "stop"
        row["sampling_logprobs"] = recomputed(run, row)
        del row["old_logprobs"]
    pad(run.rows, TOKENIZER.eos_token_id)
    for row in run.rows:
        row["completion_ids"] += [TOKENIZER.eos_token_id] * 2
        for name in ("loss_mask", "sampling_logprobs"):
            row[name] = row[name] + [0] * 2


def tool_within_a_turn(run: Run) -> None:
    """A turn goes on behind the output of a tool, with no end in between."""
    output = TOKENIZER.encode("<information>17</information>")
    for row in run.rows:
        row["completion_ids"][5:5] = output
        row["loss_mask"][5:5] = [False] * len(output)
        values = recomputed(run, row)
        row["sampling_logprobs"] = [
            v if flag else 0.0 for v, flag in zip(values, row["loss_mask"], strict=True)
        ]
        del row["old_logprobs"]


def rendered_with_options(row: dict[str, Any]) -> None:
    row["prompt_ids"] = row["prompt_ids"] + TOKENIZER.encode("<think>\n\n</think>\n\n")
    for name in ("sampling_logprobs", "old_logprobs"):
        del row[name]


def numbered_anew(run: Run) -> None:
    """Conversations have the same numbers in each step."""
    for number, row in enumerate(run.rows):
        row["conversation"], row["step"] = number % 4, number // 4


def further_reward(row: dict[str, Any]) -> None:
    row["raw_reward"] = 3 * row["score"]


def reward_at_the_end(row: dict[str, Any]) -> None:
    row["rewards"] = [0.0] * (len(row["completion_ids"]) - 1) + [row.pop("score")] + [0.0] * 3


def rewards_by_name(row: dict[str, Any]) -> None:
    row["scores"] = {"right": row.pop("score") - 1, "format": 1.0, "length": None}


def recorded_top_p(row: dict[str, Any]) -> None:
    row["top_p"] = 0.8


def empty_response(run: Run) -> None:
    for name in ("completion_ids", "loss_mask", "sampling_logprobs", "old_logprobs"):
        run.rows[0][name] = []


def of_a_bfloat16_engine(run: Run) -> None:
    run.candidates[0].dtype = torch.bfloat16
    model = copy.deepcopy(run.candidates[0].model).bfloat16()
    for row in run.rows:
        ids = [row["prompt_ids"] + row["completion_ids"]]
        row["sampling_logprobs"] = logprobs_of(model, ids, 1.0)[
            0, len(row["prompt_ids"]) :
        ].tolist()


SOUND: list[tuple[str, dict[str, Any], Callable[[Run], None]]] = [
    ("tokens that are certain, whose log-probability is 0", TURNS | {"temperature": 0.02}, nothing),
    ("numbers of four digits", PLAIN | {"kl": "k3"}, each(four_digits)),
    ("numbers of bfloat16", PLAIN | {"kl": "k3"}, each(bfloat16_numbers)),
    ("a KL that is masked with its row", PLAIN | {"kl": "k1"}, left_out),
    ("padding that ends responses too", PLAIN, padded_with_an_end),
    ("a tool within a turn", PLAIN, tool_within_a_turn),
    ("a template with options", PLAIN, each(rendered_with_options)),
    ("conversations of several steps", PLAIN, numbered_anew),
    ("a further column of rewards", PLAIN, each(further_reward)),
    ("a reward for each token", PLAIN, each(reward_at_the_end)),
    ("rewards by name in place of a score", PLAIN, each(rewards_by_name)),
    ("rows that record top-p", PLAIN | {"keep": kept_top_p, "old": False}, each(recorded_top_p)),
    ("an empty response", PLAIN, empty_response),
    (
        "256 responses of one token by an engine in bfloat16",
        PLAIN | {"prompts": 32, "group": 8, "length": 1},
        of_a_bfloat16_engine,
    ),
]


@pytest.mark.parametrize(
    ("settings", "change"), [case[1:] for case in SOUND], ids=[case[0] for case in SOUND]
)
def test_unusual_rows_raise_no_alarm(
    settings: dict[str, Any], change: Callable[[Run], None], tmp_path: Path
) -> None:
    run = sound_run(8, **settings)
    change(run)
    options: dict[str, Any] = {}
    if change is left_out:
        options["truncated"] = "mask"
    if change is numbered_anew:
        options["algorithm"] = None
    run = run._replace(settings=run.settings._replace(**options))
    found = checked(run, tmp_path, Padding(_padding_of(change), run.candidates[0].end_ids))
    assert [fault.text for fault in found.faults] == []


def _padding_of(change: Callable[[Run], None]) -> int:
    end = change is padded_with_an_end
    return int(TOKENIZER.eos_token_id if end else TOKENIZER.pad_token_id)


def test_a_response_that_a_string_ended_is_not_cut_off(tmp_path: Path) -> None:
    run = sound_run(8, **PLAIN)
    for row in run.rows:
        row["finish_reason"] = "stop"
    settings = run.settings._replace(truncated="mask", max_new_tokens=None)
    assert checked(run._replace(settings=settings), tmp_path).faults == []


def infinite(row: dict[str, Any]) -> None:
    row["sampling_logprobs"][2] = -math.inf


def missing(row: dict[str, Any]) -> None:
    row["sampling_logprobs"] = [math.nan] * len(row["sampling_logprobs"])


def zero(row: dict[str, Any]) -> None:
    row["sampling_logprobs"] = [0.0] * len(row["sampling_logprobs"])


HIDDEN: list[tuple[str, dict[str, Any], Callable[[Run], None], str]] = [
    ("an infinite number hides the base", PLAIN | {"engine": "base"}, each(infinite), "base samp"),
    ("an infinite number", PLAIN, each(infinite), "NaN or infinite"),
    ("numbers that are missing", PLAIN, each(missing), "NaN or infinite"),
    ("zeros for numbers", PLAIN | {"old": False}, each(zero), "none of the weights"),
    (
        "few responses of the base, nothing recorded",
        ALONE | {"engine": "base", "length": 100, "prompts": 2, "group": 4},
        nothing,
        "base sampled",
    ),
    (
        "tool tokens are trained on where tokens are certain",
        TURNS | {"temperature": 0.02},
        each(all_trained),
        "did not write",
    ),
]


@pytest.mark.parametrize(
    ("settings", "plant", "named"), [case[1:] for case in HIDDEN], ids=[case[0] for case in HIDDEN]
)
def test_a_fault_in_unusual_rows_is_found(
    settings: dict[str, Any], plant: Callable[[Run], None], named: str, tmp_path: Path
) -> None:
    run = sound_run(8, **settings)
    plant(run)
    assert any(named in fault.text for fault in checked(run, tmp_path).faults)


UNUSABLE = {
    "token id 1000000": {"completion_ids": [10**6] * 12},
    "token id -1": {"completion_ids": [-1] * 12},
    "has 403 tokens": {"completion_ids": [9] * 380},
    r"jsonl:1: sampling holds \[0": {"sampling_logprobs": [[0.5]] * 12},
    "jsonl:1: score holds 'good'": {"score": ["good"]},
    "jsonl:1: micro_batch holds 'a'": {"micro_batch": "a"},
}


@pytest.mark.parametrize("named", UNUSABLE)
def test_a_row_that_cannot_be_used_is_named(named: str, tmp_path: Path) -> None:
    run = sound_run(8, **PLAIN)
    run.rows[0] |= UNUSABLE[named]
    with pytest.raises(ValueError, match=named):
        checked(run, tmp_path)


def test_tensors_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step_3.pt"
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"step_3\.pt is damaged"):
        read_rollouts(path)
    ids = torch.ones(2, 3, dtype=torch.long)
    torch.save({"prompt_ids": ids, "completion_ids": ids, "score": torch.ones(5)}, path)
    with pytest.raises(ValueError, match=r"different numbers of rows.*'score': 5"):
        read_rollouts(path)
    torch.save({"prompt_ids": ids, "completion_ids": ids, "pixel_values": torch.ones(9, 4)}, path)
    assert [row.step for row in read_rollouts(path)] == [3, 3]


def test_an_engine_in_bfloat16_is_no_fault_of_weights_in_float32(tmp_path: Path) -> None:
    run = sound_run(8, **PLAIN)
    of_a_bfloat16_engine(run)
    run.candidates[0].dtype = None
    first = checked(run, tmp_path).answers[0]
    assert first.verdict == "unknown"
    assert "16 of 16" in first.text
    assert "--engine_dtype bfloat16" in first.text
    run.candidates[0].dtype = torch.float32
    assert "none of the weights" in checked(run, tmp_path).answers[0].text


def test_responses_about_images_are_computed_with_them() -> None:
    vlm = vlms.build_vlm("qwen2_vl")
    entries = [vlms.row(vlm, [0], answer="one!"), vlms.row(vlm, [1], answer="two?")]
    batch = vlms.batch_of(entries)
    values = torch.zeros(batch.input_ids.shape)
    with torch.no_grad():
        for index, entry in enumerate(entries):
            own = vlms.plain_logprobs(vlm.model, vlm, entry)
            values[index, batch.response_mask[index]] = own
    rollout = Rollout(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        response_mask=batch.response_mask,
        media=batch.media,
        sampling_logprobs=values,
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([False, False]),
    )
    rows = [*rows_of_batch(rollout, "step")]
    policy = Candidate("policy", vlm.model, vlm.tokenizer, torch.float32)
    first = verify(rows, [policy]).answers[0]
    assert (first.verdict, first.text[:21]) == ("sound", "policy sampled 2 of 2")
    for row in rows:
        row.media = None
    first = verify(rows, [policy]).answers[0]
    assert (first.verdict, "images" in first.text) == ("unknown", True)


def test_responses_that_are_alone_in_their_group_have_no_formula(tmp_path: Path) -> None:
    run = sound_run(8, **PLAIN)
    for number, row in enumerate(run.rows):
        row["group"] = number
    texts = [answer.text for answer in checked(run, tmp_path).answers]
    assert any("no two responses have the same group" in text for text in texts)


def test_adapters_are_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sound_run(8, **PLAIN)
    base = run.candidates[2].model
    base.save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, **options)).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapters")
    for row in run.rows:
        ids = [row["prompt_ids"] + row["completion_ids"]]
        values = logprobs_of(adapted, ids, 1.0)[0, len(row["prompt_ids"]) :].tolist()
        row["sampling_logprobs"] = row["old_logprobs"] = values
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in run.rows))
    names = [f"--weights={name}={tmp_path / name}" for name in ("adapters", "base")]
    run_verify([str(file), *names])
    assert "ok: adapters sampled 16 of 16 responses" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="3"):
        run_verify([str(file), *names[::-1]])
    assert "FAULT: adapters sampled 16 of 16 responses" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--weights a: .*config\.json"):
        run_verify([str(file), f"--weights=a={tmp_path}"])
