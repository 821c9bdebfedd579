"""`Baton`: a body that runs on a thread of its own but only while its caller waits for it.

Autograd offers no way to stop a backward pass and to go on later, but a hook may block. So the body
runs on a second thread and the two hand a baton to and fro: never do both run. Hooks that call
`pause` in the middle of ``backward()`` thereby return control to whoever called `resume`.

A body that is dropped begins anew on the same thread: cuDNN keeps its plans of attention by thread,
and making one takes 90 ms (measured on an H200).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any


class BatonDropped(BaseException):
    """Raised in a body that is dropped or closed while it pauses."""


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
        self._dropping = self._closing = False
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
        if self._dropping:
            raise BatonDropped
        self._take_over()

    def drop(self) -> None:
        """End a body that pauses; the next `resume` begins it anew, on the same thread."""
        if self._thread is not None:
            self._dropping = True
            self._theirs.release()
            self._mine.acquire()
            self._dropping = False

    def close(self) -> None:
        """End a body that pauses, and its thread."""
        thread = self._thread
        if thread is not None:
            self._dropping = self._closing = True
            self._theirs.release()
            thread.join()
        self._dropping = self._closing = False
        self._thread, self._error = None, None
        # Whoever ended has released the caller once more.
        self._mine.acquire(blocking=False)

    def _run(self) -> None:
        try:
            while self._dropped() and not self._closing:
                self._mine.release()
                self._theirs.acquire()
                if self._closing:
                    break
        except BaseException as error:
            self._error = error
        finally:
            if not self._closing:
                self._thread = None
            self._mine.release()

    def _dropped(self) -> bool:
        """Run the body; whether it ended because it had to, whatever it said then."""
        try:
            self._take_over()
            self._body()
        except BaseException:
            if not self._dropping:
                raise
            return True
        return False

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
