"""HTTP client of a vLLM server."""

from __future__ import annotations

from typing import Any, TypeAlias

import httpx

from lrlhf.rollout.engines.synced_engine import EngineFailure

Address: TypeAlias = tuple[str, str]
"""URL and token, which change when a server is restarted."""

GENERATE = "/inference/v1/generate"
"""Route with token ids as input and output."""


class ServerResponseError(EngineFailure):
    """A server responded with an error status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def busy(self) -> bool:
        """Whether the server, or a proxy, is overloaded."""
        return self.status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


class ServerClient:
    """HTTP client; errors of the connection are `EngineFailure`s.

    Args:
        url: URL of the server, without a path.
        token: Bearer token of requests.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self._settings: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {token}"},
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=32),
            "timeout": httpx.Timeout(30.0, read=None, pool=None),
            # without proxies of the environment
            "trust_env": False,
        }
        self._http = httpx.Client(**self._settings)

    @property
    def address(self) -> Address:
        """URL and token."""
        return self.url, self.token

    def close(self) -> None:
        self._http.close()

    def is_healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether the server and its engine run."""
        try:
            request = self._http.build_request("GET", "/health", timeout=timeout)
            # before the server runs, another process may listen there
            del request.headers["Authorization"]
            return self._http.send(request).status_code == httpx.codes.OK
        except (httpx.TransportError, RuntimeError):  # RuntimeError: closed meanwhile
            return False

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send a request and return the JSON of the response; None if it is none.

        Args:
            path: Route, with its query.
            body: JSON.
            timeout: Seconds until the response; None: no limit.

        Raises:
            EngineFailure: The connection failed or timed out, or, as a `ServerResponseError`, the
                server failed.
            ValueError: It refuses the request.
            PermissionError: It refuses the token.
        """
        return self.request("POST", path, body, timeout=timeout)

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Send a request with any method; see `post`."""
        limits = httpx.Timeout(30.0, read=timeout, pool=None)
        try:
            response = self._http.request(method, path, json=body, timeout=limits)
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise _connection_failure(path, error) from error
        self._check(response)
        # some routes respond with text
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else None

    def _check(self, response: httpx.Response) -> None:
        path = response.request.url.path
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise PermissionError(
                f"the vLLM server at {self.url} requires another token: set VLLM_API_KEY here to "
                "the one that the server was started with"
            )
        passing = (httpx.codes.NOT_FOUND, httpx.codes.TOO_MANY_REQUESTS)
        if response.is_server_error or response.status_code in passing:
            status, text = response.status_code, response.text[:500]
            message = f"the vLLM server answered {path} with {status}: {text}"
            raise ServerResponseError(message, status=status)
        if response.is_error:
            raise ValueError(f"the vLLM server refused {path}: {response.text[:500]}")

    def call_workers(self, method: str, *args: str, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return their results."""
        body = {"method": method, "args": list(args)}
        results: list[Any] = self.post("/collective_rpc", body, timeout=timeout)["results"]
        return results

    def session(self) -> httpx.AsyncClient:
        """Return a client for many concurrent requests."""
        return httpx.AsyncClient(**self._settings)

    async def generate(self, session: httpx.AsyncClient, body: dict[str, Any]) -> bytes:
        """Post ``body`` to `GENERATE` in an open `session`, and return the JSON; see `post`."""
        try:
            response = await session.post(GENERATE, json=body)
        except httpx.TransportError as error:
            raise _connection_failure(GENERATE, error) from error
        self._check(response)
        return response.content


def _connection_failure(path: str, error: Exception) -> EngineFailure:
    reason = f"{type(error).__name__}: {error}"
    return EngineFailure(f"the vLLM server did not answer {path} ({reason})")
