"""Every family of language models works as far as docs/models.md says."""

import re
import warnings
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.matrices import few_of
from tests.models.family_table import COLUMNS, PAGE, REASONS, failures, measure, stored_rows
from tests.models.text_families import FAMILIES, LEFT_OUT

ROWS = stored_rows()


# plain; other names, positions and projections; bounds, scales and windows; experts; state spaces;
# prompts that are not shared; a routine of generation of its own
SHORT = (
    *("llama", "gpt2", "opt", "mpt", "gemma2", "cohere2", "minicpm3", "qwen3_moe", "deepseek_v3"),
    *("jamba", "mamba", "falcon_h1", "recurrent_gemma", "llama4_text", "inkling_text", "cpmant"),
)


@pytest.mark.slow
@pytest.mark.parametrize("family", few_of(FAMILIES, SHORT))
def test_a_tiny_model_of_a_family_works_as_the_page_says(family: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the families' own code
        measured = measure(family, tmp_path)
    assert measured == ROWS[family], f"run `python -m tests.models.family_table {family}`"


def test_the_page_has_every_family_and_a_reason_for_each_that_fails() -> None:
    assert set(FAMILIES) | set(LEFT_OUT) >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert sorted(ROWS) == FAMILIES
    assert {family for family, row in ROWS.items() if failures(row)} == set(REASONS)


def test_the_page_counts_what_its_table_says() -> None:
    counts = {name: sum(bool(row[name]) for row in ROWS.values()) for name in COLUMNS}
    text = PAGE.read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| ([\w ]+) \| (\d+) \| ", text, flags=re.M))
    assert stated == {name: str(count) for name, count in counts.items()}
