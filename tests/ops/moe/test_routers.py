"""moe_route beside the routers of transformers' models, and the loss of Mixtral."""

from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from samples import BF16, F32, make

from deepspeed_ext.ops import moe_load_balancing_loss, moe_route


class Router(NamedTuple):
    """A router of transformers, and what it is called here.

    Args:
        model: the folder, and the name of its classes.
        router: the class, without that name.
        sizes: what its configuration is made with.
        options: of moe_route.
        dtypes: that its weights come in.
    """

    model: tuple[str, str]
    router: str
    sizes: dict[str, Any]
    options: dict[str, Any]
    dtypes: tuple[torch.dtype, ...] = (F32, BF16)


_DEEPSEEK = dict(num_experts_per_tok=6, n_group=4, topk_group=2, routed_scaling_factor=2.5)
_GROUPED: dict[str, Any] = dict(groups=4, topk_groups=2, scale=2.5)
ROUTERS = {
    "Mixtral": Router(
        ("mixtral", "Mixtral"),
        "TopKRouter",
        dict(num_local_experts=8, num_experts_per_tok=2),
        dict(normalize=True),
    ),
    "Qwen 3 MoE": Router(
        ("qwen3_moe", "Qwen3Moe"),
        "TopKRouter",
        dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
        dict(normalize=True),
    ),
    "OLMoE": Router(
        ("olmoe", "Olmoe"),
        "TopKRouter",
        dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
        {},
    ),
    "DeepSeek V2": Router(
        ("deepseek_v2", "DeepseekV2"),
        "TopkRouter",
        dict(n_routed_experts=32, topk_method="group_limited_greedy", **_DEEPSEEK),
        _GROUPED,
        (F32,),
    ),
    "DeepSeek V3": Router(
        ("deepseek_v3", "DeepseekV3"),
        "TopkRouter",
        dict(n_routed_experts=32, norm_topk_prob=True, **_DEEPSEEK),
        dict(score="sigmoid", normalize=True, **_GROUPED),
        (F32,),
    ),
    "gpt-oss": Router(
        ("gpt_oss", "GptOss"),
        "TopKRouter",
        dict(num_local_experts=32, num_experts_per_tok=4),
        dict(score="softmax_topk"),
    ),
}


def made(name: str, dtype: torch.dtype) -> Any:
    """Return a router with random weights; its biases are as large as differences of scores."""
    folder, prefix = ROUTERS[name].model
    package = f"transformers.models.{folder}"
    pytest.importorskip("transformers", reason="needs transformers")
    config = getattr(import_module(f"{package}.configuration_{folder}"), f"{prefix}Config")
    modeling = import_module(f"{package}.modeling_{folder}")
    router = getattr(modeling, prefix + ROUTERS[name].router)(
        config(hidden_size=64, **ROUTERS[name].sizes)
    )
    with torch.no_grad():
        for i, tensor in enumerate([*router.parameters(), *router.buffers()]):
            tensor.copy_(make(tuple(tensor.shape), F32, i) * 0.1)
    return router.to(dtype)


@pytest.mark.parametrize("name", ROUTERS)
def test_as_transformers(name: str, device: str) -> None:
    """The same choices, where no others are as good, and weights."""
    for dtype in ROUTERS[name].dtypes:
        router = made(name, dtype).to(device)
        logits, weights, chosen = router(make((300, 64), dtype, 9, device))
        bias = getattr(router, "e_score_correction_bias", None)
        options = ROUTERS[name].options
        got = moe_route(logits.detach(), chosen.shape[-1], bias=bias, **options)
        order = chosen.argsort(-1)
        mine = got.experts.argsort(-1)
        same = (got.experts.gather(-1, mine) == chosen.gather(-1, order)).all(-1)
        assert same.double().mean() >= (1 if dtype == F32 else 0.8)  # the others have ties
        torch.testing.assert_close(
            got.weights.gather(-1, mine)[same],
            weights.detach().float().gather(-1, order)[same],
            rtol=1e-5 if dtype == F32 else 2e-2,
            atol=1e-6,
        )


def test_the_loss_of_mixtral(device: str) -> None:
    """Of one layer: k times ours."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    modeling = import_module(f"{transformers.__name__}.models.mixtral.modeling_mixtral")
    logits = make((300, 8), F32, 0, device)
    want = modeling.load_balancing_loss_func((logits,), 8, 2)
    got = moe_load_balancing_loss(moe_route(logits, 2)) * 2
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
