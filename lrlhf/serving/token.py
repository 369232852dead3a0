"""The bearer token, as the service checks it: compared in constant time, and not left out."""

from __future__ import annotations

import hmac
import ipaddress

from lrlhf.rewards.remote.service_token import DEFAULT_TOKEN_ENV


def is_accepted(header: str | None, token: str) -> bool:
    """Compare an ``Authorization`` header with the token, in a time that tells nothing of it."""
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), token.encode())
    return same and scheme.lower() == "bearer"


def check_exposure(host: str, token: str | None) -> None:
    """Make sure that a service without a token is reached from its own machine only.

    Raises:
        ValueError: It would be reached from elsewhere.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"host is {host!r}, so that other machines reach the service, and it has no token: set "
            f"the environment variable {DEFAULT_TOKEN_ENV}, or token_file, or take 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
