"""Which arguments of sglang-router a profile may set: all of the snapshot's, but for those that this table refuses."""

from __future__ import annotations

from slime_hpc.spec.passthrough.arguments import Argument, Interval, first_match, load_snapshot

_SERVER = "slime-hpc starts the router, on the driver's host, and only the driver talks to it"
_ENGINES = "slime-hpc tells the router which engines there are"
_LOST = "slime-hpc decides when an engine is lost, and makes its samples again"
_ALL_AT_ONCE = "a round's requests come all at once, and slime-hpc limits how many are under way"
_KEYS = "made fresh for each attempt, so that no key is ever written down"
_PLAIN = "the router speaks plain HTTP, inside the job's network, with keys"
_TOKENS = "slime-hpc sends tokens, with the chat template applied, and asks for no chat"

REFUSED = {
    "host": _SERVER,
    "port": _SERVER,
    "cors_allowed_origins": _SERVER,
    "prometheus_*": _SERVER,
    "request_id_headers": _SERVER,
    "shutdown_grace_period_secs": _SERVER,
    "log_*": "`slime-hpc logs RUN router` relies on it",
    "enable_trace": "nothing but keys may leave the job's network",
    "otlp_traces_endpoint": "nothing but keys may leave the job's network",
    "worker_*": _ENGINES,
    "*selector": _ENGINES,
    "service_discovery*": _ENGINES,
    "dp_aware": _ENGINES,
    "model_path": _ENGINES,
    "enable_igw": "one model is trained",
    "backend": "engines are SGLang's",
    "pd_disaggregation": "this version runs regular engines only: no prefill, decode or encoder ones",
    "prefill_*": "this version runs regular engines only: no prefill, decode or encoder ones",
    "decode_*": "this version runs regular engines only: no prefill, decode or encoder ones",
    "bucket_*": "this version runs regular engines only: no prefill, decode or encoder ones",
    "mini_lb": "it does no more than choose at random",
    "*retr*": _LOST,
    "cb_*": _LOST,
    "disable_circuit_breaker": _LOST,
    "*health*": _LOST,
    "request_timeout_secs": "slime-hpc's own deadlines end what takes too long",
    "max_concurrent_requests": _ALL_AT_ONCE,
    "queue_*": _ALL_AT_ONCE,
    "rate_limit_tokens_per_second": _ALL_AT_ONCE,
    "*api_key*": _KEYS,
    "control_plane_*": _KEYS,
    "jwt_*": _KEYS,
    "*cert_*": _PLAIN,
    "*_key_path": _PLAIN,
    "tokenizer_*": _TOKENS,
    "chat_template": _TOKENS,
    "reasoning_parser": _TOKENS,
    "tool_call_parser": _TOKENS,
    "mcp_config_path": _TOKENS,
    "history_backend": _TOKENS,
    "oracle_*": _TOKENS,
    "postgres_*": _TOKENS,
    "redis_*": _TOKENS,
}
"""Name or pattern of a name → why it may not be set, first match first. All else is passed on as it is."""

INTERVALS = {
    "cache_threshold": Interval(0, 1, high_open=False),
    "balance_abs_threshold": Interval(0),
    "balance_rel_threshold": Interval(1),
    "eviction_interval_secs": Interval(1),
    "max_tree_size": Interval(1),
    "max_idle_secs": Interval(1),
    "max_payload_size": Interval(1),
}


def router_arguments() -> dict[str, Argument]:
    return load_snapshot("sglang-router").named()


def router_refusal(name: str) -> str | None:
    """Why no profile may set an argument, or None."""
    return first_match(REFUSED, name)
