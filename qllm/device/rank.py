"""Compiler of a policy's `rank`: for the host with numba, for the device to LTO-IR with numba-cuda.

`rank` is a small language: whole numbers, `+ - * // % << >> & | ^`, comparisons, `and or not`,
`if`, assignments, `min`, `max`, `abs`, whole-number fields of the policy and of its module. All
other code is refused, with its line in the error. The result is one C function

    void qllm_rank(i64 arrival_ns, i64 priority, i64 deadline_ns, i64 prompt_tokens,
                   i64 done_tokens, i64 served_ns, i64 now_ns, i64 *out)   // out = {tier, key}

on 64-bit integers that wrap. A division by zero gives 0 in this function. In Python it raises.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from qllm.errors import ConfigError, pip_install
from qllm.policy import RankPolicy

SYMBOL = "qllm_rank"
ARGUMENTS = tuple(inspect.signature(RankPolicy.rank).parameters)[1:]
ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (12, 0))
"""Compute capabilities for which `qllm policies --compile` compiles."""
_CALLS = ("min", "max", "abs")
_STATEMENTS = (ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.Pass)
_EXPRESSIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call)
_SUMS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_BITS = (ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_GLUE = (ast.Load, ast.Store, ast.boolop, ast.unaryop)


class HostRank(NamedTuple):
    """A compiled `rank` of this process."""

    address: int
    owner: Any
    """Object that owns the machine code."""


_known: dict[str, HostRank] = {}
"""Compiled functions by their source, which contains all numbers."""


def compile_host(policy: Any) -> HostRank:
    """Compile the `rank` of a policy for this machine.

    Raises:
        ConfigError: The policy is no `RankPolicy`, its `rank` cannot be compiled (the message names
            the line and the reason), or numba is missing.
    """
    tree, file = rank_tree(policy)
    text = ast.unparse(tree)
    if text in _known:
        return _known[text]
    try:
        import numba
    except ImportError as error:
        raise ConfigError(
            "the native scheduler compiles the policy's rank with numba, which is not installed; "
            f"{pip_install('device')}, or use loop='host'"
        ) from error
    i64 = numba.types.int64
    signature = numba.types.void(*[i64] * len(ARGUMENTS), numba.types.CPointer(i64))
    make = numba.cfunc(signature, error_model="numpy")
    compiled = _compiled(policy, make, _function(tree, file))
    _known[text] = HostRank(compiled.address, compiled)
    return _known[text]


def compile_device(policy: Any, capability: tuple[int, int]) -> bytes:
    """Compile the `rank` of a policy to LTO-IR, to be linked into the scheduler kernel.

    The compiler needs no GPU.

    Args:
        policy: A `RankPolicy`.
        capability: Compute capability of the device, like (9, 0).

    Raises:
        ConfigError: An error of `compile_host`, or numba-cuda is missing.
    """
    tree, file = rank_tree(policy)
    try:
        import_module("numba_cuda")  # numba alone has an older numba.cuda
        from numba import cuda, types
    except ImportError as error:
        raise ConfigError(
            f"compiling for a device needs numba-cuda ({error}); {pip_install('device')}"
        ) from error
    signature = types.void(*[types.int64] * len(ARGUMENTS), types.CPointer(types.int64))

    def make(body: Callable[..., None]) -> Any:
        return cuda.compile(
            body,
            signature,
            device=True,
            abi="c",
            abi_info={"abi_name": SYMBOL},
            cc=capability,
            output="ltoir",
        )

    code, _ = _compiled(policy, make, _function(tree, file))
    return bytes(code)


def _compiled(policy: Any, make: Callable[..., Any], function: Callable[..., None]) -> Any:
    try:
        with _old_numpy_names():
            return make(function)
    except Exception as error:  # numba raises errors of many classes
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"rank of policy {type(policy).__name__} cannot be compiled: {reason}"
        ) from error


@contextmanager
def _old_numpy_names() -> Iterator[None]:
    """Add a name to numpy >= 2.5 that numba-cuda 0.30 needs to compile, inside the `with` block."""
    if hasattr(np, "row_stack"):
        yield
        return
    np.row_stack = np.vstack
    try:
        yield
    finally:
        del np.row_stack


def rank_text(policy: Any) -> str:
    """Return the source of a policy's `rank` with its numbers: the input of a compiled kernel.

    Raises:
        ConfigError: An error of `rank_tree`.
    """
    return ast.unparse(rank_tree(policy)[0])


def rank_tree(policy: Any) -> tuple[ast.Module, str]:
    """Return `rank` as a function of integers and an array for the verdict, without `self`.

    Returns:
        The syntax tree of the function, with the policy's numbers in it, and the source file.

    Raises:
        ConfigError: The policy is no `RankPolicy`, declares that it cannot be compiled, or its
            `rank` uses more than the language of this module.
    """
    name = type(policy).__name__
    if not isinstance(policy, RankPolicy):
        raise ConfigError(
            f"policy {name} plans by itself; only a RankPolicy can be compiled, so use "
            "loop='host' for it"
        )
    if not policy.compilable:
        raise ConfigError(f"policy {name} says compilable=False; use loop='host' for it")
    if policy.max_preemptions is not None:
        raise ConfigError(
            f"policy {name} has max_preemptions={policy.max_preemptions}; native decisions know no "
            "such bound, so use None, or loop='host'"
        )
    method = type(policy).rank
    try:
        lines, first = inspect.getsourcelines(method)
        file = inspect.getsourcefile(method) or "?"
    except (OSError, TypeError) as error:
        raise ConfigError(f"the source of rank of policy {name} cannot be read: {error}") from error
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    try:
        (definition,) = tree.body
        if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
            raise _RefusedError(tree.body[0], "rank must be a plain method")
        _rewrite(definition, policy, method)
    except _RefusedError as refused:
        raise ConfigError(
            f"rank of policy {name} cannot be compiled: {file}:{refused.line}: {refused}"
        ) from None
    return ast.fix_missing_locations(tree), file


def _function(tree: ast.Module, file: str) -> Callable[..., None]:
    names: dict[str, Any] = {}
    exec(compile(tree, file, "exec"), names)
    function: Callable[..., None] = names["rank"]
    return function


class _RefusedError(Exception):
    def __init__(self, node: ast.AST, reason: str) -> None:
        super().__init__(reason)
        self.line = getattr(node, "lineno", 0)


def _rewrite(definition: ast.FunctionDef, policy: RankPolicy, method: Any) -> None:
    """Check a method and rewrite it to the function that `rank_tree` returns."""
    given = [arg.arg for arg in definition.args.args]
    if len(given) != len(ARGUMENTS) + 1 or definition.args.kwonlyargs or definition.args.vararg:
        raise _RefusedError(definition, f"rank must take self, {', '.join(ARGUMENTS)}")
    me, *arguments = given
    body = definition.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]  # the docstring
    if not body or not _returns(body):
        raise _RefusedError(definition, "not every path returns a (tier, key)")
    out = "out_"
    stored = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and _is_store(n)}
    numbers = _Numbers(policy, me, {*arguments, *stored}, inspect.getclosurevars(method).globals)
    statements = [numbers.visit(statement) for statement in body]
    for statement in statements:
        _check(statement)
    definition.name = "rank"
    definition.returns = None
    definition.args.args = [ast.arg(arg) for arg in (*arguments, out)]
    definition.args.defaults = []
    definition.body = list(_stored(statements, out))


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _returns(body: Sequence[ast.stmt]) -> bool:
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _returns(last.body) and _returns(last.orelse)
    return isinstance(last, ast.Return)


class _Numbers(ast.NodeTransformer):
    """Transformer of a syntax tree that replaces names by their numbers."""

    def __init__(self, policy: RankPolicy, me: str, local: set[str], outer: Any) -> None:
        self.policy = policy
        self.me = me
        self.local = local
        self.outer = outer

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace `self.field`, or a constant of an imported module or class."""
        base = node.value
        if not isinstance(base, ast.Name):
            raise _RefusedError(node, f"{ast.unparse(node)} is not a number that is known at start")
        owner = self.policy if base.id == self.me else self.outer.get(base.id)
        return self._number(node, getattr(owner, node.attr, None))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace a constant of the module. Keep a local name."""
        if node.id in self.local:
            return node
        return self._number(node, self.outer.get(node.id))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Keep a call of `min`, `max` or `abs`. Refuse all others."""
        called = node.func
        if not isinstance(called, ast.Name) or called.id not in _CALLS or node.keywords:
            what = ast.unparse(called)
            raise _RefusedError(node, f"calls {what}; only {', '.join(_CALLS)} can be called")
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the annotation of an assignment."""
        if node.value is None or not isinstance(node.target, ast.Name):
            raise _RefusedError(node, "an annotation without a value")
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace `a ** b` of two known numbers by its value."""
        left, right = self.visit(node.left), self.visit(node.right)
        node.left, node.right = left, right
        if isinstance(node.op, ast.Pow):
            numbers: list[Any] = [x.value for x in (left, right) if isinstance(x, ast.Constant)]
            if len(numbers) == 2 and all(isinstance(n, int) and abs(n) < 64 for n in numbers):
                return self._number(node, pow(*numbers))
        return node

    def _number(self, node: ast.expr, value: Any) -> ast.AST:
        if not isinstance(value, int):
            raise _RefusedError(node, f"{ast.unparse(node)} is {value!r}, not a whole number")
        return ast.copy_location(ast.Constant(int(value)), node)


def _check(node: ast.AST) -> None:
    """Refuse syntax that is not in the language."""
    for child in ast.walk(node):
        if isinstance(child, ast.Constant):
            if not isinstance(child.value, int) or not -(2**63) <= child.value < 2**63:
                raise _RefusedError(child, f"{child.value!r} is not a 64-bit whole number")
        elif isinstance(child, ast.Assign):
            if not all(isinstance(target, ast.Name) for target in child.targets):
                raise _RefusedError(child, "only plain names can be assigned to")
        elif isinstance(child, ast.operator | ast.cmpop):
            if not isinstance(child, _SUMS + _BITS + _COMPARISONS):
                raise _RefusedError(_owner(node, child), f"uses {type(child).__name__}")
        elif isinstance(child, ast.Tuple):
            pass  # `_stored` checks the places of return statements
        elif not isinstance(child, (*_STATEMENTS, *_EXPRESSIONS, *_GLUE, ast.Name)):
            raise _RefusedError(child, f"uses {type(child).__name__}")


def _owner(tree: ast.AST, wanted: ast.AST) -> ast.AST:
    """Return the node that has an operator, because an operator itself has no line."""
    return next(n for n in ast.walk(tree) if wanted in ast.iter_child_nodes(n))


def _stored(statements: Sequence[ast.stmt], out: str) -> Iterator[ast.stmt]:
    """Yield the statements, with each `return tier, key` replaced by stores to `out`."""
    for statement in statements:
        if isinstance(statement, ast.If):
            statement.body = list(_stored(statement.body, out))
            statement.orelse = list(_stored(statement.orelse, out))
            _no_tuple(statement.test)
            yield statement
        elif isinstance(statement, ast.Return):
            yield from _verdict(statement.value, statement, out)
        else:
            _no_tuple(statement)
            yield statement


def _no_tuple(node: ast.AST) -> None:
    for child in ast.walk(node):
        if isinstance(child, ast.Tuple):
            raise _RefusedError(child, "a tuple, other than the one that is returned")


def _verdict(value: ast.expr | None, at: ast.stmt, out: str) -> Iterator[ast.stmt]:
    if isinstance(value, ast.IfExp):
        branches = [list(_verdict(v, at, out)) for v in (value.body, value.orelse)]
        yield ast.copy_location(ast.If(value.test, *branches), at)
        return
    if not isinstance(value, ast.Tuple) or len(value.elts) != 2:
        raise _RefusedError(at, "must return tier, key: two whole numbers")
    for element in value.elts:
        _no_tuple(element)
    for name, element in zip(("tier_", "key_"), value.elts, strict=True):
        yield ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], element), at)
    for i, name in enumerate(("tier_", "key_")):
        slot = ast.Subscript(ast.Name(out, ast.Load()), ast.Constant(i), ast.Store())
        yield ast.copy_location(ast.Assign([slot], ast.Name(name, ast.Load())), at)
    yield ast.copy_location(ast.Return(None), at)
