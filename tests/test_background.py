"""Work beside the main thread."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading

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


def test_a_task_that_ends_the_process_does_not_end_the_event_loop() -> None:
    loop = EventLoop("test")

    async def leaves() -> None:
        await asyncio.gather(_leave(), asyncio.sleep(60))

    waiting = loop.submit(asyncio.sleep(0.2, "waited"))
    leaving = loop.submit(leaves())
    assert waiting.result(10) == "waited"
    assert loop.submit(asyncio.sleep(0, "after")).result(10) == "after"
    leaving.cancel()


async def _leave() -> None:
    sys.exit(3)


def test_a_closed_event_loop_has_ended_its_thread_and_starts_anew_when_used() -> None:
    loop = EventLoop("closed")
    unfinished = loop.submit(asyncio.sleep(60))
    assert loop.submit(asyncio.sleep(0, "before")).result(10) == "before"
    loop.close(10)
    assert unfinished.cancelled()
    assert "closed" not in {thread.name for thread in threading.enumerate()}
    loop.close(10)
    assert loop.submit(asyncio.sleep(0, "after")).result(10) == "after"
