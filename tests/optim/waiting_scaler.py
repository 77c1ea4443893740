"""A GradScaler whose numbers are there when it uses them."""

import torch


class _WaitingCopies(torch.amp.grad_scaler._MultiDeviceReplicator):
    """Copies of a number on other devices. torch does not wait for those in host memory.

    It puts 1 into such a copy when it finds inf, and what arrives late is 0 again.
    """

    def get(self, device):
        copy = super().get(device)
        if self.master.is_cuda:
            torch.cuda.synchronize()
        return copy


def waiting_scaler(monkeypatch, device, init_scale):
    """A GradScaler on this device, for gradients on the CPU; all others wait too, until undone."""
    monkeypatch.setattr(torch.amp.grad_scaler, "_MultiDeviceReplicator", _WaitingCopies)
    return torch.amp.GradScaler(device, init_scale=init_scale)
