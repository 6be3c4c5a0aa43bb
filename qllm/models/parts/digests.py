"""Digests of the source of functions, by which parts of models are recognised."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

MOE_NAMES = {"block_sparse_moe": "mlp", "moe": "mlp", "feed_forward": "mlp"}
"""The name in digests for the submodule with experts, by its name in a model."""


class _Normal(ast.NodeTransformer):
    """A rewriter of syntax trees.

    It drops annotations, docstrings, and the name of the submodule with experts.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns, node.decorator_list = "f", None, []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = MOE_NAMES.get(node.attr, node.attr)
        return node


def fingerprint(module: nn.Module) -> str:
    """Return a digest of a class's forward, names normalised; empty without source."""
    return source_digest(inspect.unwrap(type(module).forward))


def forward_source(module: nn.Module) -> str:
    """Return the source of the forward of a module's class.

    Raises:
        OSError: The class has no source.
    """
    return _source(inspect.unwrap(type(module).forward))


@cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


@cache
def source_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's source, names normalised; empty if it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    text = ast.unparse(_Normal().visit(tree))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
