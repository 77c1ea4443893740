"""The states of a request, and which may follow which::

WAITING --> PREFILLING --> RUNNING
   |            |             |
   +------------+-------------+--> DONE: finished, cancelled or failed
"""

from enum import Enum


class State(Enum):
    """How far a request is."""

    WAITING = "waiting"  # for a slot and pages
    PREFILLING = "prefilling"  # has a slot, into which its prompt goes part by part
    RUNNING = "running"  # its first token is queued, and each step may queue the next one
    DONE = "done"  # nothing more will come of it


NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset((State.PREFILLING, State.DONE)),
    State.PREFILLING: frozenset((State.RUNNING, State.DONE)),
    State.RUNNING: frozenset((State.DONE,)),
    State.DONE: frozenset(),
}
