"""A shell that starts something with `&` makes it ignore Ctrl-C, and its children too; these tests send it."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
