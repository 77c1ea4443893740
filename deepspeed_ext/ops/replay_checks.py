"""A quick run of replay_, for ds_report."""

import torch

from deepspeed_ext.ops import record, rms_norm


def replay(device: str) -> None:
    """Compare recorded calls with calls, for other values than those that were recorded."""
    weight = torch.ones(300, device=device)

    def twice(x: torch.Tensor) -> torch.Tensor:
        first = rms_norm(x.view(5, 300), weight)
        assert isinstance(first, torch.Tensor)
        second = rms_norm(first[1:], weight, residual=first[:4], eps=1e-3)
        assert not isinstance(second, torch.Tensor)
        return second[0]

    with torch.no_grad():
        _, recorded = record(twice, torch.zeros(1500, device=device))
        x = torch.linspace(-1, 1, 1500, device=device)
        if not torch.equal(recorded(x), twice(x)):
            raise AssertionError("replay_: results differ from those of the calls")
