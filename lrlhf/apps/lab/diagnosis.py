"""Why a policy does not learn: causes that the files of its run show, the first to mend first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf.apps.lab.run_files import RunFiles, records
from lrlhf.statistics.intervals import t_quantile
from lrlhf.statistics.paired import mean_by_sign_flips

_FEW = 8
"""Iterations of which a trend says nothing."""
_POWER = 2.8
"""Standard errors of a difference that is found in 80 % of all runs at a level of 5 %."""


class Cause(NamedTuple):
    """One reason why a run does not learn, or not what it should."""

    name: str
    evidence: str
    """What the files show, in figures."""
    change: str
    """The option to change first, and why that one."""


class Diagnosis(NamedTuple):
    """What the files of a run say about its learning."""

    learns: bool
    verdict: str
    causes: list[Cause]
    """In the order of mending: a cause explains many that stand behind it."""
    facts: dict[str, float]
    """Figures of the signal; NaN where the files do not say."""


class _Group(NamedTuple):
    """The responses to one prompt in one iteration, in arrays with an entry for each."""

    step: int
    prompt: str
    distinct: int
    """Texts that differ."""
    right_texts: float
    """Share of the texts that hold the row's ``answer`` column as a word, less the share that hold
    the answer of the prompt before: what it is by chance. NaN: there is none."""
    scores: NDArray[np.float64]
    lengths: NDArray[np.float64]
    cut_off: NDArray[np.bool_]
    advantages: NDArray[np.float64]
    rewards: dict[str, NDArray[np.float64]]
    """Each reward times its weight."""

    @property
    def spread(self) -> float:
        """Standard deviation of the scores that there are."""
        known = self.scores[np.isfinite(self.scores)]
        return float(known.std()) if len(known) else 0.0


class _Trend(NamedTuple):
    """How far a straight line through the values rises over the run, and its 95 % interval."""

    rise: float
    reach: float
    noise: float
    """Standard deviation of a value around the line."""

    @property
    def grows(self) -> bool:
        return self.rise > self.reach + 1e-9


class Evidence:
    """The files of a run as the checks read them.

    Args:
        run: Of a policy: it has logged ``rollout/score``.

    Raises:
        ValueError: It is the run of a reward model or of something else without rollouts, or a
            file cannot be read.
    """

    def __init__(self, run: RunFiles) -> None:
        self.curves = {
            name: dict(sorted((step, value) for step, value in curve.items() if value == value))
            for name, curve in run.curves().items()
        }
        if not self.curves.get("rollout/response_length"):
            raise ValueError(
                f"{run.folder} is not the run of a policy, or has not rolled out yet: metrics.csv "
                "has no rollout/response_length. For reward models see docs/troubleshooting.md"
            )
        self._options = run.options
        self.groups = list(_groups(run.responses()))
        self.evaluations = {
            step: list(records(path)) for step, path in _ends(list(run.evaluations.items()))
        }
        self.steps = len(self.curves["rollout/response_length"])

    def option(self, name: str) -> Any:
        """Return an option of the module; None: the run's files do not say."""
        value: Any = self._options
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
            value = value.get("init_args", value) if isinstance(value, Mapping) else value
        return value

    def named(self, name: str) -> str:
        """Name an option of the module, with its value where the config has one."""
        value = self.option(name)
        return f"model.{name}" if value is None else f"model.{name} ({value})"

    def early(self, name: str) -> float:
        """Return the mean of a metric over the first quarter of its steps."""
        return self._mean(name, slice(None, self._quarter(name)))

    def recent(self, name: str) -> float:
        """Return the mean of a metric over the last quarter of its steps."""
        return self._mean(name, slice(-self._quarter(name), None))

    def _quarter(self, name: str) -> int:
        return max(1, len(self.curves.get(name, ())) // 4)

    def _mean(self, name: str, part: slice) -> float:
        values = list(self.curves.get(name, {}).values())[part]
        return math.fsum(values) / len(values) if values else math.nan

    def trend(self, name: str) -> _Trend:
        """Fit a straight line through a metric, each step as one observation."""
        values = np.array(list(self.curves.get(name, {}).values()))
        count = len(values)
        if count < _FEW or not np.isfinite(values).all():
            return _Trend(math.nan, math.inf, math.nan)
        place = np.linspace(-0.5, 0.5, count)
        rise = float(place @ values / (place @ place))
        gaps = values - values.mean() - rise * place
        noise = math.sqrt(float(gaps @ gaps) / (count - 2))
        reach = t_quantile(0.95, count - 2) * noise / math.sqrt(float(place @ place))
        return _Trend(rise, reach, noise)

    @cached_property
    def late(self) -> list[_Group]:
        """The groups of the last quarter of the steps."""
        steps = sorted({group.step for group in self.groups})
        first = steps[-max(1, len(steps) // 4)] if steps else 0
        return [group for group in self.groups if group.step >= first]

    def pooled(self, name: str, groups: Sequence[_Group] | None = None) -> NDArray[np.float64]:
        """Return one field of all responses that have a score."""
        parts = [
            getattr(group, name)[np.isfinite(group.scores)]
            for group in (self.groups if groups is None else groups)
        ]
        return np.concatenate(parts).astype(float) if parts else np.zeros(0)

    @cached_property
    def gain(self) -> tuple[float, float, float] | None:
        """Gain of the evaluation from the first to the last and its interval; None: unknown.

        Prompts are paired, and samples of a prompt averaged.
        """
        sides = [_by_prompt(rows) for rows in self.evaluations.values()]
        if len(sides) < 2:
            return None
        shared = [key for key in sides[0] if key in sides[1]]
        if not shared:
            return None
        own = mean_by_sign_flips([sides[1][key] - sides[0][key] for key in shared])
        return own.value, own.low, own.high

    @property
    def collapsed(self) -> bool:
        """Whether the entropy has fallen to a tenth."""
        return abs(self.recent("policy/entropy")) < 0.1 * abs(self.early("policy/entropy"))

    @cached_property
    def unchanged_answers(self) -> float:
        """Share of the evaluation's answers whose text is the same in the first and the last."""
        sides = list(self.evaluations.values())
        if len(sides) < 2 or len(sides[0]) != len(sides[1]):
            return math.nan
        same = [
            first.get("completion") == last.get("completion")
            for first, last in zip(*sides, strict=True)
            if first.get("temperature", 0.0) == 0.0
        ]
        return sum(same) / len(same) if same else math.nan


def _groups(rows: Iterator[dict[str, Any]]) -> Iterator[_Group]:
    """Gather the responses of a prompt, which stand behind each other."""
    other: Any = None
    for _, same in groupby(rows, lambda row: (row.get("step"), row.get("rank"), row.get("group"))):
        own = list(same)
        yield _group(own, other)
        other = (own[0].get("columns") or {}).get("answer")


def _group(rows: list[dict[str, Any]], other: Any) -> _Group:
    def numbers(values: Sequence[Any]) -> NDArray[np.float64]:
        return np.array([math.nan if value is None else float(value) for value in values])

    first = rows[0]
    texts = [str(row.get("completion", "")) for row in rows]
    answer = (first.get("columns") or {}).get("answer")
    return _Group(
        step=int(first.get("step", 0)),
        prompt=str(first.get("prompt", "")),
        distinct=len(set(texts)),
        right_texts=_share_that_holds(texts, answer) - _share_that_holds(texts, other),
        scores=numbers([row.get("score") for row in rows]),
        lengths=numbers([row.get("length") for row in rows]),
        cut_off=np.array([row.get("finish_reason") in {"length", "max_tokens"} for row in rows]),
        advantages=numbers([row.get("advantage") for row in rows]),
        rewards={
            name: numbers([_weighted(row, name) for row in rows])
            for name in first.get("rewards") or {}
        },
    )


def _share_that_holds(texts: Sequence[str], answer: Any) -> float:
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        return math.nan
    word = re.compile(rf"(?<![\w.]){re.escape(str(answer).strip())}(?![\w])", re.IGNORECASE)
    return sum(bool(word.search(text)) for text in texts) / len(texts)


def _weighted(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get("rewards", {}).get(name)
    weight = row.get("weights", {}).get(name, 1.0)
    return None if value is None or weight is None else value * weight


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(row.get("score"), int | float):
            key = json.dumps([row.get("source"), row.get("row"), row.get("prompt")])
            scores.setdefault(key, []).append(float(row["score"]))
    return {key: math.fsum(own) / len(own) for key, own in scores.items()}


def _ends(entries: list[Any]) -> list[Any]:
    return entries if len(entries) < 2 else [entries[0], entries[-1]]


def diagnose(run: RunFiles) -> Diagnosis:
    """Look for the causes that keep a policy from learning.

    Each check reads figures that the run has logged; none trains or loads a model. They are asked
    from the first link of the chain to the last: responses, rewards, differences within a group,
    the size of steps, and what was learnt instead. A cause hides those behind it, so that the first
    is the one to mend.

    Args:
        run: Of a policy, finished or not.

    Raises:
        ValueError: As `Evidence` does.
    """
    evidence = Evidence(run)
    learns, verdict = _verdict(evidence)
    checks = _ALWAYS if learns else _CHECKS
    causes = [cause for check in checks if (cause := check(evidence)) is not None]
    if not learns and not causes:
        causes = [_noise(evidence)]
    return Diagnosis(learns, verdict, causes, _facts(evidence))


def _verdict(run: Evidence) -> tuple[bool, str]:
    trend = run.trend("rollout/score")
    if run.gain is not None:
        gain, low, high = run.gain
        steps = list(run.evaluations)
        what = (
            f"eval/score changed by {gain:+.3g} from step {steps[0]} to step {steps[1]} (95 % "
            f"interval {low:+.3g} to {high:+.3g}, by prompt)"
        )
        learns = low > 0 or (gain > 0 and trend.grows)
    elif math.isfinite(trend.reach):
        what = (
            f"rollout/score rose by {trend.rise:+.3g} ± {trend.reach:.2g} over {run.steps} "
            "iterations"
        )
        learns = trend.grows
    else:
        return False, f"{run.steps} iterations are too few to see whether it learns"
    return learns, f"{'It learns' if learns else 'No learning is shown'}: {what}"


def _facts(run: Evidence) -> dict[str, float]:
    late = run.late
    noise = run.trend("rollout/score").noise
    facts = {
        "share of groups that teach": _mean([group.spread > 0 for group in late]),
        "score, standard deviation within a group": _mean([group.spread for group in late]),
        "score, noise from iteration to iteration": noise,
        "iterations that show a rise of 0.05": 12 * (_POWER * noise / 0.05) ** 2,
        "share of squared advantages in the top 1 % of responses": _top_share(run),
        "response length": run.recent("rollout/response_length"),
        "truncated": run.recent("rollout/truncated_fraction"),
        "entropy, first quarter": run.early("policy/entropy"),
        "entropy, last quarter": run.recent("policy/entropy"),
        "KL to the reference per response": run.recent("kl/sequence"),
        "clipped": run.recent("policy/clip_fraction"),
    }
    shares = _variance_shares(run)
    return facts | {f"share of {name} in the spread of scores": own for name, own in shares.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _top_share(run: Evidence) -> float:
    squares = np.sort(run.pooled("advantages") ** 2)[::-1]
    return (
        float(squares[: max(1, len(squares) // 100)].sum() / squares.sum())
        if squares.any()
        else math.nan
    )


def _within_groups(run: Evidence) -> dict[str, NDArray[np.float64]]:
    """Return each weighted reward less the mean of its group, for all responses that have all."""
    names = list(dict.fromkeys(name for group in run.groups for name in group.rewards))
    parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in names}
    for group in run.groups:
        if all(name in group.rewards and np.isfinite(group.rewards[name]).all() for name in names):
            for name in names:
                parts[name].append(group.rewards[name] - group.rewards[name].mean())
    return {name: np.concatenate(own) if own else np.zeros(0) for name, own in parts.items()}


def _variance_shares(run: Evidence) -> dict[str, float]:
    """Return the share of each reward in the variance of the scores within groups.

    A share is the covariance of the reward with the score over the variance of the score: they sum
    to 1, and a reward that pulls against the others has a negative one.
    """
    parts = _within_groups(run)
    score = np.sum(list(parts.values()), axis=0) if parts else np.zeros(0)
    total = float(score @ score)
    if len(parts) < 2 or total == 0:
        return {}
    return {name: float(own @ score) / total for name, own in parts.items()}


def _skipped_steps(run: Evidence) -> Cause | None:
    counts = run.curves.get("train/skipped_steps", {})
    count = max(counts.values(), default=0.0)
    if count <= 0.1 * run.steps:
        return None
    kinds = [
        name for name in run.curves if name.startswith("guard/") and any(run.curves[name].values())
    ]
    return Cause(
        "skipped_steps",
        f"{count:g} optimizer steps in {run.steps} iterations were left out "
        f"({', '.join(kinds) or 'by the guard'}): nothing moved in them",
        "lrlhf replay with the newest dump names the first module that failed; then "
        f"{run.named('optimizer.lr')} lower, or trainer.precision",
    )


def _failing_rewards(run: Evidence) -> Cause | None:
    shares = {
        name.split("/")[1]: run.recent(name)
        for name in run.curves
        if name.endswith("/unscored_fraction")
    }
    worst = max(shares, key=shares.__getitem__, default="")
    lost = run.recent("rollout/unscorable_fraction")
    if not lost > 0.1:
        return None
    return Cause(
        "failing_rewards",
        f"{lost:.0%} of the responses have no score and teach nothing; {worst} gave none for "
        f"{shares.get(worst, math.nan):.0%}",
        f"the reward {worst}: the log has its first traceback, and a response of rollouts.jsonl "
        "repeats it in Python",
    )


def _engine_differs(run: Evidence) -> Cause | None:
    gap, age = run.recent("mismatch/mean"), run.recent("sync/age")
    if not gap > 0.1:
        return None
    old = f"; the weights that sampled were {age:.1f} iterations old" if age > 0 else ""
    return Cause(
        "engine_differs",
        f"engine and trainer differ by {gap:.2g} nats per token: the update is not of the policy "
        f"that sampled{old}",
        "max_staleness lower" if age > 1 else "engine.dtype, or VLLMWeightSync.every_n_steps: 1",
    )


def _blind_reward(run: Evidence) -> Cause | None:
    """The right answer stands in responses that got the least score, whatever they say."""
    scores = run.pooled("scores")
    held = [group.right_texts for group in run.groups if group.right_texts == group.right_texts]
    share = _mean(held)
    if len(scores) < 16 or np.ptp(scores) > 0 or not share > 0.02:
        return None
    return Cause(
        "blind_reward",
        f"all {len(scores):,} responses have the score {scores[0]:g}, but {share:.0%} of them, "
        "more than by chance, hold the answer of their row as a word",
        "model.rewards: the pattern or column that the reward looks for; call it in Python with "
        "such a response",
    )


def _truncated(run: Evidence) -> Cause | None:
    cut = run.recent("rollout/truncated_fraction")
    scores, flags = run.pooled("scores"), run.pooled("cut_off").astype(bool)
    if not cut > 0.5 or not flags.any() or len(scores) != len(flags):
        return None
    size, whole = float(np.ptp(scores)), float(scores[flags].mean())
    ended = float(scores[~flags].mean()) if not flags.all() else math.nan
    # where nothing differs, the end that the reward looks for may never have been reached
    if not (ended - whole > 0.25 * size if size > 0 else cut > 0.9 and whole <= 0):
        return None
    return Cause(
        "truncated",
        f"{cut:.0%} of the responses are cut off before their end and score {whole:.3g}"
        + (f", others {ended:.3g}" if size > 0 else ", as all do"),
        f"{run.named('sampling.max_new_tokens')} higher, or sampling.stop where the format has an "
        "end",
    )


def _same_samples(run: Evidence) -> Cause | None:
    first = [group for group in run.groups if group.step <= min(g.step for g in run.groups) + 1]
    same = _mean([group.distinct == 1 for group in first if len(group.scores) > 1])
    if not same > 0.5:
        return None
    return Cause(
        "same_samples",
        f"in {same:.0%} of the first groups all responses are the same text: there is nothing to "
        "compare",
        f"{run.named('sampling.temperature')} nearer to 1",
    )


def _no_differences(run: Evidence) -> Cause | None:
    """All responses to a prompt have the same score: none is right, or all are."""
    late, scores = run.late, run.pooled("scores")
    idle = _mean([group.spread == 0 for group in late if len(group.scores) > 1])
    if not idle > 0.8 or not len(scores):
        return None
    level, best = _mean(run.pooled("scores", late).tolist()), float(scores.max())
    silent = f"in {idle:.0%} of the groups all responses have the same score"
    if np.ptp(scores) > 0 and level > float(scores.min()) + 0.8 * float(np.ptp(scores)):
        return Cause(
            "solved",
            f"{silent}, and the mean is {level:.3g} of at most {best:.3g}: the prompts are solved",
            "data.train: harder prompts; or dynamic_sampling.prompts, which looks for those that "
            "still differ",
        )
    if np.ptp(scores) == 0 and best > 0:
        return Cause(
            "solved",
            f"{silent}, {best:g}, from the first iteration: the prompts are too easy, or the "
            "reward gives that for anything",
            "data.train: harder prompts, after a look at responses in rollouts.jsonl",
        )
    return Cause(
        "too_hard",
        f"{silent}, and the mean is {level:.3g}: the policy hardly ever earns more",
        "data.train: easier prompts or a worked example in prompt_template; then "
        f"{run.named('num_generations')} higher, or a reward with partial credit",
    )


def _frozen(run: Evidence) -> Cause | None:
    rates = list(run.curves.get("train/lr", {}).values())
    waits = run.option("update.freeze_steps")
    if isinstance(waits, int) and waits >= run.steps:
        return Cause(
            "frozen",
            f"update.freeze_steps is {waits} and the run has {run.steps} iterations: the critic "
            "alone was trained",
            f"model.update.freeze_steps ({waits}) lower",
        )
    full = run.option("optimizer.lr")
    if rates and (max(rates) == 0 or (isinstance(full, float) and max(rates) < 0.2 * full)):
        return Cause(
            "no_rate",
            f"train/lr was at most {max(rates):.2g} of {full}: the run ended in its warm-up",
            f"{run.named('optimizer.warmup_steps')} lower than trainer.max_steps",
        )
    if run.recent("policy/grad_norm") == 0 and any(group.spread > 0 for group in run.late):
        return Cause(
            "frozen",
            "policy/grad_norm is 0 although scores of a group differ: no weight is trained",
            "the options that freeze weights (peft, trainable parts)",
        )
    return None


def _penalty(run: Evidence) -> Cause | None:
    """The first-order gain of a policy that pays ``coef`` per nat is the variance over ``coef``."""
    coef, moved = run.recent("kl/coef"), run.recent("kl/sequence")
    spread = _mean([group.spread for group in run.groups])
    if run.curves.get("kl/loss"):  # beside advantages, which may be normalised
        spread = max(spread, 1.0)
    paid = coef * moved
    # a policy that was thrown off pays much too, but that is not why
    if not spread > 0 or not (coef > 3 * spread or (paid > spread and not run.collapsed)):
        return None
    return Cause(
        "penalty",
        f"the KL penalty outweighs the reward: a response pays {paid:.2g} ({coef:.3g} per nat), "
        f"and rewards of a group differ by {spread:.2g}",
        f"{run.named('reference.kl_coef')} ten times lower",
    )


def _too_large(run: Evidence) -> Cause | None:
    """The policy was thrown off: it got worse, or says one thing that is not the best it tried."""
    trend, scores = run.trend("rollout/score"), run.pooled("scores")
    level = float(np.mean(run.pooled("scores", run.late))) if run.late else math.nan
    short = level < float(scores.min()) + 0.8 * float(np.ptp(scores)) if len(scores) else False
    first, last = run.early("policy/entropy"), run.recent("policy/entropy")
    clipped = run.recent("policy/clip_fraction")
    far = max(run.curves.get("policy/approx_kl", {0: 0.0}).values())
    signs = {
        f"rollout/score fell by {-trend.rise:.2g}": -trend.rise > 2 * trend.reach,
        f"eval/score fell by {-run.gain[0] if run.gain else 0:.2g}": run.gain and run.gain[2] < 0,
        f"entropy fell from {first:.2g} to {last:.2g} nats per token at a score of {level:.2g}, "
        "where responses have earned more": run.collapsed and short,
        f"{clipped:.0%} of the ratios are clipped": clipped > 0.3,
        f"an update moved the policy by {far:.2g} nats per token": far > 0.1,
    }
    if not any(list(signs.values())[:3]):
        return None
    return Cause(
        "steps_too_large",
        "the policy was thrown off: " + ", ".join(sign for sign, seen in signs.items() if seen),
        f"{run.named('optimizer.lr')} three to ten times lower; then reference.kl_coef or "
        "update.entropy_coef",
    )


def _too_small(run: Evidence) -> Cause | None:
    """Nothing moves, although there is something to learn from."""
    same, moved = run.unchanged_answers, run.recent("kl/sequence")
    if run.steps < _FEW or not (same > 0.9 or abs(moved) < 0.01):
        return None
    how = (
        f"{same:.0%} of the greedy answers are the same text in the first and the last evaluation"
        if same > 0.9
        else f"the KL to the reference is {moved:.2g} nats per response"
    )
    return Cause(
        "steps_too_small",
        f"the policy has hardly moved in {run.steps} iterations: {how}",
        f"{run.named('optimizer.lr')} ten times higher (adapters take ten times the rate of full "
        "training)",
    )


def _length(run: Evidence) -> Cause | None:
    """The score follows the length, and the length has changed."""
    first, last = run.early("rollout/response_length"), run.recent("rollout/response_length")
    gaps = [
        (group.lengths - group.lengths.mean(), group.scores - group.scores.mean())
        for group in run.groups
        if np.isfinite(group.scores).all()
    ]
    lengths = np.concatenate([own for own, _ in gaps] or [np.zeros(0)])
    scores = np.concatenate([own for _, own in gaps] or [np.zeros(0)])
    size = math.sqrt(float(lengths @ lengths) * float(scores @ scores))
    follows = float(lengths @ scores) / size if size > 0 else 0.0
    if not (abs(follows) > 0.5 and max(first, last) > 1.3 * min(first, last)):
        return None
    return Cause(
        "length",
        f"responses went from {first:.0f} to {last:.0f} tokens, and within a group the score "
        f"follows the length (correlation {follows:+.2f}): that is what it learns",
        "model.rewards: a LengthPenalty, or a reward that does not pay for length",
    )


def _rewards_against_each_other(run: Evidence) -> Cause | None:
    parts, shares = _within_groups(run), _variance_shares(run)
    sizes = {name: float(own @ own) for name, own in parts.items()}
    total = np.sum(list(parts.values()), axis=0) if parts else np.zeros(0)
    if len(parts) > 1 and float(total @ total) < 0.25 * math.fsum(sizes.values()):
        left = math.sqrt(float(total @ total) / math.fsum(sizes.values()))
        return Cause(
            "rewards_cancel",
            f"the rewards cancel each other: within a group {' and '.join(parts)} together vary by "
            f"{left:.0%} of what they vary by one by one",
            "the weights of model.rewards: that of the less wanted one lower",
        )
    largest = max(shares, key=shares.__getitem__, default="")
    quiet = [name for name in shares if name != largest and sizes[name] > 0]
    if not (shares.get(largest, 0.0) > 0.95 and quiet):
        return None
    return Cause(
        "one_reward",
        f"{shares[largest]:.0%} of what differs within a group comes from {largest}; "
        f"{', '.join(quiet)} hardly counts",
        f"the weights of model.rewards: that of {largest} lower, or normalise each reward (gdpo)",
    )


def _outliers(run: Evidence) -> Cause | None:
    share, count = _top_share(run), len(run.pooled("advantages"))
    if count < 200 or not share > 0.5:
        return None
    return Cause(
        "outliers",
        f"1 % of the responses hold {share:.0%} of the squared advantages: the gradient is theirs",
        "the scale of model.rewards (clip or bound it), then advantage.scale_rewards",
    )


def _training_prompts_only(run: Evidence) -> Cause | None:
    trend = run.trend("rollout/score")
    if run.gain is None or not trend.grows:
        return None
    if not (run.gain[0] < 0.1 * trend.rise and run.gain[2] < 0.5 * trend.rise):
        return None
    prompts = len({group.prompt for group in run.groups})
    return Cause(
        "training_prompts_only",
        f"rollout/score rose by {trend.rise:.2g}, eval/score by {run.gain[0]:.2g} (at most "
        f"{run.gain[2]:.2g}): what it learns holds for the {prompts} training prompts alone",
        "data.train: more different prompts",
    )


def _critic(run: Evidence) -> Cause | None:
    share = run.recent("value/explained_variance")
    if not (share < 0.05 and run.steps >= _FEW):
        return None
    return Cause(
        "critic",
        f"the critic explains {share:.0%} of the variance of the returns: advantages are as noisy "
        "as without one",
        f"{run.named('critic.optimizer.lr')} higher, or update.freeze_steps: it goes first",
    )


def _noise(run: Evidence) -> Cause:
    """Nothing is wrong that the files show: the run is too short for its noise."""
    trend = run.trend("rollout/score")
    if math.isnan(trend.noise):
        return Cause(
            "too_short",
            f"the run has {run.steps} iterations: too few for any trend",
            f"trainer.max_steps at least {4 * _FEW}",
        )
    seen = _POWER * trend.noise * math.sqrt(12 / run.steps)
    return Cause(
        "too_noisy",
        f"the score varies by {trend.noise:.2g} from iteration to iteration: {run.steps} of them "
        f"show a rise of {seen:.2g} or more, and a rise of {seen / 2:.2g} takes {4 * run.steps}",
        f"data.batch_size higher (twice as many prompts halve the variance), or "
        f"{run.named('num_generations')}, or more iterations",
    )


_ALWAYS: tuple[Callable[[Evidence], Cause | None], ...] = (
    _skipped_steps,
    _failing_rewards,
    _engine_differs,
    _too_large,
    _length,
    _training_prompts_only,
)
"""What a run that learns should mend too."""
_CHECKS: tuple[Callable[[Evidence], Cause | None], ...] = (
    _skipped_steps,
    _failing_rewards,
    _engine_differs,
    _blind_reward,
    _rewards_against_each_other,
    _truncated,
    _same_samples,
    _frozen,
    _penalty,
    _too_large,
    _outliers,
    _no_differences,
    _length,
    _too_small,
    _training_prompts_only,
    _critic,
)
