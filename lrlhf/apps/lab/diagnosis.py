"""Why a policy does not learn: causes that the files of its run show, the first to mend first."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lrlhf.apps.lab.hacking import FALL, fall, in_parts, length_share, rise_shares
from lrlhf.apps.lab.run_files import RunFiles, records
from lrlhf.statistics.intervals import Estimate, t_quantile
from lrlhf.statistics.paired import mean_by_sign_flips

if TYPE_CHECKING:
    import pandas as pd

_FEW = 8
"""Iterations of which a trend says nothing."""
_FEW_UNITS = 20
"""Groups, or iterations, whose spread is too uncertain to tell a fall of a reward."""
_POWER = 2.8
"""Standard errors of a difference that is found in 80 % of all runs at a level of 5 %."""


_ALWAYS = {"skipped_steps", "failing_rewards", "engine_differs"}
_ALWAYS |= {"steps_too_large", "length", "training_prompts_only", "held_out_falls"}
"""What a run that learns should mend too."""


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


class _Trend(NamedTuple):
    """How far a straight line through the values rises over the run, and its 95 % interval."""

    rise: float
    reach: float
    noise: float
    """Standard deviation around the line of as many independent values."""

    @property
    def grows(self) -> bool:
        return self.rise > self.reach + 1e-9


class Evidence:
    """The files of a run as the checks read them.

    Args:
        run: Of a policy: it has logged ``rollout/response_length``.

    Raises:
        ValueError: It is the run of a reward model or of something else without rollouts, or a
            file cannot be read.
    """

    def __init__(self, run: RunFiles) -> None:
        self.curves = {
            name: {step: curve[step] for step in sorted(curve) if math.isfinite(curve[step])}
            for name, curve in run.curves().items()
        }
        self.steps = len(self.curves.get("rollout/response_length", ()))
        if not self.steps:
            raise ValueError(
                f"{run.folder} is not the run of a policy, or has not rolled out yet: metrics.csv "
                "has no rollout/response_length. For reward models see docs/troubleshooting.md"
            )
        self.run, self._options = run, run.options
        paths = list(run.evaluations.items())
        self.evaluations = {step: _main_rows(path) for step, path in [*paths[:1], *paths[1:][-1:]]}
        table = _table(run)
        self.rows = table[np.isfinite(table["score"])]
        """One per response that has a score."""
        grouped = self._compares and table.groupby("group").size().max() != 1
        self.unit = "group" if grouped else "iteration"
        """Whose scores the algorithm compares."""
        self.a_unit = "a group" if grouped else "an iteration"
        self.rows = in_parts(self.rows.assign(unit=self.rows["group" if grouped else "step"]))
        steps = np.unique(self.rows["step"])
        self.late = self.rows[self.rows["step"].isin(steps[-_quarter(len(steps)) :])]
        """The rows of the last quarter of the steps."""

    @property
    def algorithm(self) -> str:
        """What advantages are by; empty: as the module has it."""
        name = self.option("advantage.estimator") or self.option("algorithm")
        return str(name or ("ppo" if "value/explained_variance" in self.curves else ""))

    @property
    def _compares(self) -> bool:
        if self.algorithm in ("", "ppo"):
            return not self.algorithm
        from lrlhf.functional.algorithms import ESTIMATORS  # noqa: PLC0415  with torch

        known = ESTIMATORS.get(self.algorithm)
        return known is None or known.groups

    def option(self, name: str) -> Any:
        """Return an option of the module; None: the run's files do not say."""
        value: Any = self._options
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
            value = value.get("init_args", value) if isinstance(value, Mapping) else value
        return value

    def with_values(self, text: str) -> str:
        """Add the value to each option that the text names, where the config has a plain one."""

        def named(found: re.Match[str]) -> str:
            value = self.option(found[1])
            plain = isinstance(value, str | int | float)
            return f"{found[0]} ({value})" if plain else found[0]

        return re.sub(r"\bmodel\.(\w+(?:\.\w+)*)", named, text)

    def early(self, name: str) -> float:
        """Return the mean of a metric over the first quarter of its steps."""
        values = list(self.curves.get(name, {}).values())
        return _mean(values[: _quarter(len(values))])

    def recent(self, name: str) -> float:
        """Return the mean of a metric over the last quarter of its steps."""
        values = list(self.curves.get(name, {}).values())
        return _mean(values[-_quarter(len(values)) :])

    def trend(self, first: float = -math.inf, last: float = math.inf) -> _Trend:
        """Fit a straight line through ``rollout/score``.

        Values near each other may be alike, as where prompts are sorted: for their autocorrelation
        ρ, n of them count as n (1 - ρ) / (1 + ρ).
        """
        curve = self.curves.get("rollout/score", {})
        values = np.array([value for step, value in curve.items() if first <= step <= last])
        count = len(values)
        if count < _FEW:
            return _Trend(math.nan, math.inf, math.nan)
        place = np.linspace(-0.5, 0.5, count)
        rise = float(place @ values / (place @ place))
        gaps = values - values.mean() - rise * place
        total = float(gaps @ gaps)
        alike = min(max(float(gaps[1:] @ gaps[:-1]) / total, 0.0), 0.9) if total > 0 else 0.0
        noise = math.sqrt(total / (count - 2) * (1 + alike) / (1 - alike))
        reach = t_quantile(0.95, count - 2) * noise / math.sqrt(float(place @ place))
        return _Trend(rise, reach, noise)

    @cached_property
    def gain(self) -> Estimate | None:
        """Gain from the first to the last evaluation: prompts are paired; None: unknown."""
        sides = [_by_prompt(rows) for rows in self.evaluations.values()]
        shared = [key for key in sides[0] if key in sides[-1]] if len(sides) > 1 else []
        return (
            mean_by_sign_flips([sides[1][key] - sides[0][key] for key in shared])
            if shared
            else None
        )

    @property
    def collapsed(self) -> bool:
        """Whether the entropy has fallen to a tenth."""
        return abs(self.recent("policy/entropy")) < 0.1 * abs(self.early("policy/entropy"))

    @property
    def unchanged_answers(self) -> float:
        """Share of the greedy answers whose text is the same in the first and last evaluation."""
        sides = list(self.evaluations.values())
        same = (
            [
                one.get("completion") == other.get("completion")
                for one, other in zip(*sides, strict=True)
                if not one.get("temperature")
            ]
            if len(sides) > 1 and len(sides[0]) == len(sides[1])
            else []
        )
        return _mean(same)

    def spreads(self, rows: pd.DataFrame) -> pd.Series[float]:
        """Standard deviation of the scores that are compared, one value for each comparison."""
        scores = rows.groupby("unit")["score"]
        # equal values may differ from their mean by rounding
        spread = scores.std(ddof=0).where(scores.max() > scores.min(), 0.0)
        return spread[scores.size() > 1]

    @cached_property
    def _known_scores(self) -> list[float]:
        own = self.rows["score"].tolist()
        return own or list(self.curves.get("rollout/score", {}).values()) or [math.nan]

    @property
    def best(self) -> float:
        """The best score that a response has earned."""
        return max(self._known_scores)

    @property
    def is_good(self) -> bool:
        """Whether the score is four fifths of the way to the best, from what is poor but not rare.

        Equal scores are good where they are above 0.
        """
        low = float(np.quantile(self._known_scores, 0.05))
        return self.best > 0 and self.recent("rollout/score") >= low + 0.8 * (self.best - low)

    @cached_property
    def idle(self) -> float:
        """Share of groups, or iterations, of equal scores in the last quarter; NaN: unknown."""
        logged = self.recent("rollout/zero_variance_groups")
        if self.unit == "group" and not math.isnan(logged):
            return logged
        alone = [max(self._known_scores) - min(self._known_scores)]
        return _mean([spread == 0 for spread in list(self.spreads(self.late)) or alone])

    def within(self, rows: pd.DataFrame, names: list[str]) -> pd.DataFrame:
        """Return columns less their means of what is compared."""
        return rows[names] - rows.groupby("unit")[names].transform("mean")

    @cached_property
    def falls(self) -> dict[str, float]:
        """`fall` of each reward that has the weight 0 throughout, where it says something."""
        names = {name.removeprefix("held_out/") for name in self.rows if "held_out/" in name}
        falls = {
            name: fall(self.rows, f"held_out/{name}")
            for name in sorted(names)
            if f"rewards/{name}" not in self.rows
            and self.rows.dropna(subset=[f"held_out/{name}"])["unit"].nunique() >= _FEW_UNITS
        }
        return {name: own for name, own in falls.items() if not math.isnan(own)}

    @cached_property
    def rewards(self) -> pd.DataFrame:
        """Each weighted reward as `within` has it, of the responses that have all of them."""
        names = [name for name in self.rows if name.startswith("rewards/")]
        parts = self.within(self.rows.dropna(subset=names), names)
        return parts.rename(columns=lambda name: name.removeprefix("rewards/"))


def _quarter(count: int) -> int:
    return max(1, count // 4)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _table(run: RunFiles) -> pd.DataFrame:
    """Return what the checks read of the responses: numbers, and texts as their hashes."""
    import pandas as pd  # noqa: PLC0415  takes half a second

    count, columns = 0, defaultdict[str, "array[float]"](lambda: array("d", [math.nan]) * count)
    for group, row in ((number, row) for number, own in enumerate(run.groups()) for row in own):
        if row.get("padding"):  # of dynamic sampling: counts in nothing
            continue
        try:
            entry = {"group": float(group), **_numbers(row)}
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{run.folder / 'rollouts.jsonl'}: a record of step {row.get('step')} is not as "
                f"RolloutLog writes it ({type(error).__name__}: {error})"
            ) from error
        for name in {**columns, **entry}:
            columns[name].append(entry.get(name, math.nan))
        count += 1
    for name in ("group", "step", "score", "length", "advantage", "cut", "text", "prompt"):
        columns[name]
    return pd.DataFrame({name: np.array(column) for name, column in columns.items()})


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    weights, rewards = row.get("weights") or {}, row.get("rewards") or {}
    texts = {"text": row.get("completion"), "prompt": row.get("prompt")}
    return {
        "step": float(row["step"]),
        **{name: _number(row.get(name)) for name in ("score", "length", "advantage")},
        "cut": float(row.get("finish_reason") in {"length", "max_turns"}),
        # 52 bits are exact in a float
        **{name: float(hash(str(text)) & (2**52 - 1)) for name, text in texts.items()},
        **{
            f"rewards/{name}": _number(value) * _number(weights.get(name, 1.0))
            for name, value in rewards.items()
            if weights.get(name) != 0
        },
        **{
            f"held_out/{name}": _number(value)
            for name, value in rewards.items()
            if weights.get(name) == 0
        },
    }


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _main_rows(path: Any) -> list[dict[str, Any]]:
    """Return the records of an evaluation's first temperature, which ``eval/score`` is of."""
    rows = list(records(path))
    return [row for row in rows if row.get("temperature") == rows[0].get("temperature")]


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for row in rows:
        score = row.get("score")
        if isinstance(score, int | float) and math.isfinite(score):
            key = json.dumps([row.get(name) for name in ("set", "source", "row", "prompt")])
            scores.setdefault(key, []).append(float(score))
    return {key: _mean(own) for key, own in scores.items()}


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
    links = (_iterations, _rewards, _steps, _differences, _what_is_learnt, _hacking)
    causes = [
        Cause(check.name, check.evidence, evidence.with_values(check.change))
        for link in links
        for check in link(evidence)
        if check.seen and (not learns or check.name in _ALWAYS)
    ]
    if not learns and not causes:
        causes = [_noise(evidence)]
    return Diagnosis(learns, verdict, causes, _facts(evidence))


def _verdict(run: Evidence) -> tuple[bool, str]:
    trend = run.trend()
    if run.gain is not None:
        first, last = run.evaluations
        what = (
            f"eval/score changed by {run.gain.value:+.3g} from step {first} to step {last} (95 % "
            f"interval {run.gain.low:+.3g} to {run.gain.high:+.3g}, by prompt)"
        )
        learns = run.gain.low > 0 or (run.gain.value > 0 and trend.grows)
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
    noise = run.trend().noise
    facts = {
        f"share of {run.unit}s that teach": 1 - run.idle,
        f"score, standard deviation within {run.a_unit}": _mean(list(run.spreads(run.late))),
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
    facts["share of the score's rise that goes with length"] = length_share(run.rows)
    several = {
        "share of {} in the spread of scores": _variance_shares(run),
        "share of {} in the score's rise": rise_shares(run.rows),
        "fall of {}, standard errors": run.falls,
    }
    return facts | {
        what.format(name): own for what, values in several.items() for name, own in values.items()
    }


def _noise(run: Evidence) -> Cause:
    """Nothing is wrong that the files show: the run is too short for its noise."""
    noise = run.trend().noise
    if math.isnan(noise):
        what = f"the run has {run.steps} iterations: too few for any trend"
        return Cause("too_short", what, f"trainer.max_steps at least {4 * _FEW}")
    seen = _POWER * noise * math.sqrt(12 / run.steps)
    return Cause(
        "too_noisy",
        f"the score varies by {noise:.2g} from iteration to iteration: {run.steps} of them show a "
        f"rise of {seen:.2g} or more, and a rise of {seen / 2:.2g} takes {4 * run.steps}",
        run.with_values(
            "data.batch_size higher (twice as many prompts halve the variance), or "
            "model.num_generations, or more iterations"
        ),
    )


class _Check(NamedTuple):
    seen: Any
    """Truth: the cause is there. Its evidence makes no sense otherwise."""
    name: str
    evidence: str
    change: str
    """``model.<option>`` is shown with its value."""


def _iterations(run: Evidence) -> Iterator[_Check]:
    """What went wrong in whole iterations."""
    count = max(run.curves.get("train/skipped_steps", {}).values(), default=0.0)
    parts = run.option("update.num_minibatches") or (4 if run.algorithm == "ppo" else 1)
    steps = run.steps * (run.option("update.num_iterations") or 1) * parts
    kinds = [name for name in run.curves if name[:6] == "guard/" and any(run.curves[name].values())]
    yield _Check(
        count > 0.1 * steps,
        "skipped_steps",
        f"{count:g} of {steps} optimizer steps were left out ({', '.join(kinds) or 'by the guard'})"
        ": nothing moved in them",
        "lrlhf replay with the newest dump names the first module that failed; then "
        "model.optimizer.lr lower, or trainer.precision",
    )
    lost = run.recent("rollout/unscorable_fraction")
    name_of = re.compile(r"rewards/(.*)/(?:unscored|mixed)_fraction")
    named = ((run.recent(name), name_of.fullmatch(name)) for name in run.curves)
    share, worst = max(((own, found[1]) for own, found in named if found), default=(0.0, ""))
    yield _Check(
        lost > 0.1,
        "failing_rewards",
        f"{lost:.0%} of the responses have no score and teach nothing"
        + (f"; {worst} gave none for {share:.0%}" if share > 0 else ""),
        "that reward of model.rewards, or the environment: the log has the first traceback, and a "
        "response of rollouts.jsonl repeats it in Python",
    )
    gap, age = run.recent("mismatch/mean"), run.recent("sync/age")
    yield _Check(
        gap > 0.1,
        "engine_differs",
        f"engine and trainer differ by {gap:.2g} nats per token: the update is not of the policy "
        "that sampled"
        + (f"; the weights that sampled were {age:.1f} iterations old" if age > 0 else ""),
        "model.max_staleness lower; every_n_steps: 1 of VLLMWeightSync; or the engine's dtype",
    )


def _rewards(run: Evidence) -> Iterator[_Check]:
    """What keeps rewards from saying anything."""
    scores = run.rows["score"]
    size = scores.max() - scores.min()
    nothing = len(scores) >= 16 and size == 0 and scores.max() <= 0
    above = list(_right_above_chance(run.run)) if nothing else []
    yield _Check(
        # by groups: an answer may stand in some texts by chance
        _mean(above) > 0.02 and mean_by_sign_flips(above).low > 0,
        "blind_reward",
        f"all {len(scores):,} responses have the score {scores.max():g}, but {_mean(above):.0%} of "
        "them, more than by chance, hold the answer of their row as a word",
        "model.rewards: the pattern or column that the reward looks for; call it in Python with "
        "such a response",
    )
    total, sizes = run.rewards.sum(axis=1), (run.rewards**2).sum()
    left, parts = float(total @ total), float(sizes.sum())
    yield _Check(
        len(sizes) > 1 and left < 0.25 * parts,
        "rewards_cancel",
        f"the rewards cancel each other: within {run.a_unit} {' and '.join(sizes.index)} together "
        f"vary by {math.sqrt(left / (parts or 1.0)):.0%} of what they vary by one by one",
        "the weights of model.rewards: that of the less wanted one lower",
    )
    cut, turns = run.recent("rollout/truncated_fraction"), run.recent("episode/max_turns_fraction")
    means = scores.groupby(run.rows["cut"]).mean()
    whole, ended = means.get(1.0, math.nan), means.get(0.0, math.nan)
    # where nothing differs, the end that the reward looks for may never have been reached
    never = size == 0 and cut > 0.9 and whole <= 0
    yield _Check(
        never or (cut > 0.5 and ended - whole > 0.25 * size),
        "truncated",
        f"{cut:.0%} of the responses are cut off before their end and score {whole:.3g}"
        + (", as all do" if never else f", others {ended:.3g}"),
        f"model.{'episodes.max_turns' if turns > 0.5 * cut else 'sampling.max_new_tokens'} higher, "
        "or sampling.stop where the format has an end",
    )
    same = _share_of_one_text(run.rows[run.rows["step"] <= run.rows["step"].min() + 1])
    yield _Check(
        same > 0.5 and not run.is_good,
        "same_samples",
        f"in {same:.0%} of the first groups all responses are the same text: there is nothing to "
        "compare",
        "model.sampling.temperature nearer to 1; if it is 1, prompts of which the policy is less "
        "sure",
    )


def _right_above_chance(run: RunFiles) -> Iterator[float]:
    """Yield for each group the share of texts that hold their row's answer, above chance.

    Chance is the share that holds the answer of the group before. Groups without one are left out.
    """
    other: Any = None
    for own in run.groups():
        texts = [str(row.get("completion", "")) for row in own]
        answer = (own[0].get("columns") or {}).get("answer")
        above = _share_that_holds(texts, answer) - _share_that_holds(texts, other)
        other = answer
        if not math.isnan(above):
            yield above


def _share_that_holds(texts: Sequence[str], answer: Any) -> float:
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        return math.nan
    word = re.compile(rf"(?<![\w.]){re.escape(str(answer).strip())}(?![\w])", re.IGNORECASE)
    return _mean([bool(word.search(text)) for text in texts])


def _share_of_one_text(rows: pd.DataFrame) -> float:
    """Return the share of groups whose responses are all the same text."""
    texts = rows.groupby("group")["text"]
    return _mean(list(texts.nunique()[texts.size() > 1] == 1))


def _steps(run: Evidence) -> Iterator[_Check]:
    """What keeps the optimizer from following the rewards."""
    waits, full = run.option("update.freeze_steps"), run.option("optimizer.lr")
    critic_alone = isinstance(waits, int) and waits >= run.steps
    still = run.recent("policy/grad_norm") == 0 and run.spreads(run.late).any()
    yield _Check(
        critic_alone or still,
        "frozen",
        f"update.freeze_steps is {waits} and the run has {run.steps} iterations: the critic alone "
        "was trained"
        if critic_alone
        else "policy/grad_norm is 0 although scores of a group differ: no weight is trained",
        "model.update.freeze_steps lower, or what else freezes weights (peft, trainable parts)",
    )
    rate = max(run.curves.get("train/lr", {}).values(), default=math.nan)
    yield _Check(
        rate == 0 or (isinstance(full, float) and rate < 0.2 * full),
        "no_rate",
        f"train/lr was at most {rate:.2g} of {full}: the run has not left its warm-up",
        "model.optimizer.warmup_steps lower than trainer.max_steps",
    )
    coef, spreads = run.recent("kl/coef"), run.spreads(run.rows)
    # groups without a difference have no side in the matter
    spread, what = _mean(list(spreads[spreads > 0])), "rewards"
    if run.curves.get("kl/loss") and spread < 1:  # beside advantages, which may be normalised
        spread, what = 1.0, "advantages"
    paid = coef * run.recent("kl/sequence")
    yield _Check(
        # the first-order gain of a policy that pays ``coef`` per nat is the variance over ``coef``;
        # one that was thrown off pays much too, but that is not why
        coef > 3 * spread or (paid > spread and not run.collapsed),
        "penalty",
        f"the KL penalty outweighs the reward: a response pays {paid:.2g} ({coef:.3g} per nat), "
        f"and {what} of {run.a_unit} differ by {spread:.2g}",
        "model.reference.kl_coef ten times lower",
    )
    trend, gain, level = run.trend(), run.gain, run.recent("rollout/score")
    first, last = run.early("policy/entropy"), run.recent("policy/entropy")
    clipped = run.recent("policy/clip_fraction")
    far = max(run.curves.get("policy/approx_kl", {}).values(), default=0.0)
    worse = {
        f"rollout/score fell by {-trend.rise:.2g}": -trend.rise > 2 * trend.reach,
        f"eval/score fell by {-gain.value if gain else 0:.2g}": gain and gain.high < 0,
        f"entropy fell from {first:.2g} to {last:.2g} nats per token at a score of {level:.2g}, "
        f"where responses have earned {run.best:.2g}": run.collapsed
        and not run.is_good
        and not _share_of_one_text(run.late) < 0.5,
    }
    signs = worse | {
        f"{clipped:.0%} of the ratios are clipped": clipped > 0.3,
        f"an update moved the policy by {far:.2g} nats per token": far > 0.1,
    }
    yield _Check(
        any(worse.values()),
        "steps_too_large",
        "the policy was thrown off: " + ", ".join(sign for sign, seen in signs.items() if seen),
        "model.optimizer.lr three to ten times lower; then reference.kl_coef or "
        "update.entropy_coef",
    )


def _differences(run: Evidence) -> Iterator[_Check]:
    """What keeps responses from being told apart."""
    level, idle = run.recent("rollout/score"), run.idle
    silent = (
        f"in {idle:.0%} of the {run.unit}s all responses have the same score, and the mean is "
        f"{level:.3g} of at most {run.best:.3g}"
    )
    yield _Check(
        idle > 0.8 and run.is_good,
        "solved",
        f"{silent}: the prompts are solved, or the reward gives that for anything",
        "data.train: harder prompts, after a look at responses in rollouts.jsonl; or "
        "dynamic_sampling.prompts, which looks for those that still differ",
    )
    yield _Check(
        idle > 0.8 and not (run.is_good or math.isnan(level)),
        "too_hard",
        f"{silent}: most prompts are too hard for the policy",
        "data.train: easier prompts or a worked example in prompt_template; then "
        "model.num_generations higher, or a reward with partial credit",
    )
    share = _top_share(run)
    yield _Check(
        share > 0.5 and len(run.rows) >= 200,
        "outliers",
        f"1 % of the responses hold {share:.0%} of the squared advantages: the gradient is theirs",
        "model.advantage.reward_clip_range, or a bound in the reward itself; then advantage.clip",
    )
    first, last = run.early("rollout/response_length"), run.recent("rollout/response_length")
    ended = run.rows[run.rows["cut"] == 0]  # to be cut off is another matter
    gaps = run.within(ended, ["length", "score"])
    size = math.sqrt(float((gaps["length"] ** 2).sum() * (gaps["score"] ** 2).sum()))
    follows = float(gaps["length"] @ gaps["score"]) / size if size > 1e-9 else 0.0
    yield _Check(
        follows**2 > 0.5
        and max(first, last) > 1.3 * min(first, last)
        and (last > first) == (follows > 0),
        "length",
        f"responses went from {first:.0f} to {last:.0f} tokens, and within {run.a_unit} the score "
        f"follows the length (correlation {follows:+.2f}): that is what it learns",
        "unless length is the aim, model.rewards: a LengthPenalty, or a reward that does not pay "
        "for length",
    )


def _top_share(run: Evidence) -> float:
    squares = np.sort(run.rows["advantage"].dropna() ** 2)[::-1]
    top, total = squares[: max(1, len(squares) // 100)].sum(), squares.sum()
    return float(top / total) if total > 0 else math.nan


def _what_is_learnt(run: Evidence) -> Iterator[_Check]:
    """What is learnt too slowly, or in place of what should be."""
    same, moved = run.unchanged_answers, run.recent("kl/sequence")
    still = abs(moved) < 0.01 and not run.option("reference.sync_every")
    how = (
        f"{same:.0%} of the greedy answers are the same text in the first and the last evaluation"
        if same > 0.9
        else f"the KL to the reference is {moved:.2g} nats per response"
    )
    yield _Check(
        run.steps >= _FEW and (same > 0.9 or still),
        "steps_too_small",
        f"the policy has hardly moved in {run.steps} iterations: {how}",
        "model.optimizer.lr ten times higher (adapters take ten times the rate of full training)",
    )
    shares, sizes = _variance_shares(run), (run.rewards**2).sum()
    largest = max(shares, key=shares.__getitem__, default="")
    # what is equal in each group may differ by rounding
    quiet = [name for name in shares if name != largest and sizes[name] > 1e-12 * sizes[largest]]
    share = shares.get(largest, math.nan)
    yield _Check(
        share > 0.95 and quiet and run.algorithm != "gdpo",
        "one_reward",
        f"{share:.0%} of what differs within {run.a_unit} comes from {largest}; "
        f"{', '.join(quiet)} hardly counts",
        "the weights of model.rewards: that of the largest lower, or algorithm: gdpo, which "
        "normalises each reward",
    )
    if run.gain is not None:
        trend, value, high = run.trend(*run.evaluations), run.gain.value, run.gain.high
        level = _mean([*_by_prompt(list(run.evaluations.values())[-1]).values()])
        # a score that only comes near that of greedy answers is one that the policy had before
        ahead = run.recent("rollout/score") - level > 0.5 * trend.rise
        yield _Check(
            trend.grows and ahead and value < 0.1 * trend.rise and high < 0.5 * trend.rise,
            "training_prompts_only",
            f"rollout/score rose by {trend.rise:.2g}, eval/score by {value:.2g} (at most "
            f"{high:.2g}): what it learns holds for the {run.rows['prompt'].nunique():,} training "
            "prompts alone",
            "data.train: more different prompts",
        )
    explained = run.recent("value/explained_variance")
    yield _Check(
        run.steps >= _FEW and explained < 0.05,
        "critic",
        f"the critic explains {max(explained, 0.0):.0%} of the variance of the returns: advantages "
        "are as noisy as without one",
        "model.critic.optimizer.lr higher, or model.update.freeze_steps: it goes first",
    )


def _hacking(run: Evidence) -> Iterator[_Check]:
    """What is paid and not wanted, by what rewards of weight 0 say of it."""
    worst = max(run.falls, key=run.falls.__getitem__, default="")
    size = run.falls.get(worst, math.nan)
    yield _Check(
        size > FALL,
        "held_out_falls",
        f"{worst}, of weight 0, is {size:.1f} standard errors below its best tenth of the run, and "
        "the score above what it was there",
        "unless it is meant to fall: the checkpoint of that time, model.reference.kl_coef higher, "
        "or a reward that knows better; read responses of both times first",
    )


def _variance_shares(run: Evidence) -> dict[str, float]:
    """Return the share of each reward in the variance of the scores within groups.

    A share is the covariance of the reward with the score over the variance of the score: they sum
    to 1, and a reward that pulls against the others has a negative one.
    """
    score = run.rewards.sum(axis=1)
    total = float(score @ score)
    if run.rewards.shape[1] < 2 or total == 0:
        return {}
    return {str(name): float(own @ score) / total for name, own in run.rewards.items()}
