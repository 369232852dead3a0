"""A tiny random model of every family of language models that transformers can build."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY = 260
"""Tokens of the tokenizer of the tests."""

_ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer "
    "rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet "
    "xmod"
)
_HALVES = (
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet"
)
_OTHER_MEDIA = "moshi musicgen musicgen_melody phi4_multimodal trocr whisper"
_DRAFTS = "gemma4_assistant gemma4_unified_assistant"
_SAME_CLASS = "gpt-sw3"

LEFT_OUT = {
    **dict.fromkeys(_ENCODERS.split(), "an encoder, whose causal form nobody trains as a policy"),
    **dict.fromkeys(_HALVES.split(), "one half of an encoder-decoder"),
    **dict.fromkeys(_OTHER_MEDIA.split(), "for sound or scanned text"),
    **dict.fromkeys(_DRAFTS.split(), "drafts tokens for another model"),
    **dict.fromkeys(_SAME_CLASS.split(), "another name of gpt2"),
    **{
        name: "looks at images; its text model has a line of its own where there is one"
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    },
}
"""Entries of transformers' list that are no text policies, and why."""

FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(LEFT_OUT))

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "embedding_size"), 32),
    **dict.fromkeys(("embedding_dim", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "n_inner", "dim_ff"), 64),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 16),
    "moe_shared_expert_intermediate_size": 16,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    "num_blocks": 2,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_heads"), 4),
    "swa_num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "zero_expert_num"), 1),
    # windows and chunks that a dozen tokens pass
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), 4),
    **dict.fromkeys(("window_size", "attention_chunk_size"), 4),
    # low-rank keys and values, and what picks keys
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    "v_head_dim": 8,
    **dict.fromkeys(("index_n_heads", "index_topk_blocks"), 2),
    "index_head_dim": 8,
    # beyond so many tokens what padding hides changes which keys are picked
    **dict.fromkeys(("index_topk", "index_block_size"), 32),
    # state spaces and linear attention
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "time_step_rank"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_HYBRID_BLOCKS = {"layers_block_type": ["linear_attention", "hybrid"], "use_mem_eff_path": False}
_BLT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size_global": 32,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}

_SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": {"gated_norm_rank": 4},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 20,
        **{f"{part}_config": _BLT for part in ("patcher", "encoder", "decoder", "global")},
    },
    "codegen": {"rotary_dim": 4, "n_head": 4},
    "cohere_compass_text": {
        "head_dim": 128,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"hc_mult": 2, "o_groups": 2, "partial_rotary_factor": 0.5},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"num_kv_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **_PER_LAYER_INPUT,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "laurel_rank": 4,
    },
    "gemma4_text": _PER_LAYER_INPUT,
    "gemma4_unified_text": _PER_LAYER_INPUT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4": {"hc_mult": 2},
    "inkling_text": {"rel_extent": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "minimax": _HYBRID,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "use_mamba_kernels": False,
    },
    "olmo_hybrid": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp_text": {
        **_HYBRID,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 8,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"embedding_dim": 128, "hidden_size": 128, "num_heads": 2},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "use_mamba_kernels": False,
    },
    "zamba2": {**_HYBRID_BLOCKS, "adapter_rank": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}


def tiny_config(family: str) -> PreTrainedConfig:
    """The family's defaults, with every size that is known by its name made small."""
    config_class = CONFIG_MAPPING[family]
    known = vars(config_class())
    renamed = set(config_class.attribute_map)
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if (name in known or name in renamed) and not isinstance(known.get(name), bool)
    }
    if "qk_rope_head_dim" in known:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return config_class(**{**sizes, **_SPECIAL.get(family, {})})


def tiny_model(family: str) -> PreTrainedModel:
    """With random weights, so large that outputs differ between inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    return model
