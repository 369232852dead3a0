"""The process of an `IsolatedReward`: started as a script, with no more than Python.

It imports nothing of the library, so that a plain function starts in a tenth of a second and has
the memory for itself. Replies are lines of JSON; the parent trusts nothing in them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import pickle
import pkgutil
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

_GRACE_S = 5
_LOADING_BYTES = 16 * 2**30
"""Address space for the imports on top of the limit: libraries reserve more than they use."""
_LARGEST = 3.4028234663852886e38
"""Of float32."""
_MAX_SHOWN = 60
_MAX_TRACEBACK = 4000


class Child:
    """Loads one reward function, and calls it for each request of the parent.

    A request is a pickle, a reply is a line of JSON.
    """

    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._process = os.getpid()
        self._number = 0
        self._function: Callable[..., Any]

    def run(self) -> None:
        """Serve until the parent closes the connection."""
        start = self._read()
        if start is None or not self._load(start):
            return
        while (request := self._read()) is not None:
            self._reply(self._call(request))

    def _load(self, start: Mapping[str, Any]) -> bool:
        """Report to the parent which arguments the function takes, or why there is none."""
        sys.path[:] = start["path"]
        memory = start["memory_bytes"]
        if memory is not None:
            _limit_memory(memory + _LOADING_BYTES)
        try:
            self._function = _loaded(start["function"])
            # a `RewardFunction` is known by its library, which is not imported here
            library = sys.modules.get("lrlhf.rewards.function")
            if library is not None and isinstance(self._function, library.RewardFunction):
                self._function.prepare()
            parameters = inspect.signature(self._function).parameters.values()
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent reports it
            self._reply(_failure(error))
            return False
        everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        named = [p.name for p in parameters if p.kind in _BY_NAME]
        required = [p.name for p in parameters if p.name in named and p.default is p.empty]
        if memory is not None:
            _limit_memory(memory + _address_space())
        self._reply({"takes": None if everything else named, "requires": required})
        return True

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        metrics: list[tuple[str, float]] = []
        extras: dict[str, list[Any]] = {}

        # as `Journal` checks: the function may catch what it logged wrongly, the parent would
        # have to drop the reply
        def log_metric(name: str, value: float) -> None:
            number = float(value)
            if not abs(number) <= _LARGEST:  # nor NaN
                raise ValueError(
                    f"log_metric({name!r}, {value!r}): the value must be a finite number"
                )
            metrics.append((str(name), number))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            entries = list(values)
            if len(entries) != request["count"]:
                raise ValueError(
                    f"log_extra({column!r}): {len(entries)} values for {request['count']} "
                    "responses; give one value per response"
                )
            extras[str(column)] = json.loads(json.dumps(entries, default=_described))

        loggers = {"log_metric": log_metric, "log_extra": log_extra}
        arguments = request["arguments"] | {name: loggers[name] for name in request["loggers"]}
        if segments := request.get("segments"):
            completions = zip(arguments["completions"], segments, strict=True)
            arguments["completions"] = [_with_segments(*each) for each in completions]
        # should the parent be gone, the kernel ends the call
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + _GRACE_S)
        try:
            returned = self._function(**arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            values = _plain(returned)
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent reports it
            return _failure(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return {"values": values, "metrics": metrics, "extras": extras}

    def _read(self) -> Any:
        """Return the parent's next request, None at the end.

        A pickle is read here, and only here: it comes from the parent, never the other way.
        """
        try:
            request = pickle.load(self._requests)
        except (EOFError, pickle.UnpicklingError):  # the parent may end in the midst of one
            return None
        self._number = request["number"]
        return request

    def _reply(self, reply: Mapping[str, Any]) -> None:
        if os.getpid() != self._process:
            os._exit(0)  # a fork, which returned from the function too: one of them answers
        self._replies.write(json.dumps({**reply, "number": self._number}).encode() + b"\n")
        self._replies.flush()


class _Text(str):
    """A completion with its segments: pairs of a text and whether the policy wrote it."""

    segments: Sequence[tuple[str, bool]]


class _Turns(list[Any]):
    """The same of a chat."""

    segments: Sequence[tuple[str, bool]]


def _with_segments(completion: Any, segments: Sequence[tuple[str, bool]] | None) -> Any:
    if segments is None:
        return completion
    known = _Text(completion) if isinstance(completion, str) else _Turns(completion)
    known.segments = segments
    return known


_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _loaded(source: str | bytes) -> Callable[..., Any]:
    if isinstance(source, bytes):
        function = pickle.loads(source)
    elif ".py:" in source:
        # by itself, without the package that the file lies in
        path, name = source.rsplit(":", 1)
        function = runpy.run_path(path, run_name=f"{name} alone")[name]
    else:
        function = pkgutil.resolve_name(source)
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise TypeError(f"{source!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


async def _awaited(result: Any) -> Any:
    return await result


def _plain(returned: Any) -> Any:
    """Return values as JSON has them; what is no number as text, for the parent's message."""
    returned = _listed(returned)
    if not isinstance(returned, list | tuple):
        return _described(returned)
    entries = [_listed(entry) for entry in returned]
    return [
        entry if entry is None or isinstance(entry, int | float) else _described(entry)
        for entry in entries
    ]


def _listed(value: Any) -> Any:
    """Return a tensor or array as Python numbers, if those libraries are loaded at all."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    is_array = numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)
    return value.tolist() if is_tensor or is_array else value


def _described(value: Any) -> str:
    text = repr(value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return f"{shown} ({type(value).__name__})"


def _failure(error: BaseException) -> dict[str, str]:
    """Describe an exception, with the end of the traceback."""
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        return {"error": f"the function called sys.exit({error.code!r})", "kind": kind}
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
        return {"error": text[-_MAX_TRACEBACK:], "kind": kind, "message": str(error)}
    except MemoryError:
        return {"error": "MemoryError", "kind": kind}


def _limit_memory(value: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))


def _address_space() -> int:
    """Return the bytes that are mapped now, 0 where that is unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  before pathlib
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Serve on the two pipes whose numbers are the arguments."""
    requests, replies = (int(number) for number in sys.argv[1:3])
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, "rb") as source, os.fdopen(replies, "wb") as target:
        Child(source, target).run()


if __name__ == "__main__":
    main()
