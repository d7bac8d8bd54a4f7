"""Interrupts at every moment of a call."""

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


def at_every_moment(call: Callable[[], Any], modules: set[ModuleType]) -> Iterator[bool]:
    """Make the call with an interrupt at the first moment, the second and so on; yield whether it was interrupted.

    Python looks for signals where a function begins and after calls: those of `modules` are tried. The last call is whole.
    """
    left, called = 0, dict[FrameType, bool]()
    files = {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "<genexpr>":  # errors at its end are lost
            return None
        frame.f_trace = trace  # from Python 3.13 on, opcodes are traced only if this is set before the next line
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and called.get(frame)):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        if event == "opcode":
            called[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if a frame asked for them before settrace
    for number in itertools.count(1):
        left, errors = number, list[KeyboardInterrupt]()  # the traceback of one keeps all frames
        try:
            sys.settrace(trace)
            call()
        except KeyboardInterrupt as error:
            errors.append(error)
        finally:
            sys.settrace(before)
        called.clear()
        yield bool(errors)
        if left > 0:
            return
