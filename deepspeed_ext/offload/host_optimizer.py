"""The optimizer that steps host copies: one of the plain classes, with parts of a step apart."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.optim.base import FlatStateOptimizer
from deepspeed_ext.optim.buckets import STEP, Bucket, BucketView, zeros
from deepspeed_ext.optim.checks import explain, name_refused
from deepspeed_ext.optim.clipping import Scaling, scalars_of
from deepspeed_ext.optim.formats import master_weights_in
from deepspeed_ext.optim.spec import Group
from deepspeed_ext.processors import Share

PIECE = 2**25  # elements that travel, and are stepped, together; whole blocks of 8-bit codes
_NO_OPTIONS = ("params", "param_names")
_TITLE = "OffloadOptimizer"  # how errors call it

Cut = Callable[[Sequence[Tensor]], Iterator[list[Tensor]]]
Out = Mapping[str, list[Tensor]]


class HostOptimizer(FlatStateOptimizer):
    """What an optimizer class has to be able to do beside its own, to be offloaded."""

    settle: Callable[[], None] = staticmethod(lambda: None)  # before state is moved

    def buckets(self) -> list[tuple[int, Bucket]]:
        """Return all buckets, each with the number of its group."""
        self._settle_old()
        plans = self._plans.current(self)
        return [(group, bucket) for group, plan in enumerate(plans) for bucket in plan.buckets]

    def params(self) -> list[Tensor]:
        """Return what is in groups, in its order."""
        return [param for group in self.param_groups for param in group["params"]]

    def give_state(self, params: Sequence[Tensor]) -> None:
        """See FlatStateOptimizer.give_state."""
        self._settle_old()
        super().give_state(params)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See FlatStateOptimizer.load_state_dict."""
        self.settle()
        super().load_state_dict(state_dict)

    def _settle_old(self) -> None:
        """Let who has state elsewhere bring it together, if plans are about to be made anew."""
        if not self._plans.is_current(self):
            self.settle()

    def forget_buckets(self) -> None:
        """Make them anew when they are wanted next."""
        self._plans.drop()

    def changes_nothing(self, params: Sequence[Tensor]) -> bool:
        """Return whether learning rates, and the gradients of these, are all 0."""
        return self._changes_nothing(params)

    def gathered(self, bucket: Bucket) -> BucketView | None:
        """Return the step of a bucket where it is, by the gradients that its parameters have."""
        return self._gather(bucket)

    def step_gathered(
        self, group: Group, bucket: Bucket, work: BucketView, scaling: Scaling
    ) -> None:
        """Take that step."""
        bucket.refresh_master_weights()
        self._step_bucket(group, bucket, work, scaling)

    def step_part(
        self, group: Group, work: BucketView, scaling: Scaling, out: Out | None = None
    ) -> None:
        """Step parameters or ranges of them, to other memory if that is given."""
        scalars = scalars_of(group, work.params[0].device, scaling)
        elsewhere = {} if out is None else {"out": out}
        try:
            self._call_op(**self._arguments(group, work, scalars), **elsewhere)
        except (ValueError, TypeError, RuntimeError) as error:
            explain(self, work, error)
            name_refused(self, work, error)
            raise

    def refuse(self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor]) -> None:
        """Raise ValueError that says what is wrong with one of these gradients."""
        buffers: dict[str, list[Tensor]] = {}
        nowhere = torch.empty(0, device="cpu")
        work = BucketView(params, grads, buffers, [], nowhere, nowhere, None, copies)
        explain(self, work, ValueError("gradients are checked before they are copied"))

    def out_of(
        self, params: list[Tensor], buffers: dict[str, list[Tensor]], scales: Sequence[Tensor]
    ) -> dict[str, list[Tensor]]:
        """Return memory by the names that the op has for what it writes."""
        op = self.spec.op
        named = {name: buffers.get(key, []) for name, key in op.state_keys.items()}
        named |= {"params": params, "steps": buffers[STEP], "scales": list(scales)}
        named["master_params"] = master_weights_in(buffers)
        return {name: named[name] for name in op.written}


def offloaded(
    cls: type[FlatStateOptimizer],
    cut: Cut,
    share: Share,
    bucket: Callable[..., Bucket] = Bucket,
) -> type[HostOptimizer]:
    """Return a class that steps as this one does, on the CPU and on CUDA, with given buckets.

    Args:
        cls: one of the optimizers.
        cut: makes the buckets.
        share: where what is in host memory is stepped, which touches its state first.
        bucket: makes a bucket of some parameters, with their state.

    Raises:
        TypeError: it is no class of deepspeed_ext.optim that steps each element by itself.
    """
    known = isinstance(cls, type) and issubclass(cls, FlatStateOptimizer)
    if not known or not hasattr(cls, "_call_op"):
        name = getattr(cls, "__name__", repr(cls))
        why = "; it needs the norm of each whole tensor in the middle of a step" if known else ""
        raise TypeError(
            f"{_TITLE}: optimizer_class is {name}, expected DeepSpeedCPUAdam, DeepSpeedCPUAdagrad,"
            f" DeepSpeedCPULion, FusedRMSprop or FusedSGD{why}"
        )
    spec = replace(
        cls.spec,
        devices=("cpu", "cuda"),
        elsewhere={},
        grad_layouts=(torch.strided,),
        cut=cut,
        zeros=partial(_zeros, share),
        bucket=bucket,
    )
    made: type[HostOptimizer] = type(_TITLE, (HostOptimizer, cls), {"spec": spec})
    return made


def _zeros(share: Share, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    make = partial(zeros, elements, dtype, device)
    return share.touching(elements * dtype.itemsize, make) if device.type == "cpu" else make()


def pieces(work: BucketView) -> list[BucketView]:
    """Cut the work of a bucket into pieces of a bounded number of elements.

    A piece is some whole parameters, or a range of a large one in the order of memory.
    """
    if len({grad.dtype for grad in work.grads}) > 1:  # an op takes one
        return [piece for part in work.split_by_grad_dtype() for piece in pieces(part)]
    cut: list[BucketView] = []
    some: list[int] = []
    elements = 0
    for i, param in enumerate(work.params):
        n = param.numel()
        if some and elements + n > PIECE:
            cut.append(work.part(some))
            some, elements = [], 0
        if n > PIECE:
            cut += (_range(work, i, begin) for begin in range(0, n, PIECE))
        else:
            some.append(i)
            elements += n
    if len(some) == len(work.params):
        return [work]
    return [*cut, work.part(some)] if some else cut


def _range(work: BucketView, i: int, begin: int) -> BucketView:
    """Return the work on a range of one parameter, of PIECE elements or fewer."""
    one = work.part([i])
    noise = None
    if one.noise is not None:
        noise = one.noise + torch.tensor([[0, begin]], device="cpu")
    return one._replace(
        params=[flat_range(work.params[i], begin, PIECE)],
        grads=[flat_range(work.grads[i], begin, PIECE)],
        offsets=one.offsets + begin,
        noise=noise,
    )


def flat_range(tensor: Tensor, begin: int, most: int) -> Tensor:
    """Return so many elements or fewer of a dense tensor, from one on, in the order of memory."""
    n = min(most, tensor.numel() - begin)
    return tensor.as_strided((n,), (1,), tensor.storage_offset() + begin)


def scaling_of(divisor: float) -> Scaling:
    """Return what the host's step divides gradients by."""
    if divisor == 1:
        return Scaling()
    return Scaling(torch.tensor(divisor, dtype=torch.float64, device="cpu"))


def options_of(group: Group) -> Group:
    """Return what a step is taken with, as it is now."""
    options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
    if isinstance(options["lr"], Tensor):
        options["lr"] = float(options["lr"])  # it may change while a step is under way
    return options
