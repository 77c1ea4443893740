"""Attention: rotary embeddings of queries and keys, and softmax where attention is not fused.

Both are functions beside the classes of a model's file. What replaces the forward of attention is
its own code, which finds ours under their names; nobody else does. The embedding says beside its
cosines and sines which positions and frequencies they are of, and code that does not know that uses
them as they are.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_ext.ops import rope, softmax
from deepspeed_ext.patching.recognition import (
    Unlike,
    check_forward,
    check_same,
    class_of,
    is_of_transformers,
    samples,
    stub_of,
)
from deepspeed_ext.patching.replaced import Replaced, are_ours

_TURN, _EAGER = "apply_rotary_pos_emb", "eager_attention_forward"  # in the files of models
_STEADY = ("default", "linear", "llama3", "yarn")  # whose frequencies no forward changes


class Turns(NamedTuple):
    """What queries and keys turn by.

    Args:
        positions: (1 or batch, tokens).
        frequencies: (pairs,), radians for each position.
        scale: of what turns.
    """

    positions: Tensor
    frequencies: Tensor
    scale: float


class Embeddings(tuple[Tensor, Tensor]):
    """Cosines and sines, as every attention takes them.

    Attributes:
        turns: what they are of; None in a copy that another has made.
    """

    turns: Turns | None = None


class _Rotary(Replaced):
    by = ("rope",)

    def run(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        module: Any = self.module
        kind = () if layer_type is None else (layer_type,)
        found = Embeddings(self.own(x, position_ids, *kind))
        prefix = "" if layer_type is None else f"{layer_type}_"
        scale = float(getattr(module, f"{prefix}attention_scaling"))
        frequencies = getattr(module, f"{prefix}inv_freq").to(x.device, torch.float32)
        found.turns = Turns(position_ids, frequencies, scale)
        return found


class _Attention(Replaced):
    """Args:
    module: that it is for.
    names: of the functions in its file that are replaced.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(module)
        self.names = names
        self.by = tuple({_TURN: "rope", _EAGER: "softmax"}[name] for name in names)
        self.code = _with(class_of(module), names)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the code, which has no name that pickle could write."""
        return {name: value for name, value in vars(self).items() if name != "code"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make it anew."""
        vars(self).update(state)
        self.code = _with(class_of(self.module), self.names)

    def run(self, *args: Any, **keywords: Any) -> Any:
        hidden = args[0] if args else keywords.get("hidden_states")
        if not isinstance(hidden, Tensor) or not are_ours(hidden) or _has_old_name(keywords):
            return self.own(*args, **keywords)
        if _TURN in self.names:
            turns = getattr(keywords.get("position_embeddings"), "turns", None)
            if turns is None:
                return self.own(*args, **keywords)
            keywords["position_embeddings"] = (turns, turns)
        return self.code(self.module, *args, **keywords)


def _has_old_name(keywords: dict[str, Any]) -> bool:
    """Tell whether an argument has a name that only what is around the forward knows."""
    return "past_key_values" in keywords or "past_key_value" in keywords


def _with(kind: Any, names: tuple[str, ...]) -> FunctionType:
    """Return the code of an attention's forward, which finds our functions under these names."""
    written: Any = inspect.unwrap(kind.forward)
    known = dict(written.__globals__)
    del known["__name__"]  # or torch.compile would look names up in the file itself
    for name in names:
        known[name] = _turned if name == _TURN else _eager_of(known[_EAGER])
    made = FunctionType(
        written.__code__, known, written.__name__, written.__defaults__, written.__closure__
    )
    made.__kwdefaults__ = written.__kwdefaults__
    return made


def _turned(
    q: Tensor, k: Tensor, cos: Turns, sin: Turns, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Do what a model's function does with cosines and sines."""
    positions, frequencies, scale = cos
    positions = positions[0] if positions.shape[0] == 1 else positions
    if unsqueeze_dim != 1:
        return rope(q, k, positions, frequencies, scale=scale)
    # Heads lie beside one another in memory, and attention takes them as they lie.
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), positions, frequencies, scale=scale)
    return q.transpose(1, 2), k.transpose(1, 2)


def _eager_of(theirs: Callable[..., Any]) -> Callable[..., Any]:
    return _eager_capped if "softcap" in inspect.signature(theirs).parameters else _eager


def _eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Do what a model's function does, with one pass over the scores."""
    return _attend(module, query, key, value, attention_mask, scaling, dropout, None)


def _eager_capped(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Do the same with scores that are capped."""
    return _attend(module, query, key, value, attention_mask, scaling, dropout, softcap)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is not None:
        mask = mask[..., : key.shape[-2]]
    scores = query @ key.transpose(2, 3)
    weights = softmax(scores, mask, scale=scaling, softcap=softcap or 0.0)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def is_turning(replaced: Replaced) -> bool:
    """Tell whether this replaces a rotary embedding."""
    return isinstance(replaced, _Rotary)


def rotary_of(module: nn.Module) -> Replaced | None:
    """Return what replaces a rotary embedding; None: it is none.

    Raises:
        Unlike: it is one whose frequencies change, or are used in another way.
    """
    kind: Any = class_of(module)
    if not kind.__name__.endswith("RotaryEmbedding") or not is_of_transformers(module):
        return None
    check_forward(module)
    rules = getattr(module, "rope_type", None)
    of_layers = rules if isinstance(rules, dict) else {None: rules}
    for layer_type, rule in of_layers.items():
        if rule not in _STEADY:
            raise Unlike(f"its rope_type is {rule!r}, expected one of {', '.join(_STEADY)}")
        _check_rotary(module, layer_type)
    return _Rotary(module)


def _check_rotary(module: Any, layer_type: str | None) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(module, f"{prefix}inv_freq", None)
    scale = getattr(module, f"{prefix}attention_scaling", None)
    if not isinstance(frequencies, Tensor) or frequencies.is_meta or scale is None:
        raise Unlike("it has no frequencies in memory")
    name = f"{prefix}inv_freq"
    on_host = frequencies.detach().cpu().float()
    stub = stub_of(module, **{name: nn.Buffer(on_host, persistent=False)})
    x, positions = samples((1, 5, 4))[0], torch.tensor([[0, 1, 2, 7, 30]])
    angles = positions[..., None].double() * on_host.double()
    angles = torch.cat([angles, angles], -1)
    want = torch.stack([angles.cos(), angles.sin()]) * float(scale)
    kind = () if layer_type is None else (layer_type,)
    forward: Any = class_of(module).forward
    check_same("its forward", lambda: torch.stack(forward(stub, x, positions, *kind)), want)


def attention_of(module: nn.Module, turns: bool) -> Replaced | None:
    """Return what replaces attention; None: it calls no function that our ops compute.

    Args:
        module: of a model.
        turns: whether the model's rotary embeddings say what they are of.

    Raises:
        Unlike: it calls some, and they are others.
    """
    kind: Any = class_of(module)
    if not kind.__name__.endswith("Attention") or not is_of_transformers(module):
        return None
    check_forward(module)
    written: Any = inspect.unwrap(kind.forward)
    known, names, problems = written.__globals__, [], []
    checks = {_TURN: _check_turn, _EAGER: _check_eager}
    for name in checks:
        if name not in written.__code__.co_names or (name == _TURN and not turns):
            continue
        try:
            if getattr(known.get(name), "__module__", None) != kind.__module__:
                raise Unlike(f"{name} has been replaced by another")
            checks[name](known[name])
        except Unlike as error:
            problems.append(str(error))
        else:
            names.append(name)
    if not names:
        raise Unlike("; ".join(problems) or f"it calls neither {_TURN} nor {_EAGER}")
    return _Attention(module, tuple(names))


def _check_turn(theirs: Callable[..., Any]) -> None:
    q, k, angles = samples((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 4))
    twice = torch.cat([angles, angles], -1)

    def turned() -> Tensor:
        return torch.cat(theirs(q, k, twice.cos(), twice.sin()), 1)

    both = torch.cat([q, k], 1)
    first, second = both.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    want = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    check_same(_TURN, turned, want)


def _check_eager(theirs: Callable[..., Any]) -> None:
    """Try it with as many heads of keys, and with fewer if it repeats them."""
    capped = "softcap" in inspect.signature(theirs).parameters
    groups = (1, 2) if "repeat_kv" in theirs.__code__.co_names else (1,)
    for group, softcap in product(groups, (None, 2.0) if capped else (None,)):
        heads = 4 // group
        q, k, v, mask = samples((2, 4, 5, 8), (2, heads, 6, 8), (2, heads, 6, 8), (2, 1, 5, 6))
        stub = SimpleNamespace(num_key_value_groups=group, training=False, head_dim=8)
        options = {} if softcap is None else {"softcap": softcap}
        call = partial(theirs, stub, q, k, v, mask, scaling=0.3, dropout=0.0, **options)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * 0.3
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        want = ((scores + mask).softmax(-1) @ v).transpose(1, 2)
        check_same(_EAGER, lambda found=call: found()[0], want)  # type: ignore[misc]
