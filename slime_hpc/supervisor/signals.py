"""Signals as values a loop can look at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker

NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm, or we on its behalf, send to say that the end is near."""


class SignalInbox:
    """Remembers the first notice this process got; later ones change nothing."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None

    @classmethod
    def install(cls) -> SignalInbox:
        """Take over the handlers of this process, whoever had set them (submitit, ray.init)."""
        inbox = cls()
        for number in (*NOTICES, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish is respected
                signal.signal(number, inbox._remember)
        return inbox

    def _remember(self, number: int, _frame: object) -> None:
        self.first = self.first or signal.Signals(number)


def block_notices() -> None:
    """Block the notices in this process and all it will start.

    Slurm sends SIGTERM to every process of every step, and a raylet that gets one dies at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def block_notices_for_good() -> None:
    """``block_notices`` for a process that uses multiprocessing; called before it has other threads.

    Starting its resource tracker, CPython unblocks SIGTERM in the thread that happens to need it first, and so
    in all that this thread starts. So it is started here.
    """
    resource_tracker.ensure_running()
    block_notices()


def watch_blocked_notices(on_notice: Callable[[signal.Signals], None]) -> None:
    """Call back, from a thread of its own, for every blocked notice that arrives."""

    def wait() -> None:
        while True:
            on_notice(signal.Signals(signal.sigwait(NOTICES)))

    threading.Thread(target=wait, name="notices", daemon=True).start()
