"""Public bugs, re-created as faults of sound rollouts, are found; sound rollouts raise no alarm."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lrlhf.apps.verify import Settings, verify
from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.rollout_rows import Padding, Row, read_rollouts
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model, build_tokenizer

Rows = list[dict[str, Any]]
TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
OPENING = TOKENIZER.encode("<|im_start|>assistant\n")


class Run(NamedTuple):
    """Rollouts in the form of plain rows, and what is said of them."""

    rows: Rows
    candidates: list[Candidate]
    settings: Settings
    draws: random.Random

    def check(self, folder: Path) -> dict[str, list[str]]:
        """Write the rows, verify them, and return the sentences of the faults by item."""
        path = folder / "rollouts.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in self.rows))
        rows = read_rollouts(path, Padding(TOKENIZER.pad_token_id))
        result = verify(rows, self.candidates, self.settings)
        faults: dict[str, list[str]] = {}
        for answer in result.faults:
            faults.setdefault(answer.item, []).append(answer.text)
        return faults


def model(seed: int, **options: Any) -> Any:
    """A tiny Llama that may end its turns."""
    made = build_language_model(TOKENIZER, seed=seed, **options)
    made.generation_config.eos_token_id = [END, TOKENIZER.eos_token_id]
    return made


def near(base: Any, seed: int, size: float = 0.02) -> Any:
    """The weights a few steps later."""
    other = model(0, hidden_size=base.config.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in base.state_dict().items():
            noise = torch.randn(value.shape, generator=generator) * size
            other.state_dict()[name].copy_(value + noise)
    return other


@torch.no_grad()
def logprobs_of(policy: Any, ids: list[list[int]], temperature: float) -> torch.Tensor:
    """``[B, T]``, of rows of one length, by a plain pass."""
    batch = torch.tensor(ids)
    scores = policy(batch).logits.float() / temperature
    own = scores[:, :-1].log_softmax(-1).gather(-1, batch[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(len(ids), 1), own], dim=1)


class Sampled(NamedTuple):
    ids: list[list[int]]
    written: list[bool]
    """Of all rows: tokens of the policy's turns."""
    logprobs: torch.Tensor


@torch.no_grad()
def sampled(
    policies: list[Any],
    prompts: list[list[int]],
    turns: list[list[int]],
    length: int,
    temperature: float,
    generator: torch.Generator,
    keep: Callable[..., Any] | None = None,
) -> Sampled:
    """Sample turns of one length, with given tokens between them; ``policies`` are those of tokens.

    In dialogues of several turns each turn but the last is closed with its end.
    """
    rows, written = [list(prompt) for prompt in prompts], [False] * len(prompts[0])
    kept = [torch.zeros(len(prompts), len(prompts[0]))]
    for number in range(len(turns) + 1):
        for place in range(length):
            policy = policies[min(len(policies) - 1, place)]
            scores = policy(torch.tensor(rows)).logits[:, -1].float() / temperature
            plain = scores.log_softmax(-1)
            if keep is not None:
                scores = keep(scores)
            if number < len(turns):
                scores = scores.clone()
                ends = torch.tensor([END, TOKENIZER.eos_token_id])
                last = place == length - 1
                scores[:, ends] = -torch.inf
                if last:
                    scores = torch.full_like(scores, -torch.inf)
                    scores[:, END] = 0.0
            chosen = torch.multinomial(scores.softmax(-1), 1, generator=generator)
            shown = scores.log_softmax(-1) if keep is not None and number == len(turns) else plain
            kept.append(shown.gather(-1, chosen))
            written.append(True)
            for row, token in zip(rows, chosen.flatten().tolist(), strict=True):
                row.append(token)
        if number < len(turns):
            for row in rows:
                row.extend(turns[number])
            written += [False] * len(turns[number])
            kept.append(torch.zeros(len(rows), len(turns[number])))
    return Sampled(rows, written, torch.cat(kept, dim=1))


def group_advantages(scores: np.ndarray, algorithm: str) -> np.ndarray:
    """``[P, G]``, by the papers' formulas."""
    mean = scores.mean(axis=1, keepdims=True)
    count = scores.shape[1]
    if algorithm == "rloo":
        return (scores - mean) * count / (count - 1)
    if algorithm == "dr_grpo":
        return scores - mean
    return (scores - mean) / (scores.std(axis=1, ddof=1, keepdims=True) + 1e-4)


def sound_run(seed: int, **fixed: Any) -> Run:
    """A sound run of random settings."""
    draws = random.Random(seed)
    pick = {
        "hidden": draws.choice([16, 32]),
        "temperature": draws.choice([0.6, 0.8, 1.0, 1.2]),
        "algorithm": draws.choice(["rloo", "grpo", "dr_grpo"]),
        "group": draws.choice([2, 4, 8]),
        "prompts": draws.choice([3, 5]),
        "turns": draws.choice([0, 0, 1, 2]),
        "length": draws.choice([6, 12, 20]),
        "recorded": draws.random() < 0.8,
        "old": draws.random() < 0.6,
        "kl": draws.choice([None, "k1", "k2", "k3"]),
        "padded": draws.random() < 0.5,
        "binary": draws.random() < 0.5,
        "engine": None,
        "policies": None,
        "keep": None,
    } | fixed
    if not pick["recorded"]:
        pick["turns"] = 0
    base = model(seed, hidden_size=pick["hidden"])
    current, stale = near(base, seed + 1), near(base, seed + 2)
    names = {"k": current, "k-1": stale, "base": base}
    candidates = [Candidate(name, each, TOKENIZER, torch.float32) for name, each in names.items()]
    generator = torch.Generator().manual_seed(seed)
    engines = (
        [names[name] for name in pick["policies"] or [pick["engine"] or "k"]]
        if not callable(pick["engine"])
        else [pick["engine"](base)]
    )
    group, count = pick["group"], pick["prompts"]
    texts = [f"{draws.choice('abcdef')}{draws.choice('xyz')}{number:02}" for number in range(count)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [
        TOKENIZER.encode(
            TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )
        for chat in chats
    ]
    tool = TOKENIZER.encode("\n<|im_start|>user\nok 17<|im_end|>\n<|im_start|>assistant\n")
    got = sampled(
        engines,
        [p for p in prompts for _ in range(group)],
        [tool] * pick["turns"],
        pick["length"],
        pick["temperature"],
        generator,
        pick["keep"],
    )
    old = logprobs_of(current, got.ids, pick["temperature"])
    ref = logprobs_of(base, got.ids, pick["temperature"])
    shape = (count, group)
    numbers = np.random.default_rng(seed)
    scores = (
        numbers.integers(0, 2, shape).astype(float)
        if pick["binary"]
        else numbers.normal(size=shape)
    )
    advantages = group_advantages(scores, pick["algorithm"]).astype(np.float32)
    rows: Rows = []
    for index, ids in enumerate(got.ids):
        start = len(prompts[0])
        last = len(ids) - pick["length"]
        stop = next(
            (n + 1 for n in range(last, len(ids)) if ids[n] in (END, TOKENIZER.eos_token_id)),
            len(ids),
        )
        ended = ids[stop - 1] in (END, TOKENIZER.eos_token_id)
        mask = [bool(flag) for flag in got.written[start:stop]]
        row: dict[str, Any] = {
            "prompt_ids": ids[:start],
            "completion_ids": ids[start:stop],
            "loss_mask": mask,
            "score": float(scores.flat[index]),
            "advantage": float(advantages.flat[index]),
            "group": index // group,
            "step": 1,
            "finish_reason": "stop" if ended else "length",
            "temperature": pick["temperature"],
            "messages": chats[index // group],
        }
        if pick["recorded"]:
            row["sampling_logprobs"] = got.logprobs[index, start:stop].tolist()
        if pick["old"]:
            row["old_logprobs"] = old[index, start:stop].tolist()
        if pick["kl"] and (pick["old"] or pick["recorded"]):
            row["ref_logprobs"] = ref[index, start:stop].tolist()
            policy = old if pick["old"] else got.logprobs
            gap = policy[index, start:stop] - ref[index, start:stop]
            kl = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[pick["kl"]]
            row["kl"] = [float(v) if m else 0.0 for v, m in zip(kl, mask, strict=True)]
        rows.append(row)
    if pick["padded"]:
        pad(rows, TOKENIZER.pad_token_id)
    settings = Settings(
        algorithm=pick["algorithm"],
        kl=pick["kl"],
        truncated="train",
        max_new_tokens=None if pick["turns"] else pick["length"],
        sampling=Sampling(temperature=pick["temperature"]),
    )
    return Run(rows, candidates, settings, draws)


def pad(rows: Rows, token: int) -> None:
    """Pad prompts left and completions right, as tensors of a batch are."""
    most = max(len(row["completion_ids"]) for row in rows)
    left = max(len(row["prompt_ids"]) for row in rows) + 2
    for row in rows:
        missing = most - len(row["completion_ids"])
        short = left - len(row["prompt_ids"])
        row["prompt_mask"] = [0] * short + [1] * len(row["prompt_ids"])
        row["prompt_ids"] = [token] * short + row["prompt_ids"]
        row["completion_ids"] = row["completion_ids"] + [token] * missing
        for name in ("loss_mask", "sampling_logprobs", "old_logprobs", "ref_logprobs", "kl"):
            if name in row:
                row[name] = row[name] + [0] * missing


def each(function: Callable[[dict[str, Any]], None]) -> Callable[[Run], None]:
    """Apply a fault to every row."""

    def apply(run: Run) -> None:
        for row in run.rows:
            function(row)

    return apply


def rolled(values: list[Any], by: int) -> list[Any]:
    return [False, *values[:-1]] if by > 0 else [*values[1:], False]


def without_newline(row: dict[str, Any]) -> None:
    """Drop the first separator behind a turn from ids and columns."""
    at = row["loss_mask"].index(False)
    for name in ("completion_ids", "loss_mask", "sampling_logprobs"):
        del row[name][at]


def without_end(row: dict[str, Any]) -> None:
    at = row["loss_mask"].index(False) - 1
    for name in ("completion_ids", "loss_mask", "sampling_logprobs"):
        del row[name][at]


def inverted(row: dict[str, Any]) -> None:
    row["loss_mask"] = [not flag for flag in row["loss_mask"]]


def all_trained(row: dict[str, Any]) -> None:
    row["loss_mask"] = [True] * len(row["loss_mask"])


def prompt_trained(row: dict[str, Any]) -> None:
    row["loss_mask"] = [True] * len(row["prompt_ids"]) + row["loss_mask"]


def first_missing(row: dict[str, Any]) -> None:
    row["loss_mask"][0] = False


def end_missing(row: dict[str, Any]) -> None:
    row["loss_mask"][-1] = False


def only_last_turn(row: dict[str, Any]) -> None:
    last = len(row["loss_mask"]) - row["loss_mask"][::-1].index(False)
    row["loss_mask"] = [flag and at >= last for at, flag in enumerate(row["loss_mask"])]


def behind_end(row: dict[str, Any]) -> None:
    """Fill up with end tokens, which count."""
    row["completion_ids"] += [END] * 4
    row["loss_mask"] += [True] * 4
    if "sampling_logprobs" in row:
        row["sampling_logprobs"] += [0.0] * 4


def tokenized_again(row: dict[str, Any]) -> None:
    """Another segmentation of the second half, with the log-probabilities of the first."""
    ids = row["completion_ids"]
    half = len(ids) // 2
    row["completion_ids"] = ids[:half] + [(token + 1) % 200 + 4 for token in ids[half:]]


def longer_mask(row: dict[str, Any]) -> None:
    row["completion_ids"] = row["completion_ids"][:-2]
    row["loss_mask"] = row["loss_mask"][:-2]


def double_start(row: dict[str, Any]) -> None:
    start = row["prompt_ids"][0]
    row["prompt_ids"] = [start, *row["prompt_ids"]]


def marked_truncated(row: dict[str, Any]) -> None:
    row["completion_ids"][-1] = END
    row["finish_reason"] = "length"


def rescaled(factor: float) -> Callable[[Run], None]:
    def apply(run: Run) -> None:
        for row in run.rows:
            row["advantage"] *= factor

    return apply


def batch_score(run: Run) -> None:
    scores = np.array([row["score"] for row in run.rows])
    for row, value in zip(
        run.rows, (scores - scores.mean()) / (scores.std(ddof=1) + 1e-8), strict=True
    ):
        row["advantage"] = float(value)


def batch_deviation(run: Run) -> None:
    scores = np.array([row["score"] for row in run.rows]).reshape(-1, 4)
    found = (scores - scores.mean(axis=1, keepdims=True)) / (scores.std(ddof=1) + 1e-4)
    for row, value in zip(run.rows, found.flatten(), strict=True):
        row["advantage"] = float(value)


def interleaved(run: Run) -> None:
    """Groups are read off rows that belong to different prompts."""
    count = len(run.rows) // 4
    scores = np.array([row["score"] for row in run.rows])
    order = [g * 4 + p for p in range(4) for g in range(count)]
    found = group_advantages(scores[order].reshape(-1, 4), "rloo").flatten()
    for place, value in zip(order, found, strict=True):
        run.rows[place]["advantage"] = float(value)


def unscored_as_zero(run: Run) -> None:
    """A reward that returned nothing counts as 0 in the baseline of its siblings."""
    for first in range(0, len(run.rows), 4):
        own = run.rows[first : first + 4]
        scores = np.array([[row["score"] for row in own]])
        scores[0, 0] = 0.0
        for row, value in zip(own, group_advantages(scores, "rloo")[0], strict=True):
            row["advantage"] = float(value)
        own[0]["score"] = float("nan")
        own[0]["advantage"] = 0.0


def other_temperature(run: Run) -> None:
    """The trainer forgets the temperature."""
    policy, ids = run.candidates[0].model, [r["prompt_ids"] + r["completion_ids"] for r in run.rows]
    for row, own in zip(run.rows, ids, strict=True):
        values = logprobs_of(policy, [own], 1.0)[0, len(row["prompt_ids"]) :]
        row["old_logprobs"] = values.tolist()


def trained_base(run: Run) -> None:
    """The trainer's graph holds the adapter of the start."""
    policy = run.candidates[2].model
    for row in run.rows:
        values = logprobs_of(policy, [row["prompt_ids"] + row["completion_ids"]], 1.0)
        row["old_logprobs"] = values[0, len(row["prompt_ids"]) :].tolist()


def kept_cache(run: Run) -> None:
    """New weights go on with keys and values of the old ones, from the sixth token on."""
    stale, new = run.candidates[1], run.candidates[0]
    for row in run.rows:
        ids = torch.tensor(row["prompt_ids"] + row["completion_ids"])
        start = len(row["prompt_ids"])
        own = new.continued(stale, Row(place="", ids=ids), start + 5, 1.0)[start:]
        first = logprobs_of(stale.model, [ids.tolist()], 1.0)[0, start:]
        row["sampling_logprobs"] = torch.where(own.isnan(), first.double(), own).tolist()


def micro_batches(run: Run) -> None:
    """The loss of the step is the mean of the means of its micro-batches."""
    means = []
    for number in range(0, len(run.rows), 3):
        own = run.rows[number : number + 3]
        losses = []
        for row in own:
            row["micro_batch"] = number // 3
            row["losses"] = [run.draws.gauss(0, 1) for _ in row["completion_ids"]]
            losses += row["losses"]
        means.append(sum(losses) / len(losses))
    for row in run.rows:
        row["step_loss"] = sum(means) / len(means)


def exchanged_kl(row: dict[str, Any]) -> None:
    pairs = zip(row["old_logprobs"], row["ref_logprobs"], strict=True)
    row["kl"] = [float(np.exp(p - r) - 1 - (p - r)) for p, r in pairs]


def history(run: Run) -> None:
    """Each row is continued by one whose history has other ids."""
    later = []
    for number, row in enumerate(run.rows):
        row["conversation"] = number
        del row["messages"]
        changed = {**row, "prompt_ids": row["prompt_ids"] + row["completion_ids"] + OPENING}
        changed["prompt_ids"][len(row["prompt_ids"])] += 1
        later.append(changed)
    run.rows[:] = [one for pair in zip(run.rows, later, strict=True) for one in pair]
    for row in run.rows:
        for name in ("advantage", "sampling_logprobs", "old_logprobs"):
            row.pop(name, None)


def first_rows_of_base(run: Run) -> None:
    """A rollback in the middle of the batch."""
    for row in run.rows[::2]:
        ids = row["prompt_ids"] + row["completion_ids"]
        values = logprobs_of(run.candidates[2].model, [ids], 1.0)[0, len(row["prompt_ids"]) :]
        row["sampling_logprobs"] = values.tolist()


def corrupt(base: Any) -> Any:
    """Two layers are exchanged."""
    made = near(base, 5)
    made.model.layers[0].mlp, made.model.layers[1].mlp = (
        made.model.layers[1].mlp,
        made.model.layers[0].mlp,
    )
    return made


def kept_top_p(scores: torch.Tensor) -> torch.Tensor:
    ordered = scores.softmax(-1).sort(-1, descending=True)
    cut = ordered.values.cumsum(-1) - ordered.values >= 0.8
    return scores.masked_fill(cut.gather(-1, ordered.indices.argsort(-1)), -torch.inf)


def raw(run: Run) -> None:
    """Log-probabilities over the whole vocabulary, of tokens that were cut off to top-k."""
    for row in run.rows:
        ids = row["prompt_ids"] + row["completion_ids"]
        values = logprobs_of(run.candidates[0].model, [ids], 1.0)[0, len(row["prompt_ids"]) :]
        row["sampling_logprobs"] = values.tolist()


def kept_top_k(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores < scores.topk(20).values[:, -1:], -torch.inf)


def shifted_logprobs(row: dict[str, Any]) -> None:
    row["sampling_logprobs"] = [*row["sampling_logprobs"][1:], row["sampling_logprobs"][0]]


def wrong_sum(row: dict[str, Any]) -> None:
    row["rewards"] = {"right": row["score"], "format": 1.0}


def nothing(run: Run) -> None:
    """The fault is in how the run sampled."""


PLAIN = {
    **{"turns": 0, "recorded": True, "old": True, "kl": None, "padded": False, "group": 4},
    **{"prompts": 4, "temperature": 1.0, "binary": False, "algorithm": "rloo", "length": 12},
}
TURNS = PLAIN | {"turns": 2, "old": False}
ALONE = PLAIN | {"recorded": False, "old": False}


def fault(
    name: str,
    named: str,
    plant: Callable[[Run], None] = nothing,
    base: dict[str, Any] = PLAIN,
    **settings: Any,
) -> Any:
    """A fault as the thread of its name has it: what is to be reported, and how it is planted."""
    return pytest.param(base | settings, plant, *named.split(": ", 1), id=name)


FAULTS = [
    fault("verl#7495: adapter never delivered", "weights: base sampled", engine="base"),
    fault("TRL#3189: weights of the step before", "weights: k-1 sampled", engine="k-1"),
    fault(
        "verl#7495: the same, nothing recorded",
        "weights: base sampled",
        nothing,
        ALONE,
        engine="base",
        length=20,
        prompts=16,
    ),
    fault(
        "TRL#5312: sleep mode reloads the base", "weights: base sampled 8 of 16", first_rows_of_base
    ),
    fault(
        "SkyRL#1680: expert weights corrupt after a sync",
        "weights: none of the weights",
        engine=corrupt,
    ),
    fault(
        "slime#1800: weights change within responses",
        "weights: from token 5 on",
        policies=["k-1"] * 5 + ["k"],
    ),
    fault("slime#1800: they change, the cache stays", "weights: from token 5 on", kept_cache),
    fault(
        "TRL#3750: log-probabilities one token off", "weights: one token", each(shifted_logprobs)
    ),
    fault("TRL#7269: top-p in the ratio", "ratio: top-p between", keep=kept_top_p),
    fault(
        "prime-rl#3235: top-k not in the ratio",
        "ratio: cut off",
        raw,
        keep=kept_top_k,
        length=20,
        prompts=16,
    ),
    fault(
        "unsloth-zoo#832: trainer without temperature",
        "ratio: temperature 1",
        other_temperature,
        temperature=0.6,
    ),
    fault("mlx-lm-lora#50: adapter constant in the graph", "ratio: those of base", trained_base),
    fault("verl#6501: newline dropped at turns", "tokens: separator", each(without_newline), TURNS),
    fault("TRL#5242: end dropped at turns", "tokens: no end", each(without_end), TURNS),
    fault("TRL#5224: history tokenized again", "tokens: history", history),
    fault("verl#6719: response tokenized again", "weights: other tokens", each(tokenized_again)),
    fault(
        "TRL#5144: mask longer than the ids", "tokens: not of the same tokens", each(longer_mask)
    ),
    fault("TRL#5471: first message twice", "tokens: chat template", each(double_start)),
    fault("TRL#4975: tool tokens trained on", "mask: did not write", each(all_trained), TURNS),
    fault("RAGEN#71: mask inverted", "mask: off by one turn", each(inverted), TURNS),
    fault("NeMo-RL#1956: prompt trained on", "mask: prompt tokens", each(prompt_trained)),
    fault("minimind#621: first token left out", "mask: shifted by one token", each(first_missing)),
    fault("slime#1490: stop token left out", "mask: last token", each(end_missing)),
    fault(
        "ms-swift#7838: only the last turn trained on",
        "mask: turn 1 of 3",
        each(only_last_turn),
        TURNS,
    ),
    fault(
        "MemGen#33: tokens behind the end count", "mask: behind the end", each(behind_end), TURNS
    ),
    fault(
        "TRL#7039: several end tokens, one known",
        "truncated: marked as truncated",
        each(marked_truncated),
        ALONE,
    ),
    fault("verl#5355: RLOO without n / (n - 1)", "advantages: dr_grpo fits", rescaled(0.75)),
    fault(
        "grpo-flat#2: z-score over the batch",
        "advantages: z-score over the batch",
        batch_score,
        algorithm="grpo",
    ),
    fault(
        "ms-swift#4919: deviation of the batch",
        "advantages: deviation of the batch",
        batch_deviation,
        algorithm="grpo",
    ),
    fault("R1-V#67: groups interleaved", "advantages: other groups", interleaved),
    fault("TRL#5902: no reward counts as zero", "advantages: not those of rloo", unscored_as_zero),
    fault("TRL#5902: score is not the sum", "advantages: not the sum", each(wrong_sum)),
    fault("mlx-lm-lora#50: KL the wrong way round", "kl: exchanged", each(exchanged_kl), kl="k3"),
    fault("TRL#2617: loss averaged by micro-batch", "loss: each micro-batch", micro_batches),
]


@pytest.mark.parametrize(("settings", "plant", "item", "named"), FAULTS)
def test_a_public_bug_is_found(
    settings: dict[str, Any], plant: Callable[[Run], None], item: str, named: str, tmp_path: Path
) -> None:
    run = sound_run(7, **settings)
    plant(run)
    found = run.check(tmp_path)
    assert any(named in text for text in found.get(item, [])), found
    # of many rows it is one fault
    assert all(len(texts) < len(run.rows) / 4 for texts in found.values()), found


@pytest.mark.parametrize("seed", range(6))
def test_a_sound_run_raises_no_alarm(seed: int, tmp_path: Path) -> None:
    assert sound_run(seed).check(tmp_path) == {}


@pytest.mark.exhaustive
def test_a_hundred_sound_runs_raise_no_alarm(tmp_path: Path) -> None:
    alarms = {seed: found for seed in range(100, 200) if (found := sound_run(seed).check(tmp_path))}
    assert alarms == {}
