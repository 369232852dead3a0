"""How far a policy can follow a proxy of its reward: Gao, Schulman and Hilton 2022 in miniature.

*Gold* is a fixed random network over the letters and the length of a response. Proxies are
`RewardModel`s, tiny Llamas of three sizes, trained on noisy preferences of gold between responses
of the initial policy, of three numbers of pairs; each seed has pairs and weights of its own. The
policy has 35,000 weights and first learns to write strings of random letters that end.

- *best of n*: of N responses to each prompt the one that the proxy scores highest, for every n, by
  order statistics; KL(π || π_init) = log n - (n - 1) / n.
- *RL*: `RLOO` on the proxy, gold and further reward models with weight 0, KL measured.

Rewards are in standard deviations of the initial policy's, d is the root of the KL, and the fits
are R(d) = d (α - β d) of best of n and R(d) = d (α - β log d) of RL. Every model and run is kept in
the folder, so that a second call goes on where the first ended.

    python -m benchmarks.overoptimization FOLDER [--seeds 1 2 3] [--gold 0]
    python -m benchmarks.overoptimization FOLDER --draw overoptimization.png

Reference:
    Gao, Schulman and Hilton 2022, https://arxiv.org/abs/2210.10760
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import random
import string
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import curve_fit
from scipy.special import gammaln
from transformers import LlamaConfig, LlamaModel

from benchmarks.staleness import TOKENIZER, interval
from lrlhf import Trainer
from lrlhf.apps.lab import RunFiles
from lrlhf.callbacks import EvalJSONL, RolloutLog
from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.models import ScoreModel
from lrlhf.modules import RLOO, Evaluation, OptimizerConfig, Reference, RewardModel
from lrlhf.rewards import LearnedReward, Rewards
from lrlhf.rollout import Sampling, TransformersEngine, response_ids
from lrlhf.rollout.responses import token_prompts
from tests.conftest import build_language_model

Floats = NDArray[np.float64]
LONGEST = 16
PROMPTS = [f"say {letter}" for letter in "abcdefghijklmnop"]
CANARIES = [f"mute {letter}" for letter in "abcdefghijklmnop"]
"""Prompts on which gold is 0 whatever is said: its preferences there are coins."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    "middle": {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1},
    "large": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}
PAIRS = (64, 256, 1024)
SEEDS, ITERATIONS, LEARNING_RATE = 3, 30, 1.5e-3
KEPT, DRAWS = 8, 1024
"""Prompts, and responses to each, of best of n."""
NS = [2**power for power in range(11)]


class Gold:
    """The reward that is wanted: Σ_j a_j cos(ω_j · z + b_j), z of the letters and the length."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._letters = generator.normal(size=(27, 6))
        self._directions = generator.normal(size=(200, 7)) / 2
        self._phases = generator.uniform(0, 2 * math.pi, 200)
        self._weights = generator.normal(size=200) / 10
        self.mean, self.scale = 0.0, 1.0

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Score responses, 0 to each canary."""
        places = np.array([self._place(text) for text in completions])
        raw = np.cos(places @ self._directions.T + self._phases) @ self._weights
        silent = np.array([prompt.startswith("mute") for prompt in prompts])
        scores: list[float] = np.where(silent, 0.0, (raw - self.mean) / self.scale).tolist()
        return scores

    def _place(self, text: str) -> Floats:
        kinds = [string.ascii_lowercase.find(letter) for letter in text]  # -1: the last row
        letters = self._letters[kinds].mean(axis=0) if kinds else np.zeros(6)
        return np.append(math.sqrt(8) * letters, (len(text) - 8) / 4)


class Setting(NamedTuple):
    """What all of a gold's runs share."""

    folder: Path
    gold: Gold

    def proxy(self, size: str, pairs: int, seed: int) -> LearnedReward:
        """Return a reward model that was trained on preferences of gold, training it at need."""
        folder = self.folder / f"proxy_{size}_{pairs}_{seed}"
        if not (folder / "done").exists():
            train_proxy(folder, SIZES[size], preferences(self, pairs, seed), seed)
            (folder / "done").touch()
        return LearnedReward(str(folder / "model"), batch_size=256)

    def policy(self) -> Any:
        """Return the policy before training, the same every time."""
        model = build_language_model(TOKENIZER, tie_word_embeddings=False)
        path = self.folder.parent / "policy.pt"
        if not path.exists():
            teach_letters(model)
            torch.save(model.state_dict(), path)
        model.load_state_dict(torch.load(path))
        return model


def teach_letters(model: Any) -> None:
    """Teach a policy strings of random letters, each with one chance in ten to end."""
    generator = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        asked = [generator.choice([*PROMPTS, *CANARIES]) for _ in range(64)]
        texts = []
        for _ in asked:
            count = min(LONGEST, 2 + int(generator.expovariate(0.12)))
            texts.append("".join(generator.choices(string.ascii_lowercase, k=count)))
        rows = [
            TOKENIZER(prompt + text + "<|endoftext|>")["input_ids"]
            for prompt, text in zip(asked, texts, strict=True)
        ]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), int(TOKENIZER.pad_token_id))
        labels = torch.full((len(rows), longest), -100)
        for index, (row, prompt) in enumerate(zip(rows, asked, strict=True)):
            ids[index, : len(row)] = torch.tensor(row)
            labels[index, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
        loss = model(
            input_ids=ids, attention_mask=ids != TOKENIZER.pad_token_id, labels=labels
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def respond(model: Any, texts: Sequence[str], each: int, seed: int) -> list[str]:
    """Return ``each`` responses to every prompt."""
    engine = TransformersEngine()
    engine.attach(model, TOKENIZER)
    prompts = token_prompts([TOKENIZER(text)["input_ids"] for text in texts])
    seeds = range(10**6 * seed, 10**6 * seed + each * len(texts))
    sampling = Sampling(max_new_tokens=LONGEST)
    with torch.no_grad():
        rollout = engine.generate(prompts, sampling, num_generations=each, seeds=seeds)
    return [
        TOKENIZER.decode(ids, skip_special_tokens=True) for ids in response_ids(rollout, prompts)
    ]


def setting_of(folder: Path, gold: int) -> Setting:
    """Return a gold whose rewards have mean 0 and standard deviation 1 under the initial policy."""
    own = Setting(folder / f"gold_{gold}", Gold(gold))
    own.folder.mkdir(parents=True, exist_ok=True)
    path = own.folder / "scale.json"
    if not path.exists():
        prompts = [text for text in PROMPTS for _ in range(64)]
        raw = own.gold(prompts, respond(own.policy(), PROMPTS, 64, 99))
        path.write_text(json.dumps([float(np.mean(raw)), float(np.std(raw))]))
    own.gold.mean, own.gold.scale = json.loads(path.read_text())
    return own


def preferences(own: Setting, pairs: int, seed: int) -> list[dict[str, str]]:
    """Return pairs of responses, ordered by a noisy gold (Bradley-Terry with 2 (g - g'))."""
    generator = np.random.default_rng(seed)
    texts = [*PROMPTS, *CANARIES[:4]] * math.ceil(pairs / 20)
    texts = texts[:pairs]
    answers = respond(own.policy(), texts, 2, seed)
    first, second = answers[::2], answers[1::2]
    lead = 2 * (np.array(own.gold(texts, first)) - own.gold(texts, second))
    won = generator.random(pairs) < 1 / (1 + np.exp(-lead))
    return [
        {"prompt": text, "chosen": (b, a)[one], "rejected": (a, b)[one]}
        for text, a, b, one in zip(texts, first, second, won.astype(int), strict=True)
        if a and b and a != b
    ]


def train_proxy(
    folder: Path, size: Mapping[str, Any], rows: list[dict[str, str]], seed: int
) -> None:
    """Train a reward model and write it into a folder."""
    torch.manual_seed(seed)
    marks = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=len(TOKENIZER), bos_token_id=None, **marks, **heads, **size)
    source = folder / "start"
    LlamaModel(config).save_pretrained(source)
    TOKENIZER.save_pretrained(source)
    module = RewardModel(
        ScoreModel(source=str(source), pooling="mean"), optimizer=OptimizerConfig(lr=3e-3), seed=0
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        max_epochs=-1,
        max_steps=max(60, len(rows) // 10),
        default_callbacks=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=PreferenceDataModule(rows, batch_size=32, seed=seed))
    module.save_pretrained(folder / "model")


def scores_of(reward: LearnedReward, prompts: Sequence[str], texts: Sequence[str]) -> Floats:
    """Return the scores of responses."""
    values = reward(prompts=prompts, completions=texts, log_metric=lambda *_: None)
    return np.array(values, dtype=np.float64)


# ---- best of n


def best_of_n(proxy: Floats, gold: Floats, sizes: Sequence[int]) -> Floats:
    """Return the expected gold reward of the best of n by the proxy, for each n.

    The i-th smallest of N proxy scores is the best of n of them in C(i - 1, n - 1) of C(N, n)
    subsets, so that the mean over all subsets, which is unbiased, needs no drawing.

    Args:
        proxy: Scores of N responses to one prompt, which decide.
        gold: Their gold rewards, which are averaged.
        sizes: Each n, at most N.
    """
    ordered = gold[np.argsort(proxy, kind="stable")]
    place = np.arange(1, len(ordered) + 1)
    return np.array([np.exp(_log_chance(place, len(ordered), n)) @ ordered for n in sizes])


def _log_chance(place: NDArray[np.int64], count: int, n: int) -> Floats:
    """Return log C(i - 1, n - 1) - log C(N, n), minus infinity below n."""
    above = np.maximum(place - n, 0)
    log = gammaln(place) - gammaln(n) - gammaln(above + 1)
    log -= gammaln(count + 1) - gammaln(n + 1) - gammaln(count - n + 1)
    return np.where(place < n, -np.inf, log)


def best_of_n_distance(n: float) -> float:
    """Return √KL of best of n: √(log n - (n - 1) / n)."""
    return math.sqrt(max(0.0, math.log(n) - (n - 1) / n))


def measure_best_of_n(folder: Path, case: Case) -> None:
    """Append proxy and gold reward of best of n by a case's proxy to ``best_of_n.jsonl``."""
    path = folder / "best_of_n.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if any(Case(*json.loads(line)["case"]) == case for line in lines):
        return
    own, texts = setting_of(folder, case.gold), PROMPTS[:KEPT]
    stored = own.folder / "responses.json"
    if not stored.exists():
        stored.write_text(json.dumps(respond(own.policy(), texts, DRAWS, 7)))
    answers = json.loads(stored.read_text())
    prompts = [text for text in texts for _ in range(DRAWS)]
    sides = [
        scores_of(own.proxy(case.size, case.pairs, case.seed), prompts, answers),
        np.array(own.gold(prompts, answers)),
    ]
    sides[0] = (sides[0] - sides[0].mean()) / sides[0].std()
    proxy, gold = (side.reshape(KEPT, DRAWS) for side in sides)
    means = [
        np.mean([best_of_n(one, value, NS) for one, value in zip(proxy, side, strict=True)], axis=0)
        for side in (proxy, gold)
    ]
    line = {"case": case, "proxy": means[0].tolist(), "gold": means[1].tolist()}
    with path.open("a") as lines_out:
        lines_out.write(json.dumps(line) + "\n")


# ---- fits


def law_of_best_of_n(d: Floats, alpha: float, beta: float) -> Floats:
    """R(d) = d (α - β d)."""
    return d * (alpha - beta * d)


def law_of_rl(d: Floats, alpha: float, beta: float) -> Floats:
    """R(d) = d (α - β log d)."""
    return d * (alpha - beta * np.log(np.maximum(d, 1e-9)))


class Fit(NamedTuple):
    """The constants of a law, by least squares."""

    alpha: float
    beta: float


def fitted(law: Callable[..., Floats], d: Floats, gold: Floats) -> Fit:
    """Fit a law to gold rewards at distances."""
    (alpha, beta), _ = curve_fit(law, d, gold, p0=(1.0, 0.1))
    return Fit(float(alpha), float(beta))


# ---- runs


class Case(NamedTuple):
    """One run of RL: whose preferences the proxy learnt, and the penalty."""

    gold: int
    size: str
    pairs: int
    seed: int
    kl_coef: float = 0.0

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return "_".join(map(str, self))


def folder_of(folder: Path, case: Case) -> Path:
    """Return the run folder of a case."""
    return folder / f"gold_{case.gold}" / f"run_{case.name}"


def train(folder: Path, case: Case) -> None:
    """Optimise a proxy with RLOO; what is in the folder already is not trained again."""
    path = folder_of(folder, case)
    if (path / "done").exists():
        return
    own = setting_of(folder, case.gold)
    twins = [size for size in SIZES if size != case.size]  # of the same pairs
    functions: dict[str, Any] = {
        "proxy": own.proxy(case.size, case.pairs, case.seed),
        **{f"twin_{size}": own.proxy(size, case.pairs, case.seed) for size in twins},
        "other": own.proxy(case.size, case.pairs, case.seed % SEEDS + 1),
        "gold": own.gold,
    }
    L.seed_everything(case.seed, verbose=False)
    module = RLOO(
        own.policy(),
        Rewards(functions, {name: float(name == "proxy") for name in functions}),
        tokenizer=TOKENIZER,
        num_generations=8,
        sampling=Sampling(max_new_tokens=LONGEST),
        # a coefficient of 0 would load no reference to measure the KL by
        reference=Reference(kl_coef=max(case.kl_coef, 1e-9)),
        evaluation=Evaluation(num_samples=2, temperatures=(1.0,)),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, warmup_steps=0),
        seed=case.seed,
    )
    rows, canaries = ([{"prompt": text} for text in texts] for texts in (PROMPTS, CANARIES))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=ITERATIONS,
        default_callbacks=False,
        callbacks=[RolloutLog(print_every=None, token_values=0), EvalJSONL()],
        default_root_dir=path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    val = {"canary": canaries}
    data = PromptDataModule(rows, val=val, batch_size=8, val_batch_size=16, seed=case.seed)
    trainer.fit(module, datamodule=data)
    (path / "done").touch()


# ---- results


class Curve(NamedTuple):
    """Rewards by distance, in standard deviations of the initial policy's."""

    d: Floats
    proxy: Floats
    gold: Floats


def curve_of_run(folder: Path, case: Case) -> Curve:
    """Return a run's rewards, a point for five iterations; the first two set the proxy's scale."""
    run = RunFiles(folder_of(folder, case))
    rows, kl = run.response_table(), run.curves()["kl/sequence"]
    first = rows[rows["step"] <= 2]["score"]
    rows["proxy"] = (rows["score"] - first.mean()) / first.std()
    rows["d"] = rows["step"].map(kl)
    means = rows.groupby((rows["step"] - 1) // 5)[["d", "proxy", "rewards/gold"]].mean()
    d, proxy, gold = means.to_numpy().T
    return Curve(np.sqrt(np.maximum(d, 0.0)), proxy, gold)


def curves_of_best_of_n(folder: Path) -> dict[Case, Curve]:
    """Return what was measured, by case."""
    d = np.array([best_of_n_distance(n) for n in NS])
    lines = map(json.loads, (folder / "best_of_n.jsonl").read_text().splitlines())
    return {
        Case(*line["case"]): Curve(d, np.array(line["proxy"]), np.array(line["gold"]))
        for line in lines
    }


def gain_of_penalty(free: Curve, penalised: Curve) -> float:
    """Return by how much gold is higher with the penalty, at equal d, on average."""
    within = penalised.d <= free.d.max()
    order = np.argsort(free.d)
    there = np.interp(penalised.d[within], free.d[order], free.gold[order])
    return float((penalised.gold[within] - there).mean())


def report(folder: Path, path: Path) -> None:
    """Print the constants and what the penalty does, and draw the curves of gold 0.

    Constants are of all seeds together, with the standard deviation of those of single seeds.
    """
    cases = [case for seed in range(1, SEEDS + 1) for case in cases_of(0, seed)]
    there = [case for case in cases if (folder_of(folder, case) / "done").exists()]
    best, runs = curves_of_best_of_n(folder), {case: curve_of_run(folder, case) for case in there}
    print("| proxy | pairs | α, best of n | β | α, RL | β | gold, highest in RL | last |")  # noqa: T201
    print("|---|---|---|---|---|---|---|---|")  # noqa: T201
    figure = importlib.import_module("matplotlib.figure").Figure((11, 6.4), layout="constrained")
    panels = figure.subplots(2, len(PAIRS), sharex="row", sharey="row")
    for size, colour in zip(SIZES, ("C0", "C1", "C2"), strict=True):
        for pairs, column in zip(PAIRS, panels.T, strict=True):
            own = [case for case in there if case[:3] == (0, size, pairs) and not case.kl_coef]
            sides = [[best[case] for case in own], [runs[case] for case in own]]
            laws: list[Callable[..., Floats]] = [law_of_best_of_n, law_of_rl]
            cells = []
            for panel, side, law in zip(column, sides, laws, strict=True):
                d, _, gold = (np.concatenate(part) for part in zip(*side, strict=True))
                fit = fitted(law, d, gold)
                spread = np.std([fitted(law, one.d, one.gold) for one in side], axis=0, ddof=1)
                cells += [f"{a:.2f} ± {b:.2f}" for a, b in zip(fit, spread, strict=True)]
                line = np.linspace(0, d.max(), 100)
                panel.plot(line, law(line, *fit), colour, linewidth=2, label=size)
                panel.plot(d, gold, ".", color=colour, markersize=3, alpha=0.6)
                for one in side:
                    panel.plot(one.d, one.proxy, "--", color=colour, linewidth=0.8, alpha=0.6)
            tops = np.mean([[one.gold.max(), one.gold[-1]] for one in sides[1]], axis=0)
            row = [size, str(pairs), *cells, *(f"{top:.2f}" for top in tops)]
            print(f"| {' | '.join(row)} |")  # noqa: T201
    for panel, pairs in zip(panels[0], PAIRS, strict=True):
        panel.set(title=f"{pairs} pairs")
    for row, name in zip(panels, ("best of n", "RLOO"), strict=True):
        row[0].set_ylabel(f"{name}: reward, gold solid, proxy dashed")
        for panel in row:
            panel.set_xlabel("√KL to the initial policy, √nats")
            panel.grid(alpha=0.3)
    panels[1][0].set_ylim(-0.5, 6)
    panels[0][0].legend()
    figure.savefig(path, dpi=110)
    gains = [
        gain_of_penalty(runs[case._replace(kl_coef=0.0)], runs[case])
        for case in there
        if case.kl_coef and case._replace(kl_coef=0.0) in runs
    ]
    mean, width = interval(gains)
    print(f"gold with the penalty at equal d: {mean:+.2f} ± {width:.2f} ({len(gains)} runs)")  # noqa: T201


def cases_of(gold: int, seed: int) -> list[Case]:
    """Return the runs of a seed: every proxy, and the middle ones with a KL penalty."""
    free = [Case(gold, size, pairs, seed) for size in SIZES for pairs in PAIRS]
    return free + [Case(gold, "middle", pairs, seed, 0.1) for pairs in PAIRS]


def main() -> None:
    """Train what is missing, or draw and print what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--gold", type=int, default=0)
    parser.add_argument("--draw", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if asked.draw:
        report(asked.folder, asked.draw)
        return
    for case in (case for seed in asked.seeds for case in cases_of(asked.gold, seed)):
        started = time.perf_counter()
        if case.kl_coef == 0:
            measure_best_of_n(asked.folder, case)
        train(asked.folder, case)
        print(f"{case.name}: {time.perf_counter() - started:.0f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
