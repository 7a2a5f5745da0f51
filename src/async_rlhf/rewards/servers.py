"""JSON over HTTP with rewards and references that live elsewhere: bounded in time, tried again, balanced over several servers.

A request goes to the least busy server; one that failed is asked after the others for half a minute. Tried again: no connection, no answer
within `timeout`, HTTP 408, 425, 429 and 5xx. So a request ends after (retries + 1) · timeout + backoff · (2^retries − 1) seconds at most,
and all requests of a batch together after `total_timeout`.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from async_rlhf.config import UserError, require, setting
from async_rlhf.rewards.base import RewardSettings

MAY_PASS = {408, 425, 429}
SHOWN = 300  # characters of an answer that an error shows
REST_SECONDS = 30  # that a server which failed is asked after the others


@dataclass
class RequestSettings:
    """How servers are asked."""

    timeout: float = setting(60.0, "Seconds that one request may take.")
    retries: int = setting(4, "Times that a request is sent again after a failure that may pass.")
    backoff: float = setting(1.0, "Seconds before it is sent again the first time; twice as many each further time.")
    total_timeout: float = setting(1800.0, "Seconds that all requests of a batch may take together.")
    concurrency: int = setting(32, "Requests at once, of each training process.")
    api_key_env: str | None = setting(None, "Environment variable that holds the API key, sent as `Authorization: Bearer`.")

    def __post_init__(self):
        for name in ("timeout", "total_timeout"):
            require(getattr(self, name) > 0, f"{name} {getattr(self, name)}: above 0 seconds")
        require(self.retries >= 0, f"retries {self.retries}: 0 or more")
        require(self.backoff >= 0, f"backoff {self.backoff}: 0 seconds or more")
        require(self.concurrency >= 1, f"concurrency {self.concurrency}: at least 1")

    def check_servers(self, urls: Sequence[str]) -> None:
        """Raise `UserError` for what is no URL, and for an API key that is not there. Asks no server."""
        for url in urls:
            try:
                parts = httpx.URL(url)
            except httpx.InvalidURL:
                parts = httpx.URL()
            require(not parts.userinfo, f"a URL of {parts.host} holds a password, and would be logged: take api_key_env")
            require(parts.scheme in ("http", "https") and parts.host, f"{url!r}: a URL such as http://localhost:8000 is needed")
        api_key(self.api_key_env)


@dataclass
class ServerSettings(RequestSettings, RewardSettings):
    """What rewards behind HTTP share."""


def api_key(variable: str | None) -> str | None:
    """The API key that the environment variable holds; None without a variable.

    Raises:
        UserError: nothing there. What is no name of a variable is not shown: it could be the key itself.
    """
    if variable is None:
        return None
    require(re.fullmatch(r"[A-Za-z_]\w*", variable), "api_key_env: the name of an environment variable is needed, not the key itself")
    require(os.environ.get(variable), f"api_key_env {variable!r}: there is no such environment variable")
    return os.environ[variable]


class Servers:
    """One or several servers that answer alike, `concurrency` requests at a time."""

    def __init__(self, urls: Sequence[str], settings: RequestSettings):
        self.urls, self.settings = list(dict.fromkeys(urls)), settings
        self._busy, self._asked = dict.fromkeys(self.urls, 0), dict.fromkeys(self.urls, 0)
        self._failed: dict[str, float] = {}  # when

    def post(self, path: str, bodies: Sequence[Any], read: Callable[[Any, int], Any] = lambda answer, i: answer) -> list[Any]:
        """What the servers answer to each body, sent to their URL + `path`, in order. The first failure ends the others.

        `read(answer, i)` makes of the answer to body i what is returned; a `ValueError` says what is wrong with it.

        Raises:
            UserError: no answer after the retries, an HTTP error that will not pass, no JSON, or a wrong answer; it names the URL.
        """
        return self._run([("POST", path, body, None, lambda answer, i=i: read(answer, i)) for i, body in enumerate(bodies)])

    def get(self, path: str) -> list[Any]:
        """What each server answers to a GET, in the order of the URLs.

        Raises:
            UserError: as `post`.
        """
        return self._run([("GET", path, None, url, lambda answer: answer) for url in self.urls])

    def _choose(self) -> str:
        since = time.monotonic() - REST_SECONDS

        def rank(url: str) -> tuple:
            failed = self._failed.get(url, 0.0)
            return failed if failed > since else 0.0, self._busy[url], self._asked[url]

        return min(self.urls, key=rank)

    def _run(self, requests: list[tuple]) -> list[Any]:
        try:
            return asyncio.run(self._concurrently(requests))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _concurrently(self, requests: list[tuple]) -> list[Any]:
        limit = asyncio.Semaphore(self.settings.concurrency)
        key, total = api_key(self.settings.api_key_env), self.settings.total_timeout
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connections = httpx.Limits(max_connections=self.settings.concurrency)
        tasks: list[asyncio.Task] = []

        async def request(client: httpx.AsyncClient, *one) -> Any:
            async with limit:
                return await self._until_answered(client, *one)

        try:
            async with (
                asyncio.timeout(total),
                httpx.AsyncClient(headers=headers, limits=connections, timeout=None) as client,
                asyncio.TaskGroup() as group,
            ):
                tasks += [group.create_task(request(client, *one)) for one in requests]
        except TimeoutError as error:
            answered = sum(task.done() and not task.cancelled() for task in tasks)
            where = ", ".join(self.urls)
            raise UserError(f"{where}: {answered} of {len(tasks)} requests answered within {total:g} s (total_timeout)") from error
        return [task.result() for task in tasks]

    async def _until_answered(
        self, client: httpx.AsyncClient, method: str, path: str, body: Any, url: str | None, read: Callable[[Any], Any]
    ) -> Any:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.settings.retries + 1),
            wait=wait_exponential(self.settings.backoff),
            retry=retry_if_exception_type(_MayPass),
            reraise=True,
        )
        try:
            return await retrying(self._once, client, method, path, body, url, read)
        except _MayPass as failure:
            raise UserError(f"{failure}; tried {self.settings.retries + 1} times") from failure

    async def _once(self, client: httpx.AsyncClient, method: str, path: str, body: Any, url: str | None, read: Callable[[Any], Any]) -> Any:
        server = url or self._choose()
        url = server.rstrip("/") + path if path else server
        self._busy[server] += 1
        self._asked[server] += 1
        try:
            response = await self._send(client, method, url, body)
        except _MayPass:
            self._failed[server] = time.monotonic()
            raise
        finally:
            self._busy[server] -= 1
        self._failed.pop(server, None)
        if not response.is_success:
            raise UserError(f"{url}: HTTP {response.status_code}: {_said(response)}")
        try:
            answer = response.json()
        except ValueError as error:
            raise UserError(f"{url}: the answer is no JSON: {_said(response)!r}") from error
        try:
            return read(answer)
        except ValueError as error:
            raise UserError(f"{url}: {error}") from error

    async def _send(self, client: httpx.AsyncClient, method: str, url: str, body: Any) -> httpx.Response:
        content = None if body is None else json.dumps(body, allow_nan=False).encode()  # as ASCII: a lone surrogate is no UTF-8
        try:
            async with asyncio.timeout(self.settings.timeout):
                response = await client.request(method, url, content=content, headers={"Content-Type": "application/json"})
        except TimeoutError as error:
            raise _MayPass(f"{url}: no answer within {self.settings.timeout:g} s (timeout)") from error
        except httpx.RequestError as error:
            raise _MayPass(f"{url}: {type(error).__name__}: {error}") from error
        if response.status_code in MAY_PASS or response.status_code >= 500:
            raise _MayPass(f"{url}: HTTP {response.status_code}: {_said(response)}")
        return response


def _said(response: httpx.Response) -> str:
    """The beginning of an answer, in one line."""
    return " ".join(response.text[: 4 * SHOWN].split())[:SHOWN]


class _MayPass(Exception):
    """A failure after which the request is worth sending again."""
