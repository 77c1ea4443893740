"""The loss of language models, by linear_cross_entropy in the place of logits."""

import inspect
import sys
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.ops import linear_cross_entropy, linear_cross_entropy_ref
from deepspeed_ext.patching.recognition import (
    Unlike,
    check_forward,
    check_same,
    class_of,
    is_of_transformers,
    samples,
    stub_of,
)
from deepspeed_ext.patching.replaced import (
    Replaced,
    are_ours,
    is_in_place,
    put,
    replaced_of,
    take_out,
)
from deepspeed_ext.torch_internals.modules import result_hooks_of

_KEEPERS = ("torch.distributed.", "deepspeed_ext.")  # whose hooks let results be as they are
_LOSSES = "transformers.loss.loss_utils"
_MODELS = "transformers.modeling_utils"
_OWN_LOSS = "_loss_function"  # the attribute of a model that has another than its class
_CAP = "final_logit_softcapping"  # in configurations
_BALANCE = "output_router_logits"  # likewise
_IGNORED = -100
_READ = (
    "num_items_in_batch",
    "ignore_index",
    "shift_labels",
)  # by the loss, of a model's arguments


class _Request:
    """A loss that is wanted of the next hidden states that reach the head.

    Args:
        labels: as a model gets them.
        softcap: of the logits.
        options: what a model hands on to its loss.
    """

    def __init__(self, labels: Tensor, softcap: float, options: dict[str, Any]) -> None:
        self.labels, self.softcap, self.options = labels, softcap, options
        self.loss: Tensor | None = None

    def targets(self) -> Tensor:
        """Return a class for each row: that of the next token, unless told otherwise."""
        shifted: Tensor | None = self.options.get("shift_labels")
        if shifted is None:
            ignored = self.options.get("ignore_index", _IGNORED)
            shifted = nn.functional.pad(self.labels, (0, 1), value=ignored)[..., 1:]
        return shifted

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Work out the loss, as transformers' function does."""
        items = self.options.get("num_items_in_batch")
        loss = linear_cross_entropy(
            hidden,
            weight,
            self.targets().to(hidden.device).reshape(hidden.shape[:-1]),
            bias=bias,
            ignore_index=self.options.get("ignore_index", _IGNORED),
            reduction="mean" if items is None else "sum",
            softcap=self.softcap,
        )
        if isinstance(items, Tensor):
            items = items.to(loss.device)
        self.loss = loss if items is None else loss / items


class _Head(Replaced):
    """The last linear layer.

    Attributes:
        request: what is wanted in place of logits.

    Raises:
        RuntimeError: there is a second call in a forward: nobody knows which rows the loss is of.
    """

    by = ("linear_cross_entropy",)
    request: _Request | None = None

    def run(self, hidden: Tensor) -> Any:
        request = self.request
        module: Any = self.module
        # Asked here, as fully_shard has whole weights within calls of their modules alone.
        if request is None or not are_ours(hidden, module.weight, module.bias):
            return self.own(hidden)
        if request.loss is not None:
            raise RuntimeError(
                "patch: the head is called twice in a forward with labels, expected once; use"
                " patch(model, loss=False)"
            )
        request.answer(hidden, module.weight, module.bias)
        return hidden.new_empty((*hidden.shape[:-1], 0))


class _Loss:
    """A model's loss function: the one that was asked for, or transformers' own.

    Args:
        model: what stands in the place of its forward.
        own: transformers' function.
    """

    def __init__(self, model: "_LanguageModel", own: Any) -> None:
        self.model, self.own = model, own

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **keywords: Any) -> Any:
        """Return the loss."""
        request = self.model.request
        if request is None or request.loss is None:
            return self.own(logits, labels, *args, **keywords)
        return request.loss


class _LanguageModel(Replaced):
    """Args:
    module: a model with a head.
    head: what stands in the place of the head's forward.
    softcap: of the logits.

    Attributes:
        request: what the call that is under way wants in place of logits.
    """

    by = ("linear_cross_entropy",)
    request: _Request | None = None

    def __init__(self, module: nn.Module, head: _Head, softcap: float) -> None:
        super().__init__(module)
        self.head, self.softcap = head, softcap

    def run(self, *args: Any, **keywords: Any) -> Any:
        labels = keywords.get("labels")
        head = None if labels is None else self._head_without_logits(keywords)
        if labels is None or head is None:
            return self.own(*args, **keywords)
        config: Any = self.module.config
        as_tuple = keywords.pop("return_dict", None)
        as_tuple = config.return_dict is False if as_tuple is None else not as_tuple
        options = {name: keywords[name] for name in _READ if keywords.get(name) is not None}
        if head.request is not None:
            raise RuntimeError(
                "patch: the model is called within a call with labels, or by another thread,"
                " expected one call at a time; use patch(model, loss=False)"
            )
        request = head.request = self.request = _Request(labels, self.softcap, options)
        try:
            found = self.own(*args, **keywords, return_dict=True)
        finally:
            head.request = self.request = None
        if request.loss is not None:
            rest = {name: value for name, value in found.items() if name != "logits"}
            found = type(found)(**rest)
        return found.to_tuple() if as_tuple else found

    def made_for(self, replica: nn.Module) -> Replaced:
        made = super().made_for(replica)
        assert isinstance(made, _LanguageModel)
        loss = vars(replica).get(_OWN_LOSS)
        if isinstance(loss, _Loss) and loss.model is self:
            setattr(replica, _OWN_LOSS, _Loss(made, loss.own))
        return made

    def _head_without_logits(self, keywords: dict[str, Any]) -> _Head | None:
        """Return what is to work out the loss; None: there is someone who reads logits."""
        module: Any = self.module
        loss = vars(module).get(_OWN_LOSS)
        if not module.training or not isinstance(loss, _Loss) or loss.model is not self:
            return None  # someone has set another since
        kept = keywords.get("logits_to_keep", 0)
        head = module.get_output_embeddings()
        there = replaced_of(head)
        if not isinstance(there, _Head) or self.head not in (there, there.origin):
            return None
        if not is_in_place(head) or not all(map(_keeps_results, result_hooks_of(head))):
            return None
        return there if type(kept) is int and kept == 0 else None


def _keeps_results(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook neither reads nor changes the logits: of fully_shard and of ours."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_KEEPERS)


def loss_of(module: Any) -> Replaced | None:
    """Return what replaces the forward of a language model; None: it is none.

    Raises:
        Unlike: it is one, and not one whose loss is known.
    """
    if not _is_pretrained(module) or not hasattr(module, "loss_function"):
        return None
    if "labels" not in inspect.signature(class_of(module).forward).parameters:
        return None
    if not is_of_transformers(module):
        home = class_of(module).__module__
        raise Unlike(f"its class is of {home}, expected one of transformers")
    check_forward(module)
    own = module.loss_function
    known = getattr(sys.modules.get(_LOSSES), "ForCausalLMLoss", None)
    if own is not known or known is None or _OWN_LOSS in vars(module):
        name = getattr(own, "__name__", type(own).__name__)
        raise Unlike(f"its loss function is {name}, expected ForCausalLMLoss of transformers")
    head = module.get_output_embeddings()
    if head is None or class_of(head) is not nn.Linear:
        found = type(head).__name__
        raise Unlike(f"its head is {found}, expected torch.nn.Linear")
    check_forward(head)
    softcap = float(getattr(module.config, _CAP, None) or 0)
    _check_loss(module, head, softcap)
    return _LanguageModel(module, _Head(head), softcap)


def _is_pretrained(module: nn.Module) -> bool:
    """Tell whether a class is a model of transformers, or one made of it."""
    if is_of_transformers(module):
        return True
    return any(kind.__module__ == _MODELS for kind in class_of(module).__mro__)


def is_head(replaced: Replaced) -> bool:
    """Tell whether this replaces the head of a language model, which the model's forward names."""
    return isinstance(replaced, _Head)


def put_loss(replaced: Replaced) -> None:
    """Put the forwards of a language model and of its head, and its loss function."""
    assert isinstance(replaced, _LanguageModel)
    model: Any = replaced.module
    own = model.loss_function
    put(replaced)
    put(replaced.head)
    setattr(model, _OWN_LOSS, _Loss(replaced, own))


def take_out_loss(model: nn.Module) -> None:
    """Undo `put_loss`."""
    if isinstance(vars(model).get(_OWN_LOSS), _Loss):
        delattr(model, _OWN_LOSS)
    replaced = replaced_of(model)
    if isinstance(replaced, _LanguageModel):
        take_out(replaced.head.module)
        take_out(model)


class _Outputs(tuple[Tensor, ...]):
    """What is below a head gives, in whatever class that is."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _Body(nn.Module):
    """Stands in the place of what is below a head, and gives hidden states.

    Args:
        hidden: that it gives.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Return the only output."""
        return _Outputs((self.hidden,))


def _check_loss(module: Any, head: Any, softcap: float) -> None:
    """Refuse a model that does something else with small hidden states and a small head."""
    config = module.config
    classes = getattr(config, "vocab_size", None)
    names = [name for name, child in module.named_children() if child is head]
    kind: Any = class_of(module)
    prefix = kind.base_model_prefix
    if len(names) != 1 or type(classes) is not int or head.weight.shape[0] != classes:
        raise Unlike("its head has another number of classes than its configuration")
    hidden, weight, bias = samples((2, 3, 2), (classes, 2), (classes,))
    body = _Body(hidden)
    object.__setattr__(body, "decoder", body)  # that some call
    small = nn.Linear(2, classes, bias=head.bias is not None, device="meta")
    small.weight = nn.Parameter(weight)
    if head.bias is not None:
        small.bias = nn.Parameter(bias)
    stub = stub_of(module, **{prefix: body, names[0]: small})
    stub.config = copy(config)
    if hasattr(config, _BALANCE):  # which is added to the loss, whatever that is
        setattr(stub.config, _BALANCE, False)
    labels = torch.tensor([[1, 0, 1], [0, 1, _IGNORED]])
    request = _Request(labels, softcap, {})
    forward = kind.forward
    check_same(
        "its forward",
        lambda: forward(stub, input_ids=labels.clamp(min=0), labels=labels, return_dict=True).loss,
        linear_cross_entropy_ref(
            hidden, weight, request.targets(), bias=small.bias, softcap=softcap
        ).detach(),
    )
