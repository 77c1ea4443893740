"""Quick runs of ops and their gradients against the references, for ds_report.

A check is one small call of an op, or a few, under the name of the op's row in the registry.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext import ops
from deepspeed_ext.ops._activations import NAMES
from deepspeed_ext.ops._compare import compare

_EPS = torch.finfo(torch.float32).eps


class _Call(NamedTuple):
    """A small call of an op.

    Args:
        shapes: of the tensors that have gradients, by the argument's name.
        options: the arguments that are no tensors.
        fixed: gives the tensors without gradients.
        scales: what values of some tensors are multiplied by; otherwise they are from 0.5 to 1.5.
    """

    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = {}
    fixed: Callable[[], Mapping[str, Tensor]] = dict
    scales: Mapping[str, float] = {}


class _Check:
    """Compares all results and gradients of an op with those of its reference, in float32.

    Args:
        name: of the op; its reference is called <name>_ref.
        calls: what it is tried with.
        then: what else to try, given a device.
    """

    def __init__(
        self, name: str, *calls: _Call, then: Callable[[str], None] = lambda device: None
    ) -> None:
        self.name, self.calls, self.then = name, calls, then

    def __call__(self, device: str) -> None:
        """Try the op on "cpu" or "cuda".

        Raises:
            RuntimeError: a result is not what the reference says.
        """
        op, reference = getattr(ops, self.name), getattr(ops, f"{self.name}_ref")
        for call in self.calls:
            generator = torch.Generator().manual_seed(0)
            values = {
                name: (torch.rand(shape, generator=generator) + 0.5) * call.scales.get(name, 1)
                for name, shape in call.shapes.items()
            }
            got = _results_and_gradients(op, call, {n: v.to(device) for n, v in values.items()})
            doubles = {name: value.double() for name, value in values.items()}
            want = _results_and_gradients(reference, call, doubles)
            for i, (value, expected) in enumerate(zip(got, want, strict=True)):
                what = f"{self.name}: {i} of results and gradients on {device}"
                compare(
                    what, value, expected, 100 * _EPS, of_largest=1000 * _EPS
                )  # as much cancels
        self.then(device)


def _results_and_gradients(
    function: Callable[..., Any], call: _Call, values: Mapping[str, Tensor]
) -> list[Tensor]:
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    device = next(iter(values.values())).device
    with torch.enable_grad():
        copies = {name: leaf.clone() for name, leaf in leaves.items()}  # an op may write to one
        fixed = {name: tensor.to(device) for name, tensor in call.fixed().items()}
        outputs = function(**copies, **fixed, **call.options)
    results = (outputs,) if isinstance(outputs, Tensor) else outputs
    grads = [
        torch.linspace(1, 50, result.numel(), dtype=torch.float64)
        .sin()
        .view(result.shape)
        .to(result)
        for result in results
    ]
    found = torch.autograd.grad(results, [*leaves.values()], grads)
    return [tensor.detach() for tensor in (*results, *found)]


def _turning() -> dict[str, Tensor]:
    """Return positions that float32 cannot turn to, and frequencies."""
    positions = torch.tensor([-3, 0, 1_000_000, 1_000_003])
    return dict(positions=positions, frequencies=ops.rope_frequencies(40))


def _layout_and_mask(blocks: int) -> dict[str, Tensor]:
    """Return a window with a first block that all see, and keys of which some are left out."""
    layout = torch.ones(1, blocks, blocks, dtype=torch.bool).triu(-1)
    layout[..., 0] = True
    keys = torch.arange(140).view(2, 70) % 7 > 0
    return dict(layout=layout, key_padding_mask=keys)


def _norm_between(device: str) -> None:
    """Compare a norm that two linear layers do between them with the same in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 300), (40, 300), (19, 40), (40,)]
    values = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]

    def results(
        first: Callable[..., Any], second: Callable[..., Tensor], values: list[Tensor]
    ) -> Tensor:
        x, wide, narrow, weight = values
        out, normed = first(x, wide, norm=ops.NextNorm(weight))
        return torch.cat([out, second(normed, narrow)], -1)

    got = results(ops.skinny_linear_norm, ops.skinny_linear, [v.to(device) for v in values])
    want = results(ops.skinny_linear_norm_ref, ops.skinny_linear_ref, values)
    compare(f"skinny_linear_norm: result on {device}", got, want, 1e-5)


def replay(device: str) -> None:
    """Compare recorded calls with calls, for other values than those that were recorded."""
    weight = torch.ones(300, device=device)

    def twice(x: Tensor) -> Tensor:
        first = ops.rms_norm(x.view(5, 300), weight)
        assert isinstance(first, Tensor)
        second = ops.rms_norm(first[1:], weight, residual=first[:4], eps=1e-3)
        assert not isinstance(second, Tensor)
        return second[0]

    with torch.no_grad():
        _, recorded = ops.record(twice, torch.zeros(1500, device=device))
        x = torch.linspace(-1, 1, 1500, device=device)
        if not torch.equal(recorded(x), twice(x)):
            raise RuntimeError("replay_: results differ from those of the calls")


_X, _VECTOR = (5, 300), (300,)
_SUM = dict(residual=_X, x_bias=_VECTOR)
rms_norm = _Check(
    "rms_norm",
    _Call(dict(x=_X, weight=_VECTOR, **_SUM), dict(weight_offset=1.0)),
    _Call(dict(x=_X, weight=_VECTOR)),
)
layer_norm = _Check(
    "layer_norm",
    _Call(dict(x=_X, weight=_VECTOR, bias=_VECTOR, **_SUM), dict(weight_offset=1.0)),
    _Call(dict(x=_X, weight=_VECTOR, bias=_VECTOR)),
)
bias_activation = _Check(
    "bias_activation",
    *(_Call(dict(x=_X, bias=_VECTOR), dict(activation=name)) for name in NAMES),
    _Call(dict(x=_X)),
)
gated_activation = _Check(
    "gated_activation",
    *(_Call(dict(gate=_X, up=_X), dict(activation=name)) for name in NAMES),
    *(_Call(dict(gate=_X), dict(activation=name)) for name in NAMES),
)
nhwc_bias_add = _Check(
    "nhwc_bias_add",
    _Call(dict(x=_X, bias=_VECTOR, other=_X, other_bias=_VECTOR)),
)


def dropout(device: str) -> None:
    """Try the ops with dropout."""
    bias_dropout_residual(device)
    dropout_activation(device)


_DROPPED = dict(p=0.3)
bias_dropout_residual = _Check(
    "bias_dropout_residual",
    _Call(dict(x=_X, bias=_VECTOR, residual=_X), _DROPPED, lambda: dict(seed=torch.tensor([7]))),
)
dropout_activation = _Check(
    "dropout_activation",
    *(
        _Call(
            dict(x=_X, bias=_VECTOR),
            dict(activation=name, **_DROPPED),
            lambda: dict(seed=torch.tensor([7])),
        )
        for name in NAMES
    ),
)
rope = _Check(
    "rope",
    *(
        _Call(dict(q=(2, 4, 3, 48), k=(2, 4, 1, 48)), dict(interleaved=way, scale=0.5), _turning)
        for way in (False, True)
    ),
)
softmax = _Check(
    "softmax",
    _Call(
        dict(x=(2, 7, 40), mask=(7, 40)),
        dict(causal=True, softcap=3.0),
        lambda: dict(alibi_slopes=torch.tensor([0.5, 0.25])),
    ),
)
sparse_attn = _Check(
    "block_sparse_attention",
    *(
        _Call(
            dict(q=(2, 4, 70, 20), k=(2, 2, 70, 20), v=(2, 2, 70, 20)),
            dict(block=block, causal=True),
            partial(_layout_and_mask, blocks),
        )
        for block, blocks in ((16, 5), (64, 2))
    ),
)
cross_entropy = _Check(
    "cross_entropy",
    *(
        _Call(
            dict(logits=_X),
            dict(label_smoothing=0.1, z_loss=0.01, inplace=inplace),
            lambda: dict(target=torch.tensor([3, -100, 0, 299, 7])),
        )
        for inplace in (False, True)
    ),
)
skinny_linear = _Check(
    "skinny_linear",
    _Call(
        dict(x=_X, weight=(80, 300), bias=(80,), residual=(5, 40)),
        dict(activation="silu", gated=True),
        scales=dict(weight=0.02),
    ),
    _Call(dict(x=(19, 77), weight=(33, 77))),
    then=_norm_between,
)
