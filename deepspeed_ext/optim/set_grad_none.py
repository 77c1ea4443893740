"""The set_grad_none of DeepSpeed's fused optimizers."""

from deepspeed_ext.optim.base import FlatStateOptimizer


class SetGradNone(FlatStateOptimizer):
    """Base of a class whose constructor says what zero_grad() does by default."""

    _settings = (*FlatStateOptimizer._settings, "set_grad_none")
    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros.

        Args:
            set_to_none: drop them; by default what set_grad_none says.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
