"""``python -m geodl.bench.sweep.child run ...``: a command of geodl's that the kernel kills when the process that started it dies.

A run whose supervisor is gone would hold its directory against the one that is started in its place. Done here, not between
fork and exec: there a process with threads, such as Ray's, may hang.
"""

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ray's workers may block or ignore what asks us to save our progress and end; a new process inherits that.
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("geodl", run_name="__main__", alter_sys=True)
