"""The papers, their claims, and the runs that each claim compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.published import panels
from benchmarks.published.policies import LengthRun, PolicyRun, StaleRun
from benchmarks.published.reward_models import LOSSES, RewardModelRun
from benchmarks.published.verdicts import Claim, Effect, Measures, difference

Run = PolicyRun | StaleRun | LengthRun | RewardModelRun


@dataclass(frozen=True, kw_only=True)
class Study:
    """A paper in miniature.

    Args:
        paper: Its name and address.
        variants: What to run under every seed.
        claims: What to measure.
        rates: Learning rates to choose from on other seeds than those that are reported; empty:
            those of the variants stay.
        chosen_by: The measure whose mean over these seeds a rate is chosen by.
        rate_of: Variants that take the learning rate of another one.
        most_seeds: How many of the seeds are run; None: all.
        draw: Draws a panel from the measures of each variant by seed.
    """

    paper: str
    variants: Mapping[str, Run]
    claims: Sequence[Claim]
    draw: Callable[[Any, Mapping[str, Sequence[Measures]]], None]
    rates: Sequence[float] = ()
    chosen_by: str = "on_the_way"
    rate_of: Mapping[str, str] = field(default_factory=dict)
    most_seeds: int | None = None


NO_WORSE = 0.05
"""Score by which a variant may be worse and still do for another one."""
RATES = (1.6e-2, 3.2e-2, 6.4e-2, 1.28e-1, 2.56e-1)
WIDE_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
CLIPPED = "PPO's ratio, K = 3"


def _more(better: str, worse: str, measure: str = "on_the_way") -> Effect:
    return difference(better, worse, measure)


AHMADIAN = Study(
    paper="[Ahmadian et al. 2024](https://arxiv.org/abs/2402.14740), RLOO",
    variants={
        "RLOO, k = 4": PolicyRun(num_generations=4),
        "RLOO, k = 2": PolicyRun(num_generations=2),
        "RAFT, k = 4": PolicyRun(algorithm="raft", num_generations=4),
        "PPO": PolicyRun(algorithm="ppo", num_generations=1),
    },
    rates=RATES,
    claims=[
        Claim(
            text="RLOO with k = 4 is no worse than with k = 2",
            paper="more samples do not hurt",
            effect=_more("RLOO, k = 4", "RLOO, k = 2"),
            above=-NO_WORSE,
        ),
        Claim(
            text="RLOO is better than RAFT, k = 4",
            paper="higher win rates at the same samples",
            effect=_more("RLOO, k = 4", "RAFT, k = 4"),
        ),
        Claim(
            text="RLOO is better than PPO",
            paper="higher reward and win rates",
            effect=_more("RLOO, k = 4", "PPO"),
        ),
    ],
    draw=panels.values("on_the_way", "mean score of all iterations"),
)


def _reward_model(loss: str, pooling: str, layer: int) -> str:
    return f"{loss}, {pooling}, {layer}"


REWARD_MODELS = {
    _reward_model(loss, pooling, layer): RewardModelRun(loss=loss, pooling=pooling, layer=layer)  # type: ignore[arg-type]
    for loss, pooling, layer in product(LOSSES, ("attention", "last"), (-1, 1))
}


def _main_effect(better: str, worse: str, position: int) -> Effect:
    """Return the difference in accuracy between two levels of a factor, over all others."""

    def effect(runs: Mapping[str, Measures]) -> float:
        pairs = []
        for name, run in runs.items():
            levels = name.split(", ")
            if levels[position] == better:
                levels[position] = worse
                pairs.append(run["accuracy"] - runs[", ".join(levels)]["accuracy"])
        return sum(pairs) / len(pairs)

    return effect


def _scaled(runs: Mapping[str, Measures]) -> float:
    effects = [_main_effect(f"{loss}_scaled", loss, 0)(runs) for loss in ("bt", "hps")]
    return sum(effects) / 2


LIGHTRFT = Study(
    paper="[LightRFT](https://github.com/opendilab/LightRFT), reward models",
    variants=REWARD_MODELS,
    rates=(1e-3, 3e-3, 1e-2, 3e-2),
    chosen_by="accuracy",
    most_seeds=3,
    rate_of={
        name: _reward_model("hps_scaled" if "scaled" in name else "hps", "attention", -1)
        for name in REWARD_MODELS
    },
    claims=[
        Claim(
            text="scaled losses are more accurate than unscaled ones",
            paper="HPDv3: BT 60.5 → 69.7 %, HPS 53.8 → 72.4 %",
            effect=_scaled,
            unit="accuracy",
        ),
        Claim(
            text="HPS scaled is more accurate than BT scaled with margin 0.1",
            paper="HPDv3: 72.4 and 69.7 %",
            effect=_main_effect("hps_scaled", "bt_scaled", 0),
            unit="accuracy",
        ),
        Claim(
            text="attention pooling is more accurate than the last token",
            paper="HPDv3: 72.4 and 70.1 %",
            effect=_main_effect("attention", "last", 1),
            unit="accuracy",
        ),
        Claim(
            text="the last layer is more accurate than the middle one",
            paper="HPDv3: 72.4 and 71.4 %",
            effect=_main_effect("-1", "1", 2),
            unit="accuracy",
        ),
    ],
    draw=panels.score_distributions([_reward_model(loss, "attention", -1) for loss in LOSSES]),
)

STALENESS = Study(
    paper="[AReaL](https://arxiv.org/abs/2505.24298), "
    "[tinker-cookbook#822](https://github.com/thinking-machines-lab/tinker-cookbook/pull/822)",
    variants={
        "K = 0": StaleRun(algorithm="unclipped", max_staleness=0),
        "unclipped, K = 3": StaleRun(algorithm="unclipped"),
        CLIPPED: StaleRun(algorithm="ppo_ratio"),
    },
    rates=(2e-3, 8e-3, 3.2e-2, 1.28e-1),
    chosen_by="score",
    rate_of={"unclipped, K = 3": "K = 0", CLIPPED: "K = 0"},
    claims=[
        Claim(
            text="unclipped importance sampling loses score at staleness 3",
            paper="unstable at 3",
            effect=_more("K = 0", "unclipped, K = 3", "score"),
        ),
        Claim(
            text="at staleness 3 PPO's ratio is better than unclipped importance sampling",
            paper="PPO's ratio is stable at 3",
            effect=_more(CLIPPED, "unclipped, K = 3", "score"),
        ),
    ],
    draw=panels.values("score", "score at the end"),
)

DR_GRPO = Study(
    paper="[Liu et al. 2025](https://arxiv.org/abs/2503.20783), Dr. GRPO",
    variants={"GRPO": LengthRun(algorithm="grpo"), "Dr. GRPO": LengthRun(algorithm="dr_grpo")},
    claims=[
        Claim(
            text="wrong answers get longer under GRPO",
            paper="they do",
            effect=lambda runs: float(runs["GRPO"]["growth_wrong"]),
            unit="tokens",
        ),
        Claim(
            text="wrong answers do not get longer under Dr. GRPO (by less than 1 token)",
            paper="they do not",
            effect=lambda runs: float(runs["Dr. GRPO"]["growth_wrong"]),
            above=-math.inf,
            below=1.0,
            unit="tokens",
        ),
        Claim(
            text="wrong answers grow more under GRPO than under Dr. GRPO",
            paper="the bias is that of GRPO's averages",
            effect=_more("GRPO", "Dr. GRPO", "growth_wrong"),
            unit="tokens",
        ),
        Claim(
            text="under GRPO wrong answers grow more than right ones",
            paper="the bias is against short wrong answers",
            effect=lambda runs: runs["GRPO"]["growth_wrong"] - runs["GRPO"]["growth_right"],
            unit="tokens",
        ),
    ],
    draw=panels.lengths,
)

RANKS = {"full": None, "rank 1": 1, "rank 8": 8}
LORA_RANK = Study(
    paper="[LoRA without regret](https://thinkingmachines.ai/blog/lora/), rank",
    variants={
        name: PolicyRun(rank=rank, taught=True, iterations=16) for name, rank in RANKS.items()
    },
    rates=WIDE_RATES,
    rate_of={"rank 8": "rank 1"},
    claims=[
        Claim(
            text="rank 1 is no worse than full training",
            paper="the same curves on MATH and GSM8K",
            effect=_more("rank 1", "full"),
            above=-NO_WORSE,
        ),
        Claim(
            text="rank 1 is no worse than rank 8",
            paper="the same curves",
            effect=_more("rank 1", "rank 8"),
            above=-NO_WORSE,
        ),
    ],
    draw=panels.values("on_the_way", "mean score of all iterations"),
)


def _rate_variant(name: str, rate: float) -> str:
    return f"{name}, {rate:g}"


def _best_rate(runs: Mapping[str, Measures], name: str) -> float:
    return max(WIDE_RATES, key=lambda rate: runs[_rate_variant(name, rate)]["on_the_way"])


LORA_RATE = Study(
    paper="[LoRA without regret](https://thinkingmachines.ai/blog/lora/), learning rate",
    variants={
        _rate_variant(name, rate): PolicyRun(rank=RANKS[name], lr=rate, taught=True, iterations=16)
        for name in ("full", "rank 1")
        for rate in WIDE_RATES
    },
    claims=[
        Claim(
            text="the best learning rate of LoRA is 10 times that of full training (3 to 30 times)",
            paper="about 10 times",
            effect=lambda runs: math.log10(_best_rate(runs, "rank 1") / _best_rate(runs, "full")),
            above=math.log10(3),
            below=math.log10(30),
            unit="decades",
        ),
    ],
    draw=panels.rates("on_the_way", "mean score of all iterations"),
)

GROUP_SIZE = Study(
    paper="[2-GRPO](https://arxiv.org/abs/2510.00977)",
    variants={
        f"{size} responses": PolicyRun(algorithm="grpo", num_generations=size, lr=3.2e-2)
        for size in (2, 16)
    },
    claims=[
        Claim(
            text="GRPO with 2 responses per prompt is no worse than with 16",
            paper="on par with 16",
            effect=_more("2 responses", "16 responses"),
            above=-NO_WORSE,
        ),
    ],
    draw=panels.values("on_the_way", "mean score of all iterations"),
)

CLIP_HIGHER = Study(
    paper="[DAPO](https://arxiv.org/abs/2503.14476), clip-higher",
    variants={
        f"clip {high}": PolicyRun(
            algorithm="dapo", num_minibatches=4, loss_options=(("clip_high", high),)
        )
        for high in (0.2, 0.28)
    },
    claims=[
        Claim(
            text="an upper clip of 0.28 keeps more entropy than 0.2",
            paper="without it the entropy collapses",
            effect=_more("clip 0.28", "clip 0.2", "entropy"),
            unit="nats per token",
        ),
    ],
    draw=panels.values("entropy", "entropy of the last quarter, nats"),
)

STUDIES: Mapping[str, Study] = {
    "ahmadian": AHMADIAN,
    "dr_grpo": DR_GRPO,
    "staleness": STALENESS,
    "lightrft": LIGHTRFT,
    "lora_rank": LORA_RANK,
    "lora_rate": LORA_RATE,
    "group_size": GROUP_SIZE,
    "clip_higher": CLIP_HIGHER,
}
