"""Autograd as it runs on a device: backward in a thread of its own, with torch's modes but without the
state that belongs to the caller's thread."""

import _thread
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch


@contextmanager
def backward_in_another_thread():
    """Inside, each run of autograd's engine is that of a thread which Python did not start; yields the
    threads, one for each run."""
    engine, runs = torch.autograd.Variable._execution_engine, []

    def run(*args, **kwargs):
        if torch._C._are_functorch_transforms_active():
            return engine.run_backward(*args, **kwargs)
        modes = torch.overrides._get_current_function_mode_stack()
        records, done, found = torch.is_grad_enabled(), threading.Event(), {}

        def body():
            runs.append(threading.get_ident())
            torch.set_grad_enabled(records)
            for mode in modes:
                torch.overrides._push_mode(mode)
            try:
                found["result"] = engine.run_backward(*args, **kwargs)
            except BaseException as error:
                found["error"] = error
            finally:
                for _ in modes:
                    torch.overrides._pop_mode()
                done.set()

        _thread.start_new_thread(body, ())
        done.wait()
        if "error" in found:
            raise found["error"]
        return found["result"]

    there = SimpleNamespace(run_backward=run, queue_callback=engine.queue_callback)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.Variable, "_execution_engine", there)
        yield runs
