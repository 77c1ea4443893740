"""patch and unpatch: put our ops into a model's modules, and take them out again."""

from collections.abc import Callable

from torch import nn

from deepspeed_ext.ops._kinds import check_flags
from deepspeed_ext.patching.attention import attention_of, is_turning, rotary_of
from deepspeed_ext.patching.experts import experts_of
from deepspeed_ext.patching.feed_forward import activation_of, feed_forward_of
from deepspeed_ext.patching.loss import is_head, loss_of, put_loss, take_out_loss
from deepspeed_ext.patching.norms import norm_of
from deepspeed_ext.patching.recognition import Unlike, class_of
from deepspeed_ext.patching.replaced import Replaced, is_in_place, put, replaced_of, take_out
from deepspeed_ext.patching.report import Report

_Kind = Callable[[nn.Module], Replaced | None]
_KINDS: tuple[_Kind, ...] = (norm_of, feed_forward_of, activation_of, experts_of, rotary_of)


def patch(model: nn.Module, *, loss: bool = True) -> Report:
    """Let the modules of a transformers model call our ops.

    Replaced are the forwards of norms (``rms_norm``, ``layer_norm``), feed-forward blocks with a
    gate (``gated_activation``), activations that torch goes over in several passes
    (``bias_activation``), rotary embeddings of queries and keys (``rope``), attention that is not
    fused (``softmax``), experts (as ``moe.register_with_transformers`` does) and the loss of
    language models (``linear_cross_entropy``). Parameters, state dicts, configurations and classes
    stay as they are, and so do other models.

    Only what is recognised is replaced: a class of transformers, or a norm of torch, whose forward
    is the one that it was written with, and that computes what ours does, which is tried with a few
    numbers. All else is left, and the report says why: a forward that was replaced by you or by
    another library, code that came with a checkpoint, a module with another formula. What is
    replaced calls the module's own forward for what our ops do not take: float64, other devices,
    DTensors. A second call changes nothing; it finds what has come since. With loss=False it takes
    the loss out.

    In training, a model that is called with `labels` makes no logits: the loss is worked out from
    hidden states in chunks, and `outputs.logits` is None. Logits are there without labels, after
    ``model.eval()``, with `logits_to_keep`, and always with loss=False. Where a layer like LoRA has
    been put around the head, or a hook sees what the head returns, or the model has been given
    another `loss_function`, the model makes logits, and the loss is its own.

    Args:
        model: of transformers, or one that has such in it; wrapped, sharded or compiled or not.
        loss: whether the loss is replaced too. False for who reads the logits of training.

    Returns:
        What was replaced and what not; printed, a table.

    Raises:
        TypeError: model is no module, or loss neither True nor False.

    See: ``unpatch``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is {model!r:.60}, expected a torch.nn.Module")
    check_flags("patch", loss=loss)
    if not loss:
        for module in model.modules():
            take_out_loss(module)
    search = _Search(dict(model.named_modules()))
    for kind in _KINDS:
        search.look(kind)
    turning = any(map(is_turning, search.found.values()))
    search.look(lambda module: attention_of(module, turning))
    if loss:
        search.look(loss_of)
    for name, replaced in search.found.items():
        if replaced_of(search.modules[name]) is not replaced:
            (put_loss if name in search.losses else put)(replaced)
    return search.report()


def unpatch(model: nn.Module) -> None:
    """Take out of a model what ``patch`` has put there, also if it was copied or pickled since.

    Args:
        model: any; one without patches stays as it is.

    Raises:
        TypeError: model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model is {model!r:.60}, expected a torch.nn.Module")
    for module in model.modules():
        take_out_loss(module)
    for module in model.modules():
        take_out(module)


class _Search:
    """Goes through the modules of a model.

    Args:
        modules: by name.

    Attributes:
        found: what replaces their forwards, or does already.
        losses: the names of those that are language models.
        left: why others are left.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.found: dict[str, Replaced] = {}
        self.losses: set[str] = set()
        self.left: dict[str, str] = {}

    def look(self, kind: _Kind) -> None:
        """Look at all of which nothing is known yet."""
        for name, module in self.modules.items():
            if name in self.found or name in self.left:
                continue
            there = replaced_of(module)
            if there is not None and is_in_place(module):
                if not is_head(there):
                    self.found[name] = there
                continue
            try:
                replaced = kind(module)
            except Unlike as error:
                self.left[name] = str(error)
                continue
            if replaced is not None:
                self.found[name] = replaced
                if kind is loss_of:
                    self.losses.add(name)

    def report(self) -> Report:
        """Return what was found, in the order of the model."""
        of = {name: class_of(module).__name__ for name, module in self.modules.items()}
        names = [name for name in of if name in self.found]
        left = {name: self.left[name] for name in of if name in self.left}
        return Report(
            {name: self.found[name].by for name in names},
            left,
            {name: of[name] for name in (*names, *left)},
        )
