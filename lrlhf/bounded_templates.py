"""Templates of strangers: a chat template comes with a model, and is a program.

The sandbox of jinja2 keeps it from the files and objects of the process, and not from its time and
memory: ten loops of a thousand are a line. Here a rendering has so many seconds of its thread, and
so many letters. A row costs some ten microseconds more.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import psutil
from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

__all__ = ["MAX_LETTERS", "MAX_SECONDS", "BoundedEnvironment", "render_jinja_template"]
ResultT = TypeVar("ResultT")

MAX_SECONDS: Final = 10.0
"""Of the processor, for one rendering; a large conversation takes a hundredth of a second."""
MAX_LETTERS: Final = 2**24
"""Of what is rendered, and of a text on the way there."""
_MAX_BYTES: Final = 2**31
"""By which the process may grow while a template that takes long is rendered."""
_LONG_SECONDS: Final = 0.3
_POLL_SECONDS: Final = 0.1
_MAX_BITS: Final = 64
"""Of a number."""
_WIDTHS: Final = re.compile(r"%[-+ #\d.]*(?:\d{6}|\*)|\{[^}]*:[^}]*(?:\d{6}|\{)")
"""In a format: what pads to a million letters, or to as many as an argument says."""


class _OverdueError(Exception):
    """Raised in a thread that renders, by the one that watches it."""


class _Budget:
    """What is left of the time of one rendering."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.clock = time.pthread_getcpuclockid(self.thread)
        self.began = time.clock_gettime(self.clock)
        self.bytes = 0
        """Of the process, when the rendering had taken long."""
        self.problem = ""

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Call something that this thread is kept from doing for too long.

        Raises:
            TemplateError: It took longer, or too much memory.
        """
        try:
            try:
                _watched.add(self)
                result = call()
            finally:
                _watched.remove(self)
            if self.problem:  # which is on its way to this thread
                raise _OverdueError
        except _OverdueError:
            _watched.remove(self)
            _raise_in(self.thread, None)
            raise TemplateError(f"the template {self.problem}") from None
        return result

    def spent(self) -> str:
        """Say what was taken too much of; empty: nothing."""
        seconds = time.clock_gettime(self.clock) - self.began
        if seconds > MAX_SECONDS:
            return f"takes longer than {MAX_SECONDS:g} s"
        if seconds < _LONG_SECONDS:
            return ""
        size = psutil.Process().memory_info().rss
        self.bytes = self.bytes or size
        return "takes gigabytes of memory" if size > self.bytes + _MAX_BYTES else ""


class _Watched:
    """Renderings that take place, and a thread that looks at them as long as there are some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: set[_Budget] = set()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, budget: _Budget) -> None:
        with self._lock:
            self._budgets.add(budget)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="templates", daemon=True)
                self._thread.start()
        if not self._some.is_set():
            self._some.set()

    def remove(self, budget: _Budget) -> None:
        """Nothing is raised for it any more when this returns."""
        with self._lock:
            self._budgets.discard(budget)

    def _look(self) -> None:
        while True:
            self._some.wait()
            time.sleep(_POLL_SECONDS)
            with self._lock:
                for budget in self._budgets:
                    if not budget.problem and (problem := budget.spent()):
                        budget.problem = problem
                        _raise_in(budget.thread, _OverdueError)
                if not self._budgets:
                    self._some.clear()


_watched = _Watched()


def _forget() -> None:
    """A forked process has no thread that watches."""
    global _watched
    _watched = _Watched()


os.register_at_fork(after_in_child=_forget)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise an error in a thread, or None: take back what it has not noticed yet."""
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


class _BoundedTemplate(Template):
    """A template whose rendering ends."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        text = _Budget().run(lambda: super(_BoundedTemplate, self).render(*args, **kwargs))
        _check_size(len(text))
        return text

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        budget, blocks, letters = _Budget(), super().generate(*args, **kwargs), 0
        while (block := budget.run(lambda: next(blocks, None))) is not None:
            letters += len(block)
            _check_size(letters)
            yield block


class _Generator(CodeGenerator):
    """Compiles ``a ~ b`` so that the text is measured."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.measured(")
        super().visit_Concat(node, frame)
        self.write(")")


def _concat(blocks: Iterable[str]) -> str:
    """Join what a template, a macro or a block writes."""
    letters, taken = 0, []
    for block in blocks:
        letters += len(block)
        _check_size(letters)
        taken.append(block)
    return "".join(taken)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template takes no more than so much time and memory."""

    template_class = _BoundedTemplate
    code_generator_class = _Generator
    concat = staticmethod(_concat)
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("batch", "center", "format", "indent", "join", "replace", "wordwrap"):
            self.filters[name] = _bounded_filter(name, self.filters[name])

    @staticmethod
    def measured(text: str) -> str:
        """Return a text that was made of bounded ones, unless it is too long."""
        _check_size(len(text))
        return text

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """Compile a template."""
        _check_size(16 * len(source) if isinstance(source, str) else 0)
        return super().from_string(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what may become large at once."""
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_pieces(left.count("%"), right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "**":
            _check_bits(_bits(left) * _number(right))
        elif operator == "*":
            texts = [one for one in (left, right) if hasattr(one, "__len__")]
            if texts:
                _check_size(len(texts[0]) * max(_number(left), _number(right)))
            else:
                _check_bits(_bits(left) + _bits(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Find the ``format`` of a text, which is refused with a large or a computed width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        _check_format(text)

        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_pieces(text.count("{"), [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return functools.wraps(wrapped)(bounded)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a method, of a text only with numbers that are widths."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _measured_arguments(getattr(__obj, "__name__", ""), owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Bound a filter, which may have the environment or the like before its value."""
    first = int(hasattr(function, "jinja_pass_arg"))

    def bounded(*given: Any, **kwargs: Any) -> Any:
        passed, value, args = given[:first], given[first], given[first + 1 :]
        if name == "join":
            separator = args[0] if args else kwargs.get("d", "")
            (value,) = _measured_arguments(name, str(separator), (value,), {})
        elif isinstance(value, str):
            args = _measured_arguments(name, value, args, kwargs)
        return function(*passed, value, *args, **kwargs)

    return functools.wraps(function)(bounded)  # with jinja2's mark of what it passes first


def _measured_arguments(
    name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a method or filter of a text, unless what it makes is too long."""
    _check_numbers(args, kwargs)
    if name == "format":
        _check_format(text)
        _check_pieces(text.count("%") + text.count("{"), [*args, *kwargs.values()])
    elif name == "replace" and len(args) > 1:
        _check_size(len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args:
        pieces = list(args[0])
        _check_size(sum(len(text) + _length(piece) for piece in pieces))
        return (pieces, *args[1:])
    return args


def _check_pieces(places: int, pieces: Iterable[Any]) -> None:
    """Refuse a format whose places may be filled with more than a text may have."""
    _check_size(places * max(map(_length, pieces), default=0))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _check_numbers(args: Any, kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        _check_size(_number(value))


def _check_format(text: str) -> None:
    if _WIDTHS.search(text):
        raise TemplateError("the template pads to more letters than anybody reads")


def _check_size(letters: float) -> None:
    if letters > MAX_LETTERS:
        raise TemplateError(f"the template makes more than {MAX_LETTERS:,} letters")


def _check_bits(bits: float) -> None:
    if bits > _MAX_BITS:
        raise TemplateError(f"the template has a number of more than {_MAX_BITS} bits")


def _number(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else 0


def _bits(value: Any) -> float:
    return value.bit_length() if isinstance(value, int) else 1


# by which `transformers` compiles the chat template of every tokenizer and processor
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[attr-defined]
