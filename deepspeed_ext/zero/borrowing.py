"""Errors of modules that use a weight of another block, which that block alone gathers."""

import ast
import linecache
from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType

from torch import nn

from deepspeed_ext.dtensors import is_dtensor
from deepspeed_ext.torch_internals.modules import modules_of, parameters_of

_SHOWN = 8  # blocks in an error


def name_borrowed(error: BaseException, model: nn.Module, blocks: tuple[str, ...]) -> None:
    """Add to what torch says of a shard among whole tensors which parameter it is, and what to do.

    Args:
        error: that has ended the forward of the model.
        model: whose gathered parameters are whole now, and all others shards.
        blocks: names of modules with a group of their own.
    """
    if "mixed torch.Tensor and DTensor" not in str(error):
        return
    shards = ((name, param) for name, param in model.named_parameters() if is_dtensor(param))
    names = {id(param): name for name, param in shards}
    name = next((names[key] for key in _used(error) if key in names), "")
    inside = [block for block in blocks if name.startswith(f"{block}.")]
    if inside:
        block = max(inside, key=len)
        others = [each for each in blocks if each != block]
        what = f"parameter {name!r} is used outside of its block {block!r}, which alone gathers it"
        fix = (
            f"leave the block out, as by blocks={others}"
            if len(others) <= _SHOWN
            else ("leave that block out of zero.shard's blocks=")
        )
    else:
        what = "a module has used a parameter of a block that was not gathered"
        fix = f"leave its block out of the blocks {list(blocks[:_SHOWN])}"
    text = f"zero: {what}, expected the block itself to use it; {fix}, and it is gathered with the"
    error.args = (f"{error}\n{text} model", *error.args[1:])


def _used(error: BaseException) -> Iterator[int]:
    """Yield ids of the values in the lines that have led to an error, those of the last first."""
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        for node in ast.walk(_statement(frame.f_code.co_filename, line)):
            value = _value(node, frame) if isinstance(node, ast.expr) else None
            yield from map(id, value if isinstance(value, list | tuple) else (value,))


def _statement(path: str, line: int) -> ast.AST:
    """Return the innermost statement of a file that has this line; an empty one if unknown."""
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Pass()
    found: ast.AST = ast.Pass()
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def _value(node: ast.expr, frame: FrameType) -> object:
    """Return what a name, an attribute or an item of a module is, without running any code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        if isinstance(owner, nn.Module):
            kept = (vars(owner), parameters_of(owner), modules_of(owner))
            return next((each[node.attr] for each in kept if node.attr in each), None)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, frame), _value(node.slice, frame))
    return None


def _item(owner: object, key: object) -> object:
    if isinstance(owner, nn.ModuleList | nn.Sequential | nn.ParameterList) and type(key) is int:
        owner = list(owner.children()) or list(owner.parameters())
    elif isinstance(owner, nn.ModuleDict | nn.ParameterDict):
        owner = {**modules_of(owner), **parameters_of(owner)}
    try:
        if type(owner) in (list, tuple, dict):
            return owner[key]  # type: ignore[index]
    except (LookupError, TypeError):
        pass
    return None
