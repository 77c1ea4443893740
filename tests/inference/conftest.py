"""What the inference tests share: this folder, which pytest puts on the path, and one thread."""

from one_thread import one_thread as one_thread
