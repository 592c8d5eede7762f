"""The HTTP clients of an SGLang server and of the router before several: the only module that speaks HTTP to them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import stamina

from slime_hpc.errors import ClusterError, DeadlineExceeded
from slime_hpc.records import read_json
from slime_hpc.types import TensorMeta, WeightVersion

CONTROL_TIMEOUT_S = 60.0
"""Pausing, flushing, opening a session: milliseconds when the scheduler is well."""
TRANSFER_TIMEOUT_S = 600.0
"""One transfer of all weights, or the rendezvous of its group."""
GENERATE_TIMEOUT_S = 7200.0
"""The last resort for one completion; a round has its own, shorter deadline."""
ANSWER_TIMEOUT_S = 20.0
"""For a server to say anything at all."""
ATTEMPTS = 3
RETRY_S = 0.5
"""The watchers' rhythm: whoever saw a process end has told before we give it up for not answering."""
POLL_S = 0.02
SPOKEN_BY_ROUTER = "X-SMG-Error-Code"
"""Header of an answer that is the router's own, not an engine's handed on."""


class EngineError(ClusterError):
    """An engine did not do what it was asked: names engine, path, status and what it said."""

    who = "engine"

    def __init__(self, url: str, path: str, said: str, *, status: int | None = None) -> None:
        self.url = url
        self.path = path
        self.status = status
        """HTTP status; None where there was no answer."""
        answer = "gave no answer" if status is None else f"answered {status}"
        super().__init__(f"{self.who} {url} {answer} to {path}: {said.strip()[:500] or 'an empty body'}")

    @property
    def is_transient(self) -> bool:
        """True where the same request may well succeed: no connection, or a server that is starting."""
        return self.status in (None, 503)


class RouterError(EngineError):
    """The router did not do what it was asked, or could not: it got no answer from the engine it chose, say."""

    who = "router"

    @property
    def is_transient(self) -> bool:
        return self.status is None or self.status >= 500


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


class _Client:
    """One server that speaks SGLang's protocol. An async context manager."""

    def __init__(self, url: str, keys: EngineKeys) -> None:
        self.url = url.rstrip("/")
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None

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

    async def generate(self, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Completion:
        """One completion with log-probs of its tokens, at the sampling temperature.

        Tried again where nothing came back or the server was starting: generating has no lasting effect.
        """
        body = {"input_ids": list(input_ids), "sampling_params": dict(sampling_params), "return_logprob": True}
        return Completion.parse(await self._insist("POST", "/generate", body, timeout_s=GENERATE_TIMEOUT_S))

    async def _insist(self, method: str, path: str, body: object = None, *, timeout_s: float) -> Any:
        """``_call`` with the key for generation, again where it had no answer."""
        async for attempt in stamina.retry_context(
            on=self._is_worth_a_retry, attempts=ATTEMPTS, timeout=None, wait_initial=RETRY_S, wait_jitter=RETRY_S
        ):
            with attempt:
                answer = await self._call(method, path, body, admin=False, timeout_s=timeout_s)
        return answer

    def _is_worth_a_retry(self, error: Exception) -> bool:
        return isinstance(error, EngineError) and error.is_transient

    async def _call(
        self, method: str, path: str, body: object = None, *, admin: bool = True, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """Parsed JSON, or the text where it is none. The server takes the admin key only where it asks for it."""
        if self._session is None:
            raise RuntimeError(f"{type(self).__name__}({self.url}) is used outside `async with`")
        key = self._keys.admin_api_key if admin else self._keys.api_key
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                headers={"Authorization": f"Bearer {key}", **self._headers()},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise self._error(path, f"waited {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._error(path, f"{type(error).__name__}: {error}") from error
        if not response.ok:
            raise self._error(path, text, response)
        return _parse(text)

    def _headers(self) -> dict[str, str]:
        return {}

    def _error(self, path: str, said: str, response: aiohttp.ClientResponse | None = None) -> EngineError:
        return EngineError(self.url, path, said, status=None if response is None else response.status)


class EngineClient(_Client):
    """One engine. Implements ``types.WeightReceiver``. EngineError on any refusal."""

    def __init__(self, url: str, keys: EngineKeys) -> None:
        super().__init__(url, keys)
        self._has_update_session: bool | None = None

    async def health(self, timeout_s: float = 25.0) -> None:
        """Have the engine generate one token, which takes it a second; it gives up itself after 20."""
        await self._call("GET", "/health", timeout_s=timeout_s)

    async def require_answer(self) -> None:
        """EngineError if its HTTP server does not answer. It does also while the scheduler is busy."""
        await self._insist("GET", "/model_info", timeout_s=ANSWER_TIMEOUT_S)

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


class RouterClient(_Client):
    """sglang-router, in front of the engines: generation, and which engines it has. RouterError if it cannot.

    An engine's own refusal is an EngineError, of the router's address: it does not say whose it was.
    """

    async def add_engine(self, url: str) -> None:
        """Returns once it gets requests. DeadlineExceeded if the router has not taken it in after a minute."""
        await self._call("POST", "/workers", {"url": url, "api_key": self._keys.api_key}, admin=False)
        await self._until(f"take in {url}", lambda workers: any(w["url"] == url and w["is_healthy"] for w in workers))

    async def remove_engine(self, url: str) -> None:
        """Returns once it gets no more requests; those that it has go on. Nothing happens if it is not there."""
        for worker in await self._workers():
            if worker["url"] == url:
                await self._call("DELETE", f"/workers/{worker['id']}", admin=False)
        await self._until(f"drop {url}", lambda workers: all(w["url"] != url for w in workers))

    async def requests(self) -> dict[str, int]:
        """How many requests each engine has, by its address; all 0 with a policy that does not count them."""
        return {worker["url"]: worker["load"] for worker in await self._workers()}

    async def ping(self) -> None:
        await self._call("GET", "/liveness", admin=False)

    async def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = (await self._call("GET", "/workers", admin=False))["workers"]
        return workers

    async def _until(self, what: str, is_done: Callable[[list[dict[str, Any]]], bool]) -> None:
        """It answers before it has done what it was asked."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                while True:
                    if is_done(await self._workers()):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(f"router {self.url} did not {what} within {CONTROL_TIMEOUT_S:.0f} s") from None

    def _is_worth_a_retry(self, error: Exception) -> bool:
        """Not what concerns an engine: whether that is lost is not for this class to find out."""
        return isinstance(error, RouterError) and error.status is None

    def _headers(self) -> dict[str, str]:
        """A new key each time: the policy ``manual`` then chooses an engine anew."""
        return {"X-SMG-Routing-Key": uuid.uuid4().hex}

    def _error(self, path: str, said: str, response: aiohttp.ClientResponse | None = None) -> EngineError:
        if response is None or SPOKEN_BY_ROUTER in response.headers:
            return RouterError(self.url, path, said, status=None if response is None else response.status)
        return super()._error(path, said, response)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # /health, /flush_cache and /abort_request answer with plain or no text
