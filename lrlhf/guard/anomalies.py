"""What must not be trained on: the limits, what is measured against them, and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.functional.kl import kl_estimate
from lrlhf.functional.masking import masked_sum
from lrlhf.options.conversion import settings
from lrlhf.run import Collectives
from lrlhf.types import Experience, SequenceBatch

_RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("max_skipped", "0 or more", lambda value: value >= 0),
    ("window", "1 or more, or null", lambda value: value >= 1),
    ("max_ratio", "above 1, or null", lambda value: value > 1),
    ("max_kl", "above 0, or null", lambda value: value > 0),
    ("max_length_factor", "above 1, or null", lambda value: value > 1),
    ("max_mismatch", "above 0, or null", lambda value: value > 0),
    ("dump", "0 or more", lambda value: value >= 0),
)


class TrainingDivergedError(ValueError):
    """Steps had to be left out again and again, and leaving them out did not help."""


@settings
@dataclass(frozen=True, kw_only=True)
class Guard:
    """Which steps are skipped, when the run stops, and what is dumped.

    A loss, gradient, score, log-probability, advantage or value that is not finite always counts.
    The limits are further ones; null switches one off. Those that depend on the task (KL, length,
    mismatch) are off by default: no number is right for every run. That of the ratio is so far
    out that healthy training does not reach it.

    An anomaly that shows before the update (scores, log-probabilities, advantages, values, KL,
    length, mismatch) leaves out all optimizer steps of the iteration, and counts once. One that
    shows in an optimizer step (loss, gradient, ratio, and the mismatch where the step is the first
    to compute it) leaves out that step. All processes leave out the same.

    Args:
        max_skipped: Stop when more steps than this had to be left out within the last ``window``.
        window: Steps of ``trainer.global_step`` (of a policy: iterations) that ``max_skipped``
            looks back over, so that a long run may have its accidents; null: the whole run.
        max_ratio: Largest factor by which the probability of what the loss clips may have changed
            since the response was drawn, up or down: of a token, or under a loss of whole
            responses the geometric mean over the response's tokens, so that its length plays no
            part. Stored rollouts, which another policy drew, are not measured.
        max_kl: Largest mean KL(policy || reference) of an iteration's responses, in nats per
            response.
        max_length_factor: Largest mean response length of an iteration, in multiples of its
            running mean over the iterations before, once there are five.
        max_mismatch: Largest mean distance between the log-probabilities of trainer and engine, in
            nats per token.
        dump: Anomalies of a run that are written to disk with all that is needed to repeat them
            (`lrlhf replay`), each with a copy of the weights; 0: none.
        dirpath: Folder of the dumps; null: ``dumps`` in the folder of the run.

    Raises:
        ValueError: A value is out of its range.
    """

    max_skipped: int = 10
    window: int | None = 1000
    max_ratio: float | None = 1e4
    max_kl: float | None = None
    max_length_factor: float | None = None
    max_mismatch: float | None = None
    dump: int = 3
    dirpath: str | None = None

    def __post_init__(self) -> None:
        for name, range_, is_within in _RANGES:
            value = getattr(self, name)
            if value is not None and not is_within(value):
                raise ValueError(f"guard.{name} is {value}; it must be {range_}")

    @property
    def max_log_ratio(self) -> float:
        """`max_ratio` in nats; inf: no limit."""
        return math.inf if self.max_ratio is None else math.log(self.max_ratio)


def refuse_policy_limits(guard: Guard, module: str) -> None:
    """Raise `ValueError` for a limit that is about responses, in a module that draws none.

    Args:
        guard: The limits.
        module: Its name.
    """
    for name in ("max_kl", "max_length_factor", "max_mismatch"):
        if getattr(guard, name) is not None:
            raise ValueError(f"guard.{name} is about a policy's responses; {module} has none")


WARM_UP = 5
"""Iterations before a length can be out of proportion."""

_DECAY = 0.9
_MAX_SHOWN = 60


class Anomaly(NamedTuple):
    """A finding because of which a step is skipped.

    Attributes:
        kind: scores, logprobs, advantages, values, kl, length, mismatch, loss, gradient or ratio.
        text: What it is, in words, with value, limit and place.
        value: What was measured; None: it is no number.
        limit: What it may be at most; None: finite.
        rank: The process that found it.
    """

    kind: str
    text: str
    value: float | None = None
    limit: float | None = None
    rank: int = 0

    def plain(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {**self._asdict(), "value": _number(self.value), "limit": _number(self.limit)}


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class RunningLength:
    """Mean response length of the last iterations, the latest counting most."""

    def __init__(self) -> None:
        self.iterations = 0
        self.mean = 0.0

    def update(self, length: float) -> None:
        """Count the mean length of an iteration, in tokens."""
        self.iterations += 1
        weight = max(1 - _DECAY, 1 / self.iterations)  # a plain mean at first
        self.mean += weight * (length - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"iterations": self.iterations, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iterations, self.mean = state["iterations"], state["mean"]


class IterationSums(NamedTuple):
    """What an iteration is judged by: numbers that add up over the ranks."""

    scores: float
    """Infinite ones; NaN says that a response could not be scored."""
    logprobs: float
    """Entries that are not finite, as in the next two."""
    advantages: float
    values: float
    kl: float
    """Nats, over ``kl_rows`` responses."""
    kl_rows: float
    tokens: float
    """Of ``rows`` responses."""
    rows: float
    mismatch: float
    """Nats, over ``mismatch_tokens`` tokens."""
    mismatch_tokens: float


def reference_kl(experience: Experience) -> Tensor | None:
    """`[B]`: distance of each response to the reference in nats; None: there is no reference.

    Of responses that the policy drew it is the k1 estimate; of others, which k1 would misjudge and
    even give a negative distance, k3.
    """
    if experience.ref_logprobs is None:
        return None
    policy, estimator = experience.policy_logprobs, "k3"
    if policy is None:
        policy, estimator = experience.old_logprobs, "k1"
    if policy is None:
        policy = experience.engine_logprobs
    estimate = kl_estimate(policy, experience.ref_logprobs, estimator=estimator)
    return masked_sum(estimate, experience.response_mask, 1)


def measure(experience: Experience) -> Tensor:
    """`[10]`: the `IterationSums` of this rank, before its update.

    Of recorded responses the engine is not to blame for any difference. Where the old
    log-probabilities are the engine's own, the update sees how far they are apart.
    """
    mask = experience.response_mask
    bad = {"logprobs": 0.0, "advantages": 0.0, "values": 0.0}
    for kind, _, value in _looked_at(experience):
        bad[kind] += float(_bad(value, mask).sum())
    kl, rows = reference_kl(experience), float(len(experience))
    old = None if experience.old_source in ("recorded", "engine") else experience.old_logprobs
    mismatch = 0.0
    if old is not None:
        mismatch = float(masked_sum((old - experience.engine_logprobs).abs(), mask))
    tokens = float(mask.sum())
    sums = IterationSums(
        scores=float(experience.scores.isinf().sum()),
        **bad,
        kl=0.0 if kl is None else float(kl.sum()),
        kl_rows=0.0 if kl is None else rows,
        tokens=tokens,
        rows=rows,
        mismatch=mismatch,
        mismatch_tokens=0.0 if old is None else tokens,
    )
    return torch.tensor(sums, device=experience.input_ids.device)


def judge(sums: IterationSums, guard: Guard, lengths: RunningLength) -> list[Anomaly]:
    """Say what is wrong with an iteration, by the ``sums`` of all ranks."""
    anomalies = [
        Anomaly(kind, f"{what}: {count:.0f} of them", count, None)
        for kind, what, count in (
            ("scores", "scores are infinite", sums.scores),
            ("logprobs", "log-probabilities before the update are not finite", sums.logprobs),
            ("advantages", "advantages are not finite", sums.advantages),
            ("values", "values or returns are not finite", sums.values),
        )
        if count > 0
    ]
    kl = sums.kl / max(sums.kl_rows, 1)
    if guard.max_kl is not None and kl > guard.max_kl:
        text = f"the mean KL to the reference is {kl:.4g} nats per response"
        anomalies.append(
            Anomaly("kl", f"{text} (guard.max_kl is {guard.max_kl:g})", kl, guard.max_kl)
        )
    anomalies += judge_mismatch(sums.mismatch, sums.mismatch_tokens, guard)
    length, factor = sums.tokens / max(sums.rows, 1), guard.max_length_factor
    if factor is not None and lengths.iterations >= WARM_UP and length > factor * lengths.mean:
        text = (
            f"responses have {length:.4g} tokens on average, {length / lengths.mean:.3g} times the "
            f"{lengths.mean:.4g} of the iterations before (guard.max_length_factor is {factor:g})"
        )
        anomalies.append(Anomaly("length", text, length, factor * lengths.mean))
    return anomalies


def judge_mismatch(total: float, tokens: float, guard: Guard) -> list[Anomaly]:
    """Say whether trainer and engine are too far apart: ``total`` nats over ``tokens``."""
    limit, mean = guard.max_mismatch, total / max(tokens, 1)
    if limit is None or not mean > limit:
        return []
    text = (
        f"trainer and engine differ by {mean:.4g} nats per token (guard.max_mismatch is {limit:g})"
    )
    return [Anomaly("mismatch", text, mean, limit)]


def _looked_at(experience: Experience) -> list[tuple[str, str, Tensor]]:
    """The tensors of which every entry of a response must be finite: kind of anomaly, and name."""
    looked_at = [
        ("logprobs", "the engine's log-probabilities", experience.sampling_logprobs),
        ("logprobs", "the log-probabilities before the update", experience.old_logprobs),
        ("logprobs", "the policy's log-probabilities", experience.policy_logprobs),
        ("logprobs", "the reference's log-probabilities", experience.ref_logprobs),
        ("advantages", "the advantages", experience.advantages),
        ("values", "the values", experience.values),
        ("values", "the returns", experience.returns),
    ]
    return [(kind, name, value) for kind, name, value in looked_at if value is not None]


def _bad(values: Tensor, mask: Tensor) -> Tensor:
    return ~values.isfinite() & (mask if values.dim() == 2 else mask.any(dim=1))


def locate(
    batch: SequenceBatch,
    outputs: Mapping[str, Tensor],
    *,
    tokenizer: PreTrainedTokenizerBase,
    rows: Tensor | None = None,
) -> str:
    """Say where the first entry is that is not finite; empty: none is within a response.

    Args:
        batch: The rows, numbered ``rows`` `[B]`; None: as they come.
        outputs: `[B, T]` or `[B]` by what to call them, looked at in their order.
        tokenizer: Writes the prompt.
        rows: See ``batch``.
    """
    for name, values in outputs.items():
        positions = _bad(values, batch.response_mask.to(values.device)).nonzero().tolist()
        if not positions:
            continue
        row, *position = positions[0]
        number = row if rows is None else int(rows[row])
        prompt = shortened(prompt_text(batch, row, tokenizer))
        token = ""
        if position:
            token_text = tokenizer.decode([int(batch.input_ids[row, position[0]])])
            token = f", token {position[0]} ({token_text!r})"
        return f"first in {name} of row {number}{token}, whose prompt is {prompt!r}"
    return ""


def locate_in(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> str:
    """Say where the first entry of an experience is that is not finite; empty: nowhere."""
    outputs = {name: value for _, name, value in _looked_at(experience)}
    infinite = experience.scores.nan_to_num(0.0, torch.inf, -torch.inf)
    return locate(experience, {"the scores": infinite, **outputs}, tokenizer=tokenizer)


def prompt_text(batch: SequenceBatch, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what stands before a row's first trained token."""
    mask = batch.response_mask[row]
    first = int(mask.long().argmax()) if bool(mask.any()) else mask.shape[0]
    ids = batch.input_ids[row, :first][batch.attention_mask[row, :first]]
    return str(tokenizer.decode(ids.tolist()))


def shortened(text: str) -> str:
    """Return the beginning of a text, as a message can show it."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def shown(value: Tensor) -> float | str:
    """Return a number for JSON, which has no word for those that are not finite."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


class StepVerdict(NamedTuple):
    """What became of one optimizer step before its gradients are looked at."""

    skips: bool
    """Whether all ranks leave it out."""
    anomalies: list[Anomaly]
    """What this rank knows of the reason; others may know more."""


class _MicroBatchLoss(NamedTuple):
    """A micro-batch's loss, and what it takes to say where it went wrong."""

    infinite: Tensor
    """A bool where the loss is, true if that is no number or infinite."""
    place_of: Callable[[], str]
    rows: Tensor
    outputs: dict[str, Tensor]


class StepWatch:
    """What one rank sees of one optimizer step; its sums, on ``device``, add up over the ranks."""

    def __init__(self, guard: Guard, *, rows: int, device: torch.device) -> None:
        self._guard = guard
        # losses that are not finite, ratios out of bounds, mismatch in nats, tokens of that
        self._sums = torch.zeros(4, device=device)
        self._losses: list[_MicroBatchLoss] = []
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._size = rows
        self.rows = torch.arange(rows)
        """Which rows of the step the present micro-batch has."""
        self.outputs: dict[str, Tensor] = {}
        """`[B, T]` each, what the models made of the present micro-batch, by what to call it."""

    @property
    def limits_mismatch(self) -> bool:
        """Whether the distance between trainer and engine matters."""
        return self._guard.max_mismatch is not None

    @property
    def log_ratios(self) -> Tensor:
        """`[B]`, how far each row's probabilities have moved, in nats; NaN: not known."""
        moved = torch.full((self._size,), torch.nan)
        for rows, distances in self._moves:
            moved[rows] = distances.cpu()
        return moved

    def turn_to(self, rows: Tensor) -> None:
        """Begin with a micro-batch."""
        self.rows, self.outputs = rows, {}

    def see_loss(self, loss: Tensor, place_of: Callable[[], str]) -> None:
        """Take down the loss of the present micro-batch, without waiting for its device.

        ``place_of`` says where its first entry is that is not finite; `judge` asks it, with
        ``rows`` and ``outputs`` as they are now. It is kept until then, and should be small.
        """
        infinite = ~loss.detach().isfinite()
        self._losses.append(_MicroBatchLoss(infinite, place_of, self.rows, self.outputs))
        self._sums[0] += infinite

    def see_ratios(self, log_ratios: Tensor) -> None:
        """Look at how far the present micro-batch has moved: `[N]`, of each row, in nats."""
        distances = log_ratios.detach().abs().float()
        self._moves.append((self.rows.cpu(), distances))
        self._sums[1] += (distances > self._guard.max_log_ratio).sum()

    def see_mismatch(self, total: Tensor, tokens: Tensor) -> None:
        """Look at the distance between trainer and engine, in nats, over so many tokens."""
        self._sums[2] += total.detach()
        self._sums[3] += tokens

    def judge(self, collectives: Collectives) -> StepVerdict:
        """Compare with the limits; all ranks call it, and all leave the step out, or none."""
        own = self._sums.tolist()
        losses, ratios, mismatch, tokens = collectives.sum(self._sums).tolist()
        anomalies: list[Anomaly] = []
        if own[0] > 0:
            where = self._place()
            anomalies.append(
                Anomaly("loss", f"the loss is not finite{f' ({where})' if where else ''}")
            )
        if own[1] > 0:
            anomalies.append(self._largest_ratio())
        too_far = judge_mismatch(mismatch, tokens, self._guard)
        anomalies += too_far if collectives.rank == 0 else []
        self._losses = []
        return StepVerdict(losses > 0 or ratios > 0 or bool(too_far), anomalies)

    def _place(self) -> str:
        """Say where the first entry is that is not finite; empty: no micro-batch has one."""
        for seen in self._losses:
            if bool(seen.infinite):
                self.rows, self.outputs = seen.rows, seen.outputs
                if location := seen.place_of():
                    return location
        return ""

    def _largest_ratio(self) -> Anomaly:
        moved = self.log_ratios
        row = int(moved.nan_to_num(-1.0).argmax())
        distance, limit = float(moved[row]), self._guard.max_ratio
        text = (
            f"the probabilities of row {row} have moved by {distance:.4g} nats "
            f"(guard.max_ratio is {limit:g}, {self._guard.max_log_ratio:.4g} nats)"
        )
        return Anomaly("ratio", text, distance, self._guard.max_log_ratio)
