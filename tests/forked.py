"""A piece of work killed with SIGKILL in the middle: in a forked child, because a fresh process first imports torch."""

import os
import signal
import time
from collections.abc import Callable


def killed(work: Callable[[], object], reached: Callable[[], object], seconds: float = 60.0) -> int:
    """Run `work` in a child until `reached()` is true here, then kill -9 it; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "the child never came to the point where it was to be killed"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return child
