"""Rows change ranks, so that each has about as many tokens to compute in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed

from lrlhf.rollout.balance import imbalance, loads, partition
from lrlhf.run.collectives import Collectives
from lrlhf.types import Experience

MIN_GAIN: Final = 0.02
"""Share of the slowest rank's tokens that an exchange must save to be worth it."""

_DTYPES: Final = (
    *(torch.bool, torch.int32, torch.int64),
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
)
_PADDING: Final = {"kept_mass": 1.0, "importance_weights": 1.0}
"""What a column has where there is no token, unless 0."""
_FIXED: Final = -1
"""Number of a column that stays where it is, and its rows with it."""


class Balanced(NamedTuple):
    """The rows of this rank in one step, and how evenly all ranks are loaded."""

    rows: Experience
    before: float
    """Tokens of the rank with most over the mean of the ranks, as the rows came."""
    after: float
    """The same of ``rows``."""


def balance_over_ranks(
    rows: Experience, collectives: Collectives, *, equal_rows: bool = True
) -> Balanced:
    """Exchange rows between the ranks so that their numbers of tokens are nearly equal.

    The rows of all ranks together stay the same, bit for bit, and with them all sums over the ranks
    and the gradient. Rows of one prompt stay together and in their order, and are consecutive
    afterwards; a prompt costs its tokens once, however many responses it has. ``group_ids`` are new
    and no two ranks have one in common; what lies in the padding is new too.

    All ranks call it with their rows of the same optimizer step. Nothing is exchanged, and the very
    object is returned, in one process, where the slowest rank would have less than 2 % fewer
    tokens, where any row shows images or videos (what they show is read and kept per process), and
    where some rank has a column that another lacks.

    Args:
        rows: Of one optimizer step on this rank, at least one.
        collectives: The ranks.
        equal_rows: Exchange only where every rank gets as many rows as any other, which complete
            groups of one size allow. Strategies that split weights need ranks to take equally many
            micro-batches, and a rank with fewer rows than micro-batches could not.
    """
    if collectives.world_size == 1:
        return Balanced(rows, 1.0, 1.0)
    groups = _groups(rows)
    entries, movable = _gather_entries(rows, groups, collectives)
    plan = _Plan.of(entries, collectives.world_size, equal_counts=equal_rows)
    gain = 1 - plan.after / plan.before
    if not movable or gain < MIN_GAIN or (equal_rows and not plan.has_equal_rows):
        return Balanced(rows, plan.before, plan.before)
    return Balanced(_exchanged(rows, groups, plan, collectives), plan.before, plan.after)


class _Group(NamedTuple):
    """Rows of one prompt on one rank."""

    rows: list[int]
    cost: int
    """Tokens of the prompt, once, and of what follows it in each row."""
    tokens: int
    """Tokens of the rows as they are sent, with a prompt each."""


class _Entry(NamedTuple):
    """What all ranks know of a group."""

    rank: int
    cost: int
    rows: int
    tokens: int


@dataclass(frozen=True)
class _Plan:
    """Where the groups of all ranks go; every rank makes the same plan.

    Args:
        entries: The groups, rank by rank.
        parts: Indices of the groups that each rank gets.
    """

    entries: Sequence[_Entry]
    parts: Sequence[Sequence[int]]

    @staticmethod
    def of(entries: Sequence[_Entry], world: int, *, equal_counts: bool) -> _Plan:
        costs = [entry.cost for entry in entries]
        return _Plan(entries, partition(costs, world, equal_counts=equal_counts))

    @property
    def before(self) -> float:
        """Largest cost of a rank over the mean, as the groups are."""
        now = [0] * len(self.parts)
        for entry in self.entries:
            now[entry.rank] += entry.cost
        return imbalance(now)

    @property
    def after(self) -> float:
        """The same after the exchange."""
        return imbalance(loads([entry.cost for entry in self.entries], self.parts))

    @property
    def has_equal_rows(self) -> bool:
        """Whether all ranks have equally many rows afterwards."""
        return len(set(loads([entry.rows for entry in self.entries], self.parts))) == 1

    def moves(self, source: int, target: int) -> list[int]:
        """Return the groups that go from one rank to another, in the order they are sent."""
        return [index for index in self.parts[target] if self.entries[index].rank == source]


def _groups(rows: Experience) -> list[_Group]:
    """Collect the rows of each prompt."""
    lengths = rows.lengths.tolist()
    # a row without a response is all prompt
    prompts = torch.where(
        rows.response_mask.any(dim=1), rows.response_mask.int().argmax(dim=1), rows.lengths
    ).tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(rows.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    return [
        _Group(
            own,
            cost=max(prompts[row] for row in own) + sum(lengths[row] - prompts[row] for row in own),
            tokens=sum(lengths[row] for row in own),
        )
        for own in members.values()
    ]


def _gather_entries(
    rows: Experience, groups: Sequence[_Group], collectives: Collectives
) -> tuple[list[_Entry], bool]:
    """Tell each other the groups, and whether all ranks have the same columns, all movable."""
    head = torch.tensor([len(groups), *_column_numbers(rows)])
    heads = [other.tolist() for other in _gather(head, collectives)]
    movable = all(other[1:] == heads[0][1:] for other in heads) and _FIXED not in heads[0][1:]
    table = torch.zeros(max(other[0] for other in heads), 3, dtype=torch.int64)
    table[: len(groups)] = torch.tensor([[one.cost, len(one.rows), one.tokens] for one in groups])
    entries = [
        _Entry(rank, *row)
        for rank, other in enumerate(_gather(table, collectives))
        for row in other[: heads[rank][0]].tolist()
    ]
    return entries, movable


def _column_numbers(rows: Experience) -> list[int]:
    """Say what each column is, so that ranks can compare theirs."""
    width = rows.input_ids.shape[1]
    numbers = []
    for field in fields(rows):
        value = getattr(rows, field.name)
        if value is None:
            numbers.append(0)
        elif not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            numbers.append(_FIXED)
        else:
            assert value.shape[1:] in ((), (width,)), field.name
            numbers.append(1 + 2 * _DTYPES.index(value.dtype) + value.dim() - 1)
    return numbers


def _exchanged(
    rows: Experience, groups: Sequence[_Group], plan: _Plan, collectives: Collectives
) -> Experience:
    """Send each row where the plan has it, and put together what arrives."""
    rank, ranks = collectives.rank, range(collectives.world_size)
    first = next(index for index, entry in enumerate(plan.entries) if entry.rank == rank)
    leaving = [plan.moves(rank, target) for target in ranks]
    coming = [plan.moves(source, rank) for source in ranks]
    sent = [(group, row) for group in chain(*leaving) for row in groups[group - first].rows]
    ids, order = torch.tensor(sent).to(rows.group_ids).unbind(dim=1)
    chosen = replace(rows.select(order), group_ids=ids)

    columns = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    mask = tensors.pop("attention_mask")
    per_row = {name: value for name, value in tensors.items() if value.dim() == 1}
    per_token = {name: value[mask] for name, value in tensors.items() if value.dim() == 2}

    row_counts = [entry.rows for entry in plan.entries]
    route = _Route(loads(row_counts, leaving), loads(row_counts, coming), collectives)
    arrived: dict[str, Any] = route.swap({**per_row, "lengths": chosen.lengths})
    lengths = arrived.pop("lengths")
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    token_counts = [entry.tokens for entry in plan.entries]
    route = _Route(loads(token_counts, leaving), loads(token_counts, coming), collectives)
    for name, tokens in route.swap(per_token).items():
        arrived[name] = _padded(tokens, mask, _PADDING.get(name, 0))
    return replace(rows, attention_mask=mask, **arrived)


@dataclass(frozen=True)
class _Route:
    """How many entries of a column go to each rank, and how many come from each.

    Args:
        leaving: By rank that they go to; the first entries go to the first rank, and so on.
        coming: By rank that they come from, in the order they arrive.
        collectives: The ranks.
    """

    leaving: list[int]
    coming: list[int]
    collectives: Collectives

    def swap(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send and receive columns of one length, `[N]` each, on one device.

        They travel as one matrix of bytes, so that every back end can send every type, unchanged.
        """
        parts = [column.contiguous()[:, None].view(torch.uint8) for column in columns.values()]
        device = self.collectives.trainer.strategy.root_device
        out = torch.cat(parts, dim=1).to(device)
        arrived = out.new_empty(sum(self.coming), out.shape[1])
        distributed.all_to_all_single(arrived, out, self.coming, self.leaving)
        split = torch.split(arrived.to(parts[0].device), [part.shape[1] for part in parts], dim=1)
        return {
            # a copy: bytes in the middle of a row are not where a number may begin
            name: part.clone(memory_format=torch.contiguous_format).view(column.dtype).squeeze(1)
            for (name, column), part in zip(columns.items(), split, strict=True)
        }


def _padded(tokens: Tensor, mask: Tensor, padding: float) -> Tensor:
    """Put tokens, row after row, where the mask has them."""
    whole = torch.full(mask.shape, padding, dtype=tokens.dtype, device=tokens.device)
    whole[mask] = tokens
    return whole


def _gather(values: Tensor, collectives: Collectives) -> list[Tensor]:
    """Return the values of every rank, which are of one shape, on the CPU."""
    here = values.to(collectives.trainer.strategy.root_device)
    everyone = [torch.empty_like(here) for _ in range(collectives.world_size)]
    distributed.all_gather(everyone, here)
    return [other.cpu() for other in everyone]
