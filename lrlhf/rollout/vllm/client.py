"""What the trainer asks of a vLLM server."""

from __future__ import annotations

from typing import Any, TypeAlias

import httpx

from lrlhf.rollout.engines.synced_engine import EngineFailure

Address: TypeAlias = tuple[str, str]
"""URL and token; a server that is started again has others."""

GENERATE = "/inference/v1/generate"
"""Where token ids go in and come out."""


class FailureAnswer(EngineFailure):
    """A server said itself that it cannot do what it was asked for.

    Args:
        message: What it said.
        status: Of its answer.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def busy(self) -> bool:
        """Whether it, or what stands before it, has too much to do, which tells nothing of it."""
        return self.status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


class ServerClient:
    """Talks HTTP to a server; any trouble on the way is an `EngineFailure`.

    Args:
        url: Of the server, without a path.
        token: Shown with every request.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self._settings: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {token}"},
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=32),
            "timeout": httpx.Timeout(30.0, read=None, pool=None),
            # a proxy of the environment is not meant for a server of one's own
            "trust_env": False,
        }
        self._http = httpx.Client(**self._settings)

    @property
    def address(self) -> Address:
        """URL and token."""
        return self.url, self.token

    def close(self) -> None:
        """Break off what is still open."""
        self._http.close()

    def is_healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            request = self._http.build_request("GET", "/health", timeout=timeout)
            # until a server is known to answer, someone else might be at this address
            del request.headers["Authorization"]
            return self._http.send(request).status_code == httpx.codes.OK
        except (httpx.TransportError, RuntimeError):  # RuntimeError: closed meanwhile
            return False

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send a request and return the JSON of the answer; None if it is none.

        Args:
            path: Route, with its query.
            body: JSON.
            timeout: Seconds until the answer; None: without an end.

        Raises:
            EngineFailure: The server is gone, took too long, or, as a `FailureAnswer`, failed.
            ValueError: It refuses what was asked.
            PermissionError: It wants another token.
        """
        return self._ask("POST", path, body, timeout)

    def get(self, path: str, *, timeout: float | None = None) -> Any:
        """Ask for something; see `post`."""
        return self._ask("GET", path, None, timeout)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None
    ) -> Any:
        limits = httpx.Timeout(30.0, read=timeout, pool=None)
        try:
            answer = self._http.request(method, path, json=body, timeout=limits)
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise _unanswered(path, error) from error
        self._check(answer)
        # some routes answer with words
        told = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if told else None

    def _check(self, answer: httpx.Response) -> None:
        path = answer.request.url.path
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise PermissionError(
                f"the vLLM server at {self.url} wants another token: set VLLM_API_KEY here to the "
                "one that the server was started with"
            )
        passing = (httpx.codes.NOT_FOUND, httpx.codes.TOO_MANY_REQUESTS)
        if answer.is_server_error or answer.status_code in passing:
            raise FailureAnswer(
                f"the vLLM server answered {path} with {answer.status_code}: {answer.text[:500]}",
                status=answer.status_code,
            )
        if answer.is_error:
            raise ValueError(f"the vLLM server refused {path}: {answer.text[:500]}")

    def call_workers(self, method: str, *args: str, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return their results."""
        body = {"method": method, "args": list(args)}
        results: list[Any] = self.post("/collective_rpc", body, timeout=timeout)["results"]
        return results

    def session(self) -> httpx.AsyncClient:
        """Return what many requests can be open in at once."""
        return httpx.AsyncClient(**self._settings)

    async def generate(self, session: httpx.AsyncClient, body: dict[str, Any]) -> bytes:
        """Ask for one response and return the JSON of the answer; see `post`.

        Args:
            session: An open `session` of this client.
            body: Of `GENERATE`.
        """
        try:
            answer = await session.post(GENERATE, json=body)
        except httpx.TransportError as error:
            raise _unanswered(GENERATE, error) from error
        self._check(answer)
        return answer.content


def _unanswered(path: str, error: Exception) -> EngineFailure:
    reason = f"{type(error).__name__}: {error}"
    return EngineFailure(f"the vLLM server did not answer {path} ({reason})")
