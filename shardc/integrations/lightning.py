"""Lightning: a strategy for `Fabric` and one for `Trainer` that shard with shardc.

Both are subclasses of Lightning's strategies for FSDP2: processes, mesh and the format of
checkpoints stay the same. A checkpoint is a folder of DCP with `meta.pt`, or one file of full
tensors. A checkpoint is read at any number of ranks. Lightning's own functions look for DTensors;
the functions here take models that `fully_shard` sharded.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.model_parallel import (
    ModelParallelStrategy as FabricModelParallel,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.model_parallel import (
    ModelParallelStrategy as TrainerModelParallel,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardc.integrations.lightning_checkpoint import (
    holds_units,
    loading,
    model_of,
    read,
    saving,
    write_checkpoint,
)
from shardc.runtime.checks.meta import states_on_meta
from shardc.runtime.modules.forward_method import register_fsdp_forward_method
from shardc.runtime.modules.modules import ShardedModule
from shardc.sharding.materialize import materialize
from shardc.sharding.shard import fully_shard
from shardc.sharding.units import units_of
from shardc.state.names import rekey_optimizer_state_dict
from shardc.state.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
ShardFn = Callable[[nn.Module, DeviceMesh], object]


class _Sharding:
    """The parts that both strategies share: the size of the mesh, and the sharding over it."""

    num_nodes: int
    num_processes: int
    _tensor_parallel_size: Any
    _data_parallel_size: Any
    _shard_fn: ShardFn | None
    _options: dict[str, Any]

    def setup_environment(self) -> None:
        """Set up the processes as Lightning does, with a mesh of all ranks."""
        ranks = self.num_nodes * self.num_processes
        self._data_parallel_size = ranks // int(self._tensor_parallel_size)
        super().setup_environment()  # type: ignore[misc]

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard `model` unless it is sharded, and initialise its parameters and buffers on meta."""
        if not holds_units(model):
            if self._shard_fn is not None:
                self._shard_fn(model, mesh)
            else:
                self._shard_all(model, mesh["data_parallel"])
        if states_on_meta(model):
            materialize(model)
        return model

    def _shard_all(self, model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh, **self._options)


class FabricStrategy(_Sharding, FabricModelParallel):
    """`Fabric(strategy=FabricStrategy())`: `fabric.setup` shards the model over all ranks."""

    def __init__(
        self,
        *,
        shard_fn: ShardFn | None = None,
        units: Any = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        **sharding: Any,
    ) -> None:
        """
        Args:
            shard_fn: calls `fully_shard`, given the model and the mesh ("data_parallel",
                "tensor_parallel"); None: `fully_shard(model, units=units, **sharding)`.
            units, sharding: arguments of `fully_shard`.
            tensor_parallel_size: ranks among which `shard_fn` cuts modules by tensor parallelism.
            save_distributed_checkpoint: True: a folder to which each rank writes its part; False:
                one file of full tensors, which any program can read.
            process_group_backend: None: the backend of the device.
        """
        super().__init__(
            self._shard,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )
        self._shard_fn, self._options = shard_fn, {"units": units, **sharding}
        self._backward_sync_control: Any = self  # Fabric asks it for `no_backward_sync`

    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Enter `no_sync` of the root units inside `module`, if `enabled`."""
        return _no_sync(module) if enabled else contextlib.nullcontext()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Write `state`, which has one sharded module; every rank must call this.

        Raises:
            TypeError: `storage_options` is given.
            NotImplementedError: `filter` is given for a sharded checkpoint.
        """
        if storage_options is not None:
            raise TypeError("FabricStrategy writes with DCP, which takes no storage_options")
        full = not self._save_distributed_checkpoint
        if filter and not full:
            raise NotImplementedError(
                "FabricStrategy cannot filter a sharded checkpoint: to filter, save one file, "
                "with save_distributed_checkpoint=False"
            )
        model, options = model_of(state)[1], saving(full)
        tensors, rest = dict[str, Any](), dict[str, Any]()
        for key, value in state.items():
            if isinstance(value, nn.Module):
                tensors[key] = get_model_state_dict(value, options=options)
            elif isinstance(value, Optimizer):
                tensors[key] = get_optimizer_state_dict(model, value, options=options)
            else:
                rest[key] = value.state_dict() if hasattr(value, "state_dict") else value
            keep = (filter or {}).get(key)
            held = tensors if key in tensors else rest
            if keep is not None and isinstance(held[key], dict):
                held[key] = {name: v for name, v in held[key].items() if keep(name, v)}
        write_checkpoint(Path(self.broadcast(path)), tensors, rest, full, self.global_rank)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model, the optimizers and the entries of `state`; return all other entries.

        Raises:
            ValueError: `state` has no sharded model, or `path` has no checkpoint.
            KeyError: with `strict`, the checkpoint lacks an entry of `state`.
        """
        path = Path(self.broadcast(path))
        if isinstance(state, nn.Module):
            whole = torch.load(path, mmap=True, map_location="cpu")
            set_model_state_dict(state, whole, options=loading(strict))
            return {}
        rest = read(path, state or {}, strict, weights_only)
        wanted = [k for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)]
        missing = [key for key in wanted if key not in rest]
        if strict and missing:
            raise KeyError(f"the checkpoint {path} has no {missing}; it has {list(rest)}")
        for key in (key for key in wanted if key in rest):
            value = rest.pop(key)
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return rest


class TrainerStrategy(_Sharding, TrainerModelParallel):
    """`Trainer(strategy=TrainerStrategy())`: it shards the parts of the model before fitting.

    Each outermost module with parameters is sharded on its own, because steps call the module.
    Parameters of the LightningModule itself are one more unit, gathered during a step.
    `configure_model` may make the modules on meta, or shard the modules with `self.device_mesh`.
    """

    def __init__(
        self,
        *,
        shard_fn: ShardFn | None = None,
        units: Any = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **sharding: Any,
    ) -> None:
        """
        Args:
            compile_options: options of the backend for compiling sharded modules; None: no compile.
            shard_fn, units, tensor_parallel_size, save_distributed_checkpoint,
                process_group_backend, sharding: as for `FabricStrategy`.
        """
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )
        self._shard_fn, self._options = shard_fn, {"units": units, **sharding}
        self._compile_options = compile_options

    def setup(self, trainer: Any) -> None:
        """Shard the LightningModule, then make its optimizers."""
        model: nn.Module = self.lightning_module
        self.accelerator.setup(trainer)
        fresh = not holds_units(model)
        model = self._shard(self.precision_plugin.convert_module(model), self.device_mesh)
        self.model = model
        for name in _STEPS if isinstance(model, ShardedModule) else ():
            register_fsdp_forward_method(model, name)
        if fresh and self._compile_options is not None:
            for part in parts_of(model):
                part.compile(backend="shardc", options=dict(self._compile_options))
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard_all(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for part in parts_of(model):
            fully_shard(part, mesh=mesh, **self._options)
        if any(True for _ in model.parameters(recurse=False)):
            fully_shard(model, mesh=mesh, **{**self._options, "units": None})

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Leave gradients unreduced inside: for the micro-batches before the last."""
        assert self.model is not None
        return _no_sync(self.model)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, sharded, or full on rank 0."""
        assert self.model is not None
        options = saving(not self._save_distributed_checkpoint)
        return get_model_state_dict(self.model, options=options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer: sharded, keyed by names; or full on rank 0, keyed by ids."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        full = not self._save_distributed_checkpoint
        assert self.model is not None
        state = get_optimizer_state_dict(self.model, inner, options=saving(full))
        if not full or not state:
            return state
        return rekey_optimizer_state_dict(state, "ids", self.model, inner)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the model and its optimizers, and return the rest of the checkpoint."""
        path = Path(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None
        optimizers = {f"optimizer_{at}": each for at, each in enumerate(self.optimizers)}
        state = {"state_dict": self.model, **optimizers}
        return read(path, state, self.lightning_module.strict_loading, weights_only)


# -- sharded models --------------------------------------------------------------------------------


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules inside `model` that have parameters and are no containers."""
    parts: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, _CONTAINERS):
            parts += parts_of(child)
        elif any(True for _ in child.parameters()):
            parts.append(child)
    return parts


@contextlib.contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in units_of(model, root_only=True).values():
            stack.enter_context(module.no_sync())
        yield
