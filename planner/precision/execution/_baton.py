"""`Baton`: a body that runs on a thread of its own but only while its caller waits for it.

Autograd offers no way to stop a backward pass and to go on later, but a hook may block. So the body
runs on a second thread and the two hand a baton to and fro: never do both run. Hooks that call
`pause` in the middle of ``backward()`` thereby return control to whoever called `resume`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any


class BatonDropped(BaseException):
    """Raised in a body that is closed while it pauses."""


class Baton:
    """See the module.

    Args:
        body: runs from the first `resume` on; calls `pause` as often as it likes.
        device: a torch device; of a GPU, the body takes over the caller's context and stream.
    """

    def __init__(self, body: Callable[[], None], device: Any) -> None:
        self._body = body
        self._device = device
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._adopt: tuple[Any, Any] | None = None

    def resume(self) -> bool:
        """Let the body run until it pauses or ends.

        Returns:
            Whether it can be resumed again.

        Raises:
            Exception: what the body raised.
        """
        if self._device.type == "cuda":
            self._adopt = _current(self._device)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="training step", daemon=True)
            self._thread.start()
        else:
            self._theirs.release()
        self._mine.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._thread is not None

    def pause(self) -> None:
        """Hand control back to the caller of `resume`; returns when it resumes."""
        self._mine.release()
        self._theirs.acquire()
        if self._closing:
            raise BatonDropped
        self._take_over()

    def close(self) -> None:
        """End a body that pauses."""
        thread = self._thread
        if thread is not None:
            self._closing = True
            self._theirs.release()
            thread.join()
        self._closing, self._thread, self._error = False, None, None
        # Whoever ended has released the caller once more.
        self._mine.acquire(blocking=False)

    def _run(self) -> None:
        try:
            self._take_over()
            self._body()
        except BaseException as error:
            if not self._closing:  # else it ends because it has to, whatever it says
                self._error = error
        finally:
            if not self._closing:
                self._thread = None
            self._mine.release()

    def _take_over(self) -> None:
        if self._adopt is None:
            return
        import torch

        context, stream = self._adopt
        torch.cuda.set_device(self._device)
        if context is not None:
            ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent(context)
        torch.cuda.set_stream(stream)


def _current(device: Any) -> tuple[Any, Any]:
    """The calling thread's CUDA context, which may be a slice, and its stream."""
    import torch

    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return (context if context.value else None), torch.cuda.current_stream(device)
