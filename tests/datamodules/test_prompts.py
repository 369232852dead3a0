import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lrlhf.datamodules import BadDataError, PromptCollator, PromptDataModule, Source, Weighted
from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.types import PromptBatch
from tests.conftest import build_tokenizer
from tests.datamodules.conftest import WriteRows, numbered_prompts


def load(train: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PromptDataModule:
    data = PromptDataModule(train, tokenizer=tokenizer, **{"batch_size": 1, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def first(train: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PromptBatch:
    return next(iter(load(train, tokenizer, **options).train_dataloader()))


def text_of(batch: PromptBatch, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(batch.input_ids[0][batch.attention_mask[0]]))


def numbers(batches: Iterable[PromptBatch]) -> list[int]:
    return [columns["number"] for batch in batches for columns in batch.columns]


def test_a_plain_prompt_is_read_as_it_is_and_other_columns_pass_on(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"prompt": "2 + 2 =", "answer": "4", "extra": {"a": [1]}}])
    batch = first(path, tokenizer)
    assert text_of(batch, tokenizer) == "2 + 2 ="
    assert batch.prompts == ("2 + 2 =",)
    assert batch.columns == ({"answer": "4", "extra": {"a": [1]}},)


def test_a_prompt_of_messages_is_rendered_with_an_open_assistant_turn(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    batch = first(write_rows([{"prompt": messages}]), tokenizer)
    assert text_of(batch, tokenizer) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert batch.prompts == (tuple(messages),)


HH = {
    "chosen": "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: why?\n\nAssistant: Because.",
    "rejected": "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: why?\n\nAssistant: Because not.",
    "answer": 3,
}


def test_a_preference_row_gives_the_prompt_that_both_answers_share(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    shared = "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: why?\n\nAssistant:"
    batch = first(write_rows([HH]), tokenizer)
    assert batch.prompts == (shared,)
    assert text_of(batch, tokenizer) == shared
    assert batch.columns == ({"answer": 3, "reference": "Because."},)


def test_a_transcript_becomes_a_chat_on_request(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = first(write_rows([HH]), tokenizer, hh_as_chat=True)
    assert batch.prompts == (
        (
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "why?"},
        ),
    )


def test_a_pair_of_message_lists_gives_its_shared_turns(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    question = {"role": "user", "content": "hi"}
    row = {
        name: [question, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "Hello."), ("rejected", "No."))
    }
    batch = first(write_rows([row]), tokenizer)
    assert batch.prompts == ((question,),)
    assert batch.columns == ({"reference": "Hello."},)


def test_a_pair_with_a_prompt_of_its_own_gives_it_once(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    user = {"role": "user", "content": "hi"}
    row = {"prompt": "hi"} | {
        name: [user, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")
    }
    batch = first(write_rows([row]), tokenizer, as_chat=True)
    assert batch.prompts == ((user,),)


def test_a_pair_that_shares_no_prompt_is_a_bad_row(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"chosen": "yes", "rejected": "no"}]
    with pytest.raises(BadDataError, match="share no prompt"):
        load(write_rows(rows), tokenizer)
    turns = [[{"role": "user", "content": text}] for text in ("yes", "no")]
    with pytest.raises(BadDataError, match="share no turn"):
        load(write_rows([dict(zip(("chosen", "rejected"), turns, strict=True))]), tokenizer)


def test_a_prompt_that_ends_with_the_assistant_is_continued(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    batch = first(write_rows([{"prompt": messages}]), tokenizer)
    assert text_of(batch, tokenizer) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"
    )


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    ],
)
def test_the_answer_of_a_whole_dialogue_becomes_the_reference(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]
) -> None:
    batch = first(write_rows([row]), tokenizer)
    assert batch.prompts == (({"role": "user", "content": "hi"},),)
    assert batch.columns[0]["reference"] == "hello"


def test_the_prompt_column_is_configurable(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"question": "why", "prompt": "not this"}])
    batch = first(path, tokenizer, prompt_column="question")
    assert batch.prompts == ("why",)
    assert batch.columns[0]["prompt"] == "not this"


def test_a_template_makes_the_prompt_from_several_columns(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"metadata": {"expression": "4 - 1"}, "question": "?"}])
    template = "5 + 3 = 8\n{{ metadata.expression }} ="
    batch = first(path, tokenizer, prompt_template=template)
    assert batch.prompts == ("5 + 3 = 8\n4 - 1 =",)
    assert batch.columns[0]["question"] == "?"


def test_a_template_cannot_reach_into_python(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = "{{ question.__class__.__mro__ }}"
    with pytest.raises(BadDataError, match=r"SecurityError: access to attribute '__class__'"):
        first(write_rows([{"question": "x"}]), tokenizer, prompt_template=template)


def test_a_broken_template_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="prompt_template is no jinja2 template"):
        PromptDataModule("nowhere.jsonl", prompt_template="{{ question")


def test_as_chat_makes_plain_text_the_users_turn_after_the_system_prompt(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = first(write_rows([{"prompt": "hi"}]), tokenizer, as_chat=True, system_prompt="be kind")
    assert batch.prompts[0] == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    )
    assert text_of(batch, tokenizer).startswith("<|im_start|>system\nbe kind<|im_end|>\n")


def test_the_system_prompt_does_not_replace_one_of_the_row(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    batch = first(write_rows([{"prompt": messages}]), tokenizer, system_prompt="be kind")
    assert batch.prompts == (tuple(messages),)


def test_template_arguments_and_tools_of_the_row_win(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = "{{ mode }} {{ depth }} {{ tools[0].name }}"
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": messages, "number": 0},
        {
            "prompt": messages,
            "chat_template_kwargs": {"mode": "row"},
            "tools": '[{"name": "theirs"}]',
            "number": 1,
        },
    ]
    data = load(
        write_rows(rows),
        tokenizer,
        chat_template=template,
        chat_template_kwargs={"mode": "all", "depth": 3},
        tools=[{"name": "ours"}],
    )
    rendered = {
        batch.columns[0]["number"]: text_of(batch, tokenizer) for batch in data.train_dataloader()
    }
    assert rendered == {0: "all 3 ours", 1: "row 3 theirs"}


def test_a_chat_template_can_be_a_file(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = write_rows(["{{ messages[0].content }}!"], name="chat.jinja")
    path = write_rows([{"prompt": [{"role": "user", "content": "hi"}]}])
    assert text_of(first(path, tokenizer, chat_template=template), tokenizer) == "hi!"


def test_a_chat_template_that_is_no_file_and_no_template_is_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"prompt": "hi"}])
    with pytest.raises(ValueError, match=r"chat_template 'chatml.jinja' is neither a file"):
        load(path, tokenizer, chat_template="chatml.jinja")


def test_messages_without_any_chat_template_are_refused(write_rows: WriteRows) -> None:
    plain = build_tokenizer()
    plain.chat_template = None
    path = write_rows([{"prompt": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ValueError, match="has no chat template: give `chat_template`"):
        load(path, plain)


def test_column_patterns_cut_columns_down_or_make_new_ones(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"prompt": "p", "answer": "6 * 12 is\n#### 72 "}])
    patterns = {"answer": r"####\s*(.+)"}
    assert first(path, tokenizer, column_patterns=patterns).columns[0]["answer"] == "72"
    patterns = {"answer -> gold": r"\d+ \* \d+"}
    columns = first(path, tokenizer, column_patterns=patterns).columns[0]
    assert columns["gold"] == "6 * 12"
    assert columns["answer"].endswith("#### 72 ")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [({"answer": "("}, "no regular expression"), ({"answer ->": "x"}, "column -> new column")],
)
def test_a_broken_column_pattern_is_refused(patterns: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataModule("nowhere.jsonl", column_patterns=patterns)


def test_long_prompts_are_left_out_and_counted_never_cut(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows([{"prompt": "12345"}, {"prompt": "123456"}])  # one token per byte
    data = load(path, tokenizer, max_prompt_tokens=5, max_bad_fraction=0.5)
    assert [batch.prompts for batch in data.train_dataloader()] == [("12345",)]
    assert "1 of 2 rows" in caplog.text
    assert "too long" in caplog.text
    assert f"{path}:2: the prompt has 6 tokens" in caplog.text


def with_bos_and_eos(*, eos: bool) -> PreTrainedTokenizerFast:
    """A word tokenizer that puts <s> before every text and perhaps </s> after it."""
    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "<pad>", "a", "b"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "<s>{% for m in messages %} {{ m.content }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(
    "prompt", ["a b", "<s> a b", [{"role": "user", "content": "a b"}]], ids=["text", "bos", "chat"]
)
def test_a_prompt_has_one_bos_and_no_eos(write_rows: WriteRows, prompt: Any, eos: bool) -> None:
    batch = first(write_rows([{"prompt": prompt}]), with_bos_and_eos(eos=eos))
    assert batch.input_ids.tolist() == [[0, 3, 4]]


def test_batches_are_padded_at_the_left() -> None:
    rows = [
        PromptRow("a", torch.tensor([7, 8], dtype=torch.int32).numpy(), {"n": 0}),
        PromptRow("b", torch.tensor([9], dtype=torch.int32).numpy(), {"n": 1}),
    ]
    batch = PromptCollator(pad_token_id=7)(rows)  # a pad id that is also a real token
    assert batch.input_ids.tolist() == [[7, 8], [7, 9]]
    assert batch.attention_mask.tolist() == [[True, True], [False, True]]
    assert batch.input_ids.dtype == torch.long
    assert batch.prompts == ("a", "b")
    assert batch.columns == ({"n": 0}, {"n": 1})


def test_rows_with_equal_prompts_never_stand_on_both_sides(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": f"p{number % 10}", "number": number} for number in range(40)]
    data = load(write_rows(rows), tokenizer, val_fraction=0.3)
    train = {batch.prompts[0] for _ in range(2) for batch in data.train_dataloader()}
    val = [batch.prompts[0] for batch in data.val_dataloader()]
    assert len(val) == 12  # 0.3 * 40, three prompts of four rows
    assert train.isdisjoint(val)
    assert len(train | set(val)) == 10


def test_the_split_depends_on_its_seed_only(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(numbered_prompts(50))

    def held_out(seed: int) -> list[int]:
        return numbers(load(path, tokenizer, val_size=10, seed=seed).val_dataloader())

    assert held_out(1) == held_out(1)
    assert len(held_out(1)) == 10
    assert held_out(1) != held_out(2)


def test_a_split_that_leaves_one_side_empty_is_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": "same", "number": number} for number in range(4)]
    with pytest.raises(BadDataError, match=r"they form 1 groups .* the largest of 4 rows"):
        load(write_rows(rows), tokenizer, val_size=2)


@pytest.mark.parametrize(
    "options",
    [{"val_size": 1, "val_fraction": 0.1}, {"val": "x.jsonl", "val_size": 1}, {"val_size": -1}],
)
def test_contradicting_settings_of_the_split_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="val_size"):
        PromptDataModule("train.jsonl", **options)


def test_validation_data_of_its_own_is_kept_whole_and_in_order(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    train = write_rows(numbered_prompts(6))
    val = write_rows(numbered_prompts(9)[4:], name="val.jsonl")
    data = load(train, tokenizer, val=val, val_batch_size=2)
    assert numbers(data.val_dataloader()) == [4, 5, 6, 7, 8]
    assert len(data.val_dataloader()) == 3
    assert "2 of 5 validation rows share a prompt" in caplog.text


def test_weights_make_no_sense_in_validation(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(numbered_prompts(6))
    with pytest.raises(ValueError, match="val: validation takes every row once"):
        load(path, tokenizer, val=[Weighted(path, 1.0)])


def test_without_validation_data_lightning_sees_no_validation_loader(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(numbered_prompts(3))
    for options, expected in (({}, False), ({"val_size": 1}, True), ({"val": path}, True)):
        data = PromptDataModule(path, tokenizer=tokenizer, **options)
        assert is_overridden("val_dataloader", data) is expected


def test_deduplicate_keeps_the_first_of_equal_prompts(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": f"p{number % 3}", "number": number} for number in range(9)]
    data = load(write_rows(rows), tokenizer, deduplicate=True)
    assert sorted(numbers(data.train_dataloader())) == [0, 1, 2]
    assert len(load(write_rows(rows), tokenizer).train_dataloader()) == 9


def test_a_mixture_gives_each_source_its_share_and_its_columns(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    small = write_rows(numbered_prompts(4), name="small.jsonl")
    large = write_rows(numbered_prompts(20)[4:], name="large.jsonl")
    train = [Weighted(small, 1.0, {"level": "easy"}), Weighted(large, 3.0)]
    data = load(train, tokenizer)
    # 20 rows: 5 places for the four small ones, 15 for the sixteen large ones
    batches = list(data.train_dataloader())
    assert sum(batch.columns[0].get("level") == "easy" for batch in batches) == 5
    assert sum(number < 4 for number in numbers(batches)) == 5


def test_a_list_without_weights_takes_every_row_once(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    one = write_rows(numbered_prompts(3), name="one.jsonl")
    two = write_rows(numbered_prompts(5)[3:], name="two.jsonl")
    batches = list(load([one, two], tokenizer).train_dataloader())
    assert sorted(numbers(batches)) == [0, 1, 2, 3, 4]
    sources = {batch.columns[0]["number"]: batch.columns[0]["source"] for batch in batches}
    assert sources == {0: one, 1: one, 2: one, 3: two, 4: two}


class Squares(Source):
    @property
    def name(self) -> str:
        return "squares"

    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{number}²", "number": number} for number in range(4)]


def test_a_source_object_is_taken_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    data = load(Squares(), tokenizer)
    assert sorted(numbers(data.train_dataloader())) == [0, 1, 2, 3]


def test_a_data_module_without_any_tokenizer_says_so(write_rows: WriteRows) -> None:
    data = PromptDataModule(write_rows(numbered_prompts(3)))
    with pytest.raises(ValueError, match="the data module has no tokenizer"):
        data.setup("fit")


def test_a_tokenizer_can_be_named_by_its_folder(write_rows: WriteRows, model_folder: str) -> None:
    data = PromptDataModule(write_rows([{"prompt": "hi"}]), tokenizer=model_folder, batch_size=1)
    data.setup("fit")
    assert text_of(next(iter(data.train_dataloader())), data.tokenizer) == "hi"


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"val_batch_size": 0}, {"num_workers": -1}, {"seed": -1}]
)
def test_impossible_loader_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        PromptDataModule("train.jsonl", **options)


def test_loaders_are_not_there_before_setup() -> None:
    with pytest.raises(RuntimeError, match="call setup"):
        PromptDataModule("train.jsonl").train_dataloader()


def test_what_a_worker_process_gets_survives_pickling(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    loader = load(write_rows(numbered_prompts(4)), tokenizer, batch_size=2).train_dataloader()
    copy = pickle.loads(pickle.dumps(loader))
    assert [batch.columns for batch in copy] == [batch.columns for batch in loader]


def test_thousands_of_rows_are_tokenised_in_few_calls() -> None:
    class Many(Squares):
        def rows(self) -> list[dict[str, Any]]:
            return numbered_prompts(3000)

    calls: list[int] = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: list[str], **options: Any) -> Any:
            calls.append(len(text))
            return super().__call__(text, **options)

    counting = build_tokenizer()
    counting.__class__ = Counting
    load(Many(), counting)
    assert sum(calls) >= 3000
    assert len(calls) < 10
