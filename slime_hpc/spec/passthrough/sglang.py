"""Which SGLang server arguments a profile may set: all of the snapshot's, but for those that this table refuses."""

from __future__ import annotations

from slime_hpc.spec.passthrough.arguments import Argument, Interval, first_match, load_snapshot

_SERVER = "slime-hpc starts the server and decides where it listens"
_LAYOUT = "follows from rollout.gpus_per_engine; set that instead"
_KEYS = "made fresh for each attempt, so that no key is ever written down"
_UNGUARDED = "its listener would not ask for the engine's keys"
_DEVICE = "decided by the cluster profile's device"
_LOCAL = "the model is the directory that model.hf_checkpoint names"
_SYNC_RANKS = "weights go to the tensor-parallel ranks of an engine; other parallelism is not built yet"
_SYNC_FORMAT = "weights arrive in the trainer's own dtype after every round; quantized ones are not built yet"
_DISAGGREGATED = "this version runs regular engines only: no prefill, decode or encoder ones"
_ELASTIC = "slime-hpc decides which engines there are"
_DRAFT = "weights are not sent to a draft model, which would fall behind"
_TOKENS = "slime-hpc sends tokens, with the chat template applied, and asks for no chat"
_LORA = "whole models are trained, without adapters"
_LOADING = "weights are loaded from model.hf_checkpoint, then come from the trainer"

REFUSED = {
    "model_path": "set model.hf_checkpoint instead",
    "tokenizer_path": "set model.hf_checkpoint instead",
    "revision": _LOCAL,
    "download_dir": _LOCAL,
    "delete_ckpt_after_loading": "it would delete the directory that model.hf_checkpoint names",
    "load_format": _LOADING,
    "model_loader_extra_config": _LOADING,
    "custom_weight_loader": _LOADING,
    "remote_instance_*": _LOADING,
    "modelexpress_config": _LOADING,
    "weight_cache_*": _LOADING,
    "decrypted_*": _LOADING,
    "checkpoint_engine_wait_weights_before_ready": "the engine would wait for weights that come only once it is ready",
    "gated_launch_port": "the engine would wait for a signal that nobody sends",
    "weight_version": "slime-hpc counts them",
    "quantization*": _SYNC_FORMAT,
    "quantize_and_serve": _SYNC_FORMAT,
    "modelopt_*": _SYNC_FORMAT,
    "rl_quant_profile": _SYNC_FORMAT,
    "host": _SERVER,
    "port": _SERVER,
    "fastapi_root_path": _SERVER,
    "enable_http_worker_reuseport": _SERVER,
    "enable_http2": "slime-hpc's client speaks HTTP/1.1",
    "http2_*": "slime-hpc's client speaks HTTP/1.1",
    "ssl_*": "slime-hpc's client speaks plain HTTP, inside the job's network, with keys",
    "enable_ssl_refresh": "slime-hpc's client speaks plain HTTP, inside the job's network, with keys",
    "grpc_*": _UNGUARDED,
    "smg_*": _UNGUARDED,
    "sidecar*": _UNGUARDED,
    "kv_events_config": _UNGUARDED,
    "load_publish_endpoint": _UNGUARDED,
    "engine_info_bootstrap_port": _UNGUARDED,
    "tokenizer_worker_num": "further workers would not ask for the engine's keys",
    "detokenizer_worker_num": "slime-hpc watches one detokenizer",
    "served_model_name": "it is the run's name",
    "max_queued_requests": "a round's requests come all at once, and slime-hpc limits how many are under way",
    "sampling_defaults": "set the keys under sampling instead",
    "log_level": "`slime-hpc logs RUN engine-0` relies on it",
    "log_level_http": "one line a request would drown the log",
    "api_key": _KEYS,
    "admin_api_key": _KEYS,
    "*watermark*": "its key would be written down",
    "nccl_port": _SERVER,
    "dist_init_addr": _SERVER,
    "nnodes": _LAYOUT,
    "node_rank": _LAYOUT,
    "tp_size": _LAYOUT,
    "base_gpu_id": _LAYOUT,
    "gpu_id_step": _LAYOUT,
    "use_ray": "slime-hpc places the engines",
    "random_seed": "set seed instead",
    "dtype": _DEVICE,
    "device": _DEVICE,
    "skip_server_warmup": "slime-hpc checks the server's health itself",
    "warmups": "slime-hpc checks the server's health itself",
    "skip_tokenizer_init": "rewards are given the text",
    "disable_tokenizer_batch_decode": "rewards are given the text",
    "is_embedding": "such an engine generates nothing",
    "incremental_streaming_output": "slime-hpc reads whole answers",
    "enable_memory_saver": "only layout colocate needs it, which this version has not",
    "enable_weights_cpu_backup": "only layout colocate needs it, which this version has not",
    "enable_draft_weights_cpu_backup": _DRAFT,
    "speculative_*": _DRAFT,
    "enable_multi_layer_eagle": _DRAFT,
    "spec_trace_dir": _DRAFT,
    "decoupled_spec_*": _DRAFT,
    "uno_lora_path": _LORA,
    "*lora*": _LORA,
    "pp_*": _SYNC_RANKS,
    "dp_size": _SYNC_RANKS,
    "attn_dp_size": _SYNC_RANKS,
    "attn_cp_size": _SYNC_RANKS,
    "dcp_*": _SYNC_RANKS,
    "moe_dp_size": _SYNC_RANKS,
    "dwdp_size": _SYNC_RANKS,
    "ep_size": _SYNC_RANKS,
    "enable_dp_*": _SYNC_RANKS,
    "enable_prefill_cp": _SYNC_RANKS,
    "cp_strategy": _SYNC_RANKS,
    "disaggregation_*": _DISAGGREGATED,
    "enable_pd_role_switch": _DISAGGREGATED,
    "enable_pdmux": _DISAGGREGATED,
    "pdmux_config_path": _DISAGGREGATED,
    "encoder_*": _DISAGGREGATED,
    "language_only": _DISAGGREGATED,
    "enable_adaptive_dispatch_to_encoder": _DISAGGREGATED,
    "ep_join_*": _ELASTIC,
    "elastic_ep_*": _ELASTIC,
    "max_ep_size": _ELASTIC,
    "enable_elastic_expert_backup": _ELASTIC,
    "cuda_graph_config": "set cuda_graph_backend_decode, cuda_graph_max_bs_decode and their like instead",
    "json_model_override_args": "the trainer's model would be another than the engine's",
    "prefill_only_disable_kv_cache": "such an engine generates nothing",
    "allow_auto_truncate": "a truncated prompt would not be the one that is trained on",
    "preferred_sampling_params": "set sampling instead",
    "*chat_template*": _TOKENS,
    "completion_template": _TOKENS,
    "reasoning_parser": _TOKENS,
    "tool_call_parser": _TOKENS,
    "tool_server": _TOKENS,
    "strip_thinking_cache": _TOKENS,
    "enable_strict_thinking": _TOKENS,
    "enable_response_store": _TOKENS,
    "stream_response_*": _TOKENS,
    "asr_*": _TOKENS,
    "dllm_*": "diffusion models are not trained here",
    "kt_*": "the trainer's weights would not reach KTransformers' experts",
}
"""Name or pattern of a name → why it may not be set, first match first. All else is passed on as it is."""

_GPU = "needs a GPU, and this cluster profile has `device: cpu`"

REFUSED_ON_CPU = {
    "attention_backend": "is torch_native on a CPU",
    "prefill_attention_backend": "is torch_native on a CPU",
    "decode_attention_backend": "is torch_native on a CPU",
    "mm_attention_backend": "is torch_native on a CPU",
    "sampling_backend": "is pytorch on a CPU",
    "disable_overlap_schedule": "is true on a CPU: the scheduler overlaps with a GPU's work only",
    "*cuda*": _GPU,
    "*torch_compile*": _GPU,
    "*nccl*": _GPU,
    "*symm_mem*": _GPU,
    "*mscclpp*": _GPU,
    "*flashinfer*": _GPU,
    "*all*reduce*": _GPU,
    "*offload*": _GPU,
    "*_gemm_*": _GPU,
    "triton_attention_*": _GPU,
    "enable_lean_attention": _GPU,
    "enable_*kernel": _GPU,
    "enable_p2p_check": _GPU,
    "enable_tf32_matmul": _GPU,
    "enable_deterministic_inference": "needs an attention backend that a CPU has not",
    "rl_on_policy_target": "needs an attention backend that a CPU has not",
    "*hicache*": _GPU,
    "enable_hierarchical_cache": _GPU,
    "*hisparse*": _GPU,
    "*lmcache*": _GPU,
    "*flexkv*": _GPU,
    "*two_batch_overlap": _GPU,
    "*single_batch_overlap": _GPU,
}

INTERVALS = {
    "mem_fraction_static": Interval(0, 1, low_open=True),
    "max_total_tokens": Interval(1),
    "max_running_requests": Interval(1),
    "context_length": Interval(1),
    "chunked_prefill_size": Interval(-1),
    "max_prefill_tokens": Interval(1),
    "page_size": Interval(1),
    "schedule_conservativeness": Interval(0, low_open=True),
    "stream_interval": Interval(1),
    "watchdog_timeout": Interval(0, low_open=True),
}


def sglang_arguments() -> dict[str, Argument]:
    return load_snapshot("sglang").named()


def sglang_refusal(name: str) -> str | None:
    """Why no profile may set an argument, or None."""
    return first_match(REFUSED, name)


def cpu_refusal(name: str) -> str | None:
    """Why a profile for ``device: cpu`` may not set an argument that others may, or None."""
    return first_match(REFUSED_ON_CPU, name)
