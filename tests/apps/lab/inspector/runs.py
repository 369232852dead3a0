"""Run folders in code: of a policy that learns, and of a reward model."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

QUESTIONS = [
    ("How do I keep basil alive on a windowsill?", ["light", "water", "pinch off the flowers"]),
    ("Explain to a child why the sky is blue.", ["sunlight", "air", "blue light is scattered"]),
    ("What should I check before I buy a used bicycle?", ["frame", "brakes", "chain", "wheels"]),
    ("Write two sentences about the sea in winter.", ["grey", "gulls", "wind"]),
    ("Wie koche ich Eier so, dass der Dotter weich bleibt?", ["sechs Minuten", "kaltes Wasser"]),
    ("Is it rude to leave a party without saying goodbye?", ["it depends", "thank the host"]),
    ("Suggest a name for a café that sells only soup.", ["Ladle", "Bowl & Co."]),
    ("What is 17 × 23? Show your work.", ["17 × 20 = 340", "17 × 3 = 51", "391"]),
]
OPENERS = ["Sure! ", "Of course. ", "As I said, ", "Well, ", "Great question! "]
FILLERS = [
    "Honestly, it is hard to say. ",
    "There are many ways to see it. ",
    "I hope this helps! ",
]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def answer(rng: random.Random, question: int, progress: float) -> tuple[str, float]:
    """An answer with fewer empty words the further training has come, and its score."""
    facts = QUESTIONS[question][1]
    told = [fact for fact in facts if rng.random() < 0.3 + 0.6 * progress]
    padding = sum(rng.random() > progress for _ in FILLERS)
    start = rng.choice(OPENERS) if rng.random() > progress else ""
    listed = "".join(f"{number}. {fact}\n" for number, fact in enumerate(told, start=1))
    body = f"Here is what matters:\n{listed}" if told else "I do not know. "
    return start + body + "".join(FILLERS[:padding]), len(told) / len(facts) - 0.1 * padding


def response(
    rng: random.Random, step: int, question: int, progress: float, **more: Any
) -> dict[str, Any]:
    text, score = answer(rng, question, progress)
    return {
        "step": step,
        "source": "questions.jsonl",
        "row": question + 1,
        "group": question,
        "prompt": f"<|im_start|>user\n{QUESTIONS[question][0]}<|im_end|>\n<|im_start|>assistant\n",
        "messages": [{"role": "user", "content": QUESTIONS[question][0]}],
        "completion": text,
        "token_ids": list(range(len(text) // 4)),
        "score": round(score, 3),
        "rewards": {"helpful": round(score + 0.1, 3), "brevity": round(-len(text) / 2000, 4)},
        "length": len(text) // 4,
        "finish_reason": "length" if len(text) > 190 else "stop",
        "weight_version": max(0, step - 1),
        "columns": {"topic": "everyday"},
        "extras": {},
        "temperature": 1.0,
        **more,
    }


def tokens(rng: random.Random, text: str, advantage: float) -> dict[str, list[Any]]:
    """Words as tokens, with values of the sizes that a run has."""
    words = [word for piece in text.split("\n") for word in (*piece.split(" "), "\n")]
    texts = [word if word == "\n" else f" {word}" for word in words[:-1]]
    logprobs = [-abs(rng.gauss(0, 1.2)) for _ in texts]
    return {
        "texts": texts,
        "advantage": [round(advantage, 4)] * len(texts),
        "logprob": [round(value, 4) for value in logprobs],
        "engine_logprob": [round(value + rng.gauss(0, 0.05), 4) for value in logprobs],
        "ref_logprob": [round(value + rng.gauss(-0.05, 0.3), 4) for value in logprobs],
        "entropy": [round(abs(rng.gauss(0.6, 0.7)), 4) for _ in texts],
        "value": [
            round(advantage * at / len(texts) + rng.gauss(0, 0.1), 4) for at in range(len(texts))
        ],
    }


def policy_run(folder: Path, *, steps: int = 40, per_step: int = 16, seed: int = 1) -> Path:
    """A policy run with an evaluation each ten steps; two responses of a step have token values."""
    rng = random.Random(seed)
    lines, rows = [], []
    for step in range(1, steps + 1):
        progress = min(1.0, step / steps + rng.gauss(0, 0.05))
        group = [response(rng, step, at % len(QUESTIONS), progress) for at in range(per_step)]
        mean = sum(line["score"] for line in group) / per_step
        for at, line in enumerate(group):
            line["advantage"] = round(line["score"] - mean, 4)
            if at % (per_step // 2) == 0:
                line["tokens"] = tokens(rng, line["completion"], line["advantage"])
            line["rank"] = 0
        lines += group
        rows.append(
            f"{step},0,{mean:.4f},{sum(line['length'] for line in group) / per_step:.2f},"
            f"{2.2 - progress + rng.gauss(0, 0.05):.4f},{0.02 * step + rng.gauss(0, 0.02):.4f},"
            f"{rng.gauss(0, 0.02):.5f},{abs(rng.gauss(0.4, 0.1)):.4f},1e-5,"
        )
        if step % 10 == 0:
            evaluation = [response(rng, step, at, progress) for at in range(len(QUESTIONS))]
            write_lines(folder / f"eval_scores_{step}.jsonl", evaluation)
            score = sum(line["score"] for line in evaluation) / len(evaluation)
            rows.append(f"{step},,,,,,,,,{score:.4f}")
    write_lines(folder / "rollouts.jsonl", lines)
    heading = (
        "step,epoch,rollout/score,rollout/response_length,policy/entropy,kl/reference,policy/loss,"
        "policy/grad_norm,lr/policy,eval/score"
    )
    (folder / "metrics.csv").write_text("\n".join([heading, *rows, ""]))
    (folder / "timings.csv").write_text(
        "step,perf/generate_s\n"
        + "".join(f"{step},{2 + rng.random():.3f}\n" for step in range(1, steps + 1))
    )
    return folder


def pair(rng: random.Random, step: int, row: int, skill: float) -> dict[str, Any]:
    question = row % len(QUESTIONS)
    good, bad = answer(rng, question, 0.95)[0], answer(rng, question, 0.1)[0]
    label = rng.choice([1, -1])
    first, second = (good, bad) if label == 1 else (bad, good)
    margin = label * rng.gauss(skill, 1.0) + 0.004 * (len(first) - len(second))
    return {
        "step": step,
        "source": "pairs.jsonl",
        "row": row + 1,
        "prompt": QUESTIONS[question][0],
        "candidate0": first,
        "candidate1": second,
        "labels": {"reward": label},
        "scores0": {"reward": round(margin / 2, 4)},
        "scores1": {"reward": round(-margin / 2, 4)},
        "margins": {"reward": round(margin, 4)},
        "info": {"annotator": rng.choice(["a", "b"])},
    }


def reward_run(folder: Path, *, pairs: int = 300, seed: int = 2) -> Path:
    """A reward model's run with three evaluations, each better than the one before."""
    rng = random.Random(seed)
    for step, skill in ((0, 0.0), (50, 0.8), (100, 1.4)):
        lines = (pair(rng, step, row, skill) for row in range(pairs))
        write_lines(folder / f"eval_scores_{step}.jsonl", lines)
    rows = "".join(
        f"{step},{0.7 - step / 400:.4f},{0.5 + step / 350:.4f}\n" for step in range(1, 101)
    )
    (folder / "metrics.csv").write_text(f"step,train/loss,reward_model/accuracy\n{rows}")
    return folder
