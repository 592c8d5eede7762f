"""What Megatron-LM's command line has beyond megatron-core's config classes, and which of both are refused.

Megatron-LM is not a dependency (its wheel holds the core only), so this is written by hand.
"""

from __future__ import annotations

from slime_hpc.spec.passthrough.arguments import Argument


def _argument(name: str, kind: str) -> Argument:
    """As Megatron-LM spells it on its command line: the name with dashes."""
    return Argument(name=name, types=(kind, "null"), flags=(f"--{name.replace('_', '-')}",))


_OTHERS = {
    "int": """
        save_interval train_iters train_samples global_batch_size micro_batch_size max_position_embeddings vocab_size
        seq_length encoder_seq_length decoder_seq_length seed rotary_base lr_decay_iters lr_decay_samples
        lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples num_workers log_interval
        eval_iters eval_interval exit_interval exit_duration_in_mins make_vocab_size_divisible_by padded_vocab_size
        distributed_timeout_minutes local_rank ckpt_step encoder_num_layers decoder_num_layers
        vocab_extra_ids rotary_seq_len_interpolation_factor timing_log_level manual_gc_interval
        empty_unused_memory_level tensorboard_log_interval tensorboard_queue_size num_experts ddp_num_buckets
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        save_retain_interval non_persistent_save_interval start_weight_decay end_weight_decay
        """,
    "float": """
        rotary_percent rope_scaling_factor lr_warmup_fraction lr_warmup_init mscale mscale_all_dim
        rotary_scaling_factor
        """,
    "bool": """
        untie_embeddings_and_output_weights group_query_attention swiglu squared_relu quick_geglu openai_gelu onnx_safe
        use_rotary_position_embeddings use_rope_scaling use_mcore_models use_legacy_models
        use_flash_attn finetune no_load_optim no_load_rng no_save_optim no_save_rng async_save use_dist_ckpt
        use_checkpoint_args use_mp_args_from_checkpoint_args use_checkpoint_opt_param_scheduler
        override_opt_param_scheduler exit_on_missing_checkpoint auto_detect_ckpt_format ckpt_fully_parallel_save
        ckpt_fully_parallel_load ckpt_assume_constant_structure use_persistent_ckpt_worker skip_train
        log_params_norm log_throughput log_progress log_timers_to_tensorboard log_memory_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard mock_data reset_position_ids
        reset_attention_mask eod_mask_loss exit_signal_handler decrease_batch_size_if_needed manual_gc manual_gc_eval
        recompute_activations use_torch_fsdp2 init_method_xavier_uniform enable_one_logger profile
        use_pytorch_profiler no_position_embedding accumulate_allreduce_grads_in_fp32_in_optimizer dataloader_save
        use_tp_pp_dp_mapping reuse_grad_buf enable_experimental enable_ft_package
        """,
    "str": """
        save load pretrained_checkpoint ckpt_format dist_ckpt_format ckpt_convert_format ckpt_convert_save
        dist_ckpt_strictness position_embedding_type lr_decay_style lr_wsd_decay_style
        weight_decay_incr_style distributed_backend tokenizer_type tokenizer_model vocab_file merge_file
        tensorboard_dir wandb_project wandb_entity wandb_exp_name wandb_save_dir dataloader_type data_cache_path split
        data_args_path timing_log_option log_level logging_level non_persistent_ckpt_type rope_type
        """,
    "list[str]": "data_path train_data_path valid_data_path test_data_path rampup_batch_size spec",
}

ARGUMENTS = tuple(_argument(name, kind) for kind, names in _OTHERS.items() for name in names.split())
"""Arguments that are no field of a config class."""

FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "grad_reduce_in_fp32": (("--accumulate-allreduce-grads-in-fp32",), ()),
    "check_for_nan_in_grad": (("--check-for-nan-in-loss-and-grad",), ("--no-check-for-nan-in-loss-and-grad",)),
    "bucket_size": (("--ddp-bucket-size",), ()),
    "average_in_collective": (("--ddp-average-in-collective",), ()),
    "pad_buckets_for_high_nccl_busbw": (("--ddp-pad-buckets-for-high-nccl-busbw",), ()),
    "gradient_reduce_div_fusion": ((), ("--no-gradient-reduce-div-fusion",)),
    "masked_softmax_fusion": ((), ("--no-masked-softmax-fusion",)),
    "bias_activation_fusion": (
        ("--bias-swiglu-fusion",),
        ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
    ),
    "bias_dropout_fusion": ((), ("--no-bias-dropout-fusion",)),
    "apply_rope_fusion": ((), ("--no-rope-fusion",)),
    "gradient_accumulation_fusion": ((), ("--no-gradient-accumulation-fusion",)),
    "persist_layer_norm": ((), ("--no-persist-layer-norm",)),
    "overlap_p2p_comm": (("--overlap-p2p-communication",), ("--no-overlap-p2p-communication",)),
}
"""Field → Megatron-LM's flags that set it, and those that clear it, beside the field's own name with dashes."""

_MODEL = "the model is what config.json of model.hf_checkpoint says, of a kind that has not got this"
_WEIGHTS = "weights come from model.hf_checkpoint"
_TE = "needs Transformer Engine, and layers are Megatron-core's own"
_MOE = "mixture-of-experts models are not built yet"
_PIPELINE = "pipeline parallelism is not built yet"
_CONTEXT = "context parallelism is not built yet"
_DEVICE = "decided by the cluster profile's device"
_FSDP = "parameters are not sharded over data-parallel ranks; Megatron's FSDP is not built yet"
_DISTRIBUTED = "of the distributed optimizer only use_distributed_optimizer itself is built yet"
_CUDA = "needs CUDA kernels that Megatron-core's own layers have not got here"
_OFFLOAD = "offloading is not built yet"
_CHECKPOINT = "slime-hpc saves and resumes by itself; see checkpoint"
_SCHEDULE = "the schedule is algorithm's lr, min_lr, lr_decay_style, lr_decay_iters and lr_warmup_iters; set those"
_DECAY = "weight decay is constant; set weight_decay"
_BATCH = "follows from sampling.rollout_batch_size × sampling.n_samples_per_prompt; set those"
_DATA = "prompts come from data, and the tokenizer from model.hf_checkpoint"
_LOG = "slime-hpc writes metrics.jsonl and the logs itself"
_INFERENCE = "SGLang generates, not Megatron"
_CODE = "takes a Python object, which a profile cannot hold"
_LAUNCH = "slime-hpc starts the ranks and ends them"
_PURE_FLOAT32 = "mixed precision is not built yet"
_OPTIMIZER = "the optimizer is Adam"
_STEP = "slime-hpc's own training step does not use it"

REFUSED = {
    # Patterns that would also match something else further down come first.
    "*_func": _CODE,
    "*init_method*": _WEIGHTS,
    "perform_initialization": _WEIGHTS,
    "use_cpu_initialization": _WEIGHTS,
    "timers": _CODE,
    "quant_recipe": _CODE,
    "fp16": _DEVICE,
    "bf16": _DEVICE,
    "*params_dtype": _DEVICE,
    "distributed_backend": _DEVICE,
    "pipeline_dtype": _PIPELINE,
    "autocast_dtype": _PURE_FLOAT32,
    "enable_autocast": _PURE_FLOAT32,
    "fp32_residual_connection": _PURE_FLOAT32,
    "disable_bf16_reduced_precision_matmul": _PURE_FLOAT32,
    "*loss_scale*": _PURE_FLOAT32,
    "hysteresis": _PURE_FLOAT32,
    "main_grads_dtype": _PURE_FLOAT32,
    "exp_avg*_dtype": _PURE_FLOAT32,
    "use_precision_aware_optimizer": _TE,
    "store_param_remainders": _TE,
    "*fp8*": _TE,
    "*fp4*": _TE,
    "*_in_bf16": _TE,
    "first_last_layers_bf16": _TE,
    "tp_only_amax_red": _TE,
    "tp_comm_*": _TE,
    "use_te_*": _TE,
    "disable_parameter_transpose_cache": _TE,
    "*kitchen*": _TE,
    "symmetric_ar_type": _TE,
    "delay_wgrad_compute": _TE,
    "softmax_type": _MODEL,
    "*moe*": _MOE,
    "*expert*": _MOE,
    "ep_overlap_*": _MOE,
    "*pipeline*": _PIPELINE,
    "*p2p*": _PIPELINE,
    "*virtual*": _PIPELINE,
    "*vp_stage": _PIPELINE,
    "variable_seq_lengths": _PIPELINE,
    "defer_embedding_wgrad_compute": _PIPELINE,
    "wgrad_deferral_limit": _PIPELINE,
    "num_microbatches_with_partial_activation_checkpoints": _PIPELINE,
    "mtp_*": "multi-token prediction is not trained",
    "*cp_comm*": _CONTEXT,
    "*context_parallel*": _CONTEXT,
    "max_seqlen_per_dp_cp_rank": _CONTEXT,
    "*cuda_graph*": _CUDA,
    "*_fusion*": _CUDA,
    "fused_*": _CUDA,
    "use_fused_*": _CUDA,
    "memory_efficient_layer_norm": _CUDA,
    "use_flash_attn": _CUDA,
    "batch_invariant_mode": _CUDA,
    "*offload*": _OFFLOAD,
    "overlap_cpu_optimizer_d2h_h2d": _OFFLOAD,
    "pin_cpu_*": _OFFLOAD,
    "*fsdp*": _FSDP,
    "*sharding_strategy": _FSDP,
    "init_model_with_meta_device": _FSDP,
    "preserve_fp32_weights": _FSDP,
    "suggested_communication_unit_size": _FSDP,
    "nccl_ub": _FSDP,
    "disable_symmetric_registration": _FSDP,
    "num_distributed_optimizer_instances": _DISTRIBUTED,
    "align_param_gather": _DISTRIBUTED,
    "overlap_param_gather_with_optimizer_step": _DISTRIBUTED,
    "reduce_scatter_with_fp32_accumulation": _DISTRIBUTED,
    "reuse_grad_buf*": _DISTRIBUTED,
    "bucket_size": "buckets matter to overlap_grad_reduce only, which is not built yet",
    "ddp_num_buckets": "buckets matter to overlap_grad_reduce only, which is not built yet",
    "pad_buckets_for_high_nccl_busbw": "buckets matter to overlap_grad_reduce only, which is not built yet",
    "average_in_collective": "gloo cannot average while it reduces",
    "check_for_large_grads": "it only warns in a log; metrics.jsonl has train/grad_norm of every round",
    "distribute_saved_activations": "recomputed activations stay on their rank",
    "recompute_activations": "set recompute_granularity: selective instead",
    "lr_*": _SCHEDULE,
    "decoupled_*lr": _SCHEDULE,
    "start_weight_decay": _DECAY,
    "end_weight_decay": _DECAY,
    "weight_decay_incr_style": _DECAY,
    "override_opt_param_scheduler": _SCHEDULE,
    "sgd_momentum": _OPTIMIZER,
    "muon_*": _OPTIMIZER,
    "micro_batch_size": "micro-batches are cut by tokens; set trainer.max_tokens_per_gpu",
    "rampup_batch_size": _BATCH,
    "decrease_batch_size_if_needed": _BATCH,
    "train_samples": "set num_rollout instead",
    "*seq_length": "follows from the samples",
    "load": "a run starts from model.hf_checkpoint; set that instead",
    "pretrained_checkpoint": "a run starts from model.hf_checkpoint; set that instead",
    "*ckpt*": _CHECKPOINT,
    "no_load_*": _CHECKPOINT,
    "no_save_*": _CHECKPOINT,
    "use_checkpoint_*": _CHECKPOINT,
    "use_mp_args_from_checkpoint_args": _CHECKPOINT,
    "exit_on_missing_checkpoint": _CHECKPOINT,
    "*dist_checkpoint": _CHECKPOINT,
    "save_retain_interval": "set checkpoint.keep instead",
    "non_persistent_*": _CHECKPOINT,
    "dataloader_*": _DATA,
    "*data_path": _DATA,
    "data_*": _DATA,
    "mock_data": _DATA,
    "split": _DATA,
    "tokenizer_*": _DATA,
    "*vocab*": _DATA,
    "merge_file": _DATA,
    "num_workers": _DATA,
    "reset_*": _DATA,
    "eod_mask_loss": _DATA,
    "*log*": _LOG,
    "tensorboard_*": _LOG,
    "wandb_*": _LOG,
    "timing_*": _LOG,
    "barrier_with_L1_time": _LOG,
    "profile": _LOG,
    "use_pytorch_profiler": _LOG,
    "eval_*": "evaluation is set up by eval",
    "skip_train": "evaluation is set up by eval",
    "test_mode": _STEP,
    "cross_entropy_*": _STEP,
    "deallocate_*": _PIPELINE,
    "clone_scatter_output_in_embedding": "it is on: without the copy the whole embedding stays in memory",
    "async_tensor_model_parallel_allreduce": "Megatron-core itself ignores it",
    "async_save": _CHECKPOINT,
    "*inference*": _INFERENCE,
    "flash_decode": _INFERENCE,
    "mlp_chunks_for_prefill": _INFERENCE,
    "exit_*": _LAUNCH,
    "distributed_timeout_minutes": _LAUNCH,
    "local_rank": _LAUNCH,
    "use_tp_pp_dp_mapping": _LAUNCH,
    "manual_gc*": _LAUNCH,
    "empty_unused_memory_level": _LAUNCH,
    "enable_*": _LAUNCH,
    "accumulate_*": _PURE_FLOAT32,
    "use_legacy_models": "only Megatron-core's models are built",
    "spec": "only Megatron-core's own layers are built",
    "*layernorm*": _MODEL,
    "*rope*": _MODEL,
    "*rotary*": _MODEL,
    "*attention*": _MODEL,
    "*attn*": _MODEL,
    "*mamba*": _MODEL,
    "dsa_*": _MODEL,
    "linear_*": _MODEL,
    "qk_*": _MODEL,
    "*_lora_rank": _MODEL,
    "v_head_dim": _MODEL,
    "mscale*": _MODEL,
    "activation_func*": _MODEL,
    "glu_linear_offset": _MODEL,
    "apply_residual_*": _MODEL,
    "softmax_scale": _MODEL,
    "window_size": _MODEL,
    "mrope_section": _MODEL,
    "is_hybrid_model": _MODEL,
    "heterogeneous_*": _MODEL,
    "squared_relu": _MODEL,
    "quick_geglu": _MODEL,
    "openai_gelu": _MODEL,
    "onnx_safe": _MODEL,
    "no_position_embedding": _MODEL,
    "*coder_num_layers": _MODEL,
    "min_offloaded_tensor_size": _OFFLOAD,
}
"""Name or pattern of a name → why no value is accepted, first match first."""
