"""Threads of tests: joining raises their errors, and waiting polls until a deadline that only fails the test."""

import contextlib
import signal
import threading
import time

PATIENCE = 120.0  # seconds until a test that hangs fails


def soon(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.001)


@contextlib.contextmanager
def handled(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Thread(threading.Thread):
    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self.function, self.args = function, args
        self.value = None
        self.error = None
        self.start()

    def run(self):
        try:
            self.value = self.function(*self.args)
        except BaseException as error:
            self.error = error

    def ends(self):
        self.join(PATIENCE)
        assert not self.is_alive(), "the thread hangs"
        if self.error is not None:
            raise self.error
        return self.value
