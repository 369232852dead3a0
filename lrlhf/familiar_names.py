"""What options of TRL, OpenRLHF, verl, LightRFT, EasyDeL, and former ones, are called here."""

from __future__ import annotations

from collections.abc import Mapping

_SAMPLING = "model.sampling."
_UPDATE = "model.update."
_KL = "model.reference.kl_coef"
_LENGTH = "model.sampling.max_new_tokens"
_CLIP = "model.update.options.clip_low and clip_high"
_MICRO = "model.update.micro_batch_tokens (for a RewardModel trainer.accumulate_grad_batches)"
_BATCH = "data.batch_size (prompts, each with model.num_generations responses, or pairs)"
_CLIP_NORM = "model.update.max_grad_norm (for a RewardModel model.max_grad_norm)"
_LEVEL = "model.update.aggregate, or model.update.loss for one ratio per response"
_FOLDER = "trainer.default_root_dir"
_REWARDS = "model.rewards.init_args.functions"
_LORA = "model.policy.init_args.lora (for a RewardModel model.model.init_args.lora)"
_POLICY = "model.policy (for a RewardModel model.model)"
_ENGINE = "model.engine (overlays lrlhf:engine/…)"
_OVERLONG = "model.rewards.init_args.functions: lrlhf.rewards.OverlongPenalty"
_CHECKPOINTS = "trainer.callbacks: lrlhf.callbacks.RLCheckpoint"

RENAMED_KEYS: Mapping[str, str] = {
    "max_skipped_steps": "guard.max_skipped",
    "update.max_skipped_steps": "guard.max_skipped",
    "reference_column": "columns",
    "names": "functions",
    "max_failures_in_a_row": "max_failures",
    "rollout_ahead": "max_staleness",
}
"""The present name by the old one, both below ``model.init_args`` (or whichever class has them).

Old names of one word are known to classes that have the present one: others mean something else.
"""
FAMILIAR_NAMES: Mapping[str, str] = {
    # KL
    **dict.fromkeys(
        ("beta", "init_kl_coef", "init_coef", "kl_coef", "kl_loss_coef", "kl_ctrl"), _KL
    ),
    **dict.fromkeys(("kl_estimator", "kl_loss_type", "kl_penalty"), "model.reference.kl_estimator"),
    **dict.fromkeys(
        ("use_kl_loss", "use_loss", "use_kl_in_reward", "use_kl_estimator_k3"),
        "model.reference.placement",
    ),
    **dict.fromkeys(
        ("kl_target", "target_kl", "kl_horizon"), "trainer.callbacks: lrlhf.callbacks.KLControl"
    ),
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps"), "model.reference.sync_every"),
    "ref_model_mixup_alpha": "model.reference.mixup",
    **dict.fromkeys(("ref_model", "ref_pretrain", "ref_model_path"), "model.reference.model"),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), "model.teacher.model"),
    "teacher_model_server_url": "model.teacher.server",
    "kd_coef": "model.teacher.coef",
    **dict.fromkeys(("loss_top_k", "teacher_top_k"), "model.teacher.top_k"),
    **dict.fromkeys(
        ("vllm_structured_outputs_regex", "guided_regex", "structured_outputs_regex"),
        "model.eval_sampling.structured, such as {regex: …}",
    ),
    # optimizer
    **dict.fromkeys(("learning_rate", "lr", "actor_learning_rate"), "model.optimizer.lr"),
    "critic_learning_rate": "model.critic.optimizer.lr",
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_scheduler", "learning_rate_fn"), "model.optimizer.schedule"
    ),
    **dict.fromkeys(
        (
            "warmup_ratio",
            "lr_warmup_ratio",
            "warmup_steps",
            "lr_warmup_steps",
            "lr_warmup_steps_ratio",
        ),
        "model.optimizer.warmup_steps (below 1: a share of all steps)",
    ),
    **dict.fromkeys(("weight_decay", "l2"), "model.optimizer.weight_decay"),
    "min_lr_ratio": "model.optimizer.min_lr_fraction",
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), "model.optimizer.betas"),
    "adam_epsilon": "model.optimizer.eps",
    "optim": "model.optimizer.optimizer_class",
    **dict.fromkeys(
        ("freezing_actor_steps", "freezing_steps", "critic_warmup"), _UPDATE + "freeze_steps"
    ),
    **dict.fromkeys(
        ("max_grad_norm", "max_norm", "grad_clip", "clip_grad", "gradient_clip"), _CLIP_NORM
    ),
    # sampling
    **dict.fromkeys(
        ("max_completion_length", "response_length", "generate_max_len", "max_response_length"),
        _LENGTH,
    ),
    **dict.fromkeys(("max_new_tokens", "max_tokens"), _LENGTH),
    **{name: _SAMPLING + name for name in ("temperature", "top_p", "top_k", "min_p")},
    "generation_kwargs": "model.sampling",
    "repetition_penalty": "model.eval_sampling.repetition_penalty, or the reward of that name",
    **dict.fromkeys(("stop_token", "stop_strings"), "model.sampling.stop"),
    **dict.fromkeys(
        ("num_generations", "rloo_k", "n_samples_per_prompt", "rollout_n"), "model.num_generations"
    ),
    **dict.fromkeys(
        ("max_prompt_length", "prompt_max_len", "max_prompt_len"), "data.max_prompt_tokens"
    ),
    **dict.fromkeys(
        ("use_vllm", "vllm_mode", "vllm_server_host", "vllm_num_engines", "num_engines"), _ENGINE
    ),
    **dict.fromkeys(("colocate_all_models", "colocate_all", "engine_type"), _ENGINE),
    **dict.fromkeys(("engine_tp_size", "tensor_model_parallel_size", "sync_backend"), _ENGINE),
    **dict.fromkeys(("enable_sleep", "enable_engine_sleep", "free_cache_engine"), _ENGINE),
    **dict.fromkeys(
        ("async_enable", "async_queue_size", "partial_rollout_enable"), "model.max_staleness"
    ),
    "val_kwargs": "model.eval_sampling",
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization", "engine_mem_util"),
        "model.engine.init_args.gpu_memory_utilization",
    ),
    "vllm_tensor_parallel_size": "model.engine.init_args.tensor_parallel_size",
    "vllm_max_model_length": "model.engine.init_args.max_model_len",
    "vllm_server_base_url": "model.engine.init_args.url of lrlhf.rollout.VLLMServerEngine",
    "vllm_server_timeout": "model.engine.init_args.start_timeout of lrlhf.rollout.VLLMServerEngine",
    **dict.fromkeys(("vllm_group_port", "vllm_model_impl", "cache_implementation"), _ENGINE),
    # episodes
    **dict.fromkeys(
        ("environment_factory", "agent_func_path", "environment", "default_agent_loop"),
        "model.episodes.environment",
    ),
    **dict.fromkeys(("tools", "tool_config_path"), "model.episodes.tools"),
    **dict.fromkeys(
        ("max_tool_calling_iterations", "max_assistant_turns"), "model.episodes.max_turns"
    ),
    # update
    **dict.fromkeys(("num_iterations", "num_ppo_epochs", "ppo_epochs"), _UPDATE + "num_iterations"),
    **dict.fromkeys(("num_mini_batches", "steps_per_generation"), _UPDATE + "num_minibatches"),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), _UPDATE + "minibatch_size"),
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",
            "micro_train_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "max_tokens_per_gpu",
            "micro_rollout_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "use_dynamic_bsz",
            "packing_samples",
            "micro_batch_size",
            "dynamic_batch_enable",
        ),
        _MICRO,
    ),
    **dict.fromkeys(
        ("epsilon", "cliprange", "eps_clip", "clip_ratio", "clip_ratio_low", "eps_clip_low_high"),
        _CLIP,
    ),
    **dict.fromkeys(("dual_clip", "clip_ratio_c"), "model.update.options.dual_clip"),
    "buffer_cpu_offload": _UPDATE + "offload",
    "buffer_limit": "data.batch_size (no response of a rollout is dropped)",
    "aux_loss_coef": _UPDATE + "router_loss_coef",
    "ptx_coef": _UPDATE + "pretraining_coef",
    **dict.fromkeys(
        ("epsilon_high", "eps_clip_high", "clip_ratio_high"), "model.update.options.clip_high"
    ),
    **dict.fromkeys(("cliprange_value", "value_clip"), "model.critic.value_clip_range"),
    "vf_coef": "model.critic.backbone_coef, or model.critic.optimizer.lr",
    **dict.fromkeys(("gamma", "lam", "lambd", "gae_lambda"), "model.advantage.options"),
    **dict.fromkeys(("entropy_coeff", "entropy_loss_coef"), _UPDATE + "entropy_coef"),
    **dict.fromkeys(
        ("top_entropy_quantile", "high_entropy_token_ratio"), _UPDATE + "high_entropy_fraction"
    ),
    **dict.fromkeys(
        ("loss_type", "policy_loss_type", "loss_mode", "loss_config"),
        _UPDATE + "loss (for a RewardModel, DPO or KTO model.loss)",
    ),
    **dict.fromkeys(
        ("loss_agg_mode", "importance_sampling_level"),
        _LEVEL,
    ),
    **dict.fromkeys(("scale_rewards", "normalize_reward"), "model.advantage.scale_rewards"),
    **dict.fromkeys(
        ("normalize_enable", "reward_running_norm", "reward_running_norm_minus_mean"),
        "model.advantage.scale_rewards",
    ),
    **dict.fromkeys(
        ("normalize_advantages", "whiten_rewards", "whiten_advantages"), "model.advantage.normalize"
    ),
    **dict.fromkeys(("advantages_norm", "no_std_norm"), "model.advantage.normalize"),
    "advantage_clip": "model.advantage.clip",
    **dict.fromkeys(("reward_clip_range", "reward_clip"), "model.advantage.reward_clip_range"),
    **dict.fromkeys(
        ("mask_truncated_completions", "missing_eos_penalty", "overlong_filtering"),
        "model.advantage.truncated",
    ),
    "stop_properly_penalty_coef": "model.advantage.truncated",
    **dict.fromkeys(("advantage_estimator", "adv_estimator", "use_cpg_loss"), "model.algorithm"),
    "norm_adv_by_std_in_grpo": "model.advantage.estimator",
    **dict.fromkeys(
        ("dynamic_filtering", "dynamic_filtering_enable", "filter_groups"),
        "model.dynamic_sampling.prompts",
    ),
    "vllm_generate_batch_size": "model.dynamic_sampling.prompts",
    **dict.fromkeys(
        (
            "is_correction_enable",
            "enable_vllm_is_correction",
            "vllm_importance_sampling_correction",
        ),
        "model.importance_sampling",
    ),
    **dict.fromkeys(
        ("is_correction_type", "rollout_is", "vllm_importance_sampling_mode"),
        "model.importance_sampling.mode",
    ),
    **dict.fromkeys(("rollout_rs", "rollout_rs_threshold"), "model.importance_sampling.reject"),
    "off_policy_mask_threshold": _UPDATE + "off_policy_threshold",
    "use_bias_correction_kl": "model.reference.kl_estimator",
    **dict.fromkeys(
        ("use_adaptive_entropy", "entropy_target", "entropy_coef_delta"),
        "trainer.callbacks: lrlhf.callbacks.EntropyControl",
    ),
    **dict.fromkeys(
        (
            "is_correction_threshold",
            "rollout_is_threshold",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_cap",
        ),
        "model.importance_sampling.high",
    ),
    "vllm_importance_sampling_clip_min": "model.importance_sampling.low",
    "center_rewards_coefficient": "model.center_coef",
    # supervised fine-tuning and preferences
    **dict.fromkeys(
        ("completion_only_loss", "assistant_only_loss", "train_on_inputs"),
        "data.loss_on (completion, assistant or all)",
    ),
    **dict.fromkeys(
        ("packing", "padding_free", "sample_packing"),
        "model.require_packing (rows are packed without padding wherever the model allows it)",
    ),
    "dataset_text_field": "data.text_column",
    "simpo_gamma": "model.margin",
    "rpo_alpha": "model.sft_coef",
    # models
    **dict.fromkeys(("model_name_or_path", "pretrain", "model_path"), _POLICY),
    "model_init_kwargs": "model.policy.init_args (for a RewardModel model.model.init_args)",
    "processing_class": "model.tokenizer",
    **dict.fromkeys(("critic_pretrain", "value_model"), "model.critic.model"),
    **dict.fromkeys(("peft_config", "use_peft", "lora_r", "lora_rank", "lora_alpha"), _LORA),
    **dict.fromkeys(("lora_dropout", "target_modules"), _LORA),
    **dict.fromkeys(
        ("freeze_visual_encoder", "freeze_vision_tower", "freeze_prefix"),
        "model.policy.init_args.freeze_vision",
    ),
    "enable_activation_offload": "model.policy.init_args.activation_offload",
    "heads_types": "model.model.init_args.heads",
    "pooling_method": "model.model.init_args.pooling",
    "probing_layer": "model.model.init_args.layer",
    "scale_for_train": "model.model.init_args.learn_scale",
    **dict.fromkeys(("torch_dtype", "dtype"), "model.policy.init_args.dtype"),
    **dict.fromkeys(
        ("attn_implementation", "flash_attn"), "model.policy.init_args.attn_implementation"
    ),
    "load_in_4bit": "model.policy.init_args.quantization",
    "disable_dropout": "model.policy.init_args.dropout",
    "trust_remote_code": "model.policy.init_args.trust_remote_code",
    **dict.fromkeys(
        (
            "gradient_checkpointing",
            "enable_gradient_checkpointing",
            "gradient_checkpointing_enable",
        ),
        "model.policy.init_args.gradient_checkpointing",
    ),
    # rewards
    **dict.fromkeys(
        (
            "reward_funcs",
            "reward_model",
            "reward_model_path",
            "reward_pretrain",
            "remote_rm_url",
            "remote_url",
            "reward_manager",
            "sandbox_fusion",
            "reward_fn",
        ),
        _REWARDS,
    ),
    "reward_weights": "model.rewards.init_args.weights",
    "reward_processing_classes": f"{_REWARDS}: lrlhf.rewards.LearnedReward (tokenizer)",
    **dict.fromkeys(("reward_recipe", "reward_fn_label_map"), "model.rewards.init_args.recipe"),
    "reward_fn_key": "model.rewards.init_args.label_column",
    **dict.fromkeys(("overlong_buffer", "overlong_buffer_len"), _OVERLONG),
    **dict.fromkeys(("overlong_penalty_factor", "overlong_buffer_penalty_factor"), _OVERLONG),
    # data
    **dict.fromkeys(("train_dataset", "dataset_name", "prompt_data", "train_files"), "data.train"),
    **dict.fromkeys(
        ("num_generations_eval", "eval_n_samples_per_prompt", "n_samples_per_eval_prompt"),
        "model.evaluation.num_samples",
    ),
    "eval_temperature": "model.evaluation.temperatures",
    **dict.fromkeys(("prompt_dataset", "prompt_split", "prompt_probs", "train_data"), "data.train"),
    "custom_cls": "data.train",
    **dict.fromkeys(
        ("eval_dataset", "test_dataset", "val_files", "eval_data", "eval_split"), "data.val"
    ),
    "pretrain_data": "data.pretraining",
    "chosen_key": "data.chosen_column",
    "rejected_key": "data.rejected_column",
    "margin_loss_enable": "data.margin_column",
    "task_instruction": "data.instruction",
    "input_template": "data.prompt_template",
    **dict.fromkeys(("fps", "max_pixels"), "data.media"),
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "rollout_batch_size",
            "train_batch_size",
            "generation_batch_size",
        ),
        _BATCH,
    ),
    "per_device_eval_batch_size": "data.val_batch_size",
    **dict.fromkeys(("input_key", "prompt_key"), "data.prompt_column"),
    **dict.fromkeys(("dataloader_num_workers", "dataset_num_proc"), "data.num_workers"),
    "shuffle_dataset": "data.shuffle",
    "max_length": "data.max_tokens (of prompts data.max_prompt_tokens)",
    "max_len": f"data.max_prompt_tokens and {_LENGTH} (of pairs data.max_tokens)",
    "filter_overlong_prompts": "data.max_prompt_tokens",
    "max_samples": "trainer.limit_train_batches",
    "max_eval_samples": "trainer.limit_val_batches",
    "chat_template_path": "data.chat_template",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "pad_to_multiple_of": "model.update.micro_batch_tokens (rows are packed)",
    "apply_chat_template": "data.as_chat",
    "system_prompt": "data.system_prompt",
    # the run
    **dict.fromkeys(
        ("report_to", "use_wandb", "wandb_project", "project_name", "logging_dir"),
        "trainer.logger",
    ),
    **dict.fromkeys(("use_tensorboard", "tensorboard_dir"), "trainer.logger"),
    **dict.fromkeys(
        ("run_name", "wandb_run_name", "experiment_name"), "trainer.logger.init_args.name"
    ),
    "wandb_org": "trainer.logger.init_args.entity",
    "wandb_group": "trainer.logger.init_args.group",
    **dict.fromkeys(("logging_steps", "logging_strategy"), "trainer.log_every_n_steps"),
    **dict.fromkeys(
        (
            "log_completions",
            "log_unique_prompts",
            "num_completions_to_print",
            "save_trajectories",
            "num_trajectories_to_save",
            "log_val_generations",
            "rollout_data_dir",
        ),
        "trainer.callbacks: lrlhf.callbacks.RolloutLog",
    ),
    **dict.fromkeys(
        (
            "save_steps",
            "save_freq",
            "save_total_limit",
            "save_strategy",
            "metric_for_best_model",
            "load_best_model_at_end",
            "max_num",
            "max_ckpt_num",
            "max_ckpt_mem",
            "max_actor_ckpt_to_keep",
            "best_metric_key",
        ),
        _CHECKPOINTS,
    ),
    "disable_ds_ckpt": f"{_CHECKPOINTS} (save_weights_only)",
    "validation_data_dir": "trainer.callbacks: lrlhf.callbacks.EvalJSONL",
    **dict.fromkeys(("enable_ema", "ema_beta"), "trainer.callbacks: lrlhf.callbacks.EMA"),
    **dict.fromkeys(("eval_steps", "eval_strategy", "test_freq"), "trainer.val_check_interval"),
    "val_before_train": "trainer.num_sanity_val_steps",
    **dict.fromkeys(("save_hf_ckpt", "save_hf"), "trainer.callbacks: lrlhf.callbacks.HFExport"),
    **dict.fromkeys(("output_dir", "save_path", "default_local_dir"), _FOLDER),
    **dict.fromkeys(("num_train_epochs", "num_episodes", "total_epochs"), "trainer.max_epochs"),
    "total_training_steps": "trainer.max_steps",
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "param_dtype"), "trainer.precision"),
    "seed": "seed_everything",
    **dict.fromkeys(
        ("resume_from_checkpoint", "load_enable", "load_checkpoint", "resume_mode"), "ckpt_path"
    ),
    **dict.fromkeys(
        (
            "deepspeed",
            "zero_stage",
            "fsdp",
            "fsdp_config",
            "adam_offload",
            "ds3_gather_for_generation",
            "partition_spec",
        ),
        "trainer.strategy",
    ),
    **dict.fromkeys(("n_gpus_per_node", "num_gpus_per_node", "num_processes"), "trainer.devices"),
    **dict.fromkeys(("nnodes", "num_machines"), "trainer.num_nodes"),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id"),
        "the export of a run, whose folder `hf upload` takes",
    ),
}
"""Where an option is here, by its last name there."""
