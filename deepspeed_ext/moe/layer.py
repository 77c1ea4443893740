"""MoE: a layer of experts, with DeepSpeed's arguments and results."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_ext.moe.arguments import check_choices, check_mesh, check_room
from deepspeed_ext.moe.experts import Experts
from deepspeed_ext.moe.older_names import take_older_names
from deepspeed_ext.moe.sending import (
    Gate,
    jittered,
    mixed,
    send,
    tokens_of,
)
from deepspeed_ext.ops import moe_assign, moe_load_balancing_loss, moe_route
from deepspeed_ext.ops._kinds import check_flags, check_kinds, check_whole
from deepspeed_ext.ops.moe.routing import Routing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_POLICIES = (None, "None", "Jitter", "RSample")


class MoE(nn.Module):
    """A layer whose tokens go through k of many experts each.

    A router, `gate`, gives each token a probability for each expert, in float32. The token goes to
    the k likeliest; of equal ones, to the lower number. Each expert has room for ceil(tokens /
    experts x capacity factor x k) tokens, and at least min_capacity; first choices take room before
    second ones, and so on, and a choice without room is dropped. The result of a token is the sum
    of what its experts return, times their weights: its probability where k is 1; else the
    probabilities divided by their sum over those that were not dropped. Of a token without experts
    it is 0. With the same random state in torch, a layer that is run again, as checkpointing does,
    routes alike.

    All of it is as in DeepSpeed 0.9, but for these:

    - k is any number, not 1 or 2, and drop_tokens=False and used_token count for each.
    - The second expert is the second likeliest. There it is drawn with Gumbel noise in each call;
      here noisy_gate_policy="RSample" does that in training, for all choices but the first. With k
      1 it draws the first, as there.
    - use_rts is for every k; with k 2 the order of tokens decides there, as use_rts=False does
      here. With k 1 that leaves it to topk there.
    - exp_counts stays on the device, and counts all choices, those dropped too, not first ones.
    - Fewer tokens than min_capacity are no error.
    - All parameters of experts get gradients, 0 for those that no token went to.
    - Parameters of experts are stacked, see `Experts`.

    A state dict has `gate.weight`, `experts.` with the expert's own names, and with use_residual
    `mlp.` and `coefficient.`. One with DeepSpeed's names, `deepspeed_moe.gate.wg.weight` and
    `deepspeed_moe.experts.deepspeed_experts.3.` for each expert, loads as well.

    Under autocast experts get tokens in its dtype, and the result has that; the router does not.

    Args:
        hidden_size: of a token.
        expert: takes (rows, hidden_size), returns as much, or a tuple of that and what is not used.
            Each expert is a copy of it.
        num_experts: 1 to 1024.
        ep_size: over how many processes experts are shared out.
        k: how many experts a token goes to.
        capacity_factor: of training.
        eval_capacity_factor: of evaluation.
        min_capacity: room that each expert has in any case.
        use_residual: each token goes through `expert` itself as well, as `mlp`. Results of both are
            added up with weights that a linear layer, `coefficient`, gives the token.
        noisy_gate_policy: None, "RSample" (above), or "Jitter": in training the router's input is
            multiplied by random numbers from 0.99 to 1.01.
        drop_tokens: False: experts have room for all.
        use_rts: which tokens of one rank of choices take room first is drawn in each call; False:
            the first ones do.
        use_tutel: False; the kernels are ours.
        enable_expert_tensor_parallelism: False.
        mesh: with ep_size above 1, a mesh of one dimension with as many processes, taken by its
            name out of one of two dimensions with all processes, for zero.shard to find the rest.
            None: such a mesh is made. Each has process groups of its own, so that layers of one
            model had better share one: init_device_mesh("cuda", (world // ep_size, ep_size),
            mesh_dim_names=("data", "expert"))["expert"].

    Raises:
        ValueError: an argument breaks a rule above; processes cannot be shared out so.

    See: Lepikhin et al., "GShard", 2020, for k 2; Fedus, Zoph & Shazeer, "Switch Transformers",
    2022, for k 1; Rajbhandari et al., "DeepSpeed-MoE", 2022, for use_residual.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        *,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        super().__init__()
        check_choices("MoE", hidden_size=hidden_size, num_experts=num_experts, k=k)
        check_room(
            "MoE",
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
        )
        check_flags(
            "MoE", use_residual=use_residual, drop_tokens=drop_tokens, use_rts=use_rts,
            use_tutel=use_tutel, enable_expert_tensor_parallelism=enable_expert_tensor_parallelism,
        )  # fmt: skip
        if noisy_gate_policy not in _POLICIES:
            raise ValueError(
                f"MoE: noisy_gate_policy is {noisy_gate_policy!r}, expected None, 'Jitter' or"
                " 'RSample'"
            )
        if use_tutel:
            raise ValueError(
                "MoE: use_tutel is True, expected False: kernels of deepspeed_ext are used"
            )
        if enable_expert_tensor_parallelism:
            raise ValueError(
                "MoE: enable_expert_tensor_parallelism is True, expected False; share experts out"
                " over more processes by ep_size"
            )
        self.num_experts, self.ep_size, self.k = int(num_experts), int(ep_size), int(k)
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = int(min_capacity), noisy_gate_policy
        self.drop_tokens, self.use_rts, self.use_residual = drop_tokens, use_rts, use_residual
        self._mesh = _mesh_of(ep_size, mesh)
        self.experts = Experts(expert, num_experts, self._mesh)
        self.gate = Gate(hidden_size, self.num_experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        self.register_load_state_dict_pre_hook(take_older_names)  # type: ignore[no-untyped-call]

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send tokens through experts.

        Args:
            hidden_states: (..., hidden_size), float32, bfloat16 or float16.
            used_token: with an element for each token; those where it is 0 go to no expert.

        Returns:
            What experts made of the tokens, of the shape of hidden_states; l_aux, (), float32: the
            loss that is least when experts are balanced, experts x sum(mean probability x share of
            first choices, dropped ones too); exp_counts, (experts,), int64: how many choices each
            is.
        """
        tokens = tokens_of("MoE", hidden_states, self.gate)
        routing = self._route(tokens, used_token)
        weights = self._weights(routing)
        beside = self.mlp if self.use_residual else None
        found, added = send(hidden_states, routing, weights, self.experts, beside, self._mesh)
        if added is not None:
            found = mixed(found, added, self.coefficient(hidden_states))
        return found, moe_load_balancing_loss(routing, first_choices=True), routing.counts

    def _route(self, tokens: Tensor, used_token: Tensor | None) -> Routing:
        noise = self.noisy_gate_policy if self.training else None
        logits = self.gate(jittered(tokens) if noise == "Jitter" else tokens)
        options: dict[str, Any] = {}
        if self.drop_tokens:
            options = dict(capacity=self._capacity(len(tokens)))
            if self.use_rts:
                seed = torch.randint(1 << 62, (), device=tokens.device)
                options.update(keep="random", seed=seed)
        if noise != "RSample" and used_token is None:
            return moe_route(logits, self.k, **options)
        found = moe_route(logits, self.k)
        experts, weights = found.experts, found.weights
        if noise == "RSample":
            experts = _drawn(logits.detach(), experts)
            weights = logits.softmax(-1).gather(-1, experts)
        if used_token is not None:
            experts = experts.where(_as_mask(used_token, len(tokens)), -1)
        placed = moe_assign(experts, weights, self.num_experts, **options)
        return placed._replace(probability_sums=found.probability_sums, z_sum=found.z_sum)

    def _capacity(self, tokens: int) -> int:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return max(math.ceil(tokens / self.num_experts * (factor * self.k)), self.min_capacity)

    def _weights(self, routing: Routing) -> Tensor:
        """Return what results are multiplied by; see the class."""
        if self.k == 1:
            return routing.weights
        kept = routing.weights.where(routing.slots >= 0, 0)
        least = torch.finfo(torch.float32).eps
        return kept / kept.sum(-1, keepdim=True).clamp(min=least)

    def extra_repr(self) -> str:
        """Return how tokens are routed."""
        return f"k={self.k}, ep_size={self.ep_size}"


def _drawn(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Return as many experts, drawn with Gumbel noise: all but the first, or the only one."""
    noisy = logits - torch.empty_like(logits).exponential_().log()
    k = likeliest.shape[-1]
    if k > 1:
        noisy = noisy.scatter(-1, likeliest[..., :1], torch.inf)
    return noisy.topk(k).indices


def _as_mask(used_token: Tensor, tokens: int) -> Tensor:
    """Return (tokens, 1), whether each is used."""
    check_kinds("MoE", used_token=(used_token, Tensor))
    if used_token.numel() != tokens:
        raise ValueError(
            f"MoE: used_token has {used_token.numel()} elements, expected one for each of the"
            f" {tokens} tokens"
        )
    return used_token.reshape(-1, 1) != 0


def _mesh_of(ep_size: int, mesh: "DeviceMesh | None") -> "DeviceMesh | None":
    """Return the mesh of experts, or None: they are all here."""
    check_whole("MoE", ep_size=ep_size)
    check_mesh("MoE", mesh)
    if mesh is not None:
        if mesh.size() != ep_size:
            raise ValueError(f"MoE: mesh has {mesh.size()} processes, expected ep_size, {ep_size}")
        return mesh
    if ep_size == 1:
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(
            f"MoE: ep_size is {ep_size}, expected 1 where torch.distributed has no process group;"
            " call init_process_group first"
        )
    world = dist.get_world_size()
    if ep_size < 1 or world % ep_size:
        raise ValueError(f"MoE: ep_size is {ep_size}, expected a divisor of {world} processes")
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
    shape, names = (world // ep_size, ep_size), ("data", "expert")
    return init_device_mesh(device, shape, mesh_dim_names=names)["expert"]
