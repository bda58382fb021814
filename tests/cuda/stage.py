"""The process that rehearses: a rank with a small model, three steps, the last one traced.

It is forked from one that has imported all of this, parts of Inductor among it, and has not touched
CUDA.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import inductor  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental
import triton
from models import LM, VOCAB, Failure, fail
from noting import LIBRARY, NotedOps, note, note_compiled_code, tracing
from rehearsal import Setup
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx import GraphModule, Node

import shardc
from shardc.backend.graph_plan import CompilePlan, GraphPlan, graph_plans, listeners
from shardc.passes.context import PassContext
from shardc.passes.nodes import is_collective, is_host_copy, is_wait, kind_of
from shardc.runtime.comm import table_rows
from shardc.runtime.compat import cache_counts

STEPS = 3
ROWS = 3
"""How many rows of a table every rank wants of every other: no kernel counts them."""


def _counted(counts: Tensor) -> Tensor:
    read = counts.cpu().fill_(ROWS)
    read[-1] = 0  # all numbers are rows
    return read


table_rows.read_by_host = _counted


def run(setup: Setup, folder: Path) -> None:
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if setup.cache is None:
        os.environ["SHARDC_DUMP"] = str(folder / "dump")  # where all is compiled anew
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(setup.cache)
        del os.environ["TRITON_CACHE_DIR"]  # in the other's, then, by device
    os.environ["STANDIN_MEETING"] = str(folder.parent)  # of ranks that split communicators
    numbers = ("held", "peak", "reserved", "planned", "loaded", "compiled")
    error, result = "", dict.fromkeys(numbers, 0)
    kernels = note_compiled_code()
    compiled: list[str] = []
    triton.knobs.compilation.listener = partial(_note_compiled, compiled)
    orders: list[tuple[str, list[str]]] = []
    listeners.append(_note_order)
    try:
        if setup.who == "ahead":
            _precompile(setup)
        else:
            rehearsal = _Rehearsal(setup)
            result = rehearsal.run(folder / "trace")
            if rehearsal.has("ends"):
                dist.destroy_process_group()
        orders = [(plan.phase, plan.notes["sent"]) for plan in graph_plans]
        result["planned"] = max((plan.peak for plan in graph_plans), default=0)
    except Exception:
        error = traceback.format_exc()
    result |= {"loaded": cache_counts()[0], "compiled": len(compiled)}
    text = json.dumps({"error": error, "kernels": kernels, "orders": orders, **result})
    (folder / "outcome.json").write_text(text)
    sys.stdout.flush()
    _leave(setup)
    os._exit(0)  # collectives of the end would move nothing


def _note_order(
    gm: GraphModule | None, ctx: PassContext, plan: CompilePlan, finished: GraphPlan
) -> None:
    """Keep the messages of a graph as NCCL has them: what is coalesced is several, one wait."""
    if gm is None:  # loaded, with what was noted
        return
    order: list[str] = finished.notes.setdefault("sent", [])
    arrived = set[Node]()
    for node in gm.graph.nodes:
        if is_collective(node):
            order += [kind_of(node)] * (len(node.args[0]) if _is_coalesced(node) else 1)
        elif is_wait(node) and not is_host_copy(node.args[0]):
            start = next((i for i in node.args[0].all_input_nodes if _is_coalesced(i)), node)
            if start not in arrived:
                order.append("wait")
            arrived.add(start)


def _is_coalesced(node: Node) -> bool:
    return is_collective(node) and "coalesced" in str(node.target)


def _precompile(setup: Setup) -> None:
    """What `_Rehearsal` compiles, without its process group."""
    torch.set_float32_matmul_precision("high")
    with torch.device("meta"):
        model = LM(setup.dim, setup.blocks, False, False)
    tokens = torch.zeros(setup.batch, setup.length, dtype=torch.long, device="meta")
    offload = fsdp.CPUOffloadPolicy if "offload" in setup.features else fsdp.OffloadPolicy
    sizes = (2, setup.world // 2) if "hsdp" in setup.features else (setup.world,)
    shardc.precompile(
        model,
        tokens,
        mesh=sizes,
        options={"fallback": False, **setup.options},
        evaluate=False,
        mp_policy=_policy(setup),
        offload_policy=offload(),
    )
    assert not torch.cuda.memory_allocated()


def _policy(setup: Setup) -> fsdp.MixedPrecisionPolicy:
    policy = fsdp.MixedPrecisionPolicy(_dtype(setup.param_dtype), _dtype(setup.reduce_dtype))
    if setup.wire is None:
        return policy
    return replace(
        shardc.MixedPrecisionPolicy.of(policy),
        gather_wire_dtype=_dtype(setup.wire),
        reduce_wire_dtype=torch.int8,
    )


def _note_compiled(
    compiled: list[str], src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
) -> None:
    if not cache_hit:
        compiled.append(src.name)


class _Peers(dist.Store):
    """A store for a rank without peers: what they would write is there, and empty."""

    def __init__(self) -> None:
        super().__init__()
        self._own = dist.HashStore()

    def set(self, key: str, value: Any) -> None:
        self._own.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._own.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Nothing to wait for."""

    def get(self, key: str) -> bytes:
        return self._own.get(key) if self._own.check([key]) else bytes(128)


def _meeting_place(setup: Setup) -> dist.Store:
    if setup.port:
        store: dist.Store = dist.TCPStore(
            "127.0.0.1", setup.port, setup.world, setup.rank == 0, wait_for_workers=False
        )
    else:
        store = dist.HashStore() if setup.rank == 0 else _Peers()
    _stores.append(store)
    return store


def _leave(setup: Setup) -> None:
    """The first rank, which has the store, waits for the others, also for those that failed."""
    if not setup.port or not _stores:
        return
    _stores[0].add("left", 1)
    until = time.monotonic() + 60
    while setup.rank == 0 and time.monotonic() < until:
        if _stores[0].add("left", 0) == setup.world:
            return
        time.sleep(0.05)


class _Rehearsal:
    """A model, its optimizer, and how a step is done."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        torch.set_float32_matmul_precision("high")
        cudnn = self.has("cudnn")  # one kind of attention, whichever torch would prefer
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.backends.cuda.enable_flash_sdp(not cudnn)
        torch.backends.cuda.enable_mem_efficient_sdp(not cudnn)
        torch.backends.cuda.enable_math_sdp(not cudnn)
        expandable = f"expandable_segments:{setup.expandable}"
        torch._C._accelerator_setAllocatorSettings(expandable)  # type: ignore[attr-defined]
        torch.cuda.set_device(setup.rank % 2)
        store = _meeting_place(setup)
        device = torch.device("cuda", setup.rank % 2) if self.has("bound") else None
        dist.init_process_group(
            "nccl", rank=setup.rank, world_size=setup.world, store=store, device_id=device
        )
        alone = not setup.port or "agreement" in setup.faults
        dist.ProcessGroup.emulated = alone  # type: ignore[attr-defined]
        if not setup.port:  # nobody to split a communicator with: groups get new ones
            dist.distributed_c10d._get_default_group().bound_device_id = None
        torch.use_deterministic_algorithms(self.has("deterministic"))
        torch.manual_seed(0)
        with torch.device("cuda"):
            flex, checkpointing = self.has("flex"), self.has("checkpoint")
            self.model: Any = LM(setup.dim, setup.blocks, flex, checkpointing)
        self.model.failing = self.fails_inside
        self.tokens = torch.zeros(setup.batch, setup.length, dtype=torch.long, device="cuda")
        self.shard()
        self.call: Callable[..., Tensor] = self.compile()
        fused = not self.has("offload")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.has("scaler"))
        self.side = torch.cuda.Stream()
        captured = "reduce-overhead" if self.has("captured") else None
        ahead = self.has("ahead")
        self.whole = shardc.compile_step(self.train, mode=captured, gather_ahead=ahead)
        _leave_out(setup.faults)

    def has(self, feature: str) -> bool:
        """Whether the feature is asked for."""
        return feature in self.setup.features

    @property
    def fails_inside(self) -> bool:
        """Whether a backward fails between two blocks: a hook there would break the graph."""
        return self.has("raises") and self.setup.way != "compiled"

    def mesh(self) -> DeviceMesh:
        """All ranks, in the shape that the features want."""
        world = self.setup.world
        if self.has("hsdp"):
            return init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("copies", "shards"))
        if self.has("hierarchical"):
            return shardc.hierarchical_mesh(world // 2)
        if self.has("tp"):
            return init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return init_device_mesh("cuda", (world,))

    def shard(self) -> None:
        """Shard the model, or make it what it is compared with."""
        setup, mesh = self.setup, self.mesh()
        if setup.who == "plain":
            self.model.to(_dtype(setup.param_dtype) or torch.float32)
            return
        if self.has("tp"):
            _parallelize(self.model, mesh["tp"])
            mesh = mesh["dp"]
        kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": _policy(setup)}
        if self.has("offload"):
            kwargs["offload_policy"] = fsdp.CPUOffloadPolicy()
        if setup.reshard is not None:
            kwargs["reshard_after_forward"] = setup.reshard
        if setup.who == "fsdp2":
            for block in self.model.blocks:
                fsdp.fully_shard(block, **kwargs)
            fsdp.fully_shard(self.model, **kwargs)
            return
        shardc.fully_shard(self.model, units="auto", **kwargs)
        if self.has("own groups"):
            self.model.set_separate_reduce_scatter_group()
            self.model.set_separate_all_gather_group()
        if self.has("group memory"):
            self.model.set_allocate_memory_from_process_group_for_comm(True, recurse=True)
        if self.has("symmetric memory"):
            self.model.set_symm_mem_for_comm(recurse=True)

    def compile(self) -> Callable[..., Tensor]:
        """The model's forward in the way that is asked for."""
        setup, model = self.setup, self.model
        if setup.way == "uncompiled":
            return model
        kwargs: dict[str, Any] = {"mode": setup.mode}
        if setup.who == "shardc":
            options = {"fallback": False, **setup.options}
            if setup.mode is None:
                kwargs = {"backend": "shardc", "options": options}
            else:  # torch.compile takes a mode or options, a backend both
                backend = partial(lookup_backend("shardc"), options=options, mode=setup.mode)
                kwargs = {"backend": backend}
        kwargs["dynamic"] = True if self.has("dynamic") else None
        if setup.way == "blocks":
            for block in model.blocks:
                block.compile(**kwargs)
        else:
            model.compile(**kwargs)
        return model

    def forward(self) -> Tensor:
        """The loss of the batch."""
        note("phase forward")
        autocast = self.has("autocast")
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            if not self.has("side stream"):
                return self.call(self.tokens)
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                loss = self.call(self.tokens)
            torch.cuda.current_stream().wait_stream(self.side)
            return loss

    def step(self) -> None:
        """One step of training; with "whole", as one graph."""
        if not self.has("whole"):
            self.train(self.tokens)
            return
        note("phase whole")
        self.whole(self.tokens)

    def train(self, tokens: Tensor) -> None:
        """Forwards, backwards and the update of one step; `tokens` are those of the batch."""
        if self.has("accumulate"):
            sync = self.model.no_sync() if self.setup.who == "shardc" else nullcontext()
            with sync:
                self.backward(self.forward())
        self.backward(self.forward())
        note("phase optimizer")
        if self.has("clip"):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """The gradients of a loss; with "raises", of one more after a backward that failed."""
        note("phase backward")
        if self.has("raises"):
            if self.setup.way == "compiled":  # one call of autograd: it fails before it
                loss.register_hook(fail)
            with suppress(Failure):
                loss.backward()
            self.model.failing = False
            self.optimizer.zero_grad()
            loss = self.forward()
            note("phase backward")
            self.model.failing = self.fails_inside
        self.scaler.scale(loss).backward()

    def tune(self) -> None:
        """Compile and tune kernels before the steps, and give back the memory that this took.

        Kernels that are found tuned take none, so what steps reserve would depend on what ran
        before.
        """
        self.backward(self.forward())
        self.optimizer.zero_grad()
        torch.cuda.empty_cache()

    def between(self, step: int) -> None:
        """What happens between two steps."""
        if self.has("lr"):
            self.optimizer.param_groups[0]["lr"] *= 0.5
        if self.has("dynamic"):
            shape = (self.setup.batch, self.setup.length + 16 * (step + 1))
            self.tokens = self.tokens.new_zeros(shape)
        if self.has("summon"):
            with shardc.summon_full_params(self.model):
                assert self.model.head.weight.shape == (VOCAB, self.setup.dim)
        if self.has("state dicts"):
            states = shardc.get_state_dict(self.model, self.optimizer)
            shardc.set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=states[0],
                optim_state_dict=states[1],
            )

    def run(self, path: Path) -> dict[str, int]:
        """Three steps, the last with a trace; bytes held before it and the most during it."""
        with NotedOps() if self.setup.way != "compiled" else nullcontext():
            self.tune()
            for step in range(STEPS - 1 + self.has("captured") + self.has("ahead")):
                self.step()
                self.between(step)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if self.has("offload") or _asks_before_it_waits():
                LIBRARY.standin_events_complete(0)  # a device that never catches up
            gc.collect()  # and not at some moment of the step
            gc.disable()
            held = torch.cuda.memory_allocated()
            with tracing(path):
                if self.has("summon") or self.has("state dicts"):
                    self.between(STEPS)
                self.step()
        if self.has("whole"):
            assert not self.whole.reasons, self.whole.reasons
            assert len(self.whole.graphs) == 1
            captures = 0 if self.has("refused") else self.has("captured") + self.has("lr")
            assert self.whole.captures == captures
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        segments = torch.cuda.memory_snapshot()
        assert any(each["is_expandable"] for each in segments) == self.setup.expandable
        return {"held": held, "peak": peak, "reserved": reserved}


def _asks_before_it_waits() -> bool:
    """Whether torch waits for no event that it has seen complete, as ProcessGroupNCCL of 2.15."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.15"


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)


def _leave_out(faults: frozenset[str]) -> None:
    """Take waits out of the code under test."""
    if "collectives" in faults:
        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("wait_tensor", lambda tensor: tensor, "CUDA", allow_override=True)
        _kept.append(library)
    if "copies" in faults:
        from shardc.runtime.comm import host_copies

        streams = {way: torch.cuda.Stream() for way in ("in", "out")}
        host_copies.stream_of = lambda device, direction: streams[direction]


_kept: list[Any] = []
_stores: list[dist.Store] = []
