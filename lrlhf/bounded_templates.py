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
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from itertools import chain
from string import Formatter
from typing import Any, Final, TypeVar

import psutil
from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
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
_MAX_WIDTH: Final = 999
_MAX_PIECES: Final = 2**20
"""Of a text that becomes a list; a letter takes fifty bytes there."""
_LONGEST_DATE: Final = 32
"""Letters that one of a format becomes."""
_WIDTH: Final = re.compile(r"\d{4}")
_WIDTHS: Final = re.compile(r"%[-+ #\d.]*(?:\d{4}|\*)")
"""In a format: what pads to more than that, or to as many letters as an argument says."""
_NAMED_WIDTHS: Final = re.compile(r"\)[-+ #\d.]*\d{4}")
"""The same behind a name, as in ``%(name)9999d``."""
_UNSAFE: Final = frozenset({"encode", "to_bytes", "translate"})
"""Methods no chat template needs: bytes have methods of their own that make much of little."""
_ELEMENTS: Final = frozenset(
    re.findall(
        r"\w+",
        "abs attr batch count d default dictsort first float groupby int items last length list"
        " map max min random reject rejectattr reverse round select selectattr slice sort unique",
    )
)
"""Filters that make no text of their value, and no sum."""
_HOLDERS: Final = (list, tuple, Mapping, Set, ValuesView)


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
    """Compiles ``a ~ b`` and ``{{ a }}`` so that what becomes text is measured before."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        joining = "markup_join" if frame.eval_ctx.autoescape else "str_join"
        if frame.eval_ctx.volatile:
            joining = "(markup_join if context.eval_ctx.autoescape else str_join)"
        self.write(f"{joining}(environment.measured((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._write_measured(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._write_measured(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._write_measured(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _write_measured(self, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        """Have a value measured that may hold another many times over, by which it is compared."""
        self.write("environment.measured(")
        visit(node, frame)
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self.write("environment.measured(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)


class _Filters(dict[str, Any]):
    """Filters that are bounded, those too that somebody sets later."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded_filter(name, function))


def _concat(blocks: Iterable[str]) -> str:
    """Join what a template, a macro or a block writes."""
    letters, pieces = 0, []
    for block in blocks:
        letters += len(block)
        _check_size(letters)
        pieces.append(block)
    return "".join(pieces)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template takes no more than so much time and memory."""

    template_class = _BoundedTemplate
    code_generator_class = _Generator
    concat = staticmethod(_concat)
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Say whether a template may have an attribute."""
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def measured(value: ResultT) -> ResultT:
        """Return what becomes a text, unless that is too long."""
        _check_size(_weight(value))
        return value

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        """Compile a template."""
        _check_size(16 * len(source) if isinstance(source, str) else 0)
        return super().from_string(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what may become large at once."""
        if operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            _check_size(_weight(left) + _weight(right))
        elif operator == "**":
            _check_bits(_bits(left) * _number(right))
        elif operator == "*":
            texts = [each for each in (left, right) if hasattr(each, "__len__")]
            if texts:
                _check_size(_weight(texts[0]) * max(_number(left), _number(right)))
            else:
                _check_bits(_bits(left) + _bits(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Find the ``format`` of a text, which is refused with a large or a computed width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        for _, _, width, _ in Formatter().parse(text):
            if width and ("{" in width or _WIDTH.search(width)):
                raise _padding()

        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_pieces(text.count("{"), [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return functools.wraps(wrapped)(bounded)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a method, of a text only with numbers that are widths."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if name == "strftime_now":  # two letters of a format are a date
            _check_size(_LONGEST_DATE * _longest(args, kwargs))
        if not isinstance(owner, str):
            return super().call(__context, __obj, *args, **kwargs)
        _check_numbers(args, kwargs)
        if name == "splitlines":
            _check_pieces_of_text(_lines(owner))
        elif name in {"split", "rsplit"}:
            separator = _argument(args, kwargs, 0, "sep")
            spaces = owner.count if separator else lambda _: len(owner.split(None, _MAX_PIECES))
            _check_pieces_of_text(spaces(separator))
        elif name == "expandtabs":
            _check_size(owner.count("\t") * _longest(args, kwargs))
        elif name == "replace":
            _check_replaced(owner, args, kwargs)
        elif name == "join" and args:
            args = (_joined(owner, args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        _check_size(_length(result))
        return result


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Bound a filter.

    It gets the context, by which jinja2 does not compute it while it compiles, unwatched.
    """
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        if name == "join":
            value = _joined(str(_argument(args, kwargs, 0, "d")), value)
        elif name == "round":
            _check_bits(_longest(args, kwargs))
        elif name in {"batch", "list", "slice", "sort", "unique"} and isinstance(value, str):
            _check_pieces_of_text(len(value))
        elif name not in _ELEMENTS:
            _check_filter(name, value, args, kwargs)
        first = {"context": context, "environment": context.environment}
        first["eval_context"] = context.eval_ctx
        first_argument = [first[passed]] if passed else []
        result = function(*first_argument, value, *args, **kwargs)
        _check_size(_length(result))
        return result

    return pass_context(functools.wraps(function)(bounded))


def _check_filter(name: str, value: Any, args: Any, kwargs: Any) -> None:
    """Refuse a filter of a text, or one that makes a text, with more letters than it may have."""
    weight = _weight(value)
    _check_size(weight)
    if name == "format":
        _check_format(str(value), [*args, *kwargs.values()])
    elif name == "replace":
        _check_replaced(str(value), args, kwargs)
    elif name == "indent":
        _check_size(weight + _lines(str(value)) * _longest(args, kwargs))
    elif name == "tojson":
        _check_size(weight * max(_longest(args, kwargs), 1))
    elif name in {"urlize", "wordwrap", "xmlattr"}:
        _check_size(weight * max(_longest(args, kwargs, numbers=False), 1))


def _argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, "")


def _check_replaced(text: str, args: Any, kwargs: Any) -> None:
    old, new = (str(_argument(args, kwargs, i, name)) for i, name in enumerate(("old", "new")))
    _check_size(len(text) + text.count(old) * len(new))


def _joined(separator: str, value: Any) -> list[Any]:
    """Return what is joined, unless that makes too long a text."""
    pieces = list(value)
    _check_size(_weight(pieces) + len(separator) * len(pieces))
    return pieces


def _lines(text: str) -> int:
    return sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) + 1


def _longest(args: Any, kwargs: Any, *, numbers: bool = True) -> float:
    """The letters of the longest argument, or how many a number says."""
    values = [*args, *kwargs.values()]
    texts = [_weight(value) for value in values if hasattr(value, "__len__")]
    return max([*texts, *map(_number, values if numbers else ())], default=0)


def _check_pieces(places: int, pieces: Iterable[Any]) -> None:
    """Refuse a format whose places may be filled with more than a text may have."""
    _check_size(places * (2 * _MAX_WIDTH + max(map(_weight, pieces), default=0)))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _weight(value: Any) -> int:
    """About the letters of a value as text, with what it holds; not counted on beyond the most."""
    if isinstance(value, str):
        return len(value)
    letters = 0
    rest: list[Any] = [(value,)]
    while rest and letters <= MAX_LETTERS:
        holder = rest.pop()
        for each in chain(holder, holder.values()) if isinstance(holder, Mapping) else holder:
            if isinstance(each, str):
                letters += len(each)
            elif isinstance(each, _HOLDERS):
                letters += 16 + 2 * len(each)  # by which this ends soon where a few hold many
                rest.append(each)
            elif isinstance(each, Namespace):
                rest.append(each._Namespace__attrs)
                letters += 16
    return letters


def _check_numbers(args: Any, kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        _check_size(_number(value))


def _check_format(text: str, pieces: Iterable[Any]) -> None:
    """Refuse a format with ``%`` that may become too long."""
    if _WIDTHS.search(text) or ("%(" in text and _NAMED_WIDTHS.search(text)):
        raise _padding()
    _check_pieces(text.count("%"), pieces)


def _check_pieces_of_text(pieces: int) -> None:
    """Refuse a text of so many pieces that a list of them would take gigabytes."""
    if pieces >= _MAX_PIECES:
        raise TemplateError(f"the template cuts a text into more than {_MAX_PIECES:,} pieces")


def _padding() -> TemplateError:
    return TemplateError("the template pads to more letters than anybody reads")


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
