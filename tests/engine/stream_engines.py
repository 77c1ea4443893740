"""What the tests of engines that stream share: configs, engines, steps, comparison."""

import pytest
import torch
import torch.distributed as dist
from test_training_loops import config
from torch.nn.functional import cross_entropy
from zero_cases import VOCABULARY, Net

import deepspeed_ext
from deepspeed_ext.dtensors import full, is_dtensor
from deepspeed_ext.optim.formats import MASTER

LOW = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.fixture(name="alone", autouse=True)
def no_process_group():
    """No process group: initialize makes one, of this process."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():  # of a test that has failed
        dist.destroy_process_group()


@pytest.fixture(name="rest", params=["cpu", "nvme"])
def each_rest(request, tmp_path):
    return rests_in(request.param, tmp_path)


def rests_in(device, folder):
    """Return zero_optimization of a config."""
    block = {"device": device} if device == "cpu" else {"device": "nvme", "nvme_path": str(folder)}
    return {"stage": 3, "offload_param": block}


def given_for(precision, zero_optimization, steps=1, **more):
    """Return a config; beside a GPU it does not clip.

    Norms of what rests are added up on the CPU, so their last bits, and what is clipped by them,
    are not those of a GPU.
    """
    if torch.cuda.is_available():
        more = {"gradient_clipping": 0.0, **more}
    if precision == "low":
        return config(3, "float32", steps, zero_optimization=zero_optimization, bf16=LOW, **more)
    return config(3, precision, steps, zero_optimization=zero_optimization, **more)


def made(given, model=None, streamed=None, **arguments):
    """Return an engine, which streams if the config asks for it."""
    model = Net() if model is None else model
    engine = deepspeed_ext.initialize(model=model, config=given, **arguments)[0]
    wanted = "offload_param" in given["zero_optimization"] if streamed is None else streamed
    assert hasattr(engine.module, "_zero_stream") == wanted
    return engine


def loss_of(engine, number):
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(VOCABULARY, (2, 4, 5), generator=generator).to(engine.device)
    return cross_entropy(engine(tokens).float().flatten(0, 1), targets.flatten())


def trained(engine, numbers, factors=None):
    """Return losses and norms of steps, and what all weights are then."""
    told = []
    for number in numbers:
        loss = loss_of(engine, number)
        engine.backward(loss * (factors or {}).get(number, 1.0))
        engine.step()
        told.append((loss.item(), engine.get_global_grad_norm() or 0.0))
    return told, weights_of(engine)


def weights_of(engine):
    """Return master weights, or others as they are."""
    state, found = {} if engine.optimizer is None else engine.optimizer.state, {}
    for name, param in engine.module.named_parameters():
        weight = full(param.detach()) if is_dtensor(param) else param.detach()
        if param.requires_grad:
            weight = state.get(param, {}).get(MASTER, weight)
        found[name] = weight.cpu()
    return found


def assert_same(streamed, kept, is_exact=True, near=None):
    """Losses and weights are the same, bit for bit, and norms, but for the last bits of a GPU's.

    near: how far those may be off that are not exact; None: as far as torch finds right.
    """
    (told, weights), (others, wanted) = streamed, kept
    exact, near = {"rtol": 0, "atol": 0}, near or {}
    close = exact if is_exact or not torch.cuda.is_available() else near
    near = near if torch.cuda.is_available() else exact
    told, others = torch.tensor(told), torch.tensor(others)
    torch.testing.assert_close(told, others, equal_nan=True, **near)
    assert not is_exact or torch.equal(told[:, 0].nan_to_num(7), others[:, 0].nan_to_num(7))
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight.to(weights[name].dtype), **close)
