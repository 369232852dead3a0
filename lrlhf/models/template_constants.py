"""What a chat template knows by name: roles, and marks by which it takes contents apart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from jinja2 import TemplateSyntaxError, meta, nodes

from lrlhf.bounded_templates import BoundedEnvironment

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins what the assistant writes, as `transformers` knows it."""

_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_WRITTEN = (nodes.Output, nodes.Concat, nodes.Add, nodes.CondExpr)
"""Nodes whose constants are what a template writes, not what it looks for."""

_LOOKING = (nodes.Compare, nodes.Getitem, nodes.Filter, nodes.Test)


class TemplateConstants(NamedTuple):
    """Texts in the expressions of a chat template."""

    roles: frozenset[str] = frozenset()
    """What it compares roles with, or has a table for."""
    marks: tuple[str, ...] = ()
    """What it looks for in texts, such as ``</think>``; words and white space alone are none."""
    variables: frozenset[str] = frozenset()
    """What it reads beside the turns, such as ``enable_thinking``."""


@lru_cache(maxsize=32)
def template_constants(template: str) -> TemplateConstants:
    """Find the constants of a template; none where it cannot be parsed, as rendering will tell."""
    # which computes no constants of any size
    environment = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        tree = environment.parse(_TAGS.sub("", template))
    except TemplateSyntaxError:
        return TemplateConstants()
    roles = {
        text
        for node in tree.find_all(_LOOKING)
        if any(map(_names_role, node.find_all(nodes.Node)))
        for text in _texts(node.find_all(nodes.Const))
    }
    tables = {text for pair in tree.find_all(nodes.Pair) for text in _texts([pair.key])}
    sought = {
        text
        for node in tree.find_all(nodes.Node)
        if not isinstance(node, _WRITTEN)
        and not (isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name))
        for text in _texts(node.iter_child_nodes())
        if len(text.strip()) > 1 and re.search(r"[^\w\s]", text)
    }
    return TemplateConstants(
        frozenset(roles | tables),
        tuple(sorted(sought, key=len, reverse=True)),
        frozenset(meta.find_undeclared_variables(tree)),
    )


def _texts(children: Iterable[nodes.Node]) -> list[str]:
    return [
        child.value
        for child in children
        if isinstance(child, nodes.Const) and isinstance(child.value, str)
    ]


def _names_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name):
        return "role" in node.name
    return "role" in (getattr(node, "attr", ""), getattr(node, "value", ""))
