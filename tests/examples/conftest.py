"""What the tests of the examples share: one thread for tiny models."""

from one_thread import one_thread as one_thread
