"""What a reward model is built from."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.media import MediaProcessor
from lrlhf.models import RewardNetwork, ScoreModel, fit_padding
from lrlhf.run.quiet_output import quiet


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
