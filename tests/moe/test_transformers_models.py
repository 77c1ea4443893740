"""Experts of transformers' models: what its own loop computes in float64, with our ops."""

import copy
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="needs transformers")

from transformers_cases import KNOWN, LAYOUTS, MODELS, exact, experts_of, looped, model_of, tokens

from deepspeed_ext.moe import register_with_transformers

NAME = "deepspeed_ext"
_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
F32, BF16 = torch.float32, torch.bfloat16
MANY = 300  # tokens, with two choices each: more rows than our own kernels take


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_with_transformers()


def assert_near(name: str, got: Tensor, want: Tensor, share: float) -> None:
    """Fail unless each element is right to a share of itself, or of the largest."""
    bound = share * (want.abs() + want.abs().max() if want.numel() else want)
    off = (got.detach().cpu().double() - want.detach()).abs()
    assert off.shape == bound.shape, name
    assert bool((off <= bound).all()), f"{name}: off by {(off / bound).max():.1f} of the bound"


def inputs(
    tokens: int = 11, k: int = 2, dtype: torch.dtype = F32, device: str = "cpu", highest: int = 4
) -> list[Tensor]:
    """Return hidden states, indices, which are below `highest`, and weights."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, 24, generator=generator).to(device, dtype)
    indices = torch.randint(highest, (tokens, k), generator=generator).to(device)
    weights = torch.rand(tokens, k, generator=generator).to(device)
    return [hidden.requires_grad_(), indices, weights.requires_grad_()]


def gradients(
    experts: Any, given: Sequence[Tensor], out: Tensor, **options: Any
) -> dict[str, Tensor]:
    leaves = dict(experts.named_parameters()) | {"hidden": given[0], "weights": given[2]}
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    found = torch.autograd.grad(out, list(leaves.values()), grad, **options)
    return dict(zip(leaves, found, strict=True))


def check(experts: Any, given: Sequence[Tensor], share: float = 1e-5) -> dict[str, Tensor]:
    """Compare results and all gradients with those of the loop; return ours."""
    out = experts(*given)
    assert (out.dtype, out.shape) == (given[0].dtype, given[0].shape)
    found = gradients(experts, given, out)
    wide = [t.detach().cpu() for t in given]
    wide = [t.double().requires_grad_() if t.is_floating_point() else t for t in wide]
    reference = looped(experts)
    want = reference(*wide)
    assert_near("result", out, want, share)
    exact_grads = gradients(reference, wide, want, materialize_grads=True)
    for name, grad in exact_grads.items():
        assert_near(name, found[name], grad, share)
    return found


@pytest.mark.parametrize("family", MODELS)
def test_models(family: str, device: str) -> None:
    """Logits, the gradients of all parameters, and the tokens that are most likely."""
    model = model_of(family, device)
    model.set_experts_implementation(NAME)
    reference, ids = exact(model), tokens(device)
    got, want = model(ids, labels=ids), reference(ids.cpu(), labels=ids.cpu())
    assert_near("logits", got.logits, want.logits, 2e-5)
    got.loss.backward()
    want.loss.backward()
    for (name, parameter), other in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert parameter.grad.stride() == parameter.stride()
        assert_near(name, parameter.grad, other.grad, 5e-5)
    options = dict(max_new_tokens=6, do_sample=False)
    written = model.generate(ids[:1], **options).cpu()
    assert torch.equal(written, reference.generate(ids[:1].cpu(), **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    """With choices of experts that are elsewhere, and one of a token that has no other."""
    flags = LAYOUTS[layout]
    if "has_post_expert_norm" in flags and "has_post_expert_norm" not in KNOWN:
        pytest.skip("needs a transformers with norms behind experts")
    experts = experts_of(device, **flags)
    given = inputs(device=device, highest=5)
    with torch.no_grad():
        given[1][3] = 4
    found = check(experts, given)
    is_elsewhere = given[1] == 4
    assert is_elsewhere.sum() > 3
    assert not found["weights"][is_elsewhere].any()
    assert not found["hidden"][3].any()


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("layout", ["plain", "interleaved"])
def test_few_tokens(layout: str, count: int) -> None:
    """Most experts have none: their gradients are 0."""
    experts = experts_of(sizes=(8, 24, 20), **LAYOUTS[layout])
    given = inputs(count, 1)
    found = check(experts, given)
    for expert in {*range(8)} - {*given[1].flatten().tolist()}:
        assert not found["gate_up_proj"][expert].any()


@pytest.mark.parametrize("layout", ["plain", "transposed", "interleaved"])
def test_many_tokens(layout: str, device: str) -> None:
    """By torch's products, not by kernels of few rows."""
    check(experts_of(device, **LAYOUTS[layout]), inputs(MANY, device=device, highest=5), 2e-5)


@pytest.mark.parametrize("k", [1, 4])
def test_one_expert_has_all(k: int) -> None:
    given = inputs(9, k)
    given[1].fill_(2)
    check(experts_of(), given)


def test_nothing_comes_of_experts_that_are_elsewhere() -> None:
    """Not NaN times 0 either, whatever is in the weights and in other tokens."""
    experts = experts_of(**LAYOUTS["interleaved"])
    hidden, indices, weights = inputs()
    with torch.no_grad():
        indices.fill_(4)
        hidden[0], weights[1] = torch.nan, torch.inf
    out = experts(hidden, indices, weights)
    out.sum().backward()
    for tensor in (out, hidden.grad, weights.grad, *(p.grad for p in experts.parameters())):
        assert not tensor.any()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_weights_in_another_dtype(dtype: torch.dtype, device: str) -> None:
    """Those of routers are float32, hidden states have what norms made of them."""
    experts = experts_of(device, dtype, activation="swish")
    found = check(experts, inputs(dtype=dtype, device=device), 3e-2)
    assert found["weights"].dtype == F32
    assert found["gate_up_proj"].dtype == dtype
    found = check(experts, inputs(device=device), 3e-2)
    assert found["hidden"].dtype == F32


@pytest.mark.parametrize("layout", ["plain", "interleaved"])
def test_autocast(layout: str, device: str) -> None:
    """Products are in bfloat16, weights and their gradients stay what they are."""
    experts = experts_of(device, **LAYOUTS[layout])
    with torch.autocast(device, BF16), Recorder() as recorder:
        out = experts(*inputs(device=device))
    dtypes = [dtype for name, dtype in recorder.results if "linear" in name]
    assert dtypes == [BF16, BF16]
    found = gradients(experts, (given := inputs(device=device)), experts(*given))
    with torch.autocast(device, BF16):
        given = inputs(device=device)
        again = experts(*given)
    assert torch.equal(out, again) and out.dtype == F32
    for name, grad in gradients(experts, given, again).items():
        assert grad.dtype == F32
        assert_near(name, grad, found[name].cpu().double(), 5e-2)
    with torch.autocast(device, BF16, enabled=False):
        check(experts, inputs(device=device))


class Recorder(TorchDispatchMode):
    """Notes what is called, and the dtype of what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, Any]] = []  # no tensors: gradients that are held get copied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.results.append((func.name(), getattr(found, "dtype", None)))
        return found

    def names(self) -> list[str]:
        """Return all that moves elements."""
        free = ("view", "transpose", "detach", "alias", "unsafe_view")
        names = [name.rpartition("::")[2] for name, _ in self.results]
        return [name for name in names if name.partition(".")[0] not in free]


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_nothing_is_moved_beside_the_products(layout: str, device: str) -> None:
    """No copies, casts, sorts or sums: what is called there and back, in full."""
    experts = experts_of(device, BF16, sizes=(4, 24, 16), **LAYOUTS[layout])
    given = inputs(MANY, dtype=BF16, device=device)
    with Recorder() as forward:
        out = experts(*given)
    assert forward.names() == [
        "moe_assign",
        "moe_permute",
        "grouped_linear",
        "gated_activation.packed",
        "grouped_linear",
        "moe_unpermute",
    ]
    with Recorder() as backward:
        out.backward(torch.ones_like(out))
    assert backward.names() == [
        "ones_like",
        "moe_unpermute_backward",
        *("grouped_linear", "grouped_linear_backward"),
        "gated_activation_backward.packed",
        *("grouped_linear", "grouped_linear_backward"),
        "moe_unpermute",
    ]
    assert experts.gate_up_proj.grad.is_contiguous()


def test_few_rows_are_not_even_copied() -> None:
    experts, given = experts_of(), inputs()
    with Recorder() as recorder, torch.no_grad():
        experts(*given)
    few = "grouped_linear.few"
    assert recorder.names() == ["moe_assign", few, few, "moe_unpermute"]


def test_frozen_experts() -> None:
    experts = experts_of(**LAYOUTS["interleaved"])
    given = inputs()
    want = gradients(experts, given, experts(*given))
    experts.requires_grad_(False)
    out = experts(*given)
    with Recorder() as recorder:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        found = torch.autograd.grad(out, [given[0], given[2]], grad)
    assert "grouped_linear_backward" not in recorder.names()
    assert torch.equal(found[0], want["hidden"]) and torch.equal(found[1], want["weights"])
    experts.requires_grad_(True)
    still = [t.detach() for t in given]
    experts(*still).backward(grad)
    assert torch.equal(experts.down_proj.grad, want["down_proj"])


def test_gradient_checkpointing() -> None:
    """Blocks that are computed again have the same bits."""
    found = []
    for checkpointed in (False, True):
        model = model_of("Qwen3Moe").train()
        model.set_experts_implementation(NAME)
        if checkpointed:
            model.gradient_checkpointing_enable()
        ids = tokens()
        model(ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("layout", ["plain", "interleaved"])
def test_can_be_compiled(layout: str, device: str) -> None:
    """In one graph for all numbers of tokens, with the same ops and bits."""
    torch.compiler.reset()
    experts = experts_of(device, **LAYOUTS[layout])
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (MANY, MANY + 70, MANY + 3):
        given = inputs(count, device=device, highest=5)
        got, want = compiled(*given), experts(*given)
        assert torch.equal(got, want)
        grads = [gradients(experts, given, out) for out in (got, want)]
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[1])


def test_another_implementation_comes_back() -> None:
    """Any other is what it was, and a model that was not asked stays as it is."""
    model, ids = model_of("Olmoe"), tokens()
    names = ("eager", "grouped_mm")
    before = []
    for name in names:
        model.set_experts_implementation(name)
        before.append(model(ids).logits)
    other = copy.deepcopy(model)
    model.set_experts_implementation(NAME)
    with Recorder() as recorder:
        assert_near("logits", model(ids).logits, before[0].double(), 2e-5)
    assert recorder.names().count("moe_assign") == 2
    register_with_transformers()
    with Recorder() as recorder:
        other(ids)
    assert "moe_assign" not in recorder.names()
    for name, logits in zip(names, before, strict=True):
        model.set_experts_implementation(name)
        assert torch.equal(model(ids).logits, logits)


def test_models_are_read_and_written_as_they_are(tmp_path: Any) -> None:
    """The name is an argument of from_pretrained, and in no file."""
    model, ids = model_of("Mixtral"), tokens()
    model.set_experts_implementation(NAME)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    read = type(model).from_pretrained(tmp_path, experts_implementation=NAME)
    assert torch.equal(read(ids).logits, model(ids).logits)
    assert read.config._experts_implementation == NAME
    assert type(model).from_pretrained(tmp_path).config._experts_implementation == "grouped_mm"


def test_transformers_is_imported_by_the_call_alone() -> None:
    code = """
import sys
import deepspeed_ext.moe
from deepspeed_ext.moe import register_with_transformers
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    register_with_transformers()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "transformers" in done.stdout


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_ext.moe.transformers_models.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"transformers is \d.*, expected 5 or newer"):
        register_with_transformers()


def broken(change: str) -> Any:
    """Return experts of which one thing is not as it should be."""
    experts = experts_of(has_bias=True)
    if change == "float64":
        return experts.double()
    if change == "codes":
        experts.down_proj = nn.Parameter(torch.zeros(4, 24, 20, dtype=torch.uint8), False)
    elif change == "flags":
        del experts.is_transposed
    elif change == "missing":
        del experts.down_proj
    elif change == "matrix":
        experts.gate_up_proj = nn.Parameter(torch.zeros(40, 24))
    elif change == "sizes":
        experts.is_transposed = True
    elif change == "biases":
        experts.down_proj_bias = nn.Parameter(torch.zeros(4, 24, 1))
    elif change == "interleaved":
        experts.is_concatenated = False
    return experts


REFUSED = {
    "float64": "gate_up_proj is float64, expected float32, bfloat16 or float16",
    "codes": "down_proj is uint8, expected float32, bfloat16 or float16",
    "flags": "is_transposed is missing, expected a class made with transformers'",
    "missing": "down_proj is NoneType, expected a tensor of all experts",
    "matrix": r"gate_up_proj has shape \[40, 24\], expected 3 dimensions",
    "sizes": r"weight has shape \[4, 24, 40\], expected three dimensions, the last one of 24",
    "biases": r"down_proj_bias has shape \[4, 24, 1\], expected 2 dimensions",
    "interleaved": "is_concatenated is False, expected True, or an _apply_gate of its own",
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_layouts_are_refused_by_name(change: str) -> None:
    with pytest.raises((TypeError, ValueError), match=REFUSED[change]):
        broken(change)(*inputs())


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_adapters(family: str) -> None:
    """LoRA of peft, laid over the tensors of all experts."""
    peft = pytest.importorskip("peft", reason="needs peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=names, init_lora_weights=False
    )
    model = model_of(family)
    model.set_experts_implementation(NAME)
    torch.manual_seed(0)
    adapted, ids = peft.get_peft_model(model, config), tokens()
    reference = copy.deepcopy(adapted).double()
    reference.get_base_model().set_experts_implementation("eager")
    got, want = adapted(ids, labels=ids), reference(ids, labels=ids)
    assert_near("logits", got.logits, want.logits, 2e-5)
    got.loss.backward()
    want.loss.backward()
    others = dict(reference.named_parameters())
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 8
    for name, parameter in trained.items():
        assert_near(name, parameter.grad, others[name].grad, 5e-5)
