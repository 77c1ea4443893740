"""The step ops: what they promise to torch, to threads and to CUDA graphs."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import warm_python
from step_cases import (
    ADAM,
    BF16,
    F16,
    F32,
    Arguments,
    Dtypes,
    Step,
    as_buffers,
    assert_same,
    clone,
    each_step,
    make,
    written,
)
from torch import Tensor
from two_pass_cases import LAMB, each_step_op

from deepspeed_ext.ops import adam_step_
from deepspeed_ext.ops.optimizers import self_checks
from deepspeed_ext.ops.optimizers.step_op import _signature_of

OPCHECKED: dict[str, Callable[[Step], Arguments]] = {
    "lists": lambda step: make(step, [0, 17]),
    "most states": lambda step: make(step, [17, 1], states=step.most_states),
    "masters": lambda step: make(step, [5], Dtypes(BF16, F16, F32, True)),
    "buffers": lambda step: as_buffers(make(step, [5, 17], Dtypes(F16, F16, F16))),
}


@each_step_op
@pytest.mark.parametrize("case", OPCHECKED)
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "scalar tensors"])
def test_opcheck(step: Step, case: str, tensors: bool, device: str) -> None:
    numbers = dict(step.base)
    beta1, beta2 = numbers.pop("betas", (0.0, 0.0))
    scalars = dict(lr_tensor=0.1, grad_scale=2.0, found_inf=0.0)
    given: dict[str, Any] = numbers | dict(beta1=beta1, beta2=beta2)
    if tensors:
        given |= {name: torch.tensor(x, device=device) for name, x in scalars.items()}
    for name, value in OPCHECKED[case](step).items():
        given[name] = [t.to(device) for t in value] if isinstance(value, list) else value
    given["coefficients"] = torch.linspace(0.5, 2.0, len(given["params"]), device=device)
    nothing = {"List[Tensor]": [], "bool": False, "Optional[Tensor]": None, "float": None}
    for name in step.ops:
        op = getattr(torch.ops.deepspeed_ext, name).default
        arguments = [
            given[a.name] if a.name in given else nothing[str(a.type)] for a in op._schema.arguments
        ]
        checked = torch.library.opcheck(op, tuple(arguments))
        assert list(checked.values()) == ["SUCCESS"] * 4


@each_step_op
def test_can_be_compiled(step: Step) -> None:
    lr = torch.tensor(0.1) if step in (ADAM, LAMB) else 0.1

    def step_and_use(arguments: Arguments) -> list[Tensor]:
        before = arguments["params"][0] + 1
        squares = step(**(step.base | arguments | dict(lr=lr)))
        used = torch.mul(arguments["params"][0], before)
        return [used] if squares is None else [used, squares * 2]

    torch.compiler.reset()  # else the ops use up the recompilations of one function
    compiled = torch.compile(step_and_use, fullgraph=True, backend="aot_eager")
    for n in (17, 33):  # the second with dynamic shapes
        got = make(step, [n, 5], Dtypes(BF16, BF16, F32, True), states=step.most_states)
        want = clone(got)
        version = got["params"][0]._version
        assert all(map(torch.equal, compiled(got), step_and_use(want)))
        assert_same(got, want)
        assert got["params"][0]._version > version


@each_step_op
def test_backward_notices_that_a_param_changed(step: Step, device: str) -> None:
    arguments = make(step, [4], device=device)
    param = arguments["params"][0].requires_grad_()
    loss = (param * param).sum()
    step(**arguments, **step.base)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_step_op
@pytest.mark.parametrize("buffers", [False, True])
def test_counts_every_write(step: Step, buffers: bool) -> None:
    arguments = make(step, [4, 0], Dtypes(BF16, BF16, F32, True), states=step.most_states)
    arguments = as_buffers(arguments) if buffers else arguments
    versions = {
        name: [t._version for t in arguments[name]] for name in [*written(arguments), "grads"]
    }
    step(**arguments, **step.base)
    for name, before in versions.items():
        bump = 0 if name == "grads" else 1
        assert [t._version for t in arguments[name]] == [version + bump for version in before], name


@each_step
def test_counts_every_write_to_what_can_be_gone_through_once(step: Step) -> None:
    """As model.parameters() can, and torch takes it."""
    arguments = make(step, [4, 0], states=step.most_states)
    names = [name for name in written(arguments) if arguments[name]]
    step(**arguments | {name: iter(arguments[name]) for name in names}, **step.base)
    for name in names:
        assert [t._version for t in arguments[name]] == [1, 1], name
    elsewhere = {name: [t.clone() for t in arguments[name]] for name in names}
    versions = {name: [t._version for t in elsewhere[name]] for name in names}
    out = {name: iter(tensors) for name, tensors in elsewhere.items()}
    step(**arguments, **step.base, out=out)
    for name in names:
        assert [t._version for t in elsewhere[name]] == [n + 1 for n in versions[name]], name
    for wrong, kind in ((arguments["params"][0], "Tensor"), (3, "int")):
        with pytest.raises(TypeError, match=rf": {names[0]} is a {kind}, expected a list$"):
            step(**arguments | {names[0]: wrong}, **step.base)


@each_step_op
def test_params_that_require_grad_need_no_no_grad(step: Step, device: str) -> None:
    arguments, want = make(step, [4], device=device), make(step, [4], device=device)
    arguments["params"][0].requires_grad_()
    arguments["grads"][0] = arguments["grads"][0].requires_grad_() * 1.0
    squares = step(**arguments, **step.base)
    step(**want, **step.base)
    assert_same(arguments, want)
    assert arguments["params"][0].is_leaf
    assert squares is None or not squares.requires_grad


@each_step_op
def test_nothing_to_do(step: Step, device: str) -> None:
    squares = step(**{name: [] for name in ("params", "grads", *step.states, "steps")}, **step.base)
    assert squares is None or squares.shape == (0, 2)
    arguments = make(step, [0, (3, 0)], device=device)  # no elements, yet a step
    step(**arguments, **step.base)
    assert [step.item() for step in arguments["steps"]] == [1, 38]


@each_step_op
def test_an_imaginary_part_of_a_conjugate_as_gradient(step: Step) -> None:
    negated = torch.view_as_complex(torch.randn(4, 2)).conj().imag
    assert negated.is_neg()
    got, want = (
        make(step, [4]) | dict(grads=[negated]),
        make(step, [4]) | dict(grads=[negated.resolve_neg()]),
    )
    step(**got, **step.base)
    step(**want, **step.base)
    assert_same(got, want)


@each_step_op
def test_all_on_meta_or_fake_is_legal_and_does_nothing(step: Step) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = [step(**make(step, [4, 3], device="meta"), **step.base)]
    with FakeTensorMode():
        made.append(step(**make(step, [4, 3]), **step.base))
    assert all(squares is None or squares.shape == (2, 2) for squares in made)


def test_releases_the_gil() -> None:
    """Another thread sees a step half done: the first element is ahead of the last one."""
    param, exp_avg, exp_avg_sq = (torch.zeros(1 << 23) for _ in range(3))
    grad, step = torch.ones(1 << 23), torch.zeros(())
    seen, finished = threading.Event(), threading.Event()

    def watch() -> None:
        while not finished.is_set() and not seen.is_set():
            last, first = param[-1].item(), param[0].item()  # a step may come in between,
            if first != last and param[-1].item() == last:  # but then the last one has moved too
                seen.set()

    watcher = threading.Thread(target=watch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    watcher.start()
    try:
        for _ in range(100):  # the watcher may have to wait for a core
            adam_step_([param], [grad], [exp_avg], [exp_avg_sq], [step], lr=0.1)
            if seen.is_set():
                break
    finally:
        finished.set()
        watcher.join()
        torch.set_num_threads(before)
    assert seen.is_set()


def test_threads_do_not_meet() -> None:
    def three_steps(n: int) -> Arguments:
        arguments = make(ADAM, [n, 7, n], Dtypes(F32, BF16))
        for i in range(3):
            adam_step_(
                **arguments, **(ADAM.base | dict(lr=0.1 / n, grad_scale=torch.tensor(i + 1.0)))
            )
        return arguments

    sizes = [1000 + 40_000 * (i % 3) + i for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(three_steps, sizes))
    for n, got in zip(sizes, together, strict=True):
        assert_same(got, three_steps(n))


@each_step_op
def test_cuda_graph_takes_new_scalars_at_every_replay(step: Step, cuda: str) -> None:
    numbers = dict(lr=0.1, grad_scale=1.0, found_inf=0.0)
    scalars = {name: torch.tensor(x, device=cuda) for name, x in numbers.items()}
    dtypes = Dtypes(BF16, BF16, F32, True)
    sizes = [1, 1000, 8193] * 300  # several launches
    got, want = (as_buffers(make(step, sizes, dtypes, cuda)) for _ in range(2))
    step(**make(step, [4], dtypes, cuda), **(step.base | scalars))  # loads the library
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(**got, **(step.base | scalars))
    for lr, scale, found in ((0.1, 1.0, 0.0), (0.03, 8.0, 0.0), (0.2, 2.0, 1.0), (0.3, 4.0, 0.0)):
        for name, x in zip(numbers, (lr, scale, found), strict=True):
            scalars[name].fill_(x)
        graph.replay()
        step(**want, **(step.base | scalars))
        assert_same(got, want)
    assert got["steps"][0][0].item() == 3


@each_step_op
def test_cuda_uses_the_current_stream(step: Step, cuda: str) -> None:
    got, want = (make(step, [1 << 22] * 4, device=cuda) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        got["grads"] = [grad.mul_(2) for grad in got["grads"]]
        step(**got, **step.base)
    torch.cuda.current_stream().wait_stream(stream)
    want["grads"] = [grad.mul_(2) for grad in want["grads"]]
    step(**want, **step.base)
    assert_same(got, want)


@each_step_op
def test_self_check_passes(step: Step, device: str) -> None:
    getattr(self_checks, step.name)(device)


@each_step
def test_self_check_finds_a_wrong_op(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(self_checks, step.title)

    def wrong(**arguments: Any) -> None:
        right(**(arguments | dict(lr=0.101)))

    wrong.__name__ = step.title
    monkeypatch.setattr(self_checks, step.title, wrong)
    with pytest.raises(RuntimeError, match=rf"^{step.title}: .* on cpu .*, expected "):
        getattr(self_checks, step.name)("cpu")


FIRST_CALLS = """
import threading, torch
from deepspeed_ext.ops import adam_step_
lists = [[torch.ones(1) for _ in range(n)] for n in (1, 3000, 10, 20000, 100, 10000, 1, 5000)]
barrier, done = threading.Barrier(len(lists)), []
def step(params):
    state = [[torch.zeros(1) for _ in params] for _ in range(3)]
    grads = [torch.ones(1) for _ in params]
    barrier.wait()
    adam_step_(params, grads, *state, lr=0.5)
    done.append(all(param.item() == 0.5 for param in params))
threads = [threading.Thread(target=step, args=(params,)) for params in lists]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(done.count(True))
"""


def test_first_calls_of_many_threads() -> None:
    """The library is loaded once; a thread that comes late to that is not refused."""
    run = warm_python.run("-c", FIRST_CALLS)
    assert run.stdout.strip() == "8", run.stderr


def test_a_function_has_the_arguments_of_its_op() -> None:
    def function(params: Any, betas: Any, *, lr: float = 0.5) -> None: ...

    names = ["params", "betas", "lr"]
    assert _signature_of(function, names) == (["params", "betas"], {"lr": 0.5})
    with pytest.raises(TypeError, match=r": \['betas', 'eps'\]$"):
        _signature_of(function, ["params", "eps", "lr"])
