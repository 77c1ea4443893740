"""An engine in words, for the config's dump_state."""

import json

from deepspeed_ext.engine.engine import Engine


def described(engine: Engine) -> str:
    """Return what an engine is made of: config, sizes, parameters, groups and schedule.

    Args:
        engine: of any kind.
    """
    params = list(engine.module.parameters())
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
    state = {
        "config": engine.config,
        "processes": engine.world_size,
        "device": str(engine.device),
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "parameters": sum(p.numel() for p in params),
        "parameters_with_gradients": sum(p.numel() for p in params if p.requires_grad),
        "optimizer": type(engine.optimizer).__name__,
        "groups": [
            {"tensors": len(g["params"]), **o} for g, o in zip(groups, options, strict=True)
        ],
        "scheduler": type(engine.lr_scheduler).__name__,
    }
    return json.dumps(state, indent=2, default=str)
