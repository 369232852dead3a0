from typing import Any

import lightning as L
import pytest
import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.options.complaints import read_complaint
from tests.datamodules.conftest import WriteRows, numbered_prompts


def parser() -> ArgumentParser:
    """As LightningCLI builds it in subclass mode."""
    built = LightningArgumentParser(exit_on_error=False)
    built.add_lightning_class_args(L.LightningDataModule, "data", subclass_mode=True)
    return built


def parse(text: str) -> Any:
    built = parser()
    config = built.parse_object(Namespace(yaml.safe_load(text)))
    return built.instantiate(config).data


PROMPTS = """
data:
  class_path: lrlhf.datamodules.PromptDataModule
  init_args:
    train: {train}
    batch_size: 1
"""


@pytest.mark.parametrize(
    ("train", "numbers"),
    [
        ("[{path}, {path}]", [0, 0, 1, 1, 2, 2]),
        ("[{{source: {path}, weight: 1.0}}]", [0, 1, 2]),
        ("[{{source: {path}, columns: {{level: easy}}}}]", [0, 1, 2]),
        (
            "[{{source: {{class_path: FileSource, init_args: {{path: {path}}}}}, weight: 2}}]",
            [0, 1, 2],
        ),
    ],
)
def test_every_way_to_name_the_train_data_works_in_yaml(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, train: str, numbers: list[int]
) -> None:
    path = write_rows(numbered_prompts(3))
    data = parse(PROMPTS.format(train=train.format(path=path)))
    assert isinstance(data, PromptDataModule)
    data._tokenizer = tokenizer
    data.setup("fit")
    seen = [batch.columns[0]["number"] for batch in data.train_dataloader()]
    assert sorted(seen) == numbers


@pytest.mark.parametrize(
    "train",
    [
        "{path: a.jsonl}",
        "{source: a.jsonl, weight: 1}",
        "[{prompt: a, answer: b}, {prompt: c}]",
        "[{source: {path: a.jsonl}}]",
        "5",
    ],
)
def test_what_is_no_data_is_answered_by_what_is(train: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse(PROMPTS.format(train=train))
    said = str(read_complaint(str(refused.value)))
    assert said.startswith("expected text (a file, folder, pattern or hub id), {class_path: ...")
    assert "or a list of these or of {source, weight, columns}, got '" in said
    assert said.endswith("; rows themselves are given in a file or from Python")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("[{source: a.jsonl, wieght: 1}]", "Weighted has no option 'wieght'"),
        ("{class_path: FileSource, init_args: {pth: a}}", "FileSource has no option 'pth'"),
    ],
)
def test_a_misspelt_option_of_a_source_is_named(train: str, message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse(PROMPTS.format(train=train))
    assert str(read_complaint(str(refused.value))).startswith(message)


def test_every_option_of_the_preferences_is_a_config_key() -> None:
    data = parse(
        """
data:
  class_path: lrlhf.datamodules.PreferenceDataModule
  init_args:
    train:
    - source:
        class_path: sentiment_ratings.VaderRatings
        init_args: {domains: [movie, tweets], part: train, margin_scale: 0.1}
      weight: 2.0
    - source: Anthropic/hh-rlhf@train
      weight: 1.0
    val: {class_path: sentiment_ratings.VaderRatings, init_args: {part: validation}}
    head_names: [truth, style]
    label_columns: {truth: t}
    margin_column: null
    score_columns: [score_chosen, score_rejected]
    hh_as_chat: true
    max_tokens: 256
    chat_template_kwargs: {enable_thinking: false}
    media: {fps: 1.0}
    batch_size: 2
"""
    )
    assert isinstance(data, PreferenceDataModule)
    assert data._batch_size == 2
