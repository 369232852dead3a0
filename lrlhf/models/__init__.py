"""How a policy, a reference and a reward model come to be, and what they say about tokens."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.models.backbone import allow_packing, hidden_states, packs
    from lrlhf.models.experts import check_has_experts
    from lrlhf.models.heads import (
        HeadConfig,
        HeadKind,
        ValueHead,
        check_output_head,
        is_tied,
        plain_model,
    )
    from lrlhf.models.loading.adapters import LoRA
    from lrlhf.models.loading.export import (
        CheckpointNames,
        check_mergeable,
        merged_state_dict,
        merged_weights,
        save_model,
        skeleton_of,
        unmergeable,
    )
    from lrlhf.models.loading.model_sources import (
        SourceError,
        cache_dir,
        load_config,
        resolve_source,
    )
    from lrlhf.models.loading.pretrained import (
        CausalLM,
        PretrainedSpec,
        compile_layers,
        is_compiled,
    )
    from lrlhf.models.loading.tokenization import (
        TEMPLATE_ERRORS,
        declared_ends,
        eos_token_ids,
        is_split,
        load_processor,
        load_tokenizer,
        reader_of,
        readers_of,
        rejoined,
        special_tokens,
        split_messages,
        split_text,
        stop_at,
        unsplit,
        unsplit_places,
    )
    from lrlhf.models.media_inputs import (
        backbone_inputs,
        cached_vision_features,
        check_media,
        forget_offsets,
        media_modules,
        numbers_media,
        placeholder_ids,
        repeat_offsets,
        ruled_out_ids,
    )
    from lrlhf.models.modes import evaluating
    from lrlhf.models.reference import ReferencePolicy, frozen_reference
    from lrlhf.models.reward_network import (
        RewardNetwork,
        ScoreModel,
        ValueModel,
        ValueNetwork,
        new_value_head,
    )
    from lrlhf.models.routing_replay import allow_replay
    from lrlhf.models.scorers import HeadedBackbone, StockClassifier
    from lrlhf.models.step_model import (
        STEP_SEPARATOR,
        StepModel,
        joined_steps,
        prepare_step_model,
        step_logits,
    )
    from lrlhf.models.text_limits import (
        TextLimits,
        context_length,
        context_of,
        fit_padding,
        limits_of,
    )
    from lrlhf.models.token_budget import TokenBudget
    from lrlhf.models.token_logprobs import (
        SequenceOutputs,
        loss_tokens,
        sequence_logprobs,
        sequence_outputs,
        sequence_values,
    )
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "STEP_SEPARATOR",
    "TEMPLATE_ERRORS",
    "CausalLM",
    "CheckpointNames",
    "HeadConfig",
    "HeadKind",
    "HeadedBackbone",
    "LoRA",
    "PretrainedSpec",
    "ReferencePolicy",
    "RewardNetwork",
    "ScoreModel",
    "SequenceOutputs",
    "SourceError",
    "StepModel",
    "StockClassifier",
    "TextLimits",
    "TokenBudget",
    "ValueHead",
    "ValueModel",
    "ValueNetwork",
    "allow_packing",
    "allow_replay",
    "backbone_inputs",
    "cache_dir",
    "cached_vision_features",
    "check_has_experts",
    "check_media",
    "check_mergeable",
    "check_output_head",
    "compile_layers",
    "context_length",
    "context_of",
    "declared_ends",
    "eos_token_ids",
    "evaluating",
    "fit_padding",
    "forget_offsets",
    "frozen_reference",
    "hidden_states",
    "is_compiled",
    "is_split",
    "is_tied",
    "joined_steps",
    "limits_of",
    "load_config",
    "load_processor",
    "load_tokenizer",
    "loss_tokens",
    "media_modules",
    "merged_state_dict",
    "merged_weights",
    "new_value_head",
    "numbers_media",
    "packs",
    "placeholder_ids",
    "plain_model",
    "prepare_step_model",
    "reader_of",
    "readers_of",
    "rejoined",
    "repeat_offsets",
    "resolve_source",
    "ruled_out_ids",
    "save_model",
    "sequence_logprobs",
    "sequence_outputs",
    "sequence_values",
    "skeleton_of",
    "special_tokens",
    "split_messages",
    "split_text",
    "step_logits",
    "stop_at",
    "unmergeable",
    "unsplit",
    "unsplit_places",
]
