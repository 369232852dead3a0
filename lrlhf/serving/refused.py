"""What a request is answered with when it gets no scores."""

from __future__ import annotations


class RefusedRequestError(ValueError):
    """A request that is answered with a status of its own and one sentence.

    Args:
        detail: What is wrong and what to do, for the client; quotes nothing of the body but names.
        status: HTTP status.
        reason: A word or two that such answers are counted by.
        retry_after: Seconds after which it may be tried again; None: it would fail again.
    """

    def __init__(
        self, detail: str, *, status: int = 422, reason: str, retry_after: int | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


def malformed(place: str, what: str) -> RefusedRequestError:
    """Return the answer to a body that is not as the protocol has it.

    Args:
        place: Where in the body, such as ``prompts[2]``.
        what: What is wrong there.
    """
    return RefusedRequestError(f"{place}: {what}", reason="malformed")
