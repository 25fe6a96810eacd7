"""Python stacks as text: from tracebacks and from faulthandler's dumps."""

from __future__ import annotations

import re
import threading

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.MULTILINE)
_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)[^\n]*\(most recent call first\):$", re.MULTILINE
)
# Frames of these say how a rank waits, not where in the program it is.
_LIBRARIES = re.compile(r"/(torch|multiprocessing|threading\.py|contextlib\.py|transformers|site-packages)\b")


def main_thread_header() -> str:
    """One line that names the main thread, to be written before the dumps of this process."""
    return f"main 0x{threading.main_thread().ident or 0:016x}\n"


def describe_stack(dump: str) -> str:
    """The main thread's part of a faulthandler dump that begins with :func:`main_thread_header`,
    innermost call last, as in a traceback; empty if there is none."""
    header = re.match(r"main 0x0*([0-9a-f]+)", dump)
    if header is None:
        return ""
    sections = list(_THREAD.finditer(dump))
    for index, section in enumerate(sections):
        if section["ident"].lstrip("0") != header[1]:
            continue
        end = sections[index + 1].start() if index + 1 < len(sections) else len(dump)
        frames = [line for line in dump[section.end() : end].splitlines() if _FRAME.match(line)]
        return "\n".join(reversed(frames))
    return ""


def where(text: str) -> str:
    """The innermost call of a dump or a traceback, and the innermost one outside the libraries:
    ``all_reduce (distributed_c10d.py:3019), called from train_step (step.py:88)``."""
    frames = list(_FRAME.finditer(describe_stack(text) or text))
    if not frames:
        return "a place without Python code"
    inner = frames[-1]
    own = next((frame for frame in reversed(frames) if not _LIBRARIES.search(frame["file"])), inner)
    if inner is own:
        return _place(inner)
    library = next((frame for frame in frames[frames.index(own) + 1 :] if frame["name"] != "wrapper"), inner)
    return f"{_place(library)}, called from {_place(own)}"


def _place(frame: re.Match[str]) -> str:
    return f"{frame['name']} ({frame['file'].rsplit('/', 1)[-1]}:{frame['line']})"
