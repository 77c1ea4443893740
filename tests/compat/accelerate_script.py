"""A script of accelerate users, started by `accelerate launch --use_deepspeed`; saves losses."""

import json
import sys
from pathlib import Path

import no_gpu
import torch
from accelerate import Accelerator
from torch import nn


def main(folder):
    torch.set_num_threads(1)
    no_gpu.pretend()
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = {"loss": [], "norm": [], "lr": []}

    def train():
        for x, wanted in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - wanted).float().square().mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found["loss"].append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                found["norm"].append(float(norm))
                found["lr"].append(optimizer.param_groups[0]["lr"])

    train()
    accelerator.save_state(folder / "state")
    train()
    accelerator.load_state(folder / "state")
    train()
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        found["sizes"] = {name: list(tensor.shape) for name, tensor in whole.items()}
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
