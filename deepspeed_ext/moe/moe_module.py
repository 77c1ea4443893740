"""MoeModule: a layer of experts, with Colossal-AI's arguments and results."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_ext.moe.arguments import check_choices, check_room
from deepspeed_ext.moe.experts import Experts
from deepspeed_ext.moe.sending import (
    Gate,
    jittered,
    mixed,
    send,
    tokens_of,
)
from deepspeed_ext.ops import moe_load_balancing_loss, moe_route
from deepspeed_ext.ops._kinds import check_flags, check_kinds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_POLICIES = (None, "Jitter", "Gaussian")


class MoeModule(nn.Module):
    """A layer whose tokens go through top_k of many experts each.

    A router, `gate`, gives each token a probability for each expert, in float32. The result of a
    token is the sum of what its experts return, each times its probability. Each expert has room
    for floor(top_k x capacity factor x tokens / experts) tokens, one more if that is odd, and at
    least min_capacity; first choices take room before second ones, each in the order of tokens.

    As in Colossal-AI 0.3, but for these: top_k is any number; drop_tks=False counts in training
    too; parameters of experts are stacked, see `Experts`, and all get gradients; parameters are
    drawn as nn.Linear draws them, and have other names: `gate.weight`, `experts.` with an expert's
    own, `residual_module.`, `residual_combine.`.

    Args:
        dim_model: of a token.
        num_experts: 1 to 1024.
        top_k: how many experts a token goes to.
        capacity_factor_train: of training.
        capacity_factor_eval: of evaluation.
        min_capacity: room that each expert has in any case.
        noisy_policy: None, or in training "Jitter": logits are multiplied by random numbers from
            0.99 to 1.01, or "Gaussian": normal ones are added, with deviation 1 / num_experts^2.
        drop_tks: False: experts have room for all.
        use_residual: each token goes through one more module as well, and a linear layer weighs
            both results.
        residual_instance: that module. None: expert_cls makes it.
        expert_instance: Experts, as many. None: expert_cls makes each of them.
        expert_cls: called with expert_args, returns a module that takes (rows, dim_model) and
            returns as much.
        mesh: of one dimension, over whose processes experts are shared out.
        expert_args: see expert_cls.

    Raises:
        ValueError: an argument breaks a rule above.

    See: Lepikhin et al., "GShard", 2020; Rajbhandari et al., "DeepSpeed-MoE", 2022, for
    use_residual.
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
        residual_instance: nn.Module | None = None,
        expert_instance: Experts | None = None,
        expert_cls: Callable[..., nn.Module] | None = None,
        *,
        mesh: "DeviceMesh | None" = None,
        **expert_args: Any,
    ) -> None:
        super().__init__()
        check_choices("MoeModule", num_experts=num_experts, dim_model=dim_model, top_k=top_k)
        check_room(
            "MoeModule",
            capacity_factor_train=capacity_factor_train,
            capacity_factor_eval=capacity_factor_eval,
            min_capacity=min_capacity,
        )
        check_flags("MoeModule", drop_tks=drop_tks, use_residual=use_residual)
        if noisy_policy not in _POLICIES:
            raise ValueError(
                f"MoeModule: noisy_policy is {noisy_policy!r}, expected None, 'Jitter' or"
                " 'Gaussian'"
            )
        self.num_experts, self.top_k = int(num_experts), int(top_k)
        self.min_capacity = int(min_capacity)
        self.capacity_factor_train = capacity_factor_train
        self.capacity_factor_eval = capacity_factor_eval
        self.noisy_policy, self.drop_tks, self.use_residual = noisy_policy, drop_tks, use_residual
        self._mesh = mesh
        make = _maker_of(expert_cls, expert_args)
        if residual_instance is not None:
            check_kinds("MoeModule", residual_instance=(residual_instance, nn.Module))
            if not use_residual:
                raise ValueError(
                    "MoeModule: residual_instance is given, expected None without use_residual"
                )
        if expert_instance is None:
            expert_instance = _experts_of(make, num_experts, mesh)
        check_kinds("MoeModule", expert_instance=(expert_instance, Experts))
        if expert_instance.num_experts != num_experts:
            raise ValueError(
                f"MoeModule: expert_instance has {expert_instance.num_experts} experts, expected"
                f" {num_experts}"
            )
        self.experts = expert_instance
        self.gate = Gate(dim_model, num_experts)
        if use_residual:
            self.residual_module = make() if residual_instance is None else residual_instance
            self.residual_combine = nn.Linear(dim_model, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens through experts.

        Args:
            inputs: (..., dim_model), float32, bfloat16 or float16.

        Returns:
            What experts made of the tokens, of the shape of inputs; and l_aux, (), float32: the
            loss that is least when experts are balanced, experts x sum(mean probability x share of
            choices, dropped ones too).
        """
        logits = self._noisy(self.gate(tokens_of("MoeModule", inputs, self.gate)))
        capacity = self._capacity(len(logits)) if self.drop_tks else None
        routing = moe_route(logits, self.top_k, capacity=capacity)
        beside = self.residual_module if self.use_residual else None
        found, added = send(inputs, routing, routing.weights, self.experts, beside, self._mesh)
        if added is not None:
            found = mixed(found, added, self.residual_combine(inputs))
        return found, moe_load_balancing_loss(routing)

    def _noisy(self, logits: Tensor) -> Tensor:
        if not self.training or self.noisy_policy is None:
            return logits
        if self.noisy_policy == "Jitter":
            return jittered(logits)
        return logits + torch.randn_like(logits) / self.num_experts**2

    def _capacity(self, tokens: int) -> int:
        factor = self.capacity_factor_train if self.training else self.capacity_factor_eval
        room = math.floor(self.top_k * factor * tokens / self.num_experts)
        return max(room + room % 2, self.min_capacity)

    def extra_repr(self) -> str:
        """Return how tokens are routed."""
        return f"top_k={self.top_k}"


def _maker_of(
    expert_cls: Callable[..., nn.Module] | None, arguments: dict[str, Any]
) -> Callable[[], nn.Module]:
    is_class = callable(expert_cls) and not isinstance(expert_cls, nn.Module)
    if expert_cls is not None and not is_class:
        raise TypeError(
            f"MoeModule: expert_cls is a {type(expert_cls).__name__}, expected a class of experts,"
            " or a function that returns one"
        )
    if arguments and expert_cls is None:
        raise TypeError(
            f"MoeModule: {next(iter(arguments))} is given, expected expert_cls, whose argument it"
            " is, or another name"
        )

    def make() -> nn.Module:
        if expert_cls is None:
            raise ValueError(
                "MoeModule: expert_cls is None, expected a class of experts, as expert_instance or"
                " residual_instance is None"
            )
        return expert_cls(**arguments)

    return make


def _experts_of(make: Callable[[], nn.Module], count: int, mesh: "DeviceMesh | None") -> Experts:
    """Return experts that are drawn one after the other, those of other processes too."""
    one = make()
    experts = Experts(one, count, mesh)
    first = 0 if mesh is None else mesh.get_local_rank() * experts.num_local_experts
    for number in range(count):
        if 0 <= number - first < experts.num_local_experts:
            experts.put(number - first, one)
        if number < count - 1:
            one = make()
    return experts
