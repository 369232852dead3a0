"""Sampling options of responses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lrlhf.options.conversion import settings

_FORMATS = {"regex", "json", "choice", "grammar"}


@settings
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options with which an engine samples responses.

    Args:
        temperature: Divides the logits; 0 takes the most likely token.
        max_new_tokens: Longest response, the end-of-sequence token included.
        min_new_tokens: Tokens before the first end-of-sequence token.
        top_p: Keep the smallest set of tokens with this much probability; 1 keeps all.
        top_k: Keep this many of the most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this fraction of the most likely one; 0 keeps all.
        keep_mask: Return the ids that these three and ``min_new_tokens`` leave at each token
            (`lrlhf.types.SamplingMask`); training sets it where it needs them.
        keep_experts: Return the experts that each token went through, for
            ``update.replay_routing``, which sets it.
        repetition_penalty: Divides positive logits of tokens of prompt and response, and multiplies
            negative ones (Keskar et al. 2019); 1 changes nothing. Penalties change the sampling
            distribution: they are for evaluation, and refused for training.
        presence_penalty: Subtracted from the logit of tokens of the response.
        frequency_penalty: Subtracted from it once per occurrence in the response.
        first_temperature: Temperature of a response's first token alone, such as 30, for diversity
            from the beginning (FIRE, Chen et al. 2024, https://arxiv.org/abs/2410.21236); None: no
            difference. In training the advantages of each response are importance weighted.
        first_top_k: Draw that token from this many of the most likely ones; 0: from all.
        structured: Structured output of vLLM, as one of ``{regex: …}``, ``{json: SCHEMA}``,
            ``{choice: [TEXT, …]}`` and ``{grammar: …}``; None: any text. For evaluation alone, as
            penalties are.
        stop: Strings that end a response where they first appear. Their tokens stay part of it;
            the text for rewards and logs ends before them.
        stop_in_text: Keep them in the text too, such as ``</answer>`` for a reward.

    Raises:
        ValueError: An option is out of its range.
    """

    temperature: float = 1.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    keep_mask: bool = False
    keep_experts: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    first_temperature: float | None = None
    first_top_k: int = 0
    structured: dict[str, Any] | None = None
    stop: tuple[str, ...] = field(default=())
    stop_in_text: bool = False

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("temperature", self.temperature >= 0, "be 0 or more"),
            ("max_new_tokens", self.max_new_tokens >= 1, "be 1 or more"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"lie between 0 and max_new_tokens ({self.max_new_tokens})",
            ),
            ("top_p", 0 < self.top_p <= 1, "lie in (0, 1], 1 keeps all"),
            ("top_k", self.top_k >= 0, "be 0 (all tokens) or more"),
            ("min_p", 0 <= self.min_p < 1, "lie in [0, 1), 0 keeps all"),
            ("repetition_penalty", self.repetition_penalty > 0, "be above 0, 1 leaves all"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "lie in [-2, 2]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "lie in [-2, 2]"),
            (
                "first_temperature",
                self.first_temperature is None or self.first_temperature > 0,
                "be above 0, or null",
            ),
            ("first_top_k", self.first_top_k >= 0, "be 0 (all tokens) or more"),
        ):
            if not holds:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}; it must {rule}")
        if self.first_top_k and self.first_temperature is None:
            raise ValueError(
                f"sampling.first_top_k is {self.first_top_k}, but there is no first_temperature "
                "that it goes with: set it, such as 30, or take top_k"
            )
        if self.structured is not None and (
            len(self.structured) != 1
            or not _FORMATS.issuperset(self.structured)
            or None in self.structured.values()
        ):
            raise ValueError(
                f"sampling.structured is {self.structured}; it must have one of "
                f"{', '.join(sorted(_FORMATS))} and its value"
            )
        # null reaches this class from a config
        if self.stop is None or "" in self.stop:  # type: ignore[redundant-expr,unused-ignore]
            raise ValueError(
                "sampling.stop must be a list of texts, [] for none; an empty text would end every "
                "response"
            )

    def at_most(self, tokens: int) -> Sampling:
        """Return a copy with at most ``tokens`` new tokens."""
        limit = min(tokens, self.max_new_tokens)
        least = min(self.min_new_tokens, limit)
        return replace(self, max_new_tokens=limit, min_new_tokens=least)

    def at_temperature(self, temperature: float) -> Sampling:
        """Return a copy with another temperature."""
        return replace(self, temperature=temperature)

    @property
    def truncates(self) -> bool:
        """Whether some tokens have probability 0 under sampling, but not under the policy."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.min_new_tokens > 0

    @property
    def starts_hot(self) -> bool:
        """Whether the first token has a sampling distribution of its own (FIRE)."""
        return self.first_temperature is not None

    @property
    def penalizes(self) -> bool:
        """Whether penalties change the distribution by the tokens before."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)
