"""Signals as values a loop can look at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

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
        for number in (*NOTICES, signal.SIGINT):
            signal.signal(number, inbox._remember)
        return inbox

    def _remember(self, number: int, _frame: object) -> None:
        self.first = self.first or signal.Signals(number)


def block_notices() -> None:
    """Block the notices in this process and all it will start.

    Slurm sends SIGTERM to every process of every step, and a raylet that gets one dies at once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def watch_blocked_notices(on_notice: Callable[[signal.Signals], None]) -> None:
    """Call back, from a thread of its own, for every blocked notice that arrives."""

    def wait() -> None:
        while True:
            on_notice(signal.Signals(signal.sigwait(NOTICES)))

    threading.Thread(target=wait, name="notices", daemon=True).start()
