"""Define the ops in torch's registry; their native libraries are loaded, or built, on first use.

The schema stands in Python, so an op exists, traces and has a fake before anything is compiled.
Until the native kernel of a device is registered, a call lands in a Python kernel, which loads the
library of that device and calls the op again; from then on torch goes straight to the native one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deepspeed_ext.op_builder import load
from deepspeed_ext.ops._kinds import kind_problem
from deepspeed_ext.torch_internals.dispatch import (
    AFTER_AUTOGRAD,
    DispatchKeySet,
    OpOverload,
    any_requires_grad,
    autograd_kernel,
    below_autograd,
    callee_of,
    has_kwarg_only_tensors,
    has_tangents,
    is_in_forward_mode,
    is_in_transform,
    is_tensorlist_like_type,
    parse_schema,
    replace_callee,
    schema_of,
)

_NAMESPACE = "deepspeed_ext"
_FRAGMENT = torch.library.Library(_NAMESPACE, "FRAGMENT")
_CALLS: dict[Callable[..., Any], Callable[..., Any]] = {}  # of `_explained`, which takes 0.2 us
_OF_KINDS = (RuntimeError, TypeError, AttributeError)  # that calls with wrong kinds end in
_NO_MEMORY = "aoti_torch_empty_strided("  # in an error of torch: a library has made no tensor
Values = Mapping[str, object]


def define(
    schema: str,
    libraries: Mapping[str, str | Callable[..., Any]],
    *,
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    without_gradient: Sequence[str] = (),
    is_step: bool = False,
    on_host: Sequence[str] = (),
) -> OpOverload:
    """Define the op of this schema, all there is to it in Python, and return it.

    No gradient vanishes. An op that returns something and has no backward raises when a gradient is
    to pass through it; one that writes to its arguments raises when one of them requires a
    gradient, and what it returns does not require any. A backward is not called if nothing depends
    on any result. No op has a forward mode, nor a gradient within torch.func: an argument with a
    tangent, or one that a transform differentiates, is an error.

    What is not asked for: autocast casts nothing, as kernels compute in float32 whatever is stored
    and take mixed dtypes; torch.library.register_autocast is for an op that must cast. An op that
    multiplies matrices names its FLOPs with torch.utils.flop_counter.register_flop_formula, below
    its definition; torch counts those only.

    Args:
        schema: in torch's schema language; every mutated argument is marked. The name may have an
            overload, as in "name.overload(...)"; arguments may be optional, or keyword-only if they
            are no tensors.
        libraries: for each device type, "cpu" or "cuda", the op library that has the kernel, or a
            kernel in Python, of an op that only calls torch's; it checks what a native one would,
            devices too, and is called below autograd, but not outside of autocast.
        fake: takes what the op takes and returns what it returns, tensors without values; devices
            are checked before. None for an op that returns nothing.
        backward: takes a context and the gradients of the results, None for those that nothing
            depends on, and returns one for each positional argument, or None.
        setup_context: with inputs=, output= and, if the schema has any, keyword_only_inputs=, saves
            in the context, ctx=, what backward needs.
        without_gradient: arguments that backward has no gradient for; it is an error that one of
            them requires a gradient.
        is_step: it is part of an optimizer's step: that parameters require gradients is none of its
            business, nor autograd's what it writes to them. The wrapper calls `refuse_tangents`.
        on_host: arguments that are in host memory whatever the device of the others is.
    """
    full_name = schema.partition("(")[0]
    parsed = parse_schema(schema)
    if parsed.returns and fake is None:
        raise TypeError(f"{full_name}: fake is None, expected a function, as it returns something")
    if has_kwarg_only_tensors(parsed) and not parsed.is_mutable:  # autograd would not see them
        raise TypeError(f"{full_name}: a tensor is keyword-only, expected it to be positional")
    calling_again = threading.local()  # other threads may be on their way here for the first time

    def load_and_call_again(*args: object, **keywords: object) -> object:
        library = libraries[_device_of(parsed.name, libraries, _values(op, args, keywords))]
        # Torch did not choose the native kernel, or that in Python.
        if getattr(calling_again, "now", False) or not isinstance(library, str):
            raise TypeError(
                f"{parsed.name}: arguments are of a kind that no kernel takes, expected Tensor"
            )
        load(library)
        calling_again.now = True
        try:
            return op(*args, **keywords)
        finally:
            calling_again.now = False

    def check_and_infer(*args: object, **keywords: object) -> object:
        _check_one_device(parsed.name, _values(op, args, keywords), on_host)
        return None if fake is None else fake(*args, **keywords)

    _FRAGMENT.define(schema)
    packet = getattr(getattr(torch.ops, _NAMESPACE), parsed.name)
    op: OpOverload = getattr(packet, parsed.overload_name or "default")
    # At once, as it is what an overload is hashed by.
    replace_callee(op, _explained(op, callee_of(op)))
    _FRAGMENT.impl(full_name, load_and_call_again, "CompositeExplicitAutograd")
    for device, kernel in libraries.items():
        if not isinstance(kernel, str):
            _FRAGMENT.impl(full_name, kernel, device.upper())
    torch.library.register_fake(f"{_NAMESPACE}::{full_name}", check_and_infer, lib=_FRAGMENT)
    if parsed.returns and not parsed.is_mutable:
        _register_gradient(full_name, op, backward, setup_context, without_gradient)
    elif is_step:
        # The default fallback would look at every tensor of every list.
        _FRAGMENT.impl(full_name, torch.library.fallthrough_kernel, "Autograd")
    else:
        _register_refusal(full_name, op)
    if parsed.is_mutable:
        _resolve_negated(full_name, op)
    if parsed.is_mutable or any(is_tensorlist_like_type(a.type) for a in parsed.arguments):
        _refuse_vmap(full_name)  # of others torch makes a loop
    return op


def call_recording_nothing(op: OpOverload, *args: object, **keywords: object) -> Any:
    """Call an op past autograd if no gradient is recorded, else as usual.

    The kernel that refuses gradients is in Python and takes all tensors of a list there and back: a
    third of the time of an op that has little to do with each.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_in_forward_mode():
        return op(*args, **keywords)
    with below_autograd():
        return op(*args, **keywords)


def call_on_tensors(op: OpOverload, *args: object, **options: object) -> Any:
    """Call an op that takes no lists past autograd if no tensor requires a gradient, either.

    The kernel that refuses gradients takes longer than a small op does.
    """
    if torch.compiler.is_compiling() or is_in_forward_mode():
        return op(*args, **options)
    if torch.is_grad_enabled() and any_requires_grad(*args):
        return op(*args, **options)
    with below_autograd():
        try:
            return _CALLS[callee_of(op)](*args, **options)
        except _OF_KINDS as error:
            _explain(op, args, options, error)
            raise


def bare(op: OpOverload) -> Callable[..., Any]:
    """Return what calls an op within `below_autograd`, and nothing else, in half the time.

    Args:
        op: of this package. All that a call of it gives is known to be tensors, of right kinds.
    """
    call = _CALLS[callee_of(op)]

    def call_kernel(*args: object, **options: object) -> Any:
        if torch.compiler.is_compiling():
            return op(*args, **options)
        try:
            return call(*args, **options)
        except RuntimeError as error:
            _explain(op, args, options, error)
            raise

    return call_kernel


def refuse_gradients(name: str, values: Values) -> None:
    """Refuse what would lose a gradient, if any is recorded.

    Args:
        name: of the op.
        values: its arguments by name.

    Raises:
        RuntimeError: a tensor requires one.
    """
    if not torch.is_grad_enabled():
        return
    for argument, tensor in _tensors(values):
        if tensor.requires_grad:
            raise RuntimeError(
                f"{name}: {argument} requires a gradient, expected none, as the op has none for it;"
                " detach it, or call the op under torch.no_grad()"
            )


def check_numbers(name: str, whole: bool = False, /, **values: object) -> None:
    """Refuse what is no number, and a tensor whose gradient would be lost as torch makes a float.

    For arguments that are not simply floats, so that these cost a call nothing:
    `if type(scale) is not float: check_numbers("softmax", scale=scale)`.

    Args:
        name: of the op.
        whole: whether they are to be whole numbers.
        values: its arguments by name.

    Raises:
        RuntimeError: a tensor requires a gradient, and gradients are recorded.
        TypeError: one is no number.
    """
    kinds = (int, torch.SymInt) if whole else (int, float, torch.SymInt, torch.SymFloat)
    for argument, value in values.items():
        if isinstance(value, Tensor):
            if value.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: {argument} requires a gradient, expected a number, as the op has none"
                    f" for it; detach it, or compute with it in plain torch, as {name}_ref does"
                )
        elif not isinstance(value, kinds):
            want = "a whole number" if whole else "a number"
            raise TypeError(f"{name}: {argument} is {value!r}, expected {want}")


def refuse_tangents(name: str, values: Values, instead: str = "detach it") -> None:
    """Refuse what would lose a tangent of forward-mode AD, with torch.func.jvp or dual numbers.

    Args:
        name: of the op.
        values: its arguments by name.
        instead: what to do.

    Raises:
        RuntimeError: a tensor has one.
    """
    if not has_tangents():
        return
    for argument, tensor in _tensors(values):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name}: {argument} has a tangent, expected none, as the op has no forward mode;"
                f" {instead}"
            )


def _explained(op: OpOverload, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what an overload is to call, with errors about kinds and memory in words to act on.

    Looked at are calls that failed only: torch takes None for any tensor, and kernels fail then
    where they ask for its memory; of other kinds it tells the schema, not the function.

    Where no gradient can be recorded, as in what torch.compile has made, the call goes past
    autograd, whose kernel is in Python and takes as long as a small op.
    """

    def explained(*args: object, **keywords: object) -> Any:
        try:
            if torch.is_grad_enabled() or is_in_forward_mode() or is_in_transform():
                return call(*args, **keywords)
            with below_autograd():
                return call(*args, **keywords)
        except _OF_KINDS as error:
            _explain(op, args, keywords, error)
            raise

    _CALLS[explained] = call
    return explained


def _explain(op: OpOverload, args: Sequence[object], keywords: Values, error: Exception) -> None:
    """Raise another error in place of one that is about the kind of an argument, or memory."""
    name, values = schema_of(op).name.partition("::")[2], _values(op, args, keywords)
    if _NO_MEMORY in str(error):
        raise _out_of_memory(name, [tensor for _, tensor in _tensors(values)]) from None
    problem = kind_problem(op, values, str(error))
    if problem is not None:
        raise TypeError(f"{name}: {problem}") from None


def _out_of_memory(name: str, tensors: Sequence[Tensor]) -> RuntimeError:
    """Return the error that torch has for it, with the words by which libraries know it."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return RuntimeError(f"{name}: DefaultCPUAllocator: can't allocate memory for a tensor")
    return torch.OutOfMemoryError(
        f"{name}: CUDA out of memory. A tensor that it makes does not fit on {device}; torch has"
        " written to stderr how many bytes that takes"
    )


def _register_gradient(
    name: str,
    op: OpOverload,
    backward: Callable[..., Any] | None,
    setup_context: Callable[..., None] | None,
    without_gradient: Sequence[str],
) -> None:
    """Do what torch.library.register_autograd does, and refuse what would be lost there.

    All by one kernel, as another one before it would cost each call half a microsecond. Where no
    gradient is wanted it takes less time than torch's, which asks again each time for what the
    schema says.
    """
    public = name.partition(".")[0]
    instead = "detach it, or use plain torch"
    if backward is not None:
        instead = f"use reverse mode, or plain torch, as {public}_ref does"
    arguments = [argument.name for argument in schema_of(op).arguments]
    lost = [(argument, arguments.index(argument)) for argument in without_gradient]

    way_out = "call the op under torch.no_grad(), or detach what it takes"
    if public.endswith("_backward"):  # whose gradients come of create_graph=True alone
        forward = public.removesuffix("_backward")
        way_out = f"for gradients of gradients use {forward}_ref, which is plain torch"

    def refuse(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(
            f"{public}: the gradient of {_first_wanted(arguments, ctx.needs_input_grad)} is wanted,"
            f" expected no use of it, as the op has none; {way_out}"
        )

    def refuse_transform(values: Values) -> NoReturn:
        if backward is None:
            refuse_gradients(public, values)
        argument = next(argument for argument, tensor in _tensors(values) if tensor.requires_grad)
        raise RuntimeError(
            f"{public}: {argument} is differentiated by a transform of torch.func, such as grad,"
            " vjp or jacrev, expected torch.autograd.grad or backward(); or use plain torch, as"
            f" {public}_ref does"
        )

    def pass_back(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):  # as a later function has returned None
            wanted = ctx.needs_input_grad
            return tuple([None] * len(each) if isinstance(each, list) else None for each in wanted)
        return (backward or refuse)(ctx, *grads)

    def set_up(ctx: Any, **values: Any) -> None:
        ctx.set_materialize_grads(False)  # no zeros for results that nothing depends on
        if setup_context is not None:
            setup_context(ctx=ctx, **values)

    record = autograd_kernel(op, pass_back, set_up)

    def kernel(keyset: DispatchKeySet, *args: object, **keywords: object) -> Any:
        if is_in_forward_mode():
            refuse_tangents(public, _values(op, args, keywords), instead)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            if lost:
                refuse_gradients(public, {argument: args[i] for argument, i in lost})
            if is_in_transform():
                refuse_transform(_values(op, args, keywords))
            return record(keyset, *args, **keywords)
        with below_autograd():
            return op.redispatch(keyset & AFTER_AUTOGRAD, *args, **keywords)

    _FRAGMENT.impl(name, kernel, "Autograd", with_keyset=True)


def _register_refusal(name: str, op: OpOverload) -> None:
    """Let an op that writes to its arguments refuse gradients and tangents."""
    public = name.partition(".")[0]

    def kernel(keyset: DispatchKeySet, *args: object, **keywords: object) -> Any:
        if is_in_forward_mode():
            refuse_tangents(public, _values(op, args, keywords))
        if torch.is_grad_enabled() and any_requires_grad(*args, *keywords.values()):
            refuse_gradients(public, _values(op, args, keywords))
        with below_autograd():
            return op.redispatch(keyset & AFTER_AUTOGRAD, *args, **keywords)

    _FRAGMENT.impl(name, kernel, "Autograd", with_keyset=True)


def _refuse_vmap(name: str) -> None:
    """Let torch.func.vmap over an op, of which torch could not make a loop, say what to do."""

    def refuse(*args: object, **keywords: object) -> NoReturn:
        raise RuntimeError(
            f"{name.partition('.')[0]}: an argument is mapped by torch.func.vmap, expected none, as"
            " the op takes lists or writes to what it takes; call it in a loop"
        )

    _FRAGMENT.impl(name, refuse, "FuncTorchBatched")


def _resolve_negated(name: str, op: OpOverload) -> None:
    """Do what torch does for ops that write to nothing: give kernels memory, not its negative.

    Views such as `x.conj().imag` have elements that are those of the memory with another sign.
    """
    written = [a.name for a in schema_of(op).arguments if a.is_write]

    def resolved(value: object) -> object:
        if isinstance(value, Tensor):
            return value.resolve_neg()
        return [resolved(each) for each in value] if isinstance(value, (list, tuple)) else value

    def kernel(*args: object, **keywords: object) -> Any:
        for argument, tensor in _tensors(_values(op, args, keywords)):
            if tensor.is_neg() and argument.partition("[")[0] in written:
                raise ValueError(
                    f"{name.partition('.')[0]}: {argument} is the negative of its memory, expected"
                    " a tensor that can be written to; use resolve_neg() first"
                )
        return op(*map(resolved, args), **{k: resolved(v) for k, v in keywords.items()})

    _FRAGMENT.impl(name, kernel, "Negative")


def _first_wanted(arguments: Sequence[str], wanted: Sequence[bool | Sequence[bool]]) -> str:
    """Return what an error calls the first argument whose gradient is wanted."""
    for argument, each in zip(arguments, wanted, strict=False):
        if isinstance(each, bool):
            if each:
                return argument
        elif any(each):
            return f"{argument}[{list(each).index(True)}]"
    return "an argument"


def _check_one_device(name: str, values: Values, on_host: Sequence[str]) -> None:
    """Check what a native kernel would: a fake is also called when one of the tensors is on meta.

    Raises:
        ValueError: a tensor is not on the device of the first one.
    """
    tensors = [item for item in _tensors(values) if item[0] not in on_host]
    for argument, tensor in tensors:
        want = tensors[0][1].device
        if tensor.device != want:
            raise ValueError(f"{name}: {argument} is on {tensor.device}, expected {want}")


def _device_of(name: str, known: Mapping[str, object], values: Values) -> str:
    """Return the type of the device that the tensors of these arguments are on.

    Raises:
        ValueError: a tensor is sparse, or on a device that the op has no library for.
    """
    devices = set()
    for argument, tensor in _tensors(values):
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: {argument} is {tensor.layout}, expected torch.strided")
        if tensor.device.type not in known:
            expected = " or ".join(known)
            raise ValueError(f"{name}: {argument} is on {tensor.device}, expected {expected}")
        devices.add(tensor.device.type)
    return "cuda" if "cuda" in devices else "cpu"


def _values(op: OpOverload, args: Sequence[object], keywords: Values) -> Values:
    """Return the arguments of a call by name; those that are left at their default may lack."""
    names = [argument.name for argument in schema_of(op).arguments]
    return {**dict(zip(names, args, strict=False)), **keywords}


def _tensors(values: Values) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a call with the text that error messages call it by."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield f"{name}[{i}]", item
