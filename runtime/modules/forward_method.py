"""Methods beside `forward` that enter a sharded module: `encode`, `generate`, ..."""

import functools
import types

import torch
from torch import nn

from shardc.runtime.checks.arguments import checked
from shardc.runtime.checks.meta import require_values
from shardc.runtime.modules.modules import ShardedModule
from shardc.runtime.unit.eager import begin_call, end_call


@checked
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make `module.method_name` read full parameters and convert inputs, as `forward` does.

    FSDP2 has a function of this name. A module that is not sharded is left as it is. Of the
    result of `torch.compile(module)`, the method of `module` changes. While the method runs, the
    module's own buckets are gathered; inner units are gathered when called.

    Raises:
        ValueError: a sharded module has no such method.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile(module)
    if not isinstance(module, ShardedModule):
        return
    function = getattr(type(module), method_name, None)
    if not callable(function):
        raise ValueError(
            f"register_fsdp_forward_method: method_name must be that of a method, and "
            f"{type(module).__name__} has no method '{method_name}'"
        )

    @functools.wraps(function)
    def method(self: ShardedModule, *args: object, **kwargs: object) -> object:
        unit = self._shardc_unit
        if unit.on_meta:
            require_values(self)
        if unit.converts:
            args, kwargs = unit.prepare_inputs(self, args, kwargs)
        call = None if torch.compiler.is_compiling() else begin_call(self)
        outputs, raised = None, True
        try:
            outputs = function(self, *args, **kwargs)
            raised = False
        finally:
            if call is not None:
                end_call(call, outputs, raised)
        return unit.finish_outputs(self, outputs) if unit.converts else outputs

    setattr(module, method_name, types.MethodType(method, module))
