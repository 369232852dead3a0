"""Signs that a policy exploits its reward: figures of a run whose true reward nobody knows.

Each compares the end of the responses with what came before, so that a part of a run, up to some
iteration, has signs too. Their error rates are measured where the true reward is known, see
``docs/reward_hacking.md``.

Reference:
    Gao, Schulman and Hilton 2022, https://arxiv.org/abs/2210.10760 (overoptimisation); Coste et al.
    2023, https://arxiv.org/abs/2310.02743 (ensembles)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_PARTS = 10
"""Stretches of equally many steps that are compared."""

FALL = 2.5
"""Standard errors from which on a fall is told.

Of a reward that neither rises nor falls one run in twenty exceeds it.
"""


def in_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the column ``part``: 0 for the first tenth of the steps, and so on."""
    steps = np.unique(rows["step"])
    place = np.searchsorted(steps, rows["step"])
    return rows.assign(part=place * min(_PARTS, len(steps)) // max(1, len(steps)))


def fall(rows: pd.DataFrame, name: str) -> float:
    """Return by how many standard errors a reward is below its best, while the score is above.

        max over parts p with score_p < score_last:  (r_p - r_last) / (s √(1 / n_p + 1 / n_last))

    Means are over the n_p groups of a part, and s is their standard deviation within parts.

    Args:
        rows: Of responses, with ``part``, ``unit`` (the group), ``score`` and the reward.
        name: Of the reward's column; NaN: this response has none.

    Returns:
        Negative where it has risen throughout; NaN where the score is nowhere lower than at the
        end, too few groups have the reward, or it is the same in all groups of a part.
    """
    groups = rows[["part", "unit", "score", name]].dropna().groupby(["part", "unit"]).mean()
    parts = groups.groupby("part")
    means, sizes = parts.mean(), parts.size()
    degrees = len(groups) - len(means)
    squares = ((groups[name] - parts[name].transform("mean")) ** 2).sum()
    # equal values may differ from their mean by rounding
    rounding = 1e-20 * (groups[name] ** 2).sum()
    if len(means) < 2 or degrees < 1 or squares <= rounding:
        return math.nan
    last = means.iloc[-1]
    errors = np.sqrt(squares / degrees * (1 / sizes + 1 / sizes.iloc[-1]))
    gaps = (means[name] - last[name]) / errors
    return float(gaps[means["score"] < last["score"]].max())


def length_share(rows: pd.DataFrame) -> float:
    """Return the share of the score's rise that the length of responses explains.

        slope · (L_last - L_first) / (score_last - score_first)

    with the slope of the score on the length within groups. NaN where the score has not risen.
    """
    own = rows[["part", "unit", "score", "length"]].dropna()
    means = own.groupby("part")[["score", "length"]].mean()
    gaps = own[["score", "length"]] - own.groupby("unit")[["score", "length"]].transform("mean")
    size = float((gaps["length"] ** 2).sum())
    rise = means.iloc[-1] - means.iloc[0] if len(means) else None
    if rise is None or rise["score"] <= 0 or size == 0:
        return math.nan
    slope = float(gaps["length"] @ gaps["score"]) / size
    return float(slope * rise["length"] / rise["score"])


def rise_shares(rows: pd.DataFrame) -> dict[str, float]:
    """Return the share of each weighted reward in the score's rise from the first part to the last.

    They sum to 1 where nothing else is in the score. Empty with less than two rewards, or where the
    score has not risen.
    """
    names = [name for name in rows if name.startswith("rewards/")]
    means = rows.dropna(subset=names).groupby("part")[["score", *names]].mean()
    if len(names) < 2 or len(means) < 2:
        return {}
    rise = means.iloc[-1] - means.iloc[0]
    if rise["score"] <= 0:
        return {}
    return {name.removeprefix("rewards/"): float(rise[name] / rise["score"]) for name in names}
