"""What the trainer asks of a vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx

from lrlhf.rollout.engine import Response
from lrlhf.rollout.synced_engine import EngineFailure
from lrlhf.rollout.vllm.base import read_response


class ServerClient:
    """Talks HTTP to a server; any trouble on the way is an `EngineFailure`.

    Args:
        url: Of the server, without a path.
        token: Shown with every request.
        concurrency: Requests that are open at the same time.
    """

    def __init__(self, url: str, token: str, *, concurrency: int) -> None:
        self.url = url.rstrip("/")
        self._concurrency = concurrency
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            limits=httpx.Limits(max_connections=concurrency + 4, max_keepalive_connections=32),
            timeout=httpx.Timeout(30.0, read=None, pool=None),
            # a proxy of the environment is not meant for a server of one's own
            trust_env=False,
        )

    def close(self) -> None:
        """Break off what is still open."""
        self._http.close()

    def is_healthy(self, *, timeout: float = 5.0) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            return self._http.get("/health", timeout=timeout).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send a request and return the JSON of the answer; None if it is empty.

        Args:
            path: Route, with its query.
            body: JSON.
            timeout: Seconds until the answer; None: without an end.

        Raises:
            EngineFailure: The server is gone, took too long, or failed.
            ValueError: It refuses what was asked.
            PermissionError: It wants another token.
        """
        try:
            answer = self._http.post(
                path, json=body, timeout=httpx.Timeout(30.0, read=timeout, pool=None)
            )
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            reason = f"{type(error).__name__}: {error}"
            raise EngineFailure(f"the vLLM server did not answer {path} ({reason})") from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise PermissionError(
                f"the vLLM server at {self.url} wants another token: set VLLM_API_KEY here to the "
                "one that the server was started with"
            )
        if answer.is_server_error or answer.status_code == httpx.codes.NOT_FOUND:
            raise EngineFailure(
                f"the vLLM server answered {path} with {answer.status_code}: {answer.text[:500]}"
            )
        if answer.is_error:
            raise ValueError(f"the vLLM server refused {path}: {answer.text[:500]}")
        return answer.json() if answer.content else None

    def call_workers(self, method: str, *args: str, timeout: float | None = None) -> list[Any]:
        """Call a method of every worker and return their results."""
        body = {"method": method, "args": list(args)}
        results: list[Any] = self.post("/collective_rpc", body, timeout=timeout)["results"]
        return results

    def complete(
        self, bodies: Sequence[dict[str, Any]], prompts: Sequence[list[int]], *, stall: float
    ) -> list[Response]:
        """Ask for one completion per body, all at once, and return them in that order.

        Args:
            bodies: Of ``/v1/completions``.
            prompts: Token ids of each, to compare with what the server says it read.
            stall: Seconds without any completion after which the server counts as hung.

        Raises:
            EngineFailure: The server failed, hung, or broke a response off.
            ValueError: It refuses a request.
        """
        threads = ThreadPoolExecutor(min(self._concurrency, len(bodies)), "vllm-request")
        try:
            futures = [threads.submit(self.post, "/v1/completions", body) for body in bodies]
            self._wait(futures, stall)
            answers = [future.result() for future in futures]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        return [_read(answer, prompt) for answer, prompt in zip(answers, prompts, strict=True)]

    def _wait(self, futures: Sequence[Future[Any]], stall: float) -> None:
        left = set(futures)
        while left:
            done, left = wait(left, timeout=stall, return_when=FIRST_COMPLETED)
            if not done:
                raise EngineFailure(
                    f"the vLLM server finished no response in {stall:g} s (engine.stall_timeout)"
                )
            for future in done:
                # the first trouble ends the wait
                future.result()


def _read(answer: dict[str, Any], prompt: list[int]) -> Response:
    choice = answer["choices"][0]
    if choice["prompt_token_ids"] != prompt:
        raise EngineFailure("vLLM answered another prompt than the one it was given")
    return read_response(
        choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
    )
