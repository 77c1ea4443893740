"""The loader of an engine: each process gets its own part of a dataset."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler


def loader_of(
    dataset: Any,
    batch_size: int,
    mesh: DeviceMesh,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> "DataLoader[Any]":
    """Return a loader of micro-batches; its sampler.set_epoch draws another order for an epoch.

    Args:
        dataset: with __len__ and __getitem__.
        batch_size: of a micro-batch in this process.
        mesh: whose processes share the dataset.
        collate_fn: of torch's DataLoader.
        num_workers: likewise.
        drop_last: leave out a last micro-batch that is not full.

    Raises:
        ValueError: dataset cannot be shared out, or nothing would be left of it.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
        what = "empty" if hasattr(dataset, "__len__") else f"a {type(dataset).__name__}"
        raise ValueError(
            f"initialize: training_data is {what}, expected a dataset with __len__ and __getitem__;"
            " iterate over a loader of your own else"
        )
    place = mesh.mesh.flatten().tolist().index(dist.get_rank())
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, mesh.size(), place)
    if drop_last and len(sampler) < batch_size:
        raise ValueError(
            f"initialize: training_data has {len(sampler)} samples for each process with"
            f" dataloader_drop_last, expected a micro-batch of {batch_size} or more"
        )
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=mesh.device_type == "cuda",
        drop_last=drop_last,
    )
