"""FusedLayerNorm and FusedRMSNorm: torch's modules with our results."""

import pytest
import torch
from samples import BF16, DTYPES, F32, make

from deepspeed_ext.ops import FusedLayerNorm, FusedRMSNorm

PAIRS = [(FusedLayerNorm, torch.nn.LayerNorm), (FusedRMSNorm, torch.nn.RMSNorm)]
each_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["layer", "rms"])


@each_pair
@pytest.mark.parametrize("shape", [40, (40,), (5, 8)])
@pytest.mark.parametrize("affine", [True, False])
def test_as_torchs(
    ours: type[torch.nn.Module],
    theirs: type[torch.nn.Module],
    shape: int | tuple[int, ...],
    affine: bool,
    device: str,
) -> None:
    """The same state, results and gradients, for any shape that is normalized over."""
    made, want = (
        kind(shape, eps=1e-4, elementwise_affine=affine, device=device) for kind in (ours, theirs)
    )
    for i, parameter in enumerate(made.parameters()):
        parameter.data.copy_(make(tuple(parameter.shape), F32, i, device))
    want.load_state_dict(made.state_dict())
    assert repr(made)[len("Fused") :] == repr(want)
    x = make((3, *([shape] if isinstance(shape, int) else shape)), F32, 9, device)
    for module in (made, want):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        grads = torch.autograd.grad(out.sin().sum(), [leaf, *module.parameters()])
        found = [out, *grads]
        if module is made:
            mine = found
    for got, expected in zip(mine, found, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@each_pair
def test_parameters_of_another_dtype(
    ours: type[torch.nn.Module], theirs: type[torch.nn.Module], device: str
) -> None:
    x = make((3, 64), BF16, 0, device)
    out = ours(64, device=device)(x)
    assert out.dtype == BF16
    torch.testing.assert_close(
        out.float(), theirs(64, device=device)(x.float()), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_eps_of_none_is_that_of_the_arithmetic(dtype: torch.dtype, device: str) -> None:
    """As in torch; beside small rows that of 16 bits would be most of the sum."""
    x = make((3, 64), dtype, 0, device) * 0.01
    eps = torch.finfo(F32).eps
    want = torch.nn.functional.rms_norm(x.double(), (64,), eps=eps)
    got = FusedRMSNorm(64, device=device, dtype=dtype)(x)
    torch.testing.assert_close(got.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    theirs = torch.nn.RMSNorm(64, device=device, dtype=dtype)(x)
    torch.testing.assert_close(got, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_without_bias(device: str) -> None:
    module = FusedLayerNorm(64, bias=False, device=device)
    assert module.bias is None
    x = make((3, 64), F32, 0, device)
    want = torch.nn.functional.layer_norm(x, (64,), module.weight)
    torch.testing.assert_close(module(x), want)


@each_pair
def test_another_shape_is_refused(
    ours: type[torch.nn.Module], theirs: type[torch.nn.Module]
) -> None:
    module = ours((4, 6))
    text = (
        rf"^{ours.__name__}: x has shape \[2, 3, 8\], expected its last dimensions to be \[4, 6\]$"
    )
    with pytest.raises(ValueError, match=text):
        module(torch.ones(2, 3, 8))


@each_pair
def test_can_be_compiled(
    ours: type[torch.nn.Module], theirs: type[torch.nn.Module], device: str
) -> None:
    module = ours((4, 6), eps=1e-5, device=device)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    x = make((5, 4, 6), F32, 0, device).requires_grad_()
    assert torch.equal(compiled(x), module(x))
