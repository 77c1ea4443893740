"""What users do to streamed models, and what goes wrong in the middle."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from stream_cases import (
    Block,
    LateEvent,
    Model,
    assert_equal_models,
    loss_of,
    on_disk,
    pair,
    some_ids,
)
from torch import nn

from deepspeed_ext import zero
from deepspeed_ext.torch_internals.dispatch import saved_tensors_hooks_here
from deepspeed_ext.zero.streaming import fetched


@pytest.fixture(name="alive")
def count_alive(monkeypatch):
    """Return how many pieces are on the device, and the most that there were at once."""
    alive, most = weakref.WeakSet(), [0]

    class Counted(fetched.Fetched):
        def begin(self):
            alive.add(self)
            most[0] = max(most[0], len(alive))
            super().begin()

    monkeypatch.setattr("deepspeed_ext.zero.streaming.streamed_model.Fetched", Counted)
    return alive, most


def logits(model, device, seed=9):
    with torch.no_grad():
        return model(some_ids(device, seed))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_no_more_blocks_are_on_the_device(device, alive, prefetch, grad):
    pieces, most = alive
    model = Model(layers=6)
    handle = zero.stream(model, to=device, prefetch=prefetch)
    for seed in range(2):
        with torch.set_grad_enabled(grad):
            loss = loss_of(model, some_ids(device, seed))
            assert len(pieces) <= int(grad)
            if grad:
                loss.backward()
        gc.collect()
        assert len(pieces) == 0
    assert most[0] == 1 + prefetch
    ends = 2 if grad else 1
    assert handle.stats()["fetched"] == 2 * (6 * ends - int(grad))
    assert handle.stats()["ahead"] == (2 * 5 * ends if prefetch else 0)


def test_a_graph_holds_no_weights(device, rest, alive):
    pieces, _ = alive
    model = Model(layers=6)
    zero.stream(model, to=device, **rest)
    losses = [loss_of(model, some_ids(device, seed)) for seed in range(3)]
    assert len(pieces) == 1
    del losses


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["block", "inside", "between", "backward"])
def test_an_error_leaves_it_as_it_was(device, error, where):
    streamed, kept, handle = pair(device)
    loss_of(streamed, some_ids(device, 5))  # a graph that is dropped

    def fail(*_):
        raise error("on purpose")

    if where == "block":
        handles = [streamed.layers[2].register_forward_pre_hook(fail)]
    elif where == "inside":
        handles = [streamed.layers[2].down.register_forward_hook(fail)]
    elif where == "between":
        handles = [streamed.layers[2].register_forward_hook(fail)]
    else:
        handles = [streamed.layers[2].register_full_backward_hook(fail)]
    with pytest.raises(error):
        loss_of(streamed, some_ids(device, 0)).backward()
    for one in handles:
        one.remove()
    streamed.zero_grad()
    for model in (streamed, kept):
        loss_of(model, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    assert not handle._windows.open and saved_tensors_hooks_here() is None
    assert all("weight" not in m.__dict__ for m in streamed.modules())


def test_nothing_is_used_again_that_was_written_past_version_counters(device, rest):
    """As quantizers of weights do, block by block, and averages of weights between forwards."""
    streamed, kept, _ = pair(device, rest=rest)
    for model in (streamed, kept):
        x = torch.linspace(-1, 1, 32, device=device).reshape(2, 16)
        for block in model.layers:
            block(x)
            for param in block.parameters():
                param.data.mul_(0.5)
            x = block(x)
        model.found = [x, loss_of(model, some_ids(device, 0))]
        for param in model.parameters():
            param.data.add_(0.25)
        model.found.append(loss_of(model, some_ids(device, 0)))
    assert all(map(torch.equal, streamed.found, kept.found))


def test_weights_that_forward_writes_are_taken_home(device, rest):
    class Normed(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.mul_(0.9)
            return super().forward(x)

    def change(model):
        model.layers = nn.ModuleList(Normed() for _ in range(3))
        model.calls = [0, 1, 2]

    streamed, kept, _ = pair(device, change, rest)
    for model in (streamed, kept):
        for _ in range(2):
            logits(model, device)
    assert_equal_models(streamed, kept)


def test_state_dicts_within_forward_and_outside(device, rest):
    streamed, kept, _ = pair(device, rest=rest)
    seen = []

    def look(*_):
        seen.append({k: v.clone() for k, v in streamed.state_dict().items()})

    streamed.layers[1].up.register_forward_hook(look)
    logits(streamed, device)
    for key, value in kept.state_dict().items():
        assert torch.equal(value.cpu(), seen[0][key].cpu())
        assert torch.equal(value.cpu(), streamed.state_dict()[key].cpu())
    assert {id(p) for p in streamed.parameters()} == {id(p) for p in streamed.parameters()}


@pytest.mark.parametrize("assign", [False, True])
def test_loading(device, assign):
    streamed, kept, _ = pair(device)
    logits(streamed, device)
    other = Model()
    for param in other.parameters():
        param.data.mul_(1.5)
    state = {key: value.clone() for key, value in other.state_dict().items()}
    if assign and device == "cuda":
        state = {k: v if "layers" in k else v.to(device) for k, v in state.items()}
    streamed.load_state_dict(state, assign=assign)
    kept.load_state_dict(state)
    assert torch.equal(logits(streamed, device), logits(kept, device))


def test_another_dtype_and_a_new_block_later(device, rest):
    streamed, kept, _ = pair(device, rest=rest)
    logits(streamed, device)
    new = Block()
    for model in (streamed, kept):
        model.to(torch.float64)
        model.layers[1] = pickle.loads(pickle.dumps(new)).to(device, torch.float64)
        loss_of(model, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)


def test_eval_between_forward_and_backward_and_between_micro_steps(device):
    streamed, kept, _ = pair(device)
    for model in (streamed, kept):
        for seed in range(2):
            loss = loss_of(model, some_ids(device, seed))
            logits(model.eval(), device)
            model.train()
            loss.backward()
            logits(model, device)
    assert_equal_models(streamed, kept, gradients=True)


def test_pickles_are_ordinary_models(device, rest):
    streamed, kept, _ = pair(device, rest=rest)
    logits(streamed, device)
    file = io.BytesIO()
    torch.save(streamed, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False, map_location="cpu")
    assert torch.equal(logits(loaded, "cpu"), logits(kept.cpu(), "cpu"))
    assert zero.stream(loaded, to=device, **rest).stats()["fetched"] == 0


def test_close(device, rest):
    streamed, kept, handle = pair(device, rest=rest)
    loss_of(streamed, some_ids(device, 0)).backward()
    handle.close()
    handle.close()
    streamed.zero_grad()
    assert not streamed.layers[0]._forward_hooks and not streamed._forward_pre_hooks
    assert torch.equal(logits(streamed.to(device), device), logits(kept, device))
    again = zero.stream(streamed, to=device, **rest)
    assert torch.equal(logits(streamed, device), logits(kept, device))
    assert again.stats()["fetched"] > 0


def test_models_go_when_nobody_has_them(rest):
    model = Model()
    handle = zero.stream(model, to="cpu", **rest)
    loss_of(model, some_ids("cpu", 0)).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    handle.close()


def test_threads_with_models_of_their_own(device, tmp_path):
    pairs = [pair(device, rest=on_disk(tmp_path) if i else None) for i in range(3)]
    errors = []

    def work(streamed, kept):
        try:
            for model in (streamed, kept):
                for seed in range(5):
                    loss_of(model, some_ids(device, seed)).backward()
            assert_equal_models(streamed, kept, gradients=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=each[:2]) for each in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_generate_of_transformers(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (2, 6))
    want = model.to(device).generate(ids.to(device), max_new_tokens=8, do_sample=False)
    handle = zero.stream(model.cpu(), to=device)
    assert torch.equal(model.generate(ids.to(device), max_new_tokens=8, do_sample=False), want)
    assert handle.stats()["ahead"] > 0


def test_errors():
    model = Model()
    stream = zero.stream
    with pytest.raises(TypeError, match=r"^zero.stream: model is a list, expected a torch.nn.Mod"):
        stream([])
    with pytest.raises(
        ValueError, match=r"^zero.stream: device is 'gpu', expected 'cpu' or 'nvme'"
    ):
        stream(model, "gpu")
    for prefetch in (-1, True, 1.0):
        with pytest.raises(ValueError, match=rf"^zero.stream: prefetch is {prefetch}, expected"):
            stream(model, prefetch=prefetch)
    for to in ("meta", "gpu", 0):
        with pytest.raises(ValueError, match=rf"^zero.stream: to is {to!r}, expected a CUDA devic"):
            stream(model, to=to)
    count = torch.cuda.device_count()
    there = f"one of {count} GPUs" if count else "the CPU, as torch finds no GPU"
    for to in (f"cuda:{count}", *(["cuda", torch.device("cuda")] if not count else [])):
        with pytest.raises(ValueError, match=rf"^zero.stream: to is '{to}', expected {there}$"):
            stream(model, to=to)
    with pytest.raises(TypeError, match=r"^zero.stream: blocks is 3, expected several in a list"):
        stream(model, blocks=3)
    with pytest.raises(ValueError, match=r"^zero.stream: model has no list of modules of one clas"):
        stream(nn.Linear(2, 2), to="cpu")
    with pytest.raises(ValueError, match=r"^zero.stream: blocks has 'none', expected a name"):
        stream(model, to="cpu", blocks=["none"])
    with pytest.raises(ValueError, match=r"^zero.stream: blocks has 'layers.0' and 'layers.0.up'"):
        stream(model, to="cpu", blocks=["layers.0", "layers.0.up"])
    stream(model, to="cpu")
    with pytest.raises(ValueError, match=r"^zero.stream: model is streamed already, expected one"):
        stream(model, to="cpu")


def test_after_ctrl_c_hooks_of_others_stay_where_they_are(device):
    streamed, kept, _ = pair(device)

    def stop(*_):
        raise KeyboardInterrupt

    handle = streamed.layers[2].down.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        streamed(some_ids(device, 0))
    handle.remove()
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(streamed, some_ids(device, 0))
        before = len(seen)
        torch.ones(3, requires_grad=True).exp().sum()
        assert len(seen) == before + 1
    loss.backward()
    loss_of(kept, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    while saved_tensors_hooks_here() is not None:  # those of the call that was stopped; other
        torch._C._autograd._pop_saved_tensors_default_hooks()  # tests would have them, too


def test_a_block_alone_after_ctrl_c_has_its_weights_of_now(device, rest):
    streamed, kept, _ = pair(device, rest=rest)

    def stop(*_):
        raise KeyboardInterrupt

    handle = streamed.layers[2].down.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        streamed(some_ids(device, 0))
    handle.remove()
    x = torch.ones(2, 16, device=device)
    for model in (streamed, kept):
        for param in model.parameters():
            param.data.mul_(0.5)
    for i in (3, 2):
        assert torch.equal(streamed.layers[i](x), kept.layers[i](x))
    LateEvent.found.clear()  # what was being read, nobody has used


def test_one_model_in_two_threads_is_an_error(device):
    model = Model()
    zero.stream(model, to=device)
    errors = []

    def other(*_):
        try:
            logits(model, device)
        except RuntimeError as error:
            errors.append(str(error))

    def meanwhile(*_):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    model.layers[1].up.register_forward_hook(meanwhile)
    want = logits(model, device)
    assert len(errors) == 1 and "is called in two threads at once, expected one" in errors[0]
    assert torch.isfinite(want).all()


def test_moves_leave_what_rests(device, rest):
    streamed, kept, handle = pair(device, rest=rest)
    resting = handle.stats()["resting_bytes"]
    loss_of(streamed, some_ids(device, 0)).backward()
    streamed.to(device)
    assert streamed.layers[0].up.weight.device.type == "cpu"
    assert streamed.layers[0].up.weight.grad.device.type == "cpu"
    loss_of(kept, some_ids(device, 0)).backward()
    assert_equal_models(streamed, kept, gradients=True)
    address = streamed.layers[0].up.weight.data_ptr()
    twin = copy.deepcopy(streamed)
    streamed.to("meta")
    assert streamed.layers[0].up.weight.data_ptr() == address
    assert streamed.words.weight.is_meta
    assert twin.to("meta").layers[0].up.weight.is_meta
    streamed.to(torch.float64)
    assert streamed.layers[0].up.weight.dtype == torch.float64
    assert handle.stats()["resting_bytes"] == 2 * resting
