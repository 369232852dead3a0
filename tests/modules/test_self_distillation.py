"""A policy that is its own teacher with privileged context in its prompt."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import PromptDataModule, ReplayDataModule
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.environments import Episodes
from lrlhf.guard.dump import StepBundle, read_bundle, write_bundle
from lrlhf.models import CausalLM, LoRA
from lrlhf.models.teacher import TeacherModel
from lrlhf.modules import PPO, RLOO, DynamicSampling, OptimizerConfig, Teacher, Update
from lrlhf.modules.policy.privileged import PrivilegedContext
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.types import Experience, Rollout, SequenceBatch
from tests.conftest import build_language_model
from tests.modules import test_episode_runs as episodes
from tests.modules.policy_runs import Run, assert_same, fit, letters, moved, sgd, weights
from tests.modules.test_distillation import after_a_step, divergence, mean, of_tokens
from tests.modules.test_distillation import padded_logprobs as own_logprobs
from tests.modules.test_distillation_runs import _alone
from tests.modules.test_rollout_queue import SaveAfter
from tests.modules.test_vision_training import ask, policy, questions  # noqa: F401  fixtures
from tests.vlms import build_vlm

CONTEXT = "{{ answer }}! {{ prompt }}"
ROWS = [
    {"prompt": f"say {word}", "answer": answer}
    for word, answer in zip(
        "abcdefgh", ["a", "bb", None, "dddd", "", "f", "g" * 9, "h"], strict=True
    )
]
INFORMED = {row["prompt"] for row in ROWS if row["answer"]}
FORMS = pytest.mark.parametrize(
    "form", [{}, {"placement": "loss"}, {"placement": "loss", "top_k": 4}], ids=str
)


def own(**options: Any) -> dict[str, Any]:
    return {"model": None, "context": CONTEXT, **options}


@pytest.fixture
def taught(learner: Any, train: Any) -> Callable[..., Run]:
    """Trains on the rows above, four of them in each iteration."""

    def taught(*args: Any, steps: int = 1, rows: Any = ROWS, **options: Any) -> Run:
        data = PromptDataModule(rows, batch_size=4, seed=3)
        chosen = {"callbacks": options.pop("callbacks", ())}
        options["teacher"] = own(**options.get("teacher", {}))
        return train(learner(*args, **options), steps=steps, data=data, **chosen)

    return taught


def theirs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    experience: Experience,
    prompts: list[str | None],
) -> Tensor:
    """`[B, T, V]` at the response tokens: of each row alone behind another prompt; None: zeros."""
    found = torch.zeros(*experience.input_ids.shape, len(tokenizer))
    for row, prompt in enumerate(prompts):
        mask = experience.response_mask[row]
        if prompt is None or not mask.any():
            continue
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        first = int(mask.int().argmax())
        behind = experience.input_ids[row, first : int(experience.attention_mask[row].sum())]
        ids = torch.cat([torch.tensor(start), behind])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0] / 0.8
        columns = mask.nonzero()[:, 0]
        found[row, columns] = logits.log_softmax(-1)[columns - first + len(start) - 1]
    return found


def prompts_of(run: Run) -> list[str | None]:
    """The teacher's, written by hand."""
    return [
        f"{record['columns']['answer']}! {record['prompt']}"
        if record["prompt"] in INFORMED
        else None
        for record in run.records
    ]


# ---- one step of each form, against a pass over each privileged prompt and its response


def test_in_the_reward_the_advantage_is_what_the_context_changes(taught, tokenizer) -> None:
    run = taught(teacher={"coef": 0.7})
    experience, prompts = run.experience, prompts_of(run)
    assert {None} < {*prompts}, "some rows have no context, others have"
    model = build_language_model(tokenizer)
    with torch.no_grad():
        before = of_tokens(own_logprobs(model, experience), experience)
    distance = of_tokens(theirs(model, tokenizer, experience, prompts), experience) - before
    informed = torch.tensor([prompt is not None for prompt in prompts])
    counts = experience.response_mask & informed[:, None]
    expected = torch.where(counts, 0.7 * distance, 0.0)
    torch.testing.assert_close(experience.advantages, expected, rtol=1e-4, atol=1e-5)
    assert run.logged["teacher/informed_fraction"] == informed.float().mean()
    assert run.logged["teacher/reverse_kl_sampled"] == pytest.approx(
        -distance[counts].mean().item(), rel=1e-4
    )
    after = after_a_step(
        experience, tokenizer, lambda p: -mean(expected * of_tokens(p, experience), experience)
    )
    assert_same(weights(run.module.policy), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_in_the_loss_the_step_is_down_the_divergence_of_informed_rows(
    taught, tokenizer, beta: float
) -> None:
    run = taught(teacher={"placement": "loss", "coef": 0.6, "beta": beta})
    experience, prompts = run.experience, prompts_of(run)
    teacher = theirs(build_language_model(tokenizer), tokenizer, experience, prompts)
    informed = torch.tensor([prompt is not None for prompt in prompts])[:, None]

    def loss(p: Tensor) -> Tensor:
        counts = experience.response_mask & informed
        # the mean is over all tokens that are trained on, as that of a KL penalty
        return 0.6 * divergence(p, teacher, beta)[counts].sum() / experience.response_mask.sum()

    after = after_a_step(experience, tokenizer, loss)
    assert_same(weights(run.module.policy), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "context"),
    [
        ({}, "{{ prompt }}"),
        ({"placement": "loss"}, CONTEXT),
        ({"placement": "loss", "top_k": 4}, " {% if answer %}a{% endif %}\n"),
        ({}, lambda _: None),
        ({"placement": "loss"}, lambda _: " \n"),
    ],
)
def test_without_context_the_term_is_exactly_0(taught, form: Any, context: Any) -> None:
    rows = [{**row, "answer": ""} for row in ROWS]
    run = taught(teacher={**form, "context": context}, rows=rows)
    assert not run.experience.advantages.any()
    assert_same(run.before, run.after)
    assert run.logged["teacher/informed_fraction"] == 0


def test_a_function_gets_what_a_template_gets(taught) -> None:
    def context(row: Mapping[str, Any]) -> str | None:
        assert {"completion", "score", "feedback", "correct_response"} <= row.keys()
        return f"{row['answer']}! {row['prompt']}" if row["answer"] else None

    function, template = taught(teacher={"context": context}), taught()
    assert torch.equal(function.experience.advantages, template.experience.advantages)
    assert moved(template.before, template.after)


def test_a_chat_is_rendered_with_the_context_in_the_last_turn_of_the_user(
    taught, tokenizer
) -> None:
    rows = [
        {
            "prompt": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": row["prompt"]},
            ],
            "answer": row["answer"],
        }
        for row in ROWS
    ]
    run = taught(rows=rows)
    privileged = run.experience.privileged
    assert privileged is not None
    texts = []
    for record, ids, mask in zip(
        run.records, privileged.input_ids, privileged.attention_mask, strict=True
    ):
        answer, turns = record["columns"]["answer"], record["messages"]
        text = turns[-1]["content"]
        changed = [*turns[:-1], {"role": "user", "content": f"{answer}! {text}"}]
        prompt = tokenizer.apply_chat_template(
            changed if answer else turns, add_generation_prompt=True, tokenize=False
        )
        texts.append(tokenizer(prompt)["input_ids"] + record["token_ids"])
        assert ids[mask].tolist() == texts[-1]


# ---- what the context is made of


def test_a_correct_response_of_the_group_teaches_the_others(taught, tokenizer) -> None:
    def first_best(completions: list[str], prompts: list[str]) -> list[float]:
        """1 and 2 for two responses of four, but not where the prompt ends with a."""
        assert len(completions) == len(prompts)
        values = [0.0, 1.0, 2.0, 0.5]
        return [
            0.0 if prompt.endswith("a") else values[number % 4]
            for number, prompt in enumerate(prompts)
        ]

    run = taught(
        teacher={"context": "{{ correct_response }}|{{ prompt }}"},
        rewards=Rewards([first_best]),
        algorithm="distillation",
        rows=[{"prompt": f"say {word}"} for word in "abcd"],
    )
    experience = run.experience
    assert experience.privileged is not None
    for row, record in enumerate(run.records):
        group = run.records[row // 4 * 4 : row // 4 * 4 + 4]
        informed = bool(experience.privileged.informed[row])
        assert informed != record["prompt"].endswith("a")
        best = group[1] if row % 4 == 2 else group[2]  # not its own
        if informed:
            ids = experience.privileged.input_ids[row, experience.privileged.attention_mask[row]]
            start = tokenizer(best["completion"] + "|" + record["prompt"])["input_ids"]
            assert ids.tolist() == start + record["token_ids"]


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_what_an_environment_says_teaches_each_turn(
    language_model, tokenizer, tmp_path, kind: Any
) -> None:
    module = episodes.build(
        kind,
        language_model,
        tokenizer,
        teacher=Teacher(context="{{ feedback }} {{ prompt }}", placement="loss"),
    )
    watcher = episodes.run(module, tmp_path)
    experience, records = watcher.experiences[0], watcher.records[0]
    privileged = experience.privileged
    assert privileged is not None
    assert privileged.informed.all()
    assert torch.equal(privileged.response_mask.sum(1), experience.response_mask.sum(1))
    for row, record in enumerate(records):
        ids = privileged.input_ids[row, privileged.attention_mask[row]].tolist()
        start = tokenizer("(1)\n(2) " + record["prompt"])["input_ids"]
        assert ids == start + record["token_ids"]


# ---- whose weights


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_teachers_weights_are_the_first_an_average_or_the_present_ones(
    taught, tokenizer, rate: float
) -> None:
    kept = SaveEach()
    run = taught(teacher={"update_rate": rate}, steps=2, callbacks=[kept])
    second, first = run.watcher.experiences[1], build_language_model(tokenizer)
    prompts = [
        f"{record['columns']['answer']}! {record['prompt']}"
        if record["prompt"] in INFORMED
        else None
        for record in run.watcher.records[1]
    ]
    present = build_language_model(tokenizer)
    present.load_state_dict(kept.states[0])
    teacher = build_language_model(tokenizer)
    with torch.no_grad():
        for weight, old, new in zip(
            teacher.parameters(), first.parameters(), present.parameters(), strict=True
        ):
            weight.copy_((1 - rate) * old + rate * new)
        before = of_tokens(own_logprobs(present, second), second)
    distance = of_tokens(theirs(teacher, tokenizer, second, prompts), second) - before
    informed = torch.tensor([prompt is not None for prompt in prompts])
    expected = torch.where(second.response_mask & informed[:, None], distance, 0.0)
    torch.testing.assert_close(second.advantages, expected, rtol=1e-3, atol=1e-4)


class SaveEach(L.Callback):
    """Keeps the policy's weights after each iteration."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.states.append(weights(pl_module.policy))


@FORMS
def test_first_weights_of_adapters_cost_no_copy(taught, model_folder, form: Any) -> None:
    policy = CausalLM(source=model_folder, lora=LoRA(r=4))
    runs = [
        taught(policy, teacher={**form, "update_rate": rate}, steps=3, optimizer=sgd(0.5))
        for rate in (0.0, 1.0)
    ]
    assert all(run.module.teacher.model.model is run.module.policy for run in runs)
    assert all(moved(run.before, run.after) for run in runs)
    assert moved(runs[0].after, runs[1].after)
    # the first iteration knows no other weights
    first, other = (run.watcher.experiences[0] for run in runs)
    torch.testing.assert_close(first.advantages, other.advantages)


# ---- what must not matter


@FORMS
def test_micro_batches_packing_and_chunks_do_not_matter(taught, model_folder, form: Any) -> None:
    runs = []
    for attention, options in (
        ("sdpa", {}),
        ("sdpa", {"micro_batch_tokens": 60}),
        ("eager", {"micro_batch_tokens": 60, "logprob_chunk": 3}),
    ):
        policy = CausalLM(source=model_folder, attn_implementation=attention)
        update = Update(max_grad_norm=math.inf, **options)
        runs.append(taught(policy, teacher=form, update=update, optimizer=sgd(1e-2), steps=2))
    assert moved(runs[0].before, runs[0].after)
    for other in runs[1:]:
        assert_same(runs[0].after, other.after, rtol=1e-4, atol=1e-6)
        for name in ("reverse_kl", "reverse_kl_sampled", "top_agreement", "informed_fraction"):
            assert other.logged[f"teacher/{name}"] == pytest.approx(
                runs[0].logged[f"teacher/{name}"], rel=1e-3
            ), name


def test_no_micro_batch_is_larger_to_either_where_both_have_longer_rows(
    taught, model_folder, monkeypatch
) -> None:
    sizes: dict[str, list[int]] = {"teacher": [], "policy": []}
    rows = TeacherModel.rows

    def note(model: TeacherModel, batch: SequenceBatch, **options: Any) -> Any:
        sizes["teacher"].append(batch.input_ids.numel())
        return rows(model, batch, **options)

    def note_own(_: Any, __: Any, given: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            sizes["policy"].append(given["input_ids"].numel())

    monkeypatch.setattr(TeacherModel, "rows", note)
    policy = CausalLM(source=model_folder, attn_implementation="eager")
    loaded = policy.load()
    loaded.base_model.register_forward_pre_hook(note_own, with_kwargs=True)
    taught(
        loaded,
        tokenizer=policy.load_tokenizer(),
        # the policy has more tokens in all, and the teacher the longer rows of every other prompt
        teacher={"placement": "loss", "context": "{{ answer }}"},
        update=Update(micro_batch_tokens=160),
        rows=[{"prompt": "say a", "answer": "b" * 40}, {"prompt": "c" * 70, "answer": "d"}] * 2,
    )
    for noted in sizes.values():
        assert 80 < max(noted) <= 160


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_micro_batch_is_larger_to_the_teacher(taught, model_folder, attention: str) -> None:
    sizes: list[int] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            sizes.append(given["input_ids"].numel())

    policy = CausalLM(source=model_folder, attn_implementation=attention)
    loaded = policy.load()
    loaded.base_model.register_forward_pre_hook(note, with_kwargs=True)
    taught(
        loaded,
        tokenizer=policy.load_tokenizer(),
        teacher={"placement": "loss", "context": "{{ answer * 9 }}! {{ prompt }}"},
        update=Update(micro_batch_tokens=150),
        rows=[{"prompt": f"say {word}", "answer": word} for word in "abcdefgh"],
    )
    # generation reads few tokens at a time
    assert 100 < max(sizes) <= 150


def test_a_resumed_run_goes_on_as_the_whole_one(learner, prompts, tmp_path) -> None:
    adam = OptimizerConfig(lr=1e-2)
    teacher = own(update_rate=0.2)
    whole = learner(teacher=teacher, optimizer=adam)
    file = tmp_path / "first.ckpt"
    fit(whole, prompts, tmp_path, steps=3, callbacks=[SaveAfter(1, file)], limit_val_batches=0)
    resumed = learner(teacher=teacher, optimizer=adam)
    fit(resumed, prompts, tmp_path, steps=3, ckpt_path=str(file), limit_val_batches=0)
    assert_same(weights(whole), weights(resumed))
    assert_same(weights(whole.teacher.model.model), weights(resumed.teacher.model.model))


def test_stored_rollouts_are_learnt_from_with_the_same_context(
    learner, train, taught, tmp_path
) -> None:
    def varied(completions: list[str]) -> list[float]:
        return [float(len(text) % 3) for text in completions]

    options: dict[str, Any] = {
        "rewards": Rewards([varied]),
        "algorithm": "distillation",
        "teacher": {"context": "{{ correct_response }}{{ answer }}! {{ prompt }}"},
    }
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    run = taught(callbacks=[log], **options)
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    again = train(learner(**{**options, "teacher": own(**options["teacher"])}), data=data)
    assert run.experience.advantages.any()
    torch.testing.assert_close(
        again.experience.advantages, run.experience.advantages, rtol=1e-3, atol=1e-4
    )


def test_a_dump_holds_what_the_teacher_has_read(taught, tmp_path) -> None:
    experience = taught().experience
    bundle = StepBundle(
        stage="iteration", batches={"experience": experience}, seeds=[(1,)], context={}
    )
    write_bundle(tmp_path, 0, bundle)
    read = read_bundle(tmp_path, 0).batches["experience"]
    assert isinstance(read, Experience)
    assert read.privileged is not None
    assert torch.equal(read.privileged.input_ids, experience.privileged.input_ids)
    assert torch.equal(read.privileged.informed, experience.privileged.informed)


def test_dynamic_sampling_keeps_context_and_response_together(taught) -> None:
    run = taught(
        rewards=Rewards([letters]),
        algorithm="grpo",
        dynamic_sampling=DynamicSampling(prompts=2),
    )
    privileged = run.experience.privileged
    assert privileged is not None
    for row, record in enumerate(run.records):
        ids = privileged.input_ids[row, privileged.attention_mask[row]].tolist()
        assert ids[-len(record["token_ids"]) :] == record["token_ids"]
        assert bool(privileged.informed[row]) == (record["prompt"] in INFORMED)


def test_rows_that_only_fill_a_batch_up_are_not_counted(taught) -> None:
    def differs(completions: list[str], prompts: list[str]) -> list[float]:
        assert len(completions) == len(prompts)
        return [float(n % 2 and prompt.endswith("a")) for n, prompt in enumerate(prompts)]

    run = taught(
        rewards=Rewards([differs]),
        algorithm="grpo",
        dynamic_sampling=DynamicSampling(prompts=2),
        rows=ROWS[:4],
        teacher={"context": "{{ prompt if prompt[4:] == 'a' else none }}!"},
    )
    padding = [record["padding"] for record in run.records]
    assert {*padding} == {True, False}
    counted = run.experience.privileged.informed[~torch.tensor(padding)]
    assert run.logged["teacher/informed_fraction"] == counted.float().mean()
    assert counted.float().mean() != run.experience.privileged.informed.float().mean()


def test_an_evaluation_measures_informed_responses(learner, train) -> None:
    data = PromptDataModule(ROWS, val=ROWS, batch_size=4)
    checks = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0, "val_check_interval": 1}
    run = train(learner(teacher=own(), optimizer=sgd(1e-9)), data=data, **checks)
    assert run.logged["eval/teacher_reverse_kl"] > 0


# ---- what is refused


@pytest.mark.parametrize(
    ("teacher", "options", "culprit"),
    [
        ({"context": None}, {}, "neither is set.*teacher.context"),
        ({"threshold": math.nan}, {}, "teacher.threshold is nan"),
        ({"context": "{{ feedback }}"}, {}, "no episodes: set episodes"),
        ({"context": "{{ correct_response }}"}, {}, "never one: set rewards"),
        (
            {"context": "{{ correct_response }}"},
            {"rewards": Rewards([letters]), "algorithm": "distillation", "num_generations": 1},
            "never one: set num_generations above 1",
        ),
        ({"context": "{{ prompt"}, {}, "teacher.context is no jinja2 template"),
        ({"context": "no.such.name"}, {}, "teacher.context 'no.such.name' cannot be imported"),
        ({"context": "Answer well."}, {}, r"teacher.context 'Answer well.'"),
        ({"update_rate": 1.5}, {}, "teacher.update_rate is 1.5"),
        ({"server": "http://here", "update_rate": 0.5}, {}, "teacher.update_rate is about"),
        (
            {"offload": True, "update_rate": 1.0},
            {},
            "teacher.offload is set",
        ),
        (
            {},
            {"episodes": Episodes(environment=episodes.Letters, history="template")},
            "episodes.agent or history",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    learner, teacher: dict[str, Any], options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        learner(teacher=own(**teacher), **options)


@pytest.mark.parametrize(("rate", "culprit"), [(0.5, "set it to 1"), (0.0, "output head")])
def test_adapters_keep_no_second_copy(
    learner, tokenizer, tmp_path, rate: float, culprit: str
) -> None:
    build_language_model(tokenizer, tie_word_embeddings=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lora = LoRA(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=culprit):
        learner(CausalLM(source=str(tmp_path), lora=lora), teacher=own(update_rate=rate))


def test_a_misspelt_column_is_named(taught) -> None:
    with pytest.raises(ValueError, match=r"teacher.context.*'answr'.*did you mean 'answer'"):
        taught(teacher={"context": "{{ answr }} {{ prompt }}"})


@pytest.mark.parametrize("name", ["completion", "score", "correct_response"])
def test_a_name_of_two_things_is_refused_before_anything_is_generated(taught, name: str) -> None:
    rows = [{"prompt": "say a", "answer": "a", name: "of the row"}] * 4
    options: dict[str, Any] = {"rewards": Rewards([letters]), "algorithm": "distillation"}
    context = f"{{{{ {name} }}}} {{{{ prompt }}}}"
    with pytest.raises(ValueError, match=f"reads '{name}', which every response has"):
        taught(teacher={"context": context}, rows=rows, engine=Idle(), **options)
    seen = []
    taught(teacher={"context": lambda row: seen.append(row[name])}, rows=rows, **options)
    assert seen
    assert "of the row" not in seen, "a function gets what the response has"


def test_an_extra_with_the_name_of_something_else_is_refused(taught) -> None:
    def judge(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("score", [3.0] * len(completions))
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="reads 'score', which every response has"):
        taught(
            teacher={"context": "{{ score }} {{ prompt }}"},
            rewards=Rewards([judge]),
            algorithm="distillation",
        )


@pytest.mark.parametrize("returned", [b"text", 3, ["text"]])
def test_a_function_returns_text_or_nothing(taught, returned: Any) -> None:
    def own_context(_: Mapping[str, Any]) -> Any:
        return returned

    culprit = rf"own_context returned a {type(returned).__name__}, .*as text, or None"
    with pytest.raises(ValueError, match=culprit):
        taught(teacher={"context": own_context})


def test_a_response_without_a_score_has_no_context_that_reads_one(taught) -> None:
    def unscored(completions: list[str], prompts: list[str]) -> list[float | None]:
        assert len(completions) == len(prompts)
        return [None if prompt.endswith("a") else 0.0 for prompt in prompts]

    run = taught(
        teacher={"context": "{{ prompt if score < 1 else none }}!"},
        rewards=Rewards([unscored]),
        algorithm="distillation",
        rows=[{"prompt": f"say {word}"} for word in "abcd"],
    )
    assert run.experience.privileged is not None
    informed = run.experience.privileged.informed.tolist()
    assert informed == [not record["prompt"].endswith("a") for record in run.records]
    assert {*informed} == {True, False}


def test_a_chat_without_a_turn_of_the_user_is_refused(taught) -> None:
    rows = [{"prompt": [{"role": "system", "content": "say a"}], "answer": "a"}] * 4
    with pytest.raises(ValueError, match=r"has none \(its turns: system\)"):
        taught(rows=rows, engine=Idle())


def test_a_context_that_no_response_has_is_told_once(taught, caplog) -> None:
    taught(teacher={"context": lambda _: None}, steps=3)
    assert caplog.text.count("no response of the first 2 steps has a context") == 1
    taught(steps=3)
    assert caplog.text.count("has a context") == 1


def test_rewritten_histories_are_refused_by_name(taught) -> None:
    run = taught()
    experience = run.experience
    forks = torch.zeros_like(experience.input_ids)
    context = run.module.teacher.context
    with pytest.raises(ValueError, match=r"history rewritten.*drop the context"):
        context.rows(
            replace(experience, forks=forks), run.records, ChatFormat(run.module.tokenizer)
        )


def test_a_dated_template_may_be_rendered_on_another_day(taught, tokenizer, monkeypatch) -> None:
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + before
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    try:
        run = taught(rows=rows)
        privileged, context = run.experience.privileged, run.module.teacher.context
        assert privileged is not None
        monkeypatch.setattr(
            chat_template_utils, "datetime", SimpleNamespace(now=lambda: datetime(2001, 2, 3))
        )
        chat = ChatFormat(tokenizer)
        assert "03 Feb 2001" in chat.render(rows[0]["prompt"], {}, prompt=True)
        again = context.rows(run.experience, run.records, chat)
    finally:
        tokenizer.chat_template = before
    assert torch.equal(again.input_ids, privileged.input_ids)


def sentencepiece(scheme: str) -> PreTrainedTokenizerFast:
    """As that of Llama 2: letters, a mark for spaces, and one put before a text."""
    letters_ = ["<s>", "</s>", "<unk>", "▁", *"abcdesy!"]
    inner = Tokenizer(models.BPE({text: n for n, text in enumerate(letters_)}, []))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_prompts_of_sentencepiece_are_written_as_they_are(scheme: str) -> None:
    tokenizer = sentencepiece(scheme)
    seen = []

    def note(row: Mapping[str, Any]) -> str:
        seen.append(row["prompt"])
        return f"{row['prompt']}!"

    ids = tokenizer("say a")["input_ids"]
    context = PrivilegedContext(note, tokenizer, 1.0, None)
    row = torch.tensor([[*ids, 4, 5]])
    rollout = Rollout(
        input_ids=row,
        attention_mask=row >= 0,
        response_mask=torch.arange(row.shape[1])[None] >= len(ids),
        sampling_logprobs=torch.zeros(row.shape),
        group_ids=torch.zeros(1, dtype=torch.long),
        truncated=torch.zeros(1, dtype=torch.bool),
    )
    record = {"group": 0, "token_ids": [4, 5], "columns": {}, "completion": "ab", "score": 0.0}
    rows = context.rows(rollout, [{**record, "segments": []}], ChatFormat(tokenizer))
    assert seen == ["say a"]
    assert rows.input_ids.tolist() == [[*tokenizer("say a!")["input_ids"], 4, 5]]


def test_resuming_with_an_average_that_was_not_kept_is_refused(learner, prompts, tmp_path) -> None:
    file = tmp_path / "first.ckpt"
    first = learner(teacher=own(update_rate=0.0))
    fit(first, prompts, tmp_path, steps=2, callbacks=[SaveAfter(1, file)], limit_val_batches=0)
    resumed = learner(teacher=own(update_rate=0.2))
    with pytest.raises(ValueError, match=r"holds no state of teacher.*teacher\.update_rate"):
        fit(resumed, prompts, tmp_path, steps=2, ckpt_path=str(file), limit_val_batches=0)


def test_a_context_without_room_for_a_response_is_refused_before_one_is_generated(
    taught,
) -> None:
    rows = [{"prompt": "say a", "answer": "a" * 300}] * 4
    with pytest.raises(ValueError, match=r"the policy reads 256 tokens.*shorten teacher.context"):
        taught(rows=rows)
    with pytest.raises(ValueError, match=r"have 3\d\d tokens, and the teacher reads 256"):
        taught(rows=rows, teacher={"context": "{{ answer }}{{ completion }} {{ prompt }}"})


def test_images_are_refused_before_anything_is_generated(ask: Any) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"show images.*drop the context"):
        ask(
            policy(
                build_vlm("qwen2_vl"),
                module=_alone,  # type: ignore[arg-type]
                teacher=Teacher(context=CONTEXT),
                optimizer=sgd(0.1),
                engine=Idle(),
            ),
            batch_size=4,
        )


class Idle(TransformersEngine):
    def generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is to be generated")


@pytest.mark.parametrize("answer", ["a", ""])
def test_a_prompt_that_is_not_rendered_again_is_refused(taught, tokenizer, answer: str) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "say a"}],
            "answer": answer,
            "chat_template_kwargs": {"greeting": "hello"},
        }
    ] * 4
    before = tokenizer.chat_template
    tokenizer.chat_template = "{{ greeting }}" + before
    try:
        with pytest.raises(ValueError, match=r"rendered again.*chat_template_kwargs"):
            taught(rows=rows, engine=Idle())
    finally:
        tokenizer.chat_template = before


def test_a_long_enough_response_is_needed_for_nothing(taught) -> None:
    run = taught(sampling=Sampling(max_new_tokens=1, temperature=0.8))
    assert run.experience.response_mask.sum(1).max() == 1
    assert run.experience.advantages.any()
