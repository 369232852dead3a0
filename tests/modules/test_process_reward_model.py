"""`ProcessRewardModel`: the loss is the mean over labelled steps, and nothing else changes it."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lrlhf.callbacks import EvalJSONL
from lrlhf.datamodules import StepwiseDataModule
from lrlhf.models import CausalLM, LoRA, StepModel, packs
from lrlhf.modules import Guard, OptimizerConfig, ProcessRewardModel, replay_dump
from lrlhf.statistics.intervals import mean_interval
from lrlhf.types import StepBatch
from tests.conftest import build_language_model
from tests.modules.language_runs import SGD, fit, gradients
from tests.modules.reward_runs import trainer
from tests.modules.test_trl_training import assert_recorded, close

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "functional" / "golden" / "trl_prm.json").read_text()
)
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+3+4?", "completions": ["2+3=5", "5+4=10"], "labels": [True, False]},
    {"prompt": "why", "completions": ["as"], "labels": [1.0]},
    {"prompt": "x", "completions": ["first", "so", "then"], "labels": [None, 0.25, 1]},
]
Build = Callable[..., ProcessRewardModel]


def classifier(tokenizer: PreTrainedTokenizerBase, **options: Any) -> PreTrainedModel:
    """The tiny language model's size, in float64, with a classifier that is not at its start."""
    config = build_language_model(tokenizer, **options).config
    config.classifier_dropout = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = LlamaForTokenClassification(config).double().eval()
        torch.nn.init.normal_(model.score.bias)
    return model


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerBase) -> Build:
    def build(model: Any = None, **options: Any) -> ProcessRewardModel:
        model = classifier(tokenizer) if model is None else model
        own = None if isinstance(model, str | StepModel) else tokenizer
        defaults: dict[str, Any] = {"optimizer": SGD, "max_grad_norm": math.inf}
        return ProcessRewardModel(model, tokenizer=own, **(defaults | options))

    return build


def batch_of(rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, **options: Any) -> StepBatch:
    data = StepwiseDataModule(
        list(rows), tokenizer=tokenizer, batch_size=len(rows), shuffle=False, **options
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    return batch


def plain_loss(model: PreTrainedModel, rows: Sequence[Any], tokenizer: Any) -> Tensor:
    """One step at a time: all text up to it through the model as `transformers` has it."""
    losses = []
    for row in rows:
        said = row["prompt"]
        for step, label in zip(row["completions"], row["labels"], strict=True):
            said += f"{step}\n"
            ids = torch.tensor([tokenizer(said)["input_ids"]])
            wrong, correct = model(ids).logits[0, -1].log_softmax(dim=-1)
            if label is not None:
                losses.append(-label * correct - (1 - label) * wrong)
    return torch.stack(losses).mean()


# ---- the loss


@pytest.mark.parametrize("case", RECORD["cases"], ids=["all steps", "last step only"])
def test_loss_gradient_and_tokens_are_those_of_trl(case: dict[str, Any], tmp_path: Path) -> None:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 24)}}
    backend = Tokenizer(WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    model = LlamaForTokenClassification(LlamaConfig(**RECORD["config"])).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.tensor(RECORD["weights"][name], dtype=torch.float64))
    model.dropout.p = 0.0
    only = case["last_step_only"]
    batch = batch_of(RECORD["rows"], tokenizer, step_separator="w23")
    assert torch.equal(batch.input_ids, torch.tensor(case["input_ids"]))
    module = ProcessRewardModel(
        model,
        tokenizer=tokenizer,
        last_step_only=only,
        optimizer=SGD,
        max_grad_norm=math.inf,
    )
    it: Any = None
    rows = module.rows_of(batch, it, training=True)
    labels = rows.labels.masked_fill(~rows.response_mask, -100)
    assert torch.equal(labels, torch.tensor(case["labels"], dtype=torch.float32))
    assert torch.equal(module.rows_of(batch, it, training=False).response_mask, batch.step_ends)
    found, logged = gradients(module, [batch], tmp_path)
    assert_recorded(found, case["gradients"])
    close(logged["train/loss"], case["loss"])


def expected_gradients(
    rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    model = classifier(tokenizer, **options)
    loss = plain_loss(model, rows, tokenizer)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}  # type: ignore[misc]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(value.abs().max() for value in expected.values()) > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_probable_and_missing_labels_count_as_what_they_are(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    loss, expected = expected_gradients(ROWS, tokenizer)
    found, logged = gradients(build(), [batch_of(ROWS, tokenizer)], tmp_path)
    assert_same(found, expected)
    close(logged["train/loss"], loss)
    assert float(logged["train/tokens"]) == 5


@pytest.mark.parametrize("limit", [None, 1, 40])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_order_micro_batches_and_packing_do_not_matter(
    build: Build,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    limit: int | None,
    attention: str,
) -> None:
    _, expected = expected_gradients(ROWS, tokenizer)
    module = build(classifier(tokenizer, attn_implementation=attention), micro_batch_tokens=limit)
    assert packs(module.model) is (attention == "sdpa")
    found, _ = gradients(module, [batch_of(ROWS[::-1], tokenizer)], tmp_path)
    assert_same(found, expected)


def test_padding_does_not_matter(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    _, expected = expected_gradients(ROWS[1:2], tokenizer)
    alone, beside = batch_of(ROWS[1:2], tokenizer), batch_of(ROWS, tokenizer)
    padded = beside.select(torch.tensor([1]))
    assert padded.input_ids.shape[1] > alone.input_ids.shape[1]
    for batch in (alone, padded):
        assert_same(gradients(build(), [batch], tmp_path)[0], expected)


def test_a_dump_of_a_step_that_is_not_finite_repeats_it(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def broken(folder: str) -> ProcessRewardModel:
        model = classifier(tokenizer)
        model.score.bias.data[0] = math.inf
        return build(model, guard=Guard(dirpath=folder))

    run = fit(broken(str(tmp_path / "dumps")), [batch_of(ROWS, tokenizer)], tmp_path)
    assert float(run.callback_metrics["train/skipped_steps"]) == 1
    (folder,) = (tmp_path / "dumps").iterdir()
    again = replay_dump(broken("elsewhere"), folder)
    assert again.reproduced
    labels = [[step["label"] for step in row["steps"]] for row in again.ranks[0].rows]
    assert labels == [[1, 0], [1], [None, 0.25, 1]]


# ---- what is measured


def test_metrics_of_an_evaluation_by_hand(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Steps named by how sure the model is of them: A to D are taken for correct, a to d not."""
    rows = [
        # the first error, step 2, is found
        {"prompt": "p", "completions": ["A", "a", "B"], "labels": [1, 0, 0]},
        # an error is found where there is none
        {"prompt": "p", "completions": ["C", "b"], "labels": [1, 1]},
        # none is found, and there is none
        {"prompt": "p", "completions": ["D"], "labels": [1]},
        # it is found too early
        {"prompt": "p", "completions": ["c", "d"], "labels": [1, 0]},
        # nobody knows which is the first
        {"prompt": "p", "completions": ["A", "a"], "labels": [None, 0]},
    ]
    module = build()
    odds = {"A": 2.0, "B": 1.0, "C": 3.0, "D": 4.0, "a": -2.0, "b": -1.0, "c": -3.0, "d": -4.0}
    plain = ProcessRewardModel.outputs_of

    def told(batch: StepBatch) -> Any:
        letters = tokenizer.convert_ids_to_tokens(batch.input_ids[batch.step_ends.roll(-1, 1)])
        outputs = torch.zeros_like(batch.labels)
        outputs[batch.step_ends] = torch.tensor([odds[letter] for letter in letters])
        found = plain(module, batch)
        right = (outputs > 0) == (batch.labels > 0.5)
        return found._replace(outputs=outputs, values={"accuracy": right.float()})

    module.outputs_of = told  # type: ignore[method-assign]
    data = StepwiseDataModule(rows, val=rows, batch_size=5, val_batch_size=2)
    callback = EvalJSONL(dirpath=tmp_path / "lines")
    run = trainer(tmp_path, callbacks=[callback])
    run.validate(module, data, verbose=False)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    # right about A, a, C, D, d and the last a, not about B, b and c
    assert logged["eval/accuracy"] == pytest.approx(6 / 9)
    # of rows 1 and 4 one error is found; of rows 2 and 3 one is rightly without
    assert logged["eval/first_error_accuracy"] == pytest.approx(0.5)
    assert logged["eval/no_error_accuracy"] == pytest.approx(0.5)
    assert logged["eval/first_error_f1"] == pytest.approx(0.5)
    # of correct steps 2, 3, -1, 4 and -3, which are above 4, 4, 3, 4 and 1 of the four wrong ones
    assert logged["eval/auroc"] == pytest.approx(16 / 20)
    (file,) = (tmp_path / "lines").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("first_error", "unknown") for line in lines] == [1, None, None, 1, "unknown"]
    assert [line.get("found_error") for line in lines][:4] == [1, 1, None, 0]
    assert lines[0]["prompt"] == "p"
    step = lines[4]["steps"][0]
    assert (step["text"], step["label"]) == ("A\n", None)
    assert step["probability"] == pytest.approx(1 / (1 + math.exp(-2)))


def test_an_evaluation_of_correct_steps_alone_has_no_auroc(build: Build, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completions": ["a", "b"], "labels": [1, 1]}]
    run = trainer(tmp_path)
    run.validate(build(), StepwiseDataModule(rows, val=rows, batch_size=1), verbose=False)
    assert "eval/no_error_accuracy" in run.callback_metrics
    assert not {"eval/auroc", "eval/first_error_f1"} & run.callback_metrics.keys()


# ---- loading and export


@pytest.mark.parametrize("lora", [None, LoRA(r=2)], ids=["whole", "LoRA"])
def test_an_exported_model_is_a_token_classifier_of_transformers(
    build: Build,
    tokenizer: PreTrainedTokenizerBase,
    model_folder: str,
    tmp_path: Path,
    lora: LoRA | None,
) -> None:
    module = build(
        StepModel(source=model_folder, lora=lora),
        step_separator=";",
        optimizer=OptimizerConfig(lr=1e-2),
    )
    before = {name: weight.clone() for name, weight in module.model.state_dict().items()}
    batch = batch_of(ROWS, tokenizer, step_separator=";")
    fit(module, [batch] * 3, tmp_path)
    after = module.model.state_dict()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert any("score" in name for name in changed)
    assert all("lora" in name or "score" in name for name in changed) is (lora is not None)
    module.export_pretrained(tmp_path / "export")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "export").eval()
    assert plain.config.id2label == {0: "wrong", 1: "correct"}
    ids = torch.tensor([tokenizer("2+3+4?2+3=5;5+4=10;")["input_ids"]])
    expected = plain(ids).logits[0].softmax(dim=-1)[:, 1]
    first = len("2+3+4?2+3=5;") - 1
    found = module.score("2+3+4?", ["2+3=5", "5+4=10"])
    torch.testing.assert_close(torch.tensor(found), expected[[first, -1]].detach())
    again = ProcessRewardModel(str(tmp_path / "export"))
    assert again.step_separator == ";"
    assert again.score(["2+3+4?", "x"], [["2+3=5", "5+4=10"], ["so"]])[0] == pytest.approx(
        found, rel=1e-4
    )
    with pytest.raises(ValueError, match="1 prompts and 2 answers"):
        again.score(["x"], [["a"], ["b"]])


def test_a_new_classifier_depends_on_the_seed_alone(model_folder: str) -> None:
    heads = []
    for drawn in (0, 5):
        torch.manual_seed(7)
        torch.randn(drawn)
        heads.append(StepModel(source=model_folder).load().score.weight.detach())
    assert torch.equal(*heads)
    torch.manual_seed(8)
    assert not torch.equal(StepModel(source=model_folder).load().score.weight, heads[0])


def test_models_that_cannot_judge_steps_are_refused(
    tokenizer: PreTrainedTokenizerBase, model_folder: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="pass its tokenizer"):
        ProcessRewardModel(classifier(tokenizer))
    with pytest.raises(ValueError, match="LlamaForCausalLM is no process reward model"):
        ProcessRewardModel(CausalLM(source=model_folder).load(), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="it is no token classifier"):
        StepModel(source=model_folder).load(trainable=False)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    encoder = BertForTokenClassification(
        BertConfig(vocab_size=len(tokenizer), num_hidden_layers=1, initializer_range=1.0, **sizes)
    )
    with pytest.raises(ValueError, match="would know what follows them"):
        ProcessRewardModel(encoder, tokenizer=tokenizer)
    config = build_language_model(tokenizer).config
    config.num_labels = 3
    LlamaForTokenClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a token classifier of 3 classes"):
        StepModel(source=str(tmp_path)).load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_separator": ""}, "step_separator is empty"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0"),
    ],
)
def test_options_out_of_range_are_refused(
    build: Build, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_another_separator_in_the_data_is_refused(build: Build, tmp_path: Path) -> None:
    data = StepwiseDataModule(ROWS, batch_size=1, step_separator=";")
    with pytest.raises(ValueError, match="step_separator is ';', and the model's is '\\\\n'"):
        trainer(tmp_path).fit(build(), data)


# ---- learning


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Answers of six sums, about half of which are off by one or two, each under a new name."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        steps, labels = [], []
        for _ in range(6):
            name, error = "".join(rng.choices("abcdefghij", k=4)), rng.choice([0, 0, 1, 2])
            left, right = rng.randint(0, 3), rng.randint(0, 3)
            steps.append(f"{name}: {left}+{right}={left + right + error}")
            labels.append(error == 0)
        rows.append({"prompt": "add", "completions": steps, "labels": labels})
    return rows


def test_a_tiny_model_learns_which_steps_of_arithmetic_are_correct(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    train, held_out = sums(200, seed=1), sums(50, seed=2)
    seen = {step for row in train for step in row["completions"]}
    assert not any(step in seen for row in held_out for step in row["completions"])
    torch.manual_seed(0)
    config = build_language_model(tokenizer, initializer_range=0.1).config
    module = ProcessRewardModel(
        LlamaForTokenClassification(config), tokenizer=tokenizer, optimizer=OptimizerConfig(lr=3e-3)
    )
    data = StepwiseDataModule(train, val=held_out, batch_size=20, val_batch_size=50)
    run = trainer(tmp_path, max_epochs=12, limit_val_batches=0)
    run.fit(module, data)
    (lines,) = run.predict(module, data.val_dataloader())  # type: ignore[misc]
    shares = []  # per answer, as steps of one answer are not independent
    for line in lines:
        right = [(one["probability"] > 0.5) == (one["label"] > 0.5) for one in line["steps"]]
        shares.append(sum(right) / len(right))
    labels = [label for row in held_out for label in row["labels"]]
    chance = max(sum(labels), len(labels) - sum(labels)) / len(labels)  # of one answer to all
    assert mean_interval(shares, bounds=(0.0, 1.0)).low > chance
