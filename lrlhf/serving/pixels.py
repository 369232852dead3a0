"""Room for decoded media, which may take ten thousand times as much as their files."""

from __future__ import annotations

import threading

from lrlhf.serving.refused import RefusedRequestError


class PixelRoom:
    """Shares the pixels that may be held among requests, first come first served.

    Args:
        most: Pixels at a time; a request that has more is alone.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    def take(self, pixels: int) -> None:
        """Wait until there is room.

        Raises:
            RefusedRequestError: The service ends.
        """
        # one after the other: a large request would wait for ever behind small ones
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._closed or self._needed(pixels) <= self._free)
            if self._closed:
                raise RefusedRequestError(
                    "the service ends", status=503, reason="closing", retry_after=5
                )
            self._free -= self._needed(pixels)

    def release(self, pixels: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._free += self._needed(pixels)
            self._changed.notify_all()

    def close(self) -> None:
        """Send away whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _needed(self, pixels: int) -> int:
        return min(pixels, self._most)
