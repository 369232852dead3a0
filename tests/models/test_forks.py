"""Rows that go on from an earlier place: the same numbers as each of their branches by itself.

What is expected comes from padded rows, one for each turn, and the attention that ``transformers``
itself has.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from lrlhf.models import allow_packing, sequence_logprobs
from lrlhf.models.packed import packed_attention as attention
from lrlhf.models.packed.packing import Stretch, compact, find_trees, pack, stretches, unfold
from lrlhf.models.token_logprobs import sequence_values
from lrlhf.rollout.minibatches import plan_micro_batches
from lrlhf.types import SequenceBatch
from tests.matrices import few_of
from tests.models.families import VOCABULARY, gemma2, gpt2, granite, llama, seeded
from tests.models.test_packing import (
    PACKED_FAMILIES,
    assert_same_gradients,
    gradients,
    mistral,
    qwen2,
)
from tests.vlms import FAMILY_PARAMS, Row, batch_of, build_vlm, row


class Turn(NamedTuple):
    """A turn of a conversation: what it was prompted with, and the policy's tokens."""

    context: list[int]
    own: list[int]


class Written(NamedTuple):
    """A row that forks, and its turns as rows of their own."""

    ids: list[int]
    sampled: list[bool]
    forks: list[int]
    turns: list[tuple[Turn, int]]
    """Each with the column of its first token in the row."""


def conversation(seed: int) -> Written:
    """Draw a conversation whose history is rewritten at several depths.

    ``P a  x b | P y c  z d | P y w e | q f``: P the prompt; a to f are turns. The second line of
    thought forks behind the prompt, the third behind y, and the last has a prompt of its own.
    """
    numbers = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (1,), generator=numbers))
        return torch.randint(3, VOCABULARY, (length,), generator=numbers).tolist()

    prompt, x, y, z, w, q = (draw(1, 6) for _ in range(6))
    a, b, c, d, e, f = (draw(1, 5) for _ in range(6))
    pieces = [prompt, a, x, b, y, c, z, d, w, e, q, f]
    starts = [0, *torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()]
    ids = [token for piece in pieces for token in piece]
    forks = [0] * len(ids)
    forks[starts[4]] = starts[4] - len(prompt)  # y follows the prompt
    forks[starts[8]] = starts[8] - starts[5]  # w follows y
    forks[starts[10]] = starts[10]  # q follows nothing
    sampled = [False] * len(ids)
    for place in (1, 3, 5, 7, 9, 11):
        sampled[starts[place] : starts[place + 1]] = [True] * len(pieces[place])
    turns = [
        (Turn(prompt, a), starts[1]),
        (Turn([*prompt, *a, *x], b), starts[3]),
        (Turn([*prompt, *y], c), starts[5]),
        (Turn([*prompt, *y, *c, *z], d), starts[7]),
        (Turn([*prompt, *y, *w], e), starts[9]),
        (Turn(q, f), starts[11]),
    ]
    return Written(ids, sampled, forks, turns)


CONVERSATIONS = [conversation(seed) for seed in (1, 2, 3)]


def forking(written: list[Written], groups: list[int]) -> SequenceBatch:
    """Put conversations into a batch, with padding at the left, the right and within."""
    rows = []
    for number, one in enumerate(written):
        table = torch.tensor([one.ids, one.sampled, one.forks, [1] * len(one.ids)])
        hole = torch.zeros(4, number, dtype=torch.long)
        rows.append(torch.cat([hole, table[:, :3], hole, table[:, 3:]], dim=1).T)
    ids, sampled, forks, mask = pad_sequence(rows, batch_first=True).unbind(2)
    return SequenceBatch(
        input_ids=pad(ids, (0, 1)),
        attention_mask=pad(mask, (0, 1)).bool(),
        response_mask=pad(sampled, (0, 1)).bool(),
        group_ids=torch.tensor(groups),
        forks=pad(forks, (0, 1)),
    )


def separate(written: list[Written]) -> SequenceBatch:
    """Put every turn into a row of its own, right-padded."""
    turns = [turn for one in written for turn, _ in one.turns]
    ids = pad_sequence([torch.tensor([*t.context, *t.own]) for t in turns], batch_first=True)
    columns = torch.arange(ids.shape[1])
    start = torch.tensor([len(turn.context) for turn in turns])[:, None]
    end = start + torch.tensor([len(turn.own) for turn in turns])[:, None]
    return SequenceBatch(
        input_ids=ids,
        attention_mask=columns < end,
        response_mask=(columns >= start) & (columns < end),
    )


BATCH = forking(CONVERSATIONS, [0, 1, 2])
TURNS = separate(CONVERSATIONS)


def of_turns(batch: SequenceBatch, values: Tensor) -> Tensor:
    """The values of all response tokens, turn by turn."""
    return values[batch.response_mask]


def assert_equal_to_separate_turns(
    model: PreTrainedModel, compute: Callable[[SequenceBatch], Tensor], *, atol: float = 1e-5
) -> None:
    plain = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    plain.set_attn_implementation("eager")  # as the family's authors wrote it
    expected = gradients(model, lambda: of_turns(TURNS, compute(TURNS)))
    actual = gradients(model, lambda: of_turns(BATCH, compute(BATCH)))
    assert_same_gradients(actual, expected, atol=atol)
    plain.set_attn_implementation("sdpa")
    assert allow_packing(model)
    actual = gradients(model, lambda: of_turns(BATCH, compute(BATCH)))
    assert_same_gradients(actual, expected, atol=atol)


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 4)  # of branches several, without long rows


# ------------------------------------------------------------------ the layout


def test_a_row_is_cut_where_it_goes_on_from_an_earlier_place() -> None:
    #        0  1  2  3  4  5  6  7  8
    forks = [0, 0, 0, 1, 0, 3, 0, 7, 2]
    assert stretches(forks, 9) == [
        Stretch(0, 3, ()),
        Stretch(3, 5, ((0, 2),)),  # 3 follows 1
        Stretch(5, 7, ((0, 2),)),  # 5 follows 1
        Stretch(7, 8, ()),  # 7 follows nothing
        Stretch(8, 9, ((0, 2), (5, 6))),  # 8 follows 5
    ]
    assert stretches(None, 4) == stretches([0] * 4, 4) == [Stretch(0, 4, ())]
    assert [part.depth for part in stretches(forks, 9)] == [0, 2, 2, 0, 3]


def test_branches_are_written_out_where_rows_are_padded() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21, 22, 0, 0, 0, 0, 0, 0]])
    forks = torch.tensor([[0, 0, 0, 1, 0, 3, 0, 7, 2], [0] * 9])
    chains = unfold(compact(ids, ids != 0, forks))
    rows = [own[mask].tolist() for own, mask in zip(*chains.rows[:2], strict=True)]
    assert rows == [
        [10, 11, 12],
        [10, 11, 13, 14],
        [10, 11, 15, 16],
        [17],
        [10, 11, 15, 18],
        [20, 21, 22],
    ]
    assert chains.owners.tolist() == [0, 0, 0, 0, 0, 1]
    flat = chains.rows.input_ids.flatten()[chains.places]
    assert torch.equal(flat[ids != 0], ids[ids != 0])


def test_every_token_is_computed_once_and_rows_share_what_comes_before_their_forks() -> None:
    one = CONVERSATIONS[0]
    batch = forking([one, one], [0, 0])
    rows = compact(batch.input_ids, batch.attention_mask, batch.forks)
    (tree,) = find_trees(rows, batch.group_ids)
    first_fork = next(column for column, fork in enumerate(one.forks) if fork)
    # two equal rows share all that is before the first fork
    assert tree.prefix == first_fork
    packed = pack(rows, [tree])
    assert len(packed.source) == 2 * len(one.ids) - first_fork
    flat = rows.input_ids.flatten()[packed.source]
    assert torch.equal(flat[packed.index][rows.attention_mask], rows.input_ids[rows.attention_mask])


# ------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("build", few_of(PACKED_FAMILIES, (llama, gpt2, gemma2, mistral, qwen2)))
def test_log_probabilities_and_gradients_are_those_of_separate_turns(
    build: Callable[[], PreTrainedModel],
) -> None:
    model = seeded(build)
    # its embeddings are multiplied, and rounding with them: sdpa alone differs by 5e-6
    atol = 5e-5 if build is granite else 1e-5
    assert_equal_to_separate_turns(model, lambda batch: sequence_logprobs(model, batch), atol=atol)


def test_values_and_their_gradients_are_those_of_separate_turns() -> None:
    model = seeded(llama)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    assert_equal_to_separate_turns(
        model, lambda batch: sequence_values(model, lambda states: head(states)[:, 0], batch)
    )


def test_adapters_learn_the_same_from_forks() -> None:
    model = peft.get_peft_model(
        seeded(llama),
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    assert_equal_to_separate_turns(model, lambda batch: sequence_logprobs(model, batch))


@torch.no_grad()
def test_neither_the_rows_of_a_group_nor_their_order_matter() -> None:
    model = seeded(llama)
    assert allow_packing(model)
    alone = sequence_logprobs(model, BATCH)
    order = torch.tensor([2, 0, 1, 0])
    batch = replace(BATCH.select(order), group_ids=torch.tensor([0, 4, 0, 4]))
    torch.testing.assert_close(sequence_logprobs(model, batch), alone[order])


@torch.no_grad()
def test_a_turn_does_not_see_other_branches() -> None:
    model = seeded(llama)
    assert allow_packing(model)
    one = CONVERSATIONS[0]
    before = sequence_logprobs(model, forking([one], [0]))
    first_fork = next(column for column, fork in enumerate(one.forks) if fork)
    changed = one._replace(ids=[*one.ids[: first_fork - 1], 3, *one.ids[first_fork:]])
    assert changed.ids != one.ids  # the last token of the first branch
    after = sequence_logprobs(model, forking([changed], [0]))
    torch.testing.assert_close(after[:, first_fork:], before[:, first_fork:], rtol=0, atol=0)


def test_micro_batches_of_padded_rows_count_what_is_before_each_fork() -> None:
    ids = torch.arange(1, 10)[None]
    batch = SequenceBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        response_mask=torch.ones_like(ids, dtype=torch.bool),
        forks=torch.tensor([[0, 0, 0, 1, 0, 3, 0, 7, 2]]),
    )
    # 3 tokens, 4, 4, 1 and 4, see the test of what is written out
    (part,) = plan_micro_batches(batch, max_tokens=None, packed=False)
    assert part.computed == 5 * 4
    (part,) = plan_micro_batches(batch, max_tokens=None, packed=True)
    assert part.computed == 9
    # of two such rows and one of 9 tokens without forks, the latter makes all branches as long
    assert batch.forks is not None
    three = batch.select(torch.tensor([0, 0, 0]))
    three = replace(three, forks=torch.cat([batch.forks, batch.forks * 0, batch.forks]))
    limits = {99: [99], 98: [54, 20], 53: [9, 40], 39: [9, 20, 20], 1: [9, 20, 20]}
    for limit, sizes in limits.items():
        parts = plan_micro_batches(three, max_tokens=limit, packed=False)
        assert [part.computed for part in parts] == sizes, limit


@pytest.mark.parametrize("family", FAMILY_PARAMS)
@torch.no_grad()
def test_forks_behind_images(family: str) -> None:
    vlm = build_vlm(family)
    answers = "first", "second one"
    rows = {
        answer: [row(vlm, [0], answer=answer), row(vlm, [1, 2], question="and?", answer=answer)]
        for answer in answers
    }
    expected = [
        of_turns(one, sequence_logprobs(vlm.model, one)).view(2, -1)
        for one in (batch_of(rows[answer]) for answer in answers)
    ]
    # both answers in one row, the second behind the question again
    together = [with_answer_of(first, second) for first, second in zip(*rows.values(), strict=True)]
    batch = batch_of(together)
    forks = torch.zeros_like(batch.input_ids)
    for place, (own, second) in enumerate(zip(together, rows[answers[1]], strict=True)):
        forks[place, len(own.input_ids) - second.response] = len(answers[0])
    batch = replace(batch, forks=forks)

    for _ in range(2):
        actual = of_turns(batch, sequence_logprobs(vlm.model, batch)).view(2, -1)
        torch.testing.assert_close(actual, torch.cat(expected, dim=1), rtol=0, atol=2e-5)
        allow_packing(vlm.model)


def with_answer_of(first: Row, second: Row) -> Row:
    """The answer of a second row behind the first."""
    ids = (*first.input_ids, *second.input_ids[len(second.input_ids) - second.response :])
    return replace(first, input_ids=ids, response=first.response + second.response)
