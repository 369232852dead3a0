"""What works with which family of language models, measured; for the table of docs/models.md.

``python -m tests.models.family_table`` prints the lines of all families, in a minute or two; with
names behind it, of these.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from lrlhf.models import CausalLM, LoRA, packs, plain_model, save_model, sequence_logprobs
from lrlhf.rollout import PolicyWeights, Sampling, TransformersEngine
from lrlhf.types import PromptBatch, SequenceBatch
from tests.conftest import build_tokenizer
from tests.models.text_families import FAMILIES, VOCABULARY, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = ("loads", "trains", "packs", "shares prompts", "exact", "exports", "LoRA", "vLLM names")

REASONS = {
    "blt": "its config lacks attributes that `generate` of transformers reads",
    "cpmant": "its output depends on right padding; rejected at loading",
    "longcat_flash": "its routers use a layer's weight without calling the layer, so an "
    "adapter there never learns; choose other `target_modules`",
    "minimax": "its linear attention gives other results in generation than over whole rows",
    "modernbert-decoder": "its output head has an extra layer; rejected at loading",
    "xlstm": "padded rows differ from unpadded ones by 2e-4 nats",
}
"""Why something essential does not work."""

_OPTIONAL = {"packs", "shares prompts"}
"""Without these a model is slower, and the log says why."""

_GAP = 1e-3

Row = dict[str, str]


def measure(family: str, folder: Path) -> Row:
    """Try everything with a tiny random model; a column is `yes`, or empty."""
    row, notes = dict.fromkeys(COLUMNS, ""), _Notes()
    tiny_model(family).save_pretrained(folder / "source")
    logger = logging.getLogger("lrlhf")
    logger.addHandler(notes)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        _measure(row, folder)
    finally:
        logger.setLevel(level)
        logger.removeHandler(notes)
    row["why not"] = "; ".join(notes.reasons + ([REASONS[family]] if family in REASONS else []))
    return row


def failures(row: Row) -> list[str]:
    """Columns that matter and do not work."""
    return [name for name in COLUMNS if not row[name] and name not in _OPTIONAL]


def _measure(row: Row, folder: Path) -> None:
    source = str(folder / "source")
    try:
        model = CausalLM(source=source).load()
    except ValueError:  # how this library refuses a model
        return
    plain = plain_model(model)
    row["loads"] = "yes"
    row["packs"] = "yes" if packs(plain) else ""
    row["trains"] = _answer(lambda: _trains(plain))
    engine = TransformersEngine()
    row["exact"] = _answer(lambda: _is_exact(plain, engine))
    row["shares prompts"] = "yes" if engine._mode.shares_prompts else ""
    row["exports"] = _answer(lambda: _exports(plain, folder / "export"))
    row["vLLM names"] = _answer(lambda: _has_names_of(plain, folder / "export"))
    row["LoRA"] = _answer(lambda: _adapters_export(source, folder / "adapted"))


def _answer(works: Callable[[], bool]) -> str:
    try:
        return "yes" if works() else ""
    # what a family's code does with what it was not written for
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError):
        return ""


def _trains(model: PreTrainedModel) -> bool:
    """Compare padded or packed rows with each row by itself, and take a step."""
    batch = _batch()
    with torch.no_grad():
        expected = _row_by_row(model, batch)
    actual = sequence_logprobs(model, batch)
    (-actual.sum()).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.zero_grad()
    with torch.no_grad():
        moved = bool((sequence_logprobs(model, batch) != actual).any())
    return finite and moved and bool((actual - expected).abs().max() < _GAP)


def _is_exact(model: PreTrainedModel, engine: TransformersEngine) -> bool:
    tokenizer = build_tokenizer()
    engine.attach(model, tokenizer)
    texts = ["what is", "a longer prompt"]
    encoded = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    prompts = PromptBatch(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"].bool(),
        prompts=tuple(texts),
        columns=({},) * len(texts),
    )
    sampling = Sampling(max_new_tokens=8)
    rollout = engine.generate(prompts, sampling, num_generations=2, seeds=[1, 2, 3, 4])
    with torch.no_grad():
        own = _row_by_row(model, rollout)
    exact = bool((own - rollout.sampling_logprobs).abs().max() < _GAP)
    return exact and engine.capabilities.exact


def _exports(model: PreTrainedModel, folder: Path) -> bool:
    save_model(model, folder)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    return _same(_logits(exported), _logits(model))


def _has_names_of(model: PreTrainedModel, folder: Path) -> bool:
    """Whether an engine is sent what stands in the files of an export."""
    stored = load_file(folder / "model.safetensors")
    sent = dict(PolicyWeights(model).tensors())
    return set(sent) == set(stored) and all(torch.equal(sent[name], stored[name]) for name in sent)


def _adapters_export(source: str, folder: Path) -> bool:
    model = CausalLM(source=source, lora=LoRA(r=2)).load()
    generator = torch.Generator().manual_seed(5)
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    for weight in adapters.values():
        weight.data.normal_(std=0.05, generator=generator)
    before = _logits(AutoModelForCausalLM.from_pretrained(source))
    save_model(model, folder)
    exported = _logits(AutoModelForCausalLM.from_pretrained(folder))
    return _same(exported, _logits(model)) and not _same(exported, before)


@torch.no_grad()
def _logits(model: torch.nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]]), use_cache=False).logits
    return logits


def _same(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() < _GAP * expected.abs().max())


def _batch() -> SequenceBatch:
    """Two pairs of rows, each with a common beginning."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, VOCABULARY, (4, 13), generator=generator)
    ids[1, :6], ids[3, :6] = ids[0, :6], ids[2, :6]
    mask = torch.arange(13) < torch.tensor([13, 9, 11, 8])[:, None]
    return SequenceBatch(
        input_ids=ids.masked_fill(~mask, 0),
        attention_mask=mask,
        response_mask=mask & (torch.arange(13) >= 6),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )


def _row_by_row(model: PreTrainedModel, batch: SequenceBatch) -> Tensor:
    """Log-probabilities of the response tokens from whole logits, without any padding."""
    logprobs = torch.zeros(batch.input_ids.shape)
    for row in range(len(batch)):
        places = batch.attention_mask[row].nonzero()[:, 0]
        ids = batch.input_ids[row, places][None]
        every = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logprobs[row, places[1:]] = every.gather(1, ids[0, 1:, None])[:, 0]
    return logprobs * batch.response_mask


class _Notes(logging.Handler):
    """Keeps the reasons that the log gives, without the texts of errors."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        notes = []
        if "pads its rows and" in message:
            reason = re.sub(r" \(.*\)", "", message.split(": ", 1)[1], flags=re.S)
            notes.append(f"packs: {reason.rstrip('.')}")
        if "it refuses a copied cache" in message:
            notes.append("shares: it refuses a copied cache")
        if way := re.search(r"responses, in (batches of (?!any).*)\.$", message):
            notes.append(f"generates in {way[1]}")
        self.reasons += [note for note in notes if note not in self.reasons]


# ------------------------------------------------------------------ the page


def stored_rows() -> dict[str, Row]:
    """Read the table of the page."""
    names = (*COLUMNS, "why not")
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) == len(names) + 1:
            rows[cells[0].strip("`")] = dict(zip(names, cells[1:], strict=True))
    return rows


def main(families: list[str]) -> None:
    """Measure some families, or all, and print their lines of the table."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for family in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            cells = " | ".join(measure(family, Path(folder)).values())
        sys.stdout.write(f"| `{family}` | {cells} |\n")


if __name__ == "__main__":
    main(sys.argv[1:])
