"""Who asks autograd to save something: torch's checkpoint, or another."""

import sys

_FUNCTION, _CHECKPOINT = "torch.autograd.function", "torch.utils.checkpoint"


def is_input_of_checkpoint() -> bool:
    """Tell a hook of autograd whether torch's checkpoint saves an input; its caller is the hook.

    Hooks are told what is saved, not by whom. With reentrance a function of autograd saves it, and
    what a function in a checkpoint saves goes to hooks of the checkpoint's own.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == _FUNCTION:
        above = frame.f_back
        if above is None:
            return False
        frame = above
    return frame is not None and frame.f_globals.get("__name__") == _CHECKPOINT
