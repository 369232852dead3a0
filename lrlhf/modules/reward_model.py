"""Reward models from preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import read_messages
from lrlhf.datamodules.rows.columns import text_of
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.datamodules.rows.prompt_rows import DEFAULT_PROMPT_COLUMN, column_or_dialogue
from lrlhf.guard import Guard
from lrlhf.media import MediaOptions, MediaProcessor, read_audio, read_image, read_video
from lrlhf.models import RewardNetwork, ScoreModel, evaluating, fit_padding
from lrlhf.modules.checks import refuse_idle_encoder
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.pairs.pair_losses import PairObjective, resolve_losses
from lrlhf.modules.pairs.pair_module import PairModule, PairOutputs
from lrlhf.modules.pairs.pair_step import PairScores, concatenate, pad_id_of
from lrlhf.modules.prompt_forms import refusal, rows_of
from lrlhf.rewards import LearnedReward
from lrlhf.run.quiet_output import quiet
from lrlhf.types import PreferenceBatch, Prompt, SequenceBatch


class RewardModel(PairModule):
    """Trains scalar scores on pairs of answers, with one head per named aspect.

    The loss of an optimizer step is the mean over all of its pairs, of all micro-batches and
    ranks, of the summed losses of each pair's labels. A label that is missing adds nothing. A step
    whose loss or gradient is not finite is left out on all ranks.

    Args:
        model: What to train: a hub id, a folder, ``package:<module>``, a `ScoreModel` that says how
            to load it, or a `RewardNetwork` that is already built (then pass ``tokenizer``).
        tokenizer: For a network that is already built.
        processor: For a vision-language network that is already built; as ``AutoProcessor`` loads
            it.
        loss: ``bradley_terry``, ``log_exp``, ``hps``, the dotted path of a function from chosen and
            rejected scores to losses, or a mix of these: a weight for each.
        margin: By how much the chosen score should lead; a pair's own margin replaces it.
        tie_weight: Weight of abs(score gap) of pairs labelled as equal, beside a preference's loss.
        head_weights: Weight of each head in the loss, 1 where none is given.
        center_coef: Strength of (chosen + rejected)², which keeps scores around 0; try 0.01.
        label_smoothing: Label smoothing: assumed share of wrong labels.
        optimizer: AdamW and its schedule, counted in optimizer steps; 3 % of them are warm-up
            unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
            ``trainer.gradient_clip_val`` takes its place where that is set.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about a reward model.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range, or names a head that does not exist.
    """

    train_metric: ClassVar[str] = "reward_model/accuracy"
    stage: ClassVar[str] = "reward"
    default_lr: ClassVar[float] = 1e-5

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        model: str | ScoreModel | RewardNetwork,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: str | dict[str, float] = "bradley_terry",
        margin: float = 0.0,
        tie_weight: float = 0.01,
        head_weights: dict[str, float] | None = None,
        center_coef: float = 0.0,
        label_smoothing: float = 0.0,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        objective = PairObjective(
            losses=resolve_losses(loss),
            margin=margin,
            tie_weight=tie_weight,
            center_coef=center_coef,
            label_smoothing=label_smoothing,
        )
        super().__init__(
            objective, optimizer=optimizer, max_grad_norm=max_grad_norm, guard=guard, seed=seed
        )
        self.network, self.tokenizer, self.processor = load_reward_model(
            model, tokenizer, processor
        )
        names = self.network.head_names
        self.set_heads(names, _weights(names, head_weights))

    # ---- what callbacks and data modules ask for

    def trainable_models(self) -> dict[str, nn.Module]:
        """Return what receives gradients, by role."""
        return {"reward": self.network}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the network and its tokenizer into ``folder``."""
        if self.processor is not None and folder is not None:
            self.processor.save(folder)
        # last: its tokenizer may pad otherwise than that of the processor
        self.network.save_pretrained(folder, self.tokenizer)

    def score(
        self,
        prompts: Any,
        responses: str | Sequence[str],
        *,
        head: str | None = None,
        images: Any = None,
        batch_size: int = 8,
    ) -> Any:
        """Score responses with the network as it is now, before, during or after training.

        The network reads them as it does in a run of PPO: plain text is ended with the
        end-of-sequence token, chats go through the tokenizer's template. No trainer is needed;
        modes and random states stay as they are.

        Args:
            prompts: Text, or a chat as a list of messages; or a list with one for each response.
            responses: One, or several: to one prompt, or to as many prompts.
            head: Which score; needed only if there are several.
            images: For a vision-language network: an image (path, ``PIL.Image``, array, bytes) or a
                list of them; with several prompts, a list with an entry for each. Text is then the
                user's turn of a chat.
            batch_size: Responses scored at the same time.

        Returns:
            A number for one response, a list for several; None in the place of those that are too
            long for the model.

        Raises:
            ValueError: Prompts and responses are not as many, one cannot be read, or there is no
                such head.

        Example:
            >>> module.score("What is 2 + 2?", ["4", "5"])
            [3.1, -2.7]
        """
        alone = isinstance(responses, str)
        listed = [responses] if isinstance(responses, str) else list(responses)
        read = prompts_of(prompts, images, len(listed), self.processor)
        reward = LearnedReward.of_network(
            self.network, self.tokenizer, self.processor, head=head, batch_size=batch_size
        )
        with evaluating(self.network):
            scores = reward(
                prompts=[prompt.prompt for prompt in read],
                completions=listed,
                log_metric=lambda *_: None,
                images=[each.images for each in read],
                videos=[item.videos for item in read],
                audios=[one.audios for one in read],
            )
        return scores[0] if alone else scores

    def summary(self) -> dict[str, str]:
        """Say what is trained, and on which heads."""
        return {**super().summary(), "heads": ", ".join(self.head_names)}

    # ---- training

    def on_fit_start(self) -> None:
        refuse_idle_encoder(self.trainer, self.network.scorer.plain, self.processor)
        super().on_fit_start()

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Score every row; returns [B, H] in the order of ``head_names``."""
        scores: Tensor = self.network(batch)
        return scores

    @property
    def plain(self) -> PreTrainedModel:
        return self.network.scorer.plain

    @staticmethod
    def train_name(metric: str) -> str:
        return f"reward_model/{metric}"

    def outputs_of(self, batch: PreferenceBatch) -> PairOutputs:
        """Score both candidates in one forward pass."""
        both = concatenate(batch.candidate0, batch.candidate1, pad_id=pad_id_of(self.tokenizer))
        return PairOutputs(PairScores(*self(both).split(len(batch))))


def _weights(head_names: Sequence[str], weights: Mapping[str, float] | None) -> list[float]:
    weights = weights or {}
    for name in weights:
        if name not in head_names:
            raise ValueError(
                f"head_weights names the head {name!r}; the heads are {', '.join(head_names)}"
            )
    return [float(weights.get(name, 1.0)) for name in head_names]


@quiet()
def load_reward_model(
    model: object, tokenizer: PreTrainedTokenizerBase | None, processor: ProcessorMixin | None
) -> tuple[RewardNetwork, PreTrainedTokenizerBase, MediaProcessor | None]:
    """Return a network, its tokenizer, and for a vision-language network its processor.

    Args:
        model: A network, a `ScoreModel`, or a source; a reward model there keeps its heads.
        tokenizer: None: the one that comes with the source.
        processor: None: the one that comes with the source, if any.

    Raises:
        ValueError: It is nothing of the kind, or a network without a tokenizer.
    """
    if isinstance(model, RewardNetwork):
        if tokenizer is None:
            raise ValueError("model is already built: pass its tokenizer too")
        network = model
    else:
        spec = _as_spec(model)
        # who names a source alone has not chosen heads: a reward model has its own
        network = spec.load(any_heads=isinstance(model, str))
        tokenizer = tokenizer or spec.load_tokenizer()
        processor = processor or spec.load_processor()
    fit_padding(tokenizer, network)
    return network, tokenizer, MediaProcessor.for_model(processor, network.config)


def _as_spec(model: object) -> ScoreModel:
    if isinstance(model, str):
        return ScoreModel(source=model)
    if isinstance(model, ScoreModel):
        return model
    raise ValueError(
        f"model is a {type(model).__name__}, expected a source, a ScoreModel or a RewardNetwork"
    )


class PromptWithMedia(NamedTuple):
    """A prompt, and what it shows."""

    prompt: Prompt
    images: list[Any]
    videos: list[Any]
    audios: list[Any]


def prompts_of(
    prompts: Any, images: Any, count: int, processor: MediaProcessor | None
) -> list[PromptWithMedia]:
    """Read the prompt of each of ``count`` responses.

    Raises:
        TypeError: A prompt is of no known form.
        ValueError: They are not as many, or one cannot be read.
    """
    if images is not None and processor is None:
        raise ValueError("images were given, and the reward model reads text only")
    rows, alone = rows_of(prompts, images)
    reader = MediaReader(processor)
    read = []
    for number, row in enumerate(rows):
        try:
            read.append(_read(row, reader))
        except BadRow as problem:
            raise refusal(number, problem) from problem
    if alone:
        return read * count
    if len(read) != count:
        raise ValueError(
            f"there are {len(read)} prompts and {count} responses; give a prompt for each "
            "response, or one prompt for all"
        )
    return read


def _read(row: Mapping[str, Any], reader: MediaReader) -> PromptWithMedia:
    column = column_or_dialogue(
        row, DEFAULT_PROMPT_COLUMN, default=DEFAULT_PROMPT_COLUMN, setting="prompt"
    )
    turns: Prompt
    refs = reader.of_columns(row, None)
    if isinstance(row[column], str):
        (turns,) = reader.of_texts((text_of(row, column),), refs)
    else:
        turns, refs = reader.of_messages(read_messages(row[column], column), refs, None)
    options = MediaOptions()
    return PromptWithMedia(
        turns,
        [read_image(value, options) for value in refs.images],
        [read_video(value, options) for value in refs.videos],
        [read_audio(value) for value in refs.audios],
    )
