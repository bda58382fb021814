"""Has an acceptance script run another way: SHARDC_VARIANT=uncompiled, blocks or breaks.

On PYTHONPATH, Python imports this file in every process that the script starts. `torch.compile` of
a model then gives the model as it is, compiles its blocks only, or meets a graph break in each.
"""

import os
from typing import Any


def _replace_compile(variant: str) -> None:
    import torch

    compile = torch.compile

    def other_compile(model: Any, fullgraph: bool = False, **kwargs: Any) -> Any:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "layers"):
            return compile(model, fullgraph=fullgraph, **kwargs)
        if variant == "blocks":
            for layer in model.layers:
                layer.compile(fullgraph=fullgraph, **kwargs)
        if variant == "breaks":
            for layer in model.layers:
                _break_inside(layer)
            return compile(model, **kwargs)
        return model

    torch.compile = other_compile


def _break_inside(layer: Any) -> None:
    import torch

    def after(*_: Any) -> None:
        torch._dynamo.graph_break()

    for child in list(layer.children())[::2]:
        child.register_forward_hook(after)


if variant := os.environ.get("SHARDC_VARIANT"):
    _replace_compile(variant)
