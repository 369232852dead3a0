"""A kind of row that is none of the library's needs a parser, a collator and the core."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.datamodules import BadDataError, BadRow, RowDataModule, RowKind
from tests.datamodules.conftest import Rows


def parse(row: Any, _: Any) -> Tensor:
    if not row["numbers"]:
        raise BadRow("empty", "it has no numbers")
    return torch.tensor(row["numbers"])


def numbers(*rows: list[int], **options: Any) -> RowDataModule[Tensor, Tensor]:
    kind = RowKind[Tensor, Tensor, Tensor](parse=parse, collate=torch.stack)
    data = RowDataModule[Tensor, Tensor](
        lambda trainer: kind, Rows({"numbers": row} for row in rows), batch_size=2, **options
    )
    data.prepare_data()
    data.setup("fit")
    return data


def test_rows_of_a_users_own_kind_are_split_shuffled_and_resumed() -> None:
    rows = [[n, -n] for n in range(9)]
    data = numbers(*rows)
    epochs = [torch.cat(list(data.train_dataloader())).tolist() for _ in range(2)]
    assert len(epochs[0]) == 8  # four batches of two, one row is left over
    assert epochs[0] != epochs[1]
    resumed = numbers(*rows)
    first = numbers(*rows)
    next(iter(first.train_dataloader()))
    resumed.load_state_dict(first.state_dict())
    assert torch.cat(list(resumed.train_dataloader())).tolist() == epochs[0][2:]
    with pytest.raises(ValueError, match="train data has changed"):
        numbers(*rows[:8], [0, 0]).load_state_dict(first.state_dict())
    with pytest.raises(BadDataError, match="1 of 3 rows of the train data"):
        numbers([1], [], [2])
