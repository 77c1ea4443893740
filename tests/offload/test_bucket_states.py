"""What may happen to a bucket in which state: all that the rules allow, and nothing else."""

import ast
from pathlib import Path

import pytest
import torch
from late_copies import be_late
from offload_cases import Pair
from optim_cases import make_params
from torch import nn

import deepspeed_ext.offload
from deepspeed_ext.offload.bucket_states import RULES, Awaited, BucketState
from deepspeed_ext.offload.host_optimizer import options_of

IDLE, WATCHED, ARRIVING, AHEAD, RETURNING = BucketState
EVENTS = sorted({rule.event for rule in RULES})
RULE_OF = {(rule.state, rule.event): rule for rule in RULES}
WAY_TO = {  # what has to happen first
    IDLE: [],
    WATCHED: ["watch"],
    ARRIVING: ["watch", "take"],
    AHEAD: ["take", "start_ahead"],
    RETURNING: ["take", "commit"],
}
FIELDS = {"_state", "_arrival", "_speculative", "_task", "_underway"}


class HeldWorker:
    """One that does nothing of what it is given."""

    def __init__(self):
        self.tasks = []

    def submit(self, task):
        self.tasks.append(task)
        return task

    def drop(self, task):
        """As if it had begun."""
        return False


class Walk:
    """A bucket with gradients, whose copies come late and whose steps nobody takes."""

    def __init__(self, monkeypatch):
        be_late(monkeypatch, "cpu")
        self.pair = Pair(params=[nn.Parameter(torch.ones(5))], model=nn.ParameterList())
        self.pair.train(1)
        self.pair.backward()
        pipeline = self.pair.ours._pipeline
        pipeline.forget_gradients()  # and what was done by them
        [self.bucket] = pipeline._buckets
        self.bucket._worker = self.worker = HeldWorker()
        self.options = options_of(pipeline.groups[0])
        self.after = self.bucket.streams.event_now()

    def do(self, event):
        """Let something happen."""
        arguments = {
            "start_ahead": (self.options, 1.0),
            "commit": (self.options, 1.0, self.after, lambda: None),
        }
        return getattr(self.bucket, event)(*arguments.get(event, ()))

    def go_to(self, state):
        """Let happen what leads to a state."""
        for event in WAY_TO[state]:
            self.do(event)
        assert self.bucket.state is state
        self.worker.tasks.clear()

    def awaited(self, arrival, speculative):
        """Return what tasks wait for that the worker was given."""
        events = [event for task in self.worker.tasks for event in task._events]
        needs = [need for task in self.worker.tasks for need in task._needs]
        found = {Awaited.READERS} if self.after in events else set()
        if arrival is not None and arrival.events[0] in events:
            found.add(Awaited.GRADIENTS)
        if speculative is not None and speculative in needs:
            found.add(Awaited.SPECULATION)
        return found


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", BucketState, ids=lambda state: state.name)
def test_rules(state, event, monkeypatch):
    walk = Walk(monkeypatch)
    walk.go_to(state)
    bucket, rule = walk.bucket, RULE_OF.get((state, event))
    if rule is None:
        before = {name: getattr(bucket, name) for name in FIELDS}
        wanted = (
            f"OffloadOptimizer: {event} of a bucket is called when it is {state.name}, expected"
        )
        with pytest.raises(RuntimeError, match=wanted):
            walk.do(event)
        assert {name: getattr(bucket, name) for name in FIELDS} == before
        assert not walk.worker.tasks
        return
    awaited = set()
    if event == "returned":
        with pytest.raises(RuntimeError, match="when it is RETURNING, and its step not over"):
            walk.do(event)
        assert bucket.state is RETURNING
        bucket.task.end()
        awaited.add(Awaited.WEIGHTS)
    before = bucket._arrival, bucket.speculative_task
    walk.do(event)
    assert bucket.state is rule.next
    assert awaited | walk.awaited(*before) == rule.awaits
    check_fields(bucket)


def check_fields(bucket):
    """Assert that there is what belongs to the state, and nothing else."""
    state = bucket.state
    assert bucket.has_taken == (state in (ARRIVING, AHEAD))
    assert (bucket.speculative_task is not None) == (state is AHEAD)
    assert (bucket.task is not None) == bool(bucket._underway) == (state is RETURNING)
    noted = bucket.gradients.question() is not None
    assert noted if state is WATCHED else not noted or bucket.has_taken


def test_every_state_can_be_left_and_reached():
    changing = [rule for rule in RULES if rule.next is not rule.state]
    assert {rule.state for rule in changing} == {rule.next for rule in changing} == set(BucketState)
    assert len(RULE_OF) == len(RULES)
    assert {rule.state for rule in RULES if rule.event == "discard"} == set(BucketState)


def test_a_worker_that_takes_no_step(monkeypatch):
    """Weights are what they were, and can be touched; the next step is one as ever."""
    pair = Pair(params=make_params(), model=nn.ParameterList())
    pair.train(2)
    pair.backward()
    pipeline = pair.ours._pipeline
    before = [param.detach().clone() for param in pair.params]

    def refuse(task):
        raise OSError("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.worker, "submit", refuse)
        with pytest.raises(OSError, match="no thread"):
            pair.ours.step()
    [bucket] = pipeline._buckets
    assert bucket.state is RETURNING and bucket.task is None
    assert all(map(torch.equal, pair.params, before))
    assert bucket.state is IDLE
    pair.zero_grad()
    pair.train(3)


def test_nobody_else_writes_the_fields():
    folder = Path(deepspeed_ext.offload.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_written and node.attr in FIELDS and path.name != "bucket_states.py":
                owner = getattr(node.value, "id", None)
                assert owner == "self" and path.name != "bucket.py", f"{path.name}:{node.lineno}"
