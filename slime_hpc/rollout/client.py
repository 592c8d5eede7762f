"""The HTTP client of one SGLang server: the only module that speaks HTTP to engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import stamina

from slime_hpc.errors import ClusterError
from slime_hpc.records import read_json
from slime_hpc.types import TensorMeta, WeightVersion

CONTROL_TIMEOUT_S = 60.0
"""Pausing, flushing, opening a session: milliseconds when the scheduler is well."""
TRANSFER_TIMEOUT_S = 600.0
"""One transfer of all weights, or the rendezvous of its group."""
GENERATE_TIMEOUT_S = 7200.0
"""The last resort for one completion; a round has its own, shorter deadline."""
GENERATE_ATTEMPTS = 3


class EngineError(ClusterError):
    """An engine did not do what it was asked: names engine, path, status and what it said."""

    def __init__(self, url: str, path: str, said: str, *, status: int | None = None) -> None:
        self.url = url
        self.path = path
        self.status = status
        """HTTP status; None where there was no answer."""
        answer = "gave no answer" if status is None else f"answered {status}"
        super().__init__(f"engine {url} {answer} to {path}: {said.strip()[:500] or 'an empty body'}")

    @property
    def is_transient(self) -> bool:
        """True where the same request may well succeed: no connection, or a server that is starting."""
        return self.status in (None, 503)


@dataclass(frozen=True)
class EngineKeys:
    """Bearer tokens of an attempt's engines: one for generation, one for everything that changes an engine."""

    api_key: str
    admin_api_key: str

    @classmethod
    def load(cls, path: Path) -> EngineKeys:
        return cls(**read_json(path))

    def __repr__(self) -> str:
        return "EngineKeys(***)"


@dataclass(frozen=True)
class Completion:
    """What /generate answered for one prompt. ``log_probs[i]`` is of ``tokens[i]``."""

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: str

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Completion:
        meta = body["meta_info"]
        scored = meta.get("output_token_logprobs") or []  # absent if aborted before its first token
        return cls(
            text=body["text"],
            tokens=tuple(int(entry[1]) for entry in scored),
            log_probs=tuple(float(entry[0]) for entry in scored),
            finish_reason=meta["finish_reason"]["type"],
            weight_version=meta["weight_version"],
        )


class EngineClient:
    """One engine. An async context manager; implements ``types.WeightReceiver``. EngineError on any refusal."""

    def __init__(self, url: str, keys: EngineKeys) -> None:
        self.url = url.rstrip("/")
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None
        self._has_update_session: bool | None = None

    async def __aenter__(self) -> Self:
        # A connection per request: one kept alive may be closed by the server just as a POST goes out.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def health(self, timeout_s: float = 25.0) -> None:
        """Have the engine generate one token, which takes it a second; it gives up itself after 20."""
        await self._call("GET", "/health", timeout_s=timeout_s)

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Completion:
        """One completion with log-probs of its tokens, at the sampling temperature.

        Tried again where nothing came back or the server was starting: generating has no lasting effect.
        """
        body = {"input_ids": list(input_ids), "sampling_params": dict(sampling_params), "return_logprob": True}
        async for attempt in stamina.retry_context(on=_is_transient, attempts=GENERATE_ATTEMPTS, timeout=None):
            with attempt:
                answer = await self._call("POST", "/generate", body, admin=False, timeout_s=GENERATE_TIMEOUT_S)
        return Completion.parse(answer)

    async def pause_generation(self) -> None:
        """End running requests as aborted and hold new ones."""
        await self._call("POST", "/pause_generation", {"mode": "abort"})

    async def continue_generation(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop all cached prefixes; refused while a request is running."""
        await self._call("POST", "/flush_cache")

    async def abort_all(self) -> None:
        """End every request now; each is answered with what it has."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._call("GET", "/server_info", admin=False)
        return info

    async def weight_version(self) -> str:
        info = await self._call("GET", "/model_info", admin=False)
        return str(info["weight_version"])

    async def weights_checksum(self) -> str:
        """Of what its ranks hold in memory, each in its order."""
        answer = await self._call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=TRANSFER_TIMEOUT_S)
        return str(answer["per_engine_checksum"])

    async def init_weights_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the trainer's group; answers when all its members have."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._call("POST", "/init_weights_update_group", body, timeout_s=TRANSFER_TIMEOUT_S)

    async def begin_weight_update(self) -> None:
        """Open the session that newer servers require around an update; older ones do not have it."""
        try:
            await self._call("POST", "/begin_weight_update", {})
        except EngineError as error:
            if error.status != 404:
                raise
            self._has_update_session = False  # an older server: it takes updates at any time
        else:
            self._has_update_session = True

    async def receive_weights(
        self, tensors: Sequence[TensorMeta], *, group_name: str, version: WeightVersion | None
    ) -> None:
        """Receive these tensors, in this order, from rank 0 of the group, and load them.

        ``version`` comes with the last of them; cached prefixes are then dropped.
        """
        body = {
            "names": [t.name for t in tensors],
            "dtypes": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "group_name": group_name,
            "flush_cache": version is not None,
            "weight_version": None if version is None else str(version),
        }
        await self._call("POST", "/update_weights_from_distributed", body, timeout_s=TRANSFER_TIMEOUT_S)

    async def end_weight_update(self) -> None:
        if self._has_update_session:
            await self._call("POST", "/end_weight_update", {})

    async def abandon_weight_update(self, group_name: str) -> None:
        """Close the session and leave the group, whatever of them a failed update left.

        EngineError only if there is no answer. To be called once the trainer has left the group, else it may wait.
        """
        for path, body in (("/end_weight_update", {}), ("/destroy_weights_update_group", {"group_name": group_name})):
            try:
                await self._call("POST", path, body)
            except EngineError as error:
                if error.status is None:
                    raise
                # It answers: there was no session or no group to leave.

    async def _call(
        self, method: str, path: str, body: object = None, *, admin: bool = True, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """Parsed JSON, or the text where it is none. The server takes the admin key only where it asks for it."""
        if self._session is None:
            raise RuntimeError(f"EngineClient({self.url}) is used outside `async with`")
        key = self._keys.admin_api_key if admin else self._keys.api_key
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineError(self.url, path, f"waited {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(self.url, path, f"{type(error).__name__}: {error}") from error
        return _parse(self.url, path, response.status, text)


def _parse(url: str, path: str, status: int, text: str) -> Any:
    if status != 200:
        raise EngineError(url, path, text, status=status)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # /health, /flush_cache and /abort_request answer with plain or no text


def _is_transient(error: Exception) -> bool:
    return isinstance(error, EngineError) and error.is_transient
