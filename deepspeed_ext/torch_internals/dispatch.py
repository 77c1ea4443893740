"""What torch's dispatcher and autograd keep to themselves: schemas, keys, what is under way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch._library.utils as _library_utils
import torch.utils._pytree as _pytree
from torch._library.autograd import Info, make_autograd_impl
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchKeySet", "OpOverload", "TorchDispatchMode"]

# OpOverload is the class of torch.ops.x.y.z, which has no public name. TorchDispatchMode sees all
# calls of ops; torch documents it, and has it in a private module only.

# The class of what a kernel that is registered with with_keyset=True gets.
DispatchKeySet = torch._C.DispatchKeySet
# Reads a schema, as a definition of an op does, which does not give it away.
parse_schema = torch._C.parse_schema
# The schema of an OpOverload; what is public about it is its text.
schema_of: Callable[[Any], Any] = attrgetter("_schema")
# Whether a schema has a tensor among its keyword-only arguments, which autograd does not see; by
# torch's own rules.
has_kwarg_only_tensors = _library_utils.has_kwarg_only_tensors
# Whether the type of an argument is a list of tensors; likewise.
is_tensorlist_like_type = _library_utils.is_tensorlist_like_type
# What an OpOverload calls, which torch.ops wraps once more. `replace_callee` puts another there.
callee_of: Callable[[OpOverload], Callable[..., Any]] = attrgetter("_op")
# A context in which ops go past autograd; torch.no_grad only lets it record nothing.
below_autograd = torch._C._AutoDispatchBelowAutograd
# What torch.set_grad_enabled calls: in C alone, so Ctrl-C comes before it or after it.
set_grad_mode = torch._C._set_grad_enabled
# The keys of the dispatcher after autograd's, to redispatch to.
AFTER_AUTOGRAD = torch._C._after_autograd_keyset
# Whether a tensor among arguments, or in lists among them, requires a gradient: in C++, where a
# loop in Python would take as long as a small op.
any_requires_grad = torch._C._any_requires_grad
# Whether a transform of torch.func is under way, such as grad or vmap.
is_in_transform = torch._C._are_functorch_transforms_active
# aten's op behind `Tensor.to`, that stand-ins answer.
TO_COPY = torch.ops.aten._to_copy.default
# Sets all tensors of a list to 0: what `zero_grad(set_to_none=False)` calls.
FOREACH_ZERO_ = torch.ops.aten._foreach_zero_.default
# Has a function called at the end of the backward that is under way, as fully_shard does itself.
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
# int8 @ int8 with sums in int32; no public function multiplies integers on a GPU.
int8_matmul = torch._int_mm
# float8 @ float8 with a scale for each row; torch.nn.functional.scaled_mm names the scaling in
# other words, and calls the same.
float8_matmul = torch._scaled_mm
# Walk through lists, tuples and dicts as torch's own code does; its only module for that is
# private.
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map


def replace_callee(op: OpOverload, call: Callable[..., Any]) -> None:
    """Let an op call something else; see `callee_of`."""
    op._op = call


def autograd_kernel(
    op: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    """Return the kernel that register_autograd would register, at a third of its time.

    That one asks the schema again at each call. Tensors in lists, which take more, are left to it.
    """
    arguments = op._schema.arguments
    if any(is_tensorlist_like_type(each.type) for each in (*arguments, *op._schema.returns)):
        return make_autograd_impl(op, Info(backward, setup_context))
    # The dispatcher takes away what is equal to a default.
    defaults = [each.default_value for each in arguments if not each.kwarg_only]
    options = {each.name: each.default_value for each in arguments if each.kwarg_only}

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: tuple[DispatchKeySet, dict[str, Any]], *args: Any) -> Any:
            keyset, keywords = call
            with below_autograd():
                output = op.redispatch(keyset & AFTER_AUTOGRAD, *args, **keywords)
                values: dict[str, Any] = {"inputs": (*args, *defaults[len(args) :])}
                if options:
                    values["keyword_only_inputs"] = {**options, **keywords}
                with _of_op(ctx):
                    setup_context(ctx=ctx, output=output, **values)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with _of_op(ctx):
                made = backward(ctx, *grads)
            return (None, *made) if isinstance(made, tuple) else (None, made)

    def kernel(keyset: DispatchKeySet, *args: Any, **keywords: Any) -> Any:
        return Recorded.apply((keyset, keywords), *args)  # type: ignore[no-untyped-call]

    return kernel


@contextmanager
def _of_op(ctx: Any) -> Iterator[None]:
    """Let a context of `Recorded` tell of the op's arguments, before which it has one of ours."""
    ctx.needs_input_grad = ctx.needs_input_grad[1:]
    try:
        yield
    finally:
        ctx.needs_input_grad = (False, *ctx.needs_input_grad)


def is_in_forward_mode() -> bool:
    """Tell whether a level of dual numbers is open; forward_ad tells of one tensor."""
    return forward_ad._current_level >= 0


def has_tangents() -> bool:
    """Tell whether tangents are looked at; torch.func turns them off in places."""
    return is_in_forward_mode() and torch._C._is_fwd_grad_enabled()


def saved_tensors_hooks_here() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the innermost hooks that pack and unpack what autograd saves in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def accumulates(node: Any) -> bool:
    """Tell whether the backward that is under way gives a leaf its gradient by this node of it.

    False where it hands the gradient to who asked by autograd.grad, or does not want it.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # which it raises of a leaf that autograd.grad was asked for
        return False


def keeps_graph() -> bool:
    """Tell whether the graph of the backward that is under way can be gone through once more."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def current_backward() -> int:
    """Return the number of the backward that this thread runs, or -1; nothing public tells."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Tell whether this thread runs a backward, as a forward that is run anew for it does."""
    return current_backward() != -1
