"""Batches say what they hold in a few lines."""

import torch

from lrlhf.types import Experience, PromptBatch, SequenceBatch, StoredRollout


def test_a_batch_shows_shapes_instead_of_numbers() -> None:
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    texts = SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask)
    prompts = PromptBatch(
        input_ids=ids,
        attention_mask=mask,
        prompts=("a", "b"),
        columns=({}, {}),
        pretraining=texts,
    )
    assert repr(prompts).splitlines() == [
        "PromptBatch",
        "  input_ids: int64 [2, 3]",
        "  attention_mask: bool [2, 3]",
        "  prompts: 2 rows",
        "  columns: 2 rows",
        "  pretraining: SequenceBatch",
        "    input_ids: int64 [2, 3]",
        "    attention_mask: bool [2, 3]",
        "    response_mask: bool [2, 3]",
    ]
    assert repr(texts.to("meta")).splitlines()[1] == "  input_ids: int64 [2, 3] on meta"


def test_every_kind_of_batch_does() -> None:
    assert Experience.__repr__ is StoredRollout.__repr__ is SequenceBatch.__repr__
