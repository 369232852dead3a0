"""REINFORCE leave-one-out, and every other algorithm without a critic."""

from __future__ import annotations

from lrlhf.modules.policy.guard import passes_guard
from lrlhf.modules.policy.update import minibatches_of
from lrlhf.modules.policy_module import PolicyModule
from lrlhf.types import PromptBatch, StoredRollout


class RLOO(PolicyModule):
    """Generates groups of responses, compares their scores, and updates the policy.

    One training step is one iteration: generate ``num_generations`` responses to each prompt of the
    batch, score them, turn the scores into advantages, take the optimizer steps.
    ``trainer.global_step`` counts iterations. A batch of stored rollouts takes the place of the
    first two. The KL to the reference is a part of the reward, or a term of the loss with
    ``reference.placement: loss``, never both. Any `Algorithm` that needs no critic fits: GRPO,
    Dr. GRPO, DAPO, GSPO, ReMax, ….

    Reference:
        Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
    """

    def training_step(self, batch: PromptBatch | StoredRollout, batch_idx: int) -> None:
        it = self.begin(batch)
        experience = self.sampler.sample(batch, it)  # y ~ π(· | x), and their scores
        self.running_scores.update(experience.scores, it.ranks)
        with it.phase("logprob"):  # log π_old(y), log π_ref(y), then the advantages
            experience = self.prepare(experience, it)
        it.show_rollout(experience)
        if passes_guard(experience, it, self.tokenizer):
            with it.phase("update"):
                experience = experience.to("cpu") if self.settings.update.offload else experience
                for part, text in minibatches_of(
                    experience, batch.pretraining, self.settings, [self.policy], it
                ):
                    self.policy_step(part, text, it)
        self.finish(experience, it)
