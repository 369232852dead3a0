"""Work beside the main thread."""

from __future__ import annotations

import asyncio
import multiprocessing

from lrlhf.background import EventLoop


def test_a_forked_process_has_an_event_loop_of_its_own() -> None:
    loop = EventLoop("test")
    assert loop.submit(asyncio.sleep(0, "before")).result(10) == "before"

    child = multiprocessing.get_context("fork").Process(target=_uses, args=(loop,))
    child.start()
    child.join(20)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert child.exitcode == 0

    assert loop.submit(asyncio.sleep(0, "after")).result(10) == "after"


def _uses(loop: EventLoop) -> None:
    assert loop.submit(asyncio.sleep(0, "in the child")).result(10) == "in the child"
