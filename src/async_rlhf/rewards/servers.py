"""JSON over HTTP with rewards that live elsewhere: bounded in time, tried again, balanced over several servers.

Tried again, at the next server if there are several: no connection, no answer within `timeout`, HTTP 408, 425, 429 and 5xx. So a
request ends after (retries + 1) · timeout + backoff · (2^retries − 1) seconds at most.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from async_rlhf.config import UserError, require, setting
from async_rlhf.rewards.base import RewardSettings

MAY_PASS = {408, 425, 429}
SHOWN = 300  # characters of an answer that an error shows


@dataclass
class ServerSettings(RewardSettings):
    """What rewards behind HTTP share."""

    timeout: float = setting(60.0, "Seconds that one request may take.")
    retries: int = setting(4, "Times that a request is sent again after a failure that may pass.")
    backoff: float = setting(1.0, "Seconds before it is sent again the first time; twice as many each further time.")
    concurrency: int = setting(32, "Requests at once, of each training process.")
    api_key_env: str | None = setting(None, "Environment variable that holds the API key, sent as `Authorization: Bearer`.")

    def __post_init__(self):
        require(self.timeout > 0, f"timeout {self.timeout}: above 0 seconds")
        require(self.retries >= 0, f"retries {self.retries}: 0 or more")
        require(self.backoff >= 0, f"backoff {self.backoff}: 0 seconds or more")
        require(self.concurrency >= 1, f"concurrency {self.concurrency}: at least 1")

    def check_servers(self, urls: Sequence[str]) -> None:
        """Raise `UserError` for what is no URL, and for an API key that is not there. Asks no server."""
        for url in urls:
            try:
                usable = httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host
            except httpx.InvalidURL:
                usable = False
            require(usable, f"{url!r}: a URL such as http://localhost:8000 is needed")
        absent = self.api_key_env and not os.environ.get(self.api_key_env)
        require(not absent, f"api_key_env {self.api_key_env!r}: there is no such environment variable")


class Servers:
    """One or several servers that answer alike. Requests go to them in turn, `concurrency` at a time."""

    def __init__(self, urls: Sequence[str], settings: ServerSettings):
        self.urls, self.settings = [url.rstrip("/") for url in urls], settings

    def post(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """What the servers answer to each body, sent to their URL + `path`, in order. The first failure ends the others.

        Raises:
            UserError: no answer after the retries, an HTTP error that will not pass, or no JSON; it names the URL.
        """
        turn = itertools.count()
        return self._run([("POST", path, body, self._from(next(turn))) for body in bodies])

    def get(self, path: str) -> list[Any]:
        """What each server answers to a GET, in the order of the URLs.

        Raises:
            UserError: as `post`.
        """
        return self._run([("GET", path, None, itertools.repeat(url)) for url in self.urls])

    def _from(self, first: int) -> Iterator[str]:
        return itertools.islice(itertools.cycle(self.urls), first % len(self.urls), None)

    def _run(self, requests: list[tuple]) -> list[Any]:
        try:
            return asyncio.run(self._concurrently(requests))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _concurrently(self, requests: list[tuple]) -> list[Any]:
        limit = asyncio.Semaphore(self.settings.concurrency)
        key = os.environ[self.settings.api_key_env] if self.settings.api_key_env else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connections = httpx.Limits(max_connections=self.settings.concurrency)

        async def request(client: httpx.AsyncClient, *one) -> Any:
            async with limit:
                return await self._until_answered(client, *one)

        async with httpx.AsyncClient(headers=headers, limits=connections, timeout=None) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(request(client, *one)) for one in requests]
        return [task.result() for task in tasks]

    async def _until_answered(self, client: httpx.AsyncClient, method: str, path: str, body: Any, urls: Iterator[str]) -> Any:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.settings.retries + 1),
            wait=wait_exponential(self.settings.backoff),
            retry=retry_if_exception_type(_MayPass),
            reraise=True,
        )
        try:
            return await retrying(self._once, client, method, path, body, urls)
        except _MayPass as failure:
            raise UserError(f"{failure}; tried {self.settings.retries + 1} times") from failure

    async def _once(self, client: httpx.AsyncClient, method: str, path: str, body: Any, urls: Iterator[str]) -> Any:
        url = next(urls) + path
        try:
            async with asyncio.timeout(self.settings.timeout):
                response = await client.request(method, url, json=body)
        except TimeoutError as error:
            raise _MayPass(f"{url}: no answer within {self.settings.timeout:g} s (timeout)") from error
        except httpx.TransportError as error:
            raise _MayPass(f"{url}: {type(error).__name__}: {error}") from error
        said = " ".join(response.text.split())[:SHOWN]
        if response.status_code in MAY_PASS or response.status_code >= 500:
            raise _MayPass(f"{url}: HTTP {response.status_code}: {said}")
        require(response.is_success, f"{url}: HTTP {response.status_code}: {said}")
        try:
            return response.json()
        except ValueError as error:
            raise UserError(f"{url}: the answer is no JSON: {said!r}") from error


class _MayPass(Exception):
    """A failure after which the request is worth sending again."""
