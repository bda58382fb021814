"""An emulated wire: a process group of any world size on one machine, where sending takes time.

Every collective occupies the one wire of this process for `latency + moved bytes / bandwidth`, one
after the other, and its wait returns when that time has passed. No data moves on a CPU: gathered
weights are whatever the memory holds. So what a step takes beyond its compute is exposed
communication, and it is the same wire for everyone who is measured. On CUDA the time is spent by a
kernel that spins on the wire's own stream. Beside it, copies write what a gather and a reduction
write, as if all ranks had the same shard: a GPU draws less power, and is faster, on numbers that
mean nothing.
"""

import heapq
import threading
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class Wire:
    """What was sent, and until when the wire is busy.

    Attributes:
        latency: seconds a message.
        bandwidth: bytes a second.
        free_at: when the wire has sent all that was given to it (`time.perf_counter`).
        log: (operation, bytes, seconds) of every message.
        stalls: (message, seconds) of every wait that had to wait (on a CPU).
    """

    latency: float
    bandwidth: float
    free_at: float = 0.0
    log: list[tuple[str, int, float]] = field(default_factory=list)
    stalls: list[tuple[int, float]] = field(default_factory=list)

    def send(self, operation: str, moved: int, value: Any = None, given: Any = None) -> Work:
        """Queue a message that moves that many bytes out of this rank.

        `value` is what its future gives: DDP reads the reduced tensors from there. `given` is held
        until the message is done, as backends do.
        """
        seconds = self.latency + moved / self.bandwidth
        self.log.append((operation, moved, seconds))
        if torch.cuda.is_available():
            return _CudaWork(seconds, value, given, operation)
        self.free_at = max(time.perf_counter(), self.free_at) + seconds
        return _CpuWork(self.free_at, self, len(self.log) - 1, value, given)

    @property
    def exposed(self) -> float:
        """Seconds that compute waited for messages (on a CPU)."""
        return sum(seconds for _, seconds in self.stalls)

    @property
    def busy(self) -> float:
        """Seconds the wire was in use."""
        return sum(seconds for _, _, seconds in self.log)

    @property
    def moved(self) -> int:
        """Bytes that left this rank."""
        return sum(moved for _, moved, _ in self.log)


class _CpuWork(Work):
    def __init__(self, done_at: float, wire: Wire, message: int, value: Any, given: Any) -> None:
        super().__init__()
        self.done_at, self.wire, self.message, self.value = done_at, wire, message, value
        self.given = given

    def wait(self, timeout: Any = None) -> bool:
        remaining = self.done_at - time.perf_counter()
        if remaining > 0:
            self.wire.stalls.append((self.message, remaining))
            time.sleep(remaining)
        self.given = None
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        _alarm.ring(self.done_at, future, self.value)
        return future


class _Alarm:
    """Completes futures (DDP wants them) at their time, from one thread."""

    def __init__(self) -> None:
        self.queue: list[tuple[float, int, torch.futures.Future[Any], Any]] = []
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def ring(self, at: float, future: torch.futures.Future[Any], value: Any) -> None:
        with self.changed:
            heapq.heappush(self.queue, (at, id(future), future, value))
            self.changed.notify()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                at, _, future, value = self.queue[0]
                remaining = at - time.perf_counter()
                if remaining > 0:
                    self.changed.wait(remaining)
                    continue
                heapq.heappop(self.queue)
            future.set_result(value)


_alarm = _Alarm()


class _CudaWork(Work):
    """A kernel that spins for the message's time on the wire's stream, then an event.

    Nothing here may take the host long: NCCL, which it stands for, is not written in Python.
    """

    streams: ClassVar[list[torch.cuda.Stream]] = []
    """The wire's, and that of the copies."""

    def __init__(self, seconds: float, value: Any, given: Any, operation: str) -> None:
        super().__init__()
        self.value, self.given = value, given
        self.waiting: set[torch.cuda.Stream] = set()
        cycles = int(seconds * _cycles_per_second())
        if not self.streams:
            self.streams[:] = torch.cuda.Stream(), torch.cuda.Stream()
        (wire, copying), current = self.streams, _current_stream()
        wire.wait_event(current.record_event())
        copying.wait_event(wire.record_event())
        _make_current(copying)
        _write_results(operation, given)
        _make_current(wire)
        torch.cuda._sleep(cycles)
        _make_current(current)
        wire.wait_event(copying.record_event())
        self.event = wire.record_event()

    def wait(self, timeout: Any = None) -> bool:
        current = _current_stream()
        if current not in self.waiting:  # a message has many tensors
            self.waiting.add(current)
            current.wait_event(self.event)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        device = torch.device("cuda", torch.cuda.current_device())
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self.streams[0]):  # who waits for the future waits for this stream
            future.set_result(self.value)
        return future


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def _current_stream() -> torch.cuda.Stream:
    """`torch.cuda.current_stream()` makes an object each time, 15 us."""
    key = torch._C._cuda_getCurrentStream(0)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream()
    return _streams[key]


def _make_current(stream: torch.cuda.Stream) -> None:
    torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)


def _write_results(operation: str, given: Any) -> None:
    """Write outputs `(W * n,)` of gathers and `(n,)` of others from what this rank has."""
    if operation not in ("all_gather", "reduce_scatter", "all_to_all") or given is None:
        return
    outputs, inputs = (each if isinstance(each, (list, tuple)) else [each] for each in given)
    for output, value in zip(outputs, inputs, strict=True):
        count = min(output.numel(), value.numel())
        aliased = output.data_ptr() == value.data_ptr()
        if operation == "all_gather":
            output.view(-1, count)[aliased:].copy_(value.view(1, -1))
        elif not aliased:
            output.view(-1)[:count].copy_(value.view(-1)[:count])


_cycles: list[float] = []


def _cycles_per_second() -> float:
    if not _cycles:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10**8)  # clocks rise
        start.record()
        torch.cuda._sleep(10**8)
        stop.record()
        stop.synchronize()
        _cycles.append(10**8 / (1e-3 * start.elapsed_time(stop)))
    return _cycles[0]


def _bytes(tensors: Any) -> int:
    items = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return sum(t.numel() * t.element_size() for t in items)


_untraced = torch.compiler.disable
"""DDP's reducer calls the group from within a compiled call, and Dynamo would trace into it."""


class WireGroup(dist.ProcessGroup):
    """Rank 0 of `world` ranks whose peers are only a wire."""

    wire = Wire(latency=0.0, bandwidth=1e12)
    emulated = True
    """Tells shardc that there is nobody to agree with."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.world = world

    def _ring(
        self, operation: str, whole: int, rounds: int = 1, value: Any = None, given: Any = None
    ) -> Work:
        """A ring moves (W-1)/W of the whole past each rank, in each of its rounds."""
        moved = rounds * whole * (self.world - 1) // self.world
        return self.wire.send(operation, moved, value, given)

    @_untraced
    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._ring("all_reduce", _bytes(tensors), 2, tensors)

    @_untraced
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._ring("all_reduce", _bytes(tensors), 2, tensors)

    @_untraced
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return self._ring("broadcast", _bytes(tensors))

    @_untraced
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for group, given in zip(outputs, inputs, strict=True):
            for output in group:  # sizes and checks that ranks exchange when they start
                if output.shape == given.shape:
                    output.copy_(given)
        return self._ring("all_gather", sum(map(_bytes, outputs)))

    @_untraced
    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        return self._ring("all_gather", _bytes(output), given=(output, given))

    @_untraced
    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        return self._ring("reduce_scatter", _bytes(given), given=(output, given))

    @_untraced
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._ring("all_gather", _bytes(outputs), given=(outputs, inputs))

    @_untraced
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._ring("reduce_scatter", _bytes(inputs), given=(outputs, inputs))

    @_untraced
    def alltoall_base(
        self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Work:
        if given.dtype == torch.uint8:  # the rows that ranks want: all want the same
            output.copy_(given)
        return self._ring("all_to_all", _bytes(given), given=(output, given))

    # The names of the same before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_untraced
    def barrier(self, opts: Any = None) -> Work:
        return self.wire.send("barrier", 0)

    def getBackendName(self) -> str:
        return "wire"

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name


def _create(store: Any, rank: int, world: int, timeout: Any) -> WireGroup:
    return WireGroup(rank, world)


def join(world: int, latency: float, bandwidth: float) -> tuple[Wire, DeviceMesh]:
    """Be rank 0 of `world` emulated ranks on a wire of `latency` s and `bandwidth` bytes/s."""
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend("wire", _create, devices=devices)
    wire = WireGroup.wire = Wire(latency, bandwidth)
    dist.init_process_group("wire", rank=0, world_size=world, store=dist.HashStore())
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return wire, init_device_mesh(kind, (world,))
