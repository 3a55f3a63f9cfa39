"""support/stopping.py - what Ctrl-C (SIGINT) and SIGTERM do in a run.

The first signal sets a flag, and no step is lost. While dialogues are held they are cancelled, and
`rlver.stop_if_asked` writes a checkpoint of the last whole step. From the beginning of the update on,
the step is finished, logged and saved first. A second signal ends the process at once.
"""

from support.errors import Stopped

import asyncio
import os
import signal
from contextlib import contextmanager

NOTICE = b"\nstopping when the last whole step is saved; once more: at once\n"


@contextmanager
def interrupts():
    """A context in which Ctrl-C raises KeyboardInterrupt, until a StopSignal catches it. After it both
    signals have their old handlers again. (asyncio's own would cancel its main task, and forget the
    Ctrl-C if that task ends without waiting for anything, as the toy's dialogues do.)"""

    def interrupt(*_):
        raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class StopSignal:
    """The flag, and the dialogues that it cancels."""

    def __init__(self, prints):
        """prints: does this process say that it stops?"""
        self.prints = prints
        self.number = 0  # of the first signal; 0: none
        self.dialogues = None  # the task that holds them

    def catch(self):
        """Handle the signals from here on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        """The handler, which Python runs between any two steps of the main thread. Raises Stopped at
        a second signal."""
        if self.number:
            raise Stopped(number)
        self.number = number
        if self.prints:
            os.write(2, NOTICE)  # not print, which may be what was interrupted
        if self.dialogues:
            # thread-safe: it wakes a loop that waits for a server
            self.dialogues.get_loop().call_soon_threadsafe(self.dialogues.cancel)

    def hold(self, runner, dialogues):
        """Run the coroutine `dialogues` in an asyncio.Runner. Returns its result, or None if a
        signal cancelled it."""

        async def hold():
            self.dialogues = asyncio.current_task()
            if self.number:  # the signal came before these dialogues, in an update or a save
                self.dialogues.cancel()
            return await dialogues

        try:
            return runner.run(hold())
        except asyncio.CancelledError:
            return None
        finally:
            self.dialogues = None
