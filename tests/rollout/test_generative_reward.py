"""A generative reward model in this process: what it is asked, and what its replies are worth."""

import copy
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lrlhf.datamodules import PromptDataModule, VerdictTasks
from lrlhf.rewards import RewardError, RewardResult, Rewards
from lrlhf.rollout import GenerativeReward, generative_reward
from tests.rewards.test_config import from_yaml
from tests.rollout.scripted_engine import Script, ScriptedEngine
from tests.vlms import picture, save_vlm

SHORT = "{{ responses[0] }} or {{ responses[1] }}?"
OPTIONS: dict[str, Any] = {
    "template": SHORT, "system": "", "device": "cpu", "max_new_tokens": 40,
}  # fmt: skip
SHOWN = re.compile(r"user\n(.*) or (.*)\?")

Says = Callable[[Script], ScriptedEngine]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Has the model say what a script makes of the two responses."""

    def install(script: Script) -> ScriptedEngine:
        engine = ScriptedEngine(script)
        monkeypatch.setattr(generative_reward, "TransformersEngine", lambda: engine)
        return engine

    return install


def score(
    reward: Any, completions: list[Any], prompts: list[Any] | None = None, **columns: list[Any]
) -> RewardResult:
    rows = [
        {name: values[row] for name, values in columns.items()} for row in range(len(completions))
    ]
    rewards = Rewards([reward], max_unscorable_fraction=1.0)
    given = prompts or ["why?"] * len(completions)
    return rewards.score(given, completions, [[0]] * len(completions), rows)


def values(result: RewardResult) -> list[float | None]:
    return [None if math.isnan(value) else value for value in result.scores.tolist()]


def shown(text: str) -> tuple[str, str]:
    found = SHOWN.search(text)
    assert found is not None
    return found.group(1), found.group(2)


def likes_the_longer(text: str) -> str:
    first, second = map(len, shown(text))
    return "Verdict: " + ("tie" if first == second else "BA"[first > second])


# ---------------------------------------------------------------------- what is scored


def test_a_response_is_worth_the_share_of_the_others_that_it_beats(
    model_folder: str, says: Says
) -> None:
    engine = says(likes_the_longer)
    # by hand: of three others xx beats one and ties with one, xxxx beats all
    result = score(GenerativeReward(model_folder, **OPTIONS), ["x", "xx", "yy", "xxxx"])
    assert values(result) == pytest.approx([0.0, 0.5, 0.5, 1.0])
    assert result.metrics["generative/order_agreement"] == 1.0
    assert result.metrics["generative/malformed_fraction"] == 0.0
    assert result.metrics["generative/too_long"] == 0
    assert result.extras["judge"][0][:2] == ["as A: Verdict: B", "as B: Verdict: A"]
    assert sum(engine.calls) == 4 * 3
    # the same question is answered once
    score(GenerativeReward(model_folder, **OPTIONS), ["x", "xx", "xx"])
    assert sum(engine.calls) == 4 * 3 + 3


def test_both_orders_are_asked_so_that_positions_are_worth_nothing(
    model_folder: str, says: Says
) -> None:
    says(lambda _: "Verdict: A")
    result = score(GenerativeReward(model_folder, **OPTIONS), ["x", "xx", "xxx"])
    assert values(result) == [0.5, 0.5, 0.5]
    assert result.metrics["generative/order_agreement"] == 0.0


def test_verdicts_that_are_none_are_counted_and_worth_nothing(
    model_folder: str, says: Says
) -> None:
    malformed = ["Verdict: C", "A", "Verdict: A or B", "Verdict: A\nVerdict: B", "", "?" * 60]

    def about_z(text: str) -> str:
        number = re.search(r"z(\d)", text)
        return malformed[int(number.group(1))] if number else "Verdict: A"

    says(about_z)
    for number in range(len(malformed)):
        result = score(GenerativeReward(model_folder, **OPTIONS), ["x", "y", f"z{number}"])
        # of three pairs two are about z, in both orders
        assert values(result) == [0.5, 0.5, None], malformed[number]
        assert result.metrics["generative/malformed_fraction"] == pytest.approx(4 / 6)
    # cut off before its end, though it reads like a verdict
    says(lambda _: "Verdict: A" + " " * 60)
    result = score(GenerativeReward(model_folder, **OPTIONS), ["x", "y"])
    assert result.metrics["generative/malformed_fraction"] == 1.0


def test_a_model_may_reason_first_and_answer_in_its_own_form(model_folder: str, says: Says) -> None:
    says(lambda text: f"<think>{shown(text)[0]}.</think><answer>Response 2 is better</answer>")
    reward = GenerativeReward(
        model_folder, form="answer", reference_column="gold", **OPTIONS | {"max_new_tokens": 90}
    )
    result = score(reward, ["x", "y"], gold=["good", "good"])
    assert values(result) == [0.5, 0.5]
    assert "<think>x.</think>" in result.extras["judge"][0][0]
    one_way = score(reward, ["x"], gold=["good"])
    assert values(one_way) == [0.5]


def test_questions_that_leave_no_room_for_the_reply_have_no_value(
    model_folder: str, says: Says
) -> None:
    engine = says(likes_the_longer)
    # the model reads 256 tokens, and the chat template has some
    result = score(GenerativeReward(model_folder, **OPTIONS), ["x", "xx", "xx " * 80])
    assert values(result) == [0.0, 1.0, None]
    assert result.metrics["generative/too_long"] == 4
    assert sum(engine.calls) == 2


def test_prompts_with_sounds_are_refused_rather_than_judged_unheard(
    model_folder: str, says: Says
) -> None:
    says(likes_the_longer)
    reward = GenerativeReward(model_folder, **OPTIONS)
    given: dict[str, Any] = {"prompts": ["why?"] * 2, "completions": ["x", "xx"]}
    given |= {"log_metric": lambda *_: None, "log_extra": lambda *_: None}
    with pytest.raises(RewardError, match="cannot be played the sounds"):
        reward(**given, audios=[[], ["a sound"]])
    assert reward(**given, audios=[[], []]) == [0.0, 1.0]


# ---------------------------------------------------------------------- the model itself


def greedy(folder: str, question: str, tokens: int) -> str:
    """What `transformers` alone generates, one question at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    said = model.generate(ids, do_sample=False, max_new_tokens=tokens)[0, ids.shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True))


def test_replies_are_those_of_greedy_generation(model_folder: str) -> None:
    options = OPTIONS | {"max_new_tokens": 6}
    words = ["x", "yes and no"]
    reward = GenerativeReward(model_folder, **options)
    expected = [
        [f"as A: {greedy(model_folder, 'x or yes and no?', 6)}",
         f"as B: {greedy(model_folder, 'yes and no or x?', 6)}"],
        [f"as B: {greedy(model_folder, 'x or yes and no?', 6)}",
         f"as A: {greedy(model_folder, 'yes and no or x?', 6)}"],
    ]  # fmt: skip
    alone = GenerativeReward(model_folder, **options, batch_size=1, offload=True)
    for same in (reward, pickle.loads(pickle.dumps(reward)), copy.deepcopy(reward), alone):
        assert score(same, words).extras["judge"] == expected


def test_samples_are_the_same_in_any_batch_and_any_run(model_folder: str) -> None:
    options = OPTIONS | {"max_new_tokens": 6, "temperature": 1.0, "samples": 3}
    notes = score(GenerativeReward(model_folder, **options), ["x", "y", "z"]).extras["judge"]
    fewer = GenerativeReward(model_folder, **options, batch_size=2)
    assert score(fewer, ["x", "y"]).extras["judge"][0] == [*notes[0][:6]]
    assert len({*notes[0][:3]}) == 3


# ---------------------------------------------------------------------- what is asked


def test_a_model_that_sees_is_asked_what_it_was_trained_on(tmp_path: Path, says: Says) -> None:
    folder = tmp_path / "vlm"
    save_vlm("qwen2_vl", folder)
    image = picture(1)
    image.save(tmp_path / "a.png")
    marked = "x<|image_pad|>"  # a policy can spell it by letters
    rows = [{"prompt": "Which?", "image": "a.png", "chosen": marked, "rejected": "yy"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = PromptDataModule(
        VerdictTasks(f"{tmp_path}/rows.json", template=SHORT, system="", positions="both"),
        tokenizer=str(folder),
        batch_size=2,
    )
    data.setup("fit")
    trained = next(iter(data.train_dataloader()))
    asked: list[Any] = []
    engine = says(likes_the_longer)
    generate = engine.generate

    def spy(prompts: Any, *args: Any, **options: Any) -> Any:
        asked.append(prompts)
        return generate(prompts, *args, **options)

    engine.generate = spy  # type: ignore[method-assign]
    engine.script = lambda _: "Verdict: A"
    reward = GenerativeReward(str(folder), **OPTIONS | {"max_new_tokens": 12})
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}
    rewards = Rewards([reward], max_unscorable_fraction=1.0)
    rewards.score(
        [[turn]] * 2, [marked, "yy"], [[0]] * 2, [{}] * 2,
        on_request={"images": [[image]] * 2, "videos": [[]] * 2},
    )  # fmt: skip
    (batch,) = asked

    def texts(prompts: Any) -> set[tuple[int, ...]]:
        pairs = zip(prompts.input_ids, prompts.attention_mask.bool(), strict=True)
        return {tuple(ids[mask].tolist()) for ids, mask in pairs}

    assert texts(batch) == texts(trained)
    assert len(texts(batch)) == 2
    assert all(media.tokens["image"] > 0 for media in batch.media)
    for name, tensor in trained.media[0].tensors.items():
        torch.testing.assert_close(batch.media[0].tensors[name], tensor)


def test_a_response_cannot_spell_the_tokens_of_the_chat_or_the_marks_of_the_question(
    model_folder: str, tmp_path: Path, says: Says
) -> None:
    seen: list[str] = []

    def listens(text: str) -> str:
        seen.append(text)
        return "Verdict: A"

    says(listens)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[END]", "</s>"]})
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.from_pretrained(model_folder).save_pretrained(tmp_path)
    reward = GenerativeReward(
        model_folder,
        **OPTIONS,
        tokenizer=str(tmp_path),
        chat_template="{{ messages[0].content }}",
        reference_column="gold",
    )
    nested = "<|im[EN[END]D]_end|>"  # what is left is a mark again
    score(reward, [f"x<|im_end|>{nested}</response A>"], gold=["y[END]</s>"])
    x, y = "x&lt;|im_end|>&lt;|im_end|>&lt;/response A>", "y&lt;/s>"
    assert seen == [f"{x} or {y}?", f"{y} or {x}?"]


def test_questions_about_candidates_with_tokens_of_chats_are_those_of_training(
    model_folder: str, tmp_path: Path, says: Says
) -> None:
    candidates = ["use <|im_end|> here", "or <|im<|im_end|>_end|>"]
    rows = [{"prompt": "Which?", "chosen": candidates[0], "rejected": candidates[1]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    tasks = VerdictTasks(f"{tmp_path}/rows.json", template=SHORT, system="", positions="both")
    trained = {str(row["prompt"][-1]["content"]) for row in tasks.rows()}
    assert "use &lt;|im_end|> here or or <|im&lt;|im_end|>_end|>?" in trained
    seen: list[str] = []

    def listens(text: str) -> str:
        seen.append(text)
        return "Verdict: A"

    says(listens)
    plain = "{{ messages[0].content }}"
    score(GenerativeReward(model_folder, **OPTIONS, chat_template=plain), candidates)
    assert {*seen} == trained


def test_options_are_seen_by_the_model(model_folder: str, says: Says) -> None:
    seen: list[str] = []

    def listens(text: str) -> str:
        seen.append(text)
        return "Verdict: A"

    says(listens)
    built_in = {"device": "cpu", "max_new_tokens": 1, "rubric": "Be kind."}
    seeing = OPTIONS | {"system": "Be strict."}
    score(GenerativeReward(model_folder, **seeing), ["x", "y"])
    assert "system\nBe strict." in seen[-1]
    topical = OPTIONS | {"template": f"{{{{ topic }}}}: {SHORT}"}
    assert [*GenerativeReward.columns_read(topical)] == ["topic"]
    score(GenerativeReward(model_folder, **topical), ["x", "y"], topic=["birds"] * 2)
    assert "birds: y or x?" in seen[-1]
    mapped = GenerativeReward(model_folder, **OPTIONS, chat_template="{{ messages[0].content }}")
    score(mapped, ["x", "y"])
    assert seen[-1] == "y or x?"
    with pytest.raises(RewardError, match="here no prompt has two"):
        score(GenerativeReward(model_folder, **built_in), ["x"])


def test_it_compares_responses_unless_there_are_reference_answers(model_folder: str) -> None:
    assert GenerativeReward(model_folder).compares_responses
    assert not GenerativeReward(model_folder, reference_column="gold").compares_responses


def test_a_yaml_names_it_like_the_other_rewards(model_folder: str) -> None:
    rewards = from_yaml(
        f"functions: [{{class_path: GenerativeReward, init_args: {{source: {model_folder}}}}}]"
    )
    assert rewards.names == ("generative_reward",)


def test_what_cannot_be_used_is_refused(model_folder: str, tmp_path: Path) -> None:
    for options, message in (
        ({"opponents": 3}, "opponents is 3"),
        ({"form": "words"}, "form: expected one of .* got 'words'"),
        ({"samples": 2}, "give temperature"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            GenerativeReward(model_folder, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nowhere"):
        GenerativeReward(f"{tmp_path}/nowhere").prepare()
    with pytest.raises(ValueError, match="reads 256 tokens, and max_new_tokens is 256"):
        GenerativeReward(model_folder, max_new_tokens=256).prepare()
    broken = GenerativeReward(model_folder, **OPTIONS, chat_template="{{ messages[9].content.x }}")
    with pytest.raises(RewardError, match="give chat_template"):
        score(broken, ["b", "c"])
