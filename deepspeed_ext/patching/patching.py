"""patch and unpatch: put our ops into a model's modules, and take them out again."""

from collections.abc import Callable

from torch import nn

from deepspeed_ext.patching.attention import attention_of, rotary_of
from deepspeed_ext.patching.experts import experts_of
from deepspeed_ext.patching.feed_forward import activation_of, feed_forward_of
from deepspeed_ext.patching.loss import loss_of, put_loss, take_out_loss
from deepspeed_ext.patching.norms import norm_of
from deepspeed_ext.patching.recognition import Unlike, class_of
from deepspeed_ext.patching.replaced import Replaced, put, replaced_of, take_out
from deepspeed_ext.patching.report import Report

_Kind = Callable[[nn.Module], Replaced | None]
_KINDS: tuple[_Kind, ...] = (norm_of, feed_forward_of, activation_of, experts_of, rotary_of)


def patch(model: nn.Module, *, loss: bool = True) -> Report:
    """Let modules of a transformers model call our ops, in training and else.

    ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is {model!r:.60}, expected a torch.nn.Module")
    modules = dict(model.named_modules())
    found: dict[str, Replaced] = {}
    left: dict[str, str] = {}

    def look(kind: _Kind, name: str, module: nn.Module) -> None:
        if name in found or name in left:
            return
        try:
            replaced = replaced_of(module)
            if replaced is not None and vars(module).get("forward") is replaced:
                found[name] = replaced
            else:
                replaced = kind(module)
                if replaced is not None:
                    found[name] = replaced
        except Unlike as error:
            left[name] = str(error)

    for kind in _KINDS:
        for name, module in modules.items():
            look(kind, name, module)
    turns = [name for name, each in found.items() if each.by == ("rope",)]
    for name, module in modules.items():
        look(lambda each: attention_of(each, bool(turns)), name, module)
    for name, module in modules.items():
        if loss:
            look(loss_of, name, module)
    for name, replaced in found.items():
        if replaced_of(modules[name]) is not replaced:
            (put_loss if replaced.by == ("linear_cross_entropy",) else put)(replaced)
    return Report(
        {name: replaced.by for name, replaced in found.items()},
        left,
        {name: class_of(modules[name]).__name__ for name in (*found, *left)},
    )


def unpatch(model: nn.Module) -> None:
    """Take out of a model what ``patch`` has put there, also if it was copied or pickled since."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model is {model!r:.60}, expected a torch.nn.Module")
    for module in model.modules():
        take_out_loss(module)
        take_out(module)
