"""PPO end to end on tiny models: what must not matter, and every option."""

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lrlhf.callbacks import EMA, KLControl, RLCheckpoint
from lrlhf.datamodules import PromptDataModule
from lrlhf.models import LoRA, ValueHead, ValueModel, ValueNetwork
from lrlhf.modules import (
    PPO,
    Advantage,
    Critic,
    DynamicSampling,
    OptimizerConfig,
    Reference,
    Update,
)
from lrlhf.modules.policy_module import advance_schedules
from lrlhf.rewards import Rewards
from tests.conftest import build_language_model
from tests.modules.policy_runs import assert_same, letters, moved, sgd, weights

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
BOTH = pytest.mark.parametrize("kind", ["head", "own"])


NAMES = """
value/loss value/mean value/clip_fraction value/explained_variance value/grad_norm value/lr
policy/grad_norm policy/loss train/lr rollout/score
"""


@BOTH
def test_actor_and_critic_take_four_steps_and_say_how(ppo, train, critic_of, kind: str) -> None:
    taken: list[int] = []

    def count(trainer: L.Trainer, _: Any) -> None:
        for index, optimizer in enumerate(trainer.optimizers):
            optimizer.register_step_post_hook(lambda *_, index=index: taken.append(index))

    module = ppo(update=Update(), critic=critic_of(kind), optimizer=OptimizerConfig(lr=1e-2))
    before = {role: weights(model) for role, model in module.trainable_models().items()}
    run = train(module, callbacks=[LambdaCallback(on_train_start=count)])
    assert sorted(taken) == [0] * 4 + [1] * 4
    for role, model in module.trainable_models().items():
        assert moved(before[role], weights(model)), role
    assert all(math.isfinite(run.logged[name]) for name in NAMES.split())
    assert run.logged["policy/clip_fraction"] > 0


@BOTH
def test_the_values_follow_the_unit_and_the_mean_of_the_scores(
    ppo, train, value_network, kind: str
) -> None:
    values = []
    for reward in (letters, lambda completions: [1000 * s - 5000 for s in letters(completions)]):
        network = value_network(relative=True) if kind == "own" else None
        run = train(
            ppo(
                reward=reward,
                num_generations=4,
                update=Update(),
                reference=Reference(kl_coef=0.0),
                critic=Critic(model=network, max_grad_norm=math.inf),
            ),
            steps=2,
        )
        values.append([e.values[e.response_mask] for e in run.watcher.experiences])
        # before it has learnt anything a new critic expects the mean
        mean = run.experience.scores.mean()
        torch.testing.assert_close(
            values[-1][0], mean.expand(len(values[-1][0])), rtol=1e-4, atol=0
        )
    spread = float(values[0][1].std())
    assert spread > 1e-3
    scaled = 1000 * values[0][1] - 5000
    torch.testing.assert_close(scaled, values[1][1], rtol=1e-3, atol=10 * spread)


def test_new_weights_of_a_critic_have_a_learning_rate_of_their_own(ppo, value_network) -> None:
    def rates(critic: Critic) -> set[float]:
        optimizer = ppo(critic=critic).values.optimizer(100).optimizer
        return {group["lr"] for group in optimizer.param_groups}

    new = 0.5 / 32
    relative = value_network(relative=True)
    assert rates(Critic(optimizer=OptimizerConfig(weight_decay=0.01))) == {new}
    assert rates(Critic(model=relative)) == {1e-5, new}
    # a head that was trained before, or a number that was asked for
    assert rates(Critic(model=value_network())) == {1e-5}
    assert rates(Critic(model=relative, optimizer=OptimizerConfig(lr=1e-4))) == {1e-4}


# ---- two networks


@pytest.mark.parametrize(("kind", "waits"), [("head", "critic"), ("own", "policy")])
def test_one_of_the_two_can_wait_while_the_other_learns(
    ppo, train, critic_of, kind: str, waits: str
) -> None:
    steps = {"policy": 0, "critic": 0} | {waits: 2}
    module = ppo(
        critic=critic_of(kind, freeze_steps=steps["critic"]),
        update=Update(loss="token_clip", freeze_steps=steps["policy"]),
    )
    models = module.trainable_models()
    before = {role: weights(model) for role, model in models.items()}
    train(module, steps=2)
    for role, model in models.items():
        assert moved(before[role], weights(model)) == (role != waits), role
    train(module, steps=3)  # counts anew: two frozen steps, then one that moves
    assert moved(before[waits], weights(models[waits]))


def test_a_schedule_begins_when_its_model_begins_to_learn() -> None:
    class Counts:
        """What of a module advances schedules."""

        def __init__(self, step: int) -> None:
            self.global_step, self.advanced = step, []

        def advance_schedule(self, index: int) -> None:
            self.advanced.append(index)

    for step, expected in ((0, [0]), (1, [0]), (2, [0, 1]), (3, [0, 1])):
        module = Counts(step)
        advance_schedules(module, [0, 2])
        assert module.advanced == expected


def test_each_gradient_is_clipped_to_its_own_norm(ppo, train, critic_of) -> None:
    def distance(bound: float) -> float:
        critic = critic_of("own", optimizer=sgd(1.0), max_grad_norm=bound)
        module = ppo(critic=critic, optimizer=sgd(0.1))
        start = weights(module.critic)
        train(module)
        after = weights(module.critic)
        return math.sqrt(sum(float((after[n] - v).square().sum()) for n, v in start.items()))

    assert distance(1e-3) == pytest.approx(1e-3, rel=1e-2)  # lr 1: the step is the gradient
    assert distance(math.inf) > 1e-2


def test_a_head_moves_the_backbone_only_when_asked_to(ppo, train) -> None:
    ends = []
    for coefficient in (0.0, 0.0, 10.0):
        critic = Critic(optimizer=OptimizerConfig(lr=1e-2), backbone_coef=coefficient)
        module = ppo(critic=critic)
        generator = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(module.value_head.output.weight, generator=generator)
        train(module)
        ends.append(weights(module.policy))
    assert_same(ends[0], ends[1])
    assert moved(ends[0], ends[2])


@pytest.mark.parametrize(
    ("kind", "aggregate"),
    [("head", "token_mean"), ("own", "sequence_mean"), ("head", "constant")],
)
def test_micro_batches_do_not_change_the_update(
    ppo, train, critic_of, kind: str, aggregate: str
) -> None:
    ends, parts = [], []
    # four prompts of 5 or 6 tokens, two responses of 6 to each: all, two prompts, or one row
    for budget in (None, 40, 6):
        update = {
            "loss": "token_clip",
            "aggregate": aggregate,
            "micro_batch_tokens": budget,
            "entropy_coef": 0.01,
            "high_entropy_fraction": 0.5,
            "num_minibatches": 1,
        }
        critic = critic_of(kind, optimizer=sgd(0.1), backbone_coef=0.0)
        module = ppo(critic=critic, optimizer=sgd(0.1), update=Update(**update))
        counted, plain = [], module.gradients.backward

        def counting(
            loss: Tensor, *, last: bool, counted: Any = counted, plain: Any = plain
        ) -> None:
            counted.append(last)
            plain(loss, last=last)

        module.gradients.backward = counting
        ends.append(train(module).after)
        parts.append(len(counted))
    once = 1 if kind == "head" else 2  # two backward passes where there are two networks
    assert parts == [once, 2 * once, 8 * once]
    for other in ends[1:]:
        assert_same(ends[0], other, **CLOSE)


# ---- state


def test_a_resumed_run_ends_in_the_same_state(ppo, train, critic_of, tmp_path) -> None:
    def resumable() -> tuple[PPO, list[Any]]:
        module = ppo(
            critic=critic_of("own", optimizer=OptimizerConfig(lr=1e-3, schedule="linear")),
            optimizer=OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2),
            advantage=Advantage(estimator="gae", scale_rewards="mean_std"),
            reference=Reference(kl_coef=0.1, sync_every=2),
            update=Update(loss="token_clip", num_iterations=2, minibatch_size=4),
        )
        files = RLCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
        return module, [EMA(decay=0.9), KLControl(target=0.01, horizon=50), files]

    def end_of(module: PPO, callbacks: list[Any], **options: Any) -> dict[str, Any]:
        trainer = train(module, steps=5, callbacks=callbacks, **options).trainer
        state = {
            "policy": module.policy.state_dict(),
            "critic": module.critic.state_dict(),
            "reference": module.reference.state_dict(),
            "kl_coef": module.kl_coef,
            "running_scores": module.running_scores.state_dict(),
            "callbacks": [callback.state_dict() for callback in callbacks[:2]],
            "step": trainer.global_step,
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        }
        return copy.deepcopy(state)

    expected = end_of(*resumable())
    again, callbacks = resumable()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1.0)
    again.kl_coef = 77.0
    found = end_of(again, callbacks, ckpt_path=str(tmp_path / "step=000003.ckpt"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert expected["kl_coef"] != 0.1
    assert expected["running_scores"]["count"] == 5 * 8


# ---- options


@pytest.mark.parametrize(
    ("gamma", "lams"), [(1.0, {"lam": 1.0}), (0.5, {"lam": 1.0}), (1.0, {"value_lam": 1.0})]
)
def test_returns_are_discounted_advantages_plus_values_before_they_are_whitened(
    ppo, train, critic_of, gamma: float, lams: dict[str, float]
) -> None:
    advantage = Advantage(estimator="gae", options={"gamma": gamma, **lams})
    reference = Reference(kl_coef=0.0)
    run = train(ppo(critic=critic_of("own"), reference=reference, advantage=advantage))
    experience = run.experience
    # Monte Carlo without a KL penalty: the return of every token is the discounted score
    mask = experience.response_mask
    following = mask.flip(1).cumsum(1).flip(1) - 1
    expected = torch.where(mask, experience.scores[:, None] * gamma**following, 0.0)
    torch.testing.assert_close(experience.returns, expected, rtol=1e-5, atol=1e-6)
    kept = experience.advantages[mask]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(kept.std()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("estimator", [None, "k3"])
def test_the_penalty_in_the_reward_is_the_estimate_that_was_asked_for(
    ppo, train, other_model, estimator: str | None
) -> None:
    reference = Reference(kl_coef=0.1, kl_estimator=estimator, model=other_model)
    advantage = Advantage(estimator="gae", options={"lam": 1.0})
    experience = train(ppo(reference=reference, advantage=advantage)).experience
    gap = experience.old_logprobs - experience.ref_logprobs
    penalty = gap if estimator is None else torch.exp(-gap) - 1 + gap
    # Monte Carlo: the return of the first token is the score less every token's penalty
    first = experience.response_mask.long().argmax(dim=1, keepdim=True)
    expected = experience.scores - 0.1 * (penalty * experience.response_mask).sum(dim=1)
    found = experience.returns.gather(1, first)[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_clipped_rewards_and_advantages_are_counted_before_they_are_clipped(ppo, train) -> None:
    run = train(ppo(advantage=Advantage(estimator="gae", reward_clip_range=(0.1, 0.2), clip=0.5)))
    scores, advantages = run.experience.scores, run.experience.advantages
    outside = float(((scores < 0.1) | (scores > 0.2)).float().mean())
    assert 0 < outside < 1
    assert run.logged["rollout/reward_clip_fraction"] == pytest.approx(outside)
    assert float(advantages.abs().max()) == 0.5
    at_bound = float((advantages[run.experience.response_mask].abs() == 0.5).float().mean())
    assert run.logged["rollout/advantage_clip_fraction"] == pytest.approx(at_bound)


def test_dynamic_sampling_samples_until_the_groups_differ(ppo, train, prompts) -> None:
    def by_prompt(prompts: list[str], completions: list[str]) -> list[float]:
        # "say a" to "say h" always score alike, the others by their letters
        scores = zip(prompts, letters(completions), strict=True)
        return [0.0 if prompt[-1] < "i" else score for prompt, score in scores]

    module = ppo(reward=by_prompt, num_generations=4, dynamic_sampling=DynamicSampling(prompts=3))
    run = train(module, data=PromptDataModule(train=str(prompts), batch_size=16))
    assert len(run.experience) == 12
    assert {record["prompt"][-1] for record in run.records}.isdisjoint("abcdefgh")
    assert bool(run.experience.counted.all())
    groups = [record["group"] for record in run.records]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [4, 4, 4]
    assert run.logged["rollout/rounds"] > 1
    assert run.experience.scores.view(3, 4).std(dim=1).min() > 0


@pytest.mark.parametrize(
    ("reward", "advantage"),
    [
        (lambda completions: [1.0] * len(completions), Advantage()),
        # all responses are truncated, or all scores are clipped to 0: nothing differs
        (letters, Advantage(truncated="exclude")),
        (letters, Advantage(reward_clip_range=(-1.0, 0.0))),
    ],
    ids=["same", "truncated", "clipped"],
)
def test_dynamic_sampling_ends_with_the_batch_and_leaves_its_fillers_out(
    ppo, train, reward: Any, advantage: Advantage
) -> None:
    rewards = Rewards({"score": reward})
    options = {"rewards": rewards, "advantage": advantage, "reference": Reference(kl_coef=0.0)}
    run = train(ppo(dynamic_sampling=DynamicSampling(prompts=2), **options))
    assert run.logged["rollout/rounds"] == 2  # 4 prompts, 2 at a time
    assert run.logged["rollout/padding_rows_fraction"] == 1
    assert not run.experience.counted.any()
    assert not run.experience.loss_mask.any()
    after = dict(run.module.named_parameters())  # without the head's unit
    assert_same({name: run.before[name] for name in after}, after)


def test_only_the_least_certain_tokens_are_trained_on(ppo, train, language_model) -> None:
    module = ppo(update=Update(loss="token_clip", high_entropy_fraction=0.34))
    experience = train(module).experience
    mask = experience.attention_mask.long()
    logits = language_model(experience.input_ids, attention_mask=mask).logits
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    assert experience.selected is not None
    for row in range(len(experience)):
        columns = experience.response_mask[row].nonzero().flatten()
        best = entropy[row, columns - 1].topk(max(1, int(0.34 * len(columns)))).indices
        chosen = experience.selected[row].nonzero().flatten()
        assert set(chosen.tolist()) == set(columns[best].tolist())


def test_the_value_clip_holds_the_critic_back(ppo, train, critic_of) -> None:
    update = Update(loss="token_clip", num_iterations=4)
    free, held = (
        train(ppo(critic=critic_of("own", value_clip_range=bound), update=update))
        for bound in (None, 1e-4)
    )
    assert "value/clip_fraction" not in free.logged
    assert held.logged["value/clip_fraction"] > 0.3
    assert moved(free.after, held.after)


def test_experience_that_waits_in_cpu_memory_gives_the_same_update(ppo, train) -> None:
    there, here = (
        train(ppo(update=Update(loss="token_clip", offload=offload, minibatch_size=4)), steps=2)
        for offload in (False, True)
    )
    assert_same(there.after, here.after)


@pytest.fixture
def texts(prompts, tmp_path) -> Callable[[], PromptDataModule]:
    """Prompts, and four pretraining texts with each batch of them."""
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(['{"text": "the quick brown fox"}'] * 8))
    options = {"pretraining": str(path), "pretraining_batch_size": 4}
    return lambda: PromptDataModule(train=str(prompts), batch_size=4, **options)


def test_pretraining_texts_become_likelier_in_their_proportion_to_the_loss(
    ppo, train, texts, tokenizer
) -> None:
    ids = torch.tensor([tokenizer("the quick brown fox")["input_ids"]])
    changes, losses = [], []

    def unlikely(module: PPO) -> float:
        with torch.no_grad():
            return float(module.policy.eval()(ids, labels=ids).loss)

    for loss in ("token_clip", "gspo", "sequence_clip"):
        update = {"num_minibatches": 1, "pretraining_coef": 1.0, "max_grad_norm": math.inf}
        module = ppo(
            critic=None,
            reference=Reference(kl_coef=0.0),
            # the same score for all: the texts alone move the policy
            advantage=Advantage(estimator="rloo", reward_clip_range=(-2.0, -1.0)),
            optimizer=sgd(0.02),
            update=Update(loss=loss, **update),
        )
        data = texts()
        losses.append(unlikely(module))
        run = train(module, data=data)
        losses.append(unlikely(module))
        assert run.logged["policy/pretraining_loss"] > 0
        changes.append({name: new - run.before[name] for name, new in run.after.items()})
    assert losses[1] < losses[0]
    length = int(next(iter(data.train_dataloader())).pretraining.response_mask[0].sum())
    assert_same(changes[0], changes[1])
    summed = {name: change * length for name, change in changes[0].items()}
    assert_same(summed, changes[2], rtol=1e-3, atol=1e-6)


@BOTH
@pytest.mark.parametrize("score", [None, 0.7])
def test_an_iteration_that_teaches_nothing_moves_nothing(
    ppo, train, critic_of, kind: str, score: float | None
) -> None:
    calls: list[int] = []

    def reward(completions: list[str]) -> list[float | None]:
        calls.append(len(completions))
        # the first iteration fills the optimizers' momentum
        return letters(completions) if len(calls) == 1 else [score] * len(completions)

    ends: list[dict[str, Tensor]] = []
    module = ppo(
        rewards=Rewards([reward], max_unscorable_fraction=1.0),
        optimizer=OptimizerConfig(lr=1e-2),
        reference=Reference(kl_coef=0.0),
        critic=None if score else critic_of(kind),
        advantage=Advantage(estimator="reinforce_plus_plus" if score else "gae"),
    )
    keep = LambdaCallback(on_train_batch_end=lambda *_: ends.append(weights(module)))
    run = train(module, steps=2, callbacks=[keep])
    assert moved(run.before, ends[0])
    assert (run.watcher.experiences[1].advantages == 0).all()
    if score is None:
        assert_same(ends[0], ends[1])


# ---- the critic's network


def test_a_critic_that_does_not_fit_the_policy_is_refused(
    ppo, tokenizer, language_model, model_folder
) -> None:
    other = build_language_model(tokenizer, seed=3)
    other.resize_token_embeddings(50)
    for model, culprit in (
        (language_model, "shares weights with the policy"),
        (other, "reads the policy's own ids"),
    ):
        network = ValueNetwork(model.base_model, ValueHead(32, "linear"))
        with pytest.raises(ValueError, match=culprit):
            ppo(language_model, critic=Critic(model=network))
    # one that is named by its source has the kind of head that was asked for
    module = ppo(critic=Critic(model=model_folder, head="mlp"))
    assert isinstance(module.critic.head.projection, torch.nn.Sequential)


def test_a_strategy_that_waits_for_every_gradient_is_refused(ppo) -> None:
    module = ppo()
    module.trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, strategy="ddp")
    with pytest.raises(ValueError, match="ddp_find_unused_parameters_true"):
        module.setup("fit")


def test_an_exported_critic_keeps_its_unit_and_learns_as_trained_weights_do(
    ppo, train, value_network, tokenizer, tmp_path
) -> None:
    network = value_network(relative=True)
    network.head.measure_in(3.0, 5.0)
    network.save_pretrained(tmp_path / "critic", tokenizer)
    loaded = ValueModel(source=str(tmp_path / "critic")).load()
    module = ppo(critic=Critic(model=loaded))
    rates = {group["lr"] for group in module.values.optimizer(100).optimizer.param_groups}
    assert rates == {1e-5}
    experience = train(module).experience
    assert (float(loaded.head.scale), float(loaded.head.shift)) == (3.0, 5.0)
    module.export_pretrained(tmp_path / "export")
    again = ValueModel(source=str(tmp_path / "export" / "critic")).load().eval()
    expected = module.critic.eval()(experience)
    torch.testing.assert_close(again(experience), expected, rtol=1e-5, atol=1e-6)


def test_a_critic_with_adapters_trains_them_only(ppo, train, model_folder) -> None:
    spec = ValueModel(source=model_folder, lora=LoRA(r=4, alpha=8))
    module = ppo(critic=Critic(model=spec, optimizer=OptimizerConfig(lr=1e-2)))
    before = weights(module.critic)
    train(module, steps=2)
    for name, value in weights(module.critic).items():
        changes = "lora" in name or name.startswith("head.")
        assert torch.equal(before[name], value) != changes or "lora_A" in name, name
