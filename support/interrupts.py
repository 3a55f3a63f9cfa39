"""support/interrupts.py - Ctrl-C, which ends a run at once, wherever it comes.

asyncio handles Ctrl-C by cancelling its main task, and forgets it if that task is just done. So a
run installs a handler of its own, which raises KeyboardInterrupt at once. Python in turn swallows
an exception that is raised in a destructor: it prints it and goes on. So the handler also writes
each Ctrl-C down, and the run raises it again where it cannot be swallowed, between two steps.
"""

import signal

pending_interrupts = []  # one entry for each Ctrl-C since `interrupt_at_once`


def interrupt_at_once():
    """Let Ctrl-C raise KeyboardInterrupt at once. Returns the handler that was there before, for
    `put_back`."""
    pending_interrupts.clear()

    def interrupt(*_):
        pending_interrupts.append("Ctrl-C")
        raise KeyboardInterrupt

    return signal.signal(signal.SIGINT, interrupt)


def put_back(handler):
    """Install the `handler` of Ctrl-C that was there before `interrupt_at_once`."""
    pending_interrupts.clear()
    signal.signal(signal.SIGINT, handler)


def raise_pending_interrupt():
    """Raise KeyboardInterrupt again if there was one, because Python has swallowed it."""
    if pending_interrupts:
        raise KeyboardInterrupt
