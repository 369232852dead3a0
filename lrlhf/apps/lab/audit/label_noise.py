"""Labels that a simple reward model, which has not seen them, is sure are wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrlhf.apps.lab.audit.findings import FaultKind, Finding, FlaggedRow, Measure
from lrlhf.apps.lab.audit.rows import AuditedRow
from lrlhf.statistics.intervals import share_interval

DOUBTFUL = FaultKind(
    "doubtful labels",
    "note",
    "A simple model that was fitted to the other pairs prefers the other answer with a calibrated "
    "probability of 90 % or more. It knows words only: some of these labels are wrong, and "
    "some of these pairs are hard.",
    "Read these pairs, the most doubtful first, and judge again.",
)
_FOLDS = 5
_FEWEST = 50
_DOUBT = 0.1
_BETTER_THAN_CHANCE = 0.55
_FEATURES = 2**18


def label_noise(rows: Sequence[AuditedRow]) -> tuple[list[Finding], list[Measure]]:
    """Fit a reward model to four fifths of the pairs, and ask it about the others, in turn.

    The model is a Bradley-Terry model, linear in the hashed counts of words and of pairs of words
    in each answer, and in the logarithm of its length. Prompts are not split over the folds. Its
    probabilities are calibrated by one slope. Where its accuracy on pairs that it has not seen is
    not clearly better than chance, nothing is said about labels.

    Raises:
        ImportError: scikit-learn is not installed; says how to install it.
    """
    labelled = [row for row in rows if row.preferred is not None and any(row.answers)]
    labelled.sort(key=_key)
    prompts = {key: index for index, key in enumerate(dict.fromkeys(row.keys for row in labelled))}
    if len(prompts) < _FEWEST:
        return [], [Measure("label noise", f"not looked at: needs {_FEWEST} prompts or more")]
    logits = _held_out_logits(labelled, np.array([prompts[row.keys] for row in labelled]))
    outcomes, of = (logits > 0).tolist(), len(labelled)
    right, (low, high) = sum(outcomes), share_interval(outcomes, [row.keys for row in labelled])
    measures = [Measure("cross-fitted model: accuracy on unseen pairs", right / of, low, high, of)]
    if low < _BETTER_THAN_CHANCE:
        note = "nothing can be said: the cross-fitted model is hardly better than chance"
        return [], [*measures, Measure("label noise", note)]
    chances = 1 / (1 + np.exp(-np.clip(_calibrated(logits), -50, 50)))
    doubtful = np.flatnonzero(chances < _DOUBT)
    finding = DOUBTFUL.findings_of(
        (
            FlaggedRow(
                labelled[k].split, labelled[k].place, f"label has probability {chances[k]:.3f}"
            )
            for k in doubtful[np.argsort(chances[doubtful], kind="stable")]
        ),
        of,
        ranked=True,
    )
    return finding, measures


def _held_out_logits(rows: Sequence[AuditedRow], groups: NDArray[Any]) -> NDArray[np.float64]:
    """Return by how much a model that has not seen a pair prefers the answer labelled better."""
    linear, text = _sklearn("linear_model"), _sklearn("feature_extraction.text")
    sparse = import_module("scipy.sparse")
    vectorizer = text.HashingVectorizer(
        n_features=_FEATURES, ngram_range=(1, 2), norm="l2", alternate_sign=False
    )
    better, worse = (
        [row.answers[_place(row, better=better)] for row in rows] for better in (True, False)
    )
    words = vectorizer.transform(better) - vectorizer.transform(worse)
    lengths = np.log1p([[len(answer) for answer in answers] for answers in (better, worse)])
    differences = sparse.hstack(
        [words, sparse.csr_matrix(lengths[:1].T - lengths[1:].T)], format="csr"
    )
    # each pair one way round by its digest: a model without intercept needs both classes
    signs = np.array([1 if _key(row)[0] % 2 else -1 for row in rows])
    turned = differences.multiply(signs[:, None]).tocsr()
    # whole prompts, spread evenly
    fold = groups % _FOLDS
    logits = np.empty(len(rows))
    for number in range(_FOLDS):
        held_out = fold == number
        model = linear.LogisticRegression(fit_intercept=False, C=1.0, max_iter=200)
        model.fit(turned[~held_out], signs[~held_out])
        logits[held_out] = differences[held_out] @ model.coef_[0]
    return logits


def _calibrated(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale logits by the one factor under which the labels are likeliest."""
    signs = np.where(np.arange(len(logits)) % 2, 1, -1)
    model = _sklearn("linear_model").LogisticRegression(fit_intercept=False, C=1e6)
    model.fit((logits * signs)[:, None], signs)
    return np.asarray(logits * model.coef_[0, 0])


def _place(row: AuditedRow, *, better: bool) -> int:
    assert row.preferred is not None
    return row.preferred if better else 1 - row.preferred


def _sklearn(name: str) -> Any:
    try:
        return import_module(f"sklearn.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            "looking for label noise needs scikit-learn: pip install 'lrlhf[audit]'"
        ) from error


def _key(row: AuditedRow) -> bytes:
    """Return what orders pairs by their texts, in whatever order they stand in the data."""
    joined = "\x00".join((row.prompt, *sorted(row.candidates)))
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()
