"""A simulated GPU, in the place of CUDA: real to PyTorch, and its kernels are the CPU's.

`install()` before torch is imported; `simulated_cuda.cpp` says how it works. Devices that are mixed raise
as on a GPU, autograd runs backward in a thread of its own, and `record()` counts launches, copies and what
waits for the device. It does not show: speed, the order of streams, compiled kernels (Triton, CUDA graphs),
cuDNN, the caching allocator, processes on several devices (NCCL).
"""

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE / "simulated_cuda.cpp"
BUILD = HERE / "build"
LIBRARY = BUILD / f"_simulated_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
TABLES = BUILD / "operators.json"
C: Any = None  # the compiled part, once installed


def torch_folder() -> Path:
    """Of torch's package, which is not imported for it."""
    return Path(importlib.util.find_spec("torch").origin).parent


def build() -> Path:
    """The compiled part, built where it is missing or older than its source; this takes half a minute."""
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > SOURCE.stat().st_mtime:
        return LIBRARY
    BUILD.mkdir(exist_ok=True)
    torch = torch_folder()
    headers = torch / "include"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = ("c10", "torch", "torch_cpu", "torch_python")
    made = LIBRARY.with_suffix(f".{os.getpid()}")  # renamed when it is whole: two may build at once
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-w", "-shared", str(SOURCE),
         *(f"-I{folder}" for folder in includes), f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries),
         f"-Wl,-rpath,{torch / 'lib'}", "-o", str(made)],
        check=True,
    )  # fmt: skip
    made.replace(LIBRARY)
    return LIBRARY


def install() -> None:
    """Make torch believe in the device."""
    global C
    assert "torch" not in sys.modules, "install() before torch is imported"
    for name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(torch_folder() / f"lib/lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    import torch

    spec = importlib.util.spec_from_file_location("_simulated_cuda", LIBRARY)
    C = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(C)
    found = tables()
    C.install(found["scalars"], [f"aten::{x}" for x in UNCHECKED], found["with_kernels"])
    become_cuda(torch)
    gpu_only(torch)


# kernels of ours; views; and what has a kernel in no CPU build of torch
OWN = [
    "empty.memory_format", "empty_strided", "_efficientzerotensor", "_copy_from", "_copy_from_and_resize",
    "_local_scalar_dense", "copy_", "view", "as_strided", "_reshape_alias", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_",
]  # fmt: skip
ONE_LAUNCH = ["convolution", "convolution_backward"]  # of cuDNN, though torch calls them composites
# arguments that CUDA's operator takes, or needs, from the CPU
UNCHECKED = [
    "_copy_from", "_copy_from_and_resize", "_pack_padded_sequence", "_thnn_fused_lstm_cell",
    "_ctc_loss.Tensor", "_segment_reduce",
]  # fmt: skip


@functools.cache
def tables() -> dict[str, list[str]]:
    """What native_functions.yaml says about the kernels of CUDA; kept beside the compiled part."""
    if TABLES.exists() and TABLES.stat().st_mtime > Path(__file__).stat().st_mtime:
        return json.loads(TABLES.read_text())
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    kernels: dict[str, set[str]] = {}
    for f in functions:
        keys: set[str] = set()
        for names in f.get("dispatch", {}):
            keys |= {name.strip() for name in names.split(",")}
        kernels[f["func"].split("(")[0]] = keys
    scalars, with_kernels = [], [*ONE_LAUNCH]
    for f in functions:
        name = f["func"].split("(")[0]
        keys = kernels[f.get("structured_delegate", name)]
        if f.get("device_check", "") == "NoCheck":
            scalars.append(f"aten::{name}")
        if name in OWN:
            continue
        if {"CPU", "CUDA"} <= keys or ("CUDA" in keys and name.startswith("_foreach_")):
            with_kernels.append(name)
    found = {"scalars": scalars, "with_kernels": with_kernels}
    TABLES.write_text(json.dumps(found))
    return found


def _index(device: Any) -> int:
    import torch

    if device is None:
        return C.current_device()
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return C.current_device() if found is None else found


def _functions(torch: Any) -> dict[str, Any]:
    """What torch.sim, or torch.cuda, has."""
    generators = tuple(C.default_generator(i) for i in range(C.device_count()))

    class device:  # noqa: N801 as in torch
        def __init__(self, which: Any) -> None:
            self.index = _index(which)

        def __enter__(self) -> None:
            self.before = C.current_device()
            C.set_device(self.index)

        def __exit__(self, *_: Any) -> None:
            C.set_device(self.before)

    def manual_seed_all(seed: int) -> None:
        for g in generators:
            g.manual_seed(int(seed))

    def set_rng_state(state: Any, device: Any = None) -> None:
        generators[_index(device)].set_state(state)

    properties = SimpleNamespace(
        name="Simulated GPU", major=9, minor=0, total_memory=2**34, multi_processor_count=8, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472, L2_cache_size=2**22, gcnArchName="", is_integrated=False,
    )  # fmt: skip
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **kw: call(),
        "_is_in_bad_fork": lambda: False,
        "device_count": C.device_count,
        "current_device": C.current_device,
        "set_device": lambda which: C.set_device(_index(which)),
        "_exchange_device": lambda i: (C.current_device(), C.set_device(i))[0],
        "_maybe_exchange_device": lambda i: (C.current_device(), C.set_device(i))[0],
        "device": device,
        "synchronize": lambda device=None: C.synchronize(),
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: torch.Stream(torch.device("cuda", _index(device))),
        "default_generators": generators,
        "manual_seed": lambda seed: generators[C.current_device()].manual_seed(int(seed)),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "set_rng_state": set_rng_state,
        "memory_allocated": lambda device=None: C.memory(_index(device))[0],
        "max_memory_allocated": lambda device=None: C.memory(_index(device))[1],
        "reset_peak_memory_stats": lambda device=None: C.reset_peak(_index(device)),
        "get_device_name": lambda device=None: "Simulated GPU",
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "_get_device": lambda d: torch.device("cuda", _index(d)),
        "_get_generator": lambda d: generators[_index(d)],
    }


def become_cuda(torch: Any) -> None:
    functions = _functions(torch)
    cuda = torch.cuda
    for module in (cuda, cuda.random, cuda.memory, cuda.streams, cuda._utils):
        for key, value in functions.items():
            if hasattr(module, key):
                setattr(module, key, value)
    torch.cuda._initialized = True
    torch.cuda._is_compiled = lambda: True
    torch._C._cuda_getDeviceCount = C.device_count
    torch._C._cuda_getDevice = C.current_device
    torch._C._cuda_setDevice = C.set_device
    torch._C._cuda_exchangeDevice = functions["_exchange_device"]
    torch._C._cuda_maybeExchangeDevice = functions["_maybe_exchange_device"]
    torch._C._cuda_init = lambda: None
    torch._C._cuda_getCurrentRawStream = lambda i: 0  # which Dynamo imports
    torch.version.cuda = "12.8"

    empty = torch.empty

    def load(
        storage: Any, location: str
    ) -> Any:  # a CPU build cannot make a storage for this device
        if not location.startswith("cuda"):
            return None
        made = empty(storage.nbytes(), dtype=torch.uint8, device=location)
        if not getattr(storage, "_torch_load_uninitialized", False):
            made.copy_(empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        return made.untyped_storage()

    torch.serialization.register_package(5, lambda storage: None, load)
    clone = torch.UntypedStorage.clone

    def cloned(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        own = empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return own.clone().untyped_storage()

    torch.UntypedStorage.clone = cloned
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # there is none; torch warns of that


def gpu_only(torch: Any) -> None:
    """Operators that only GPUs have, from others: the fused cells of LSTM and GRU."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    globals()["_library"] = library  # kept alive

    def lstm(i, h, c, ib=None, hb=None):
        gates = i + h
        gates = gates if ib is None else gates + ib + hb
        a, f, g, o = gates.chunk(4, 1)
        a, f, g, o = a.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new = f * c + a * g
        return o * new.tanh(), new, torch.cat([a, f, g, o], 1)

    def lstm_backward(gh, gc, cx, cy, workspace, has_bias):
        if gh is None and gc is None:
            return None, None, None
        a, f, g, o = workspace.chunk(4, 1)
        t = cy.tanh()
        gh = torch.zeros_like(cx) if gh is None else gh
        gc = torch.zeros_like(cx) if gc is None else gc
        d = gh * o * (1 - t * t) + gc
        gates = torch.cat(
            [d * g * a * (1 - a), d * cx * f * (1 - f), d * a * (1 - g * g), gh * t * o * (1 - o)],
            1,
        )
        return gates, d * f, gates.sum(0) if has_bias else None

    def gru(i, h, hx, ib=None, hb=None):
        if ib is not None:
            i, h = i + ib, h + hb
        ri, zi, ni = i.chunk(3, 1)
        rh, zh, nh = h.chunk(3, 1)
        r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
        n = (ni + r * nh).tanh()
        return n + z * (hx - n), torch.cat([r, z, n, hx, nh], 1)

    def gru_backward(g, workspace, has_bias):
        r, z, n, hx, nh = workspace.chunk(5, 1)
        dn = g * (1 - z) * (1 - n * n)
        dz = g * (hx - n) * z * (1 - z)
        dr = dn * nh * r * (1 - r)
        gi, gh = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
        return gi, gh, g * z, gi.sum(0) if has_bias else None, gh.sum(0) if has_bias else None

    library.impl("_use_cudnn_ctc_loss", lambda *args: False)  # there is no cuDNN
    library.impl("_use_cudnn_ctc_loss.Tensor", lambda *args: False)
    library.impl("_thnn_fused_lstm_cell", lstm)
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward)
    library.impl("_thnn_fused_gru_cell", gru)
    library.impl("_thnn_fused_gru_cell_backward", gru_backward)


# numbers of GPUs

CONVOLUTIONS = ["convolution", "convolution_backward"]
PRODUCTS = ["mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out", "baddbmm_", "addmm_",
            "addbmm", "mv", "addmv", "addmv.out", "addmv_", "dot"]  # fmt: skip
# by atomic additions in any order, unless torch.use_deterministic_algorithms (the page of that function)
NOISY = [
    "index_add", "index_add_", "index_add.out", "scatter_add", "scatter_add_", "scatter_add.out",
    "scatter_reduce.two", "scatter_reduce.two_out", "scatter_reduce_.two", "_index_put_impl_",
    "embedding_dense_backward", "convolution_backward", "max_pool2d_with_indices_backward",
    "max_pool2d_with_indices_backward.grad_input", "adaptive_max_pool2d_backward",
    "_adaptive_avg_pool2d_backward", "avg_pool3d_backward", "upsample_bilinear2d_backward",
    "upsample_nearest2d_backward", "grid_sampler_2d_backward", "_ctc_loss_backward.Tensor",
    "_ctc_loss_backward", "reflection_pad2d_backward", "cumsum", "index_select_backward", "gather_backward",
    "nll_loss2d_forward", "_embedding_bag_dense_backward",
]  # fmt: skip


def tf32(convolutions: bool = True, products: bool = False) -> None:
    """Rounds what tensor cores round; convolutions are so by default on a GPU."""
    names = CONVOLUTIONS * convolutions + PRODUCTS * products
    C.set_tf32([f"aten::{name}" for name in names])


def nondeterministic(on: bool = True) -> None:
    """The last bit of what CUDA sums by atomics is random."""
    C.set_noisy([f"aten::{name}" for name in NOISY] if on else [])


# counting


class Record:
    """Counts inside a `with record()`: of kernels, copies and stalls, and the lines that stall."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.lines: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        return sum(n for key, n in self.counts.items() if key.startswith("launch "))

    @property
    def stalls(self) -> int:
        return sum(self.lines.values())

    def __str__(self) -> str:
        return "\n".join([f"stalls {self.stalls}", *map(str, self.lines.most_common())])


def _line(what: str, wanted: tuple[str, ...]) -> str:
    """Of the wanted files, that which a stall comes from, and the two that called it."""
    found = [
        f"{one.filename}:{one.lineno} `{one.line}`"
        for one in reversed(traceback.extract_stack())
        if any(part in one.filename for part in wanted)
    ]
    return f"{what}: {' < '.join(found[:3])}"


@contextlib.contextmanager
def record(wanted: tuple[str, ...] = ("/hoglib/", "/experiments/")) -> Any:
    found = Record()
    C.reset_counts()
    C.set_listener(lambda kind, what: found.lines.update([_line(f"{kind} {what}", wanted)]))
    try:
        yield found
    finally:
        C.set_listener(None)
        found.counts = dict(C.counts())
