"""Entries of AOT autograd's cache serve every GPU of a kind, under any index.

Inductor writes the index of the GPU into its code. A key leaves out the index of the process that
compiles. A load changes an entry from another index: its code, and the folder of its Triton
kernels. Of the records of kernels the changed entry keeps only binaries: Inductor makes the other
records anew from the code.
"""

import re
from typing import Any, TypeAlias

import torch

Entry: TypeAlias = Any
"""AOT autograd's record of a compiled graph; each version of torch has another class for it."""

_INDEX = (
    r"(cuda:|type='cuda', index=|_DeviceGuard\(|cuda\.set_device\(|cuda\.device\(|"
    r"get_raw_stream\(|default_generators\[|\braw_stream|\bstream)({})(?!\d)"
)
"""Places in Inductor's code with the index of a GPU, also in the names of its streams."""


def own_gpu() -> int | None:
    """The index of the GPU that this process works on; None where it works on none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def name_ptxas() -> None:
    """Give Triton from the start the ptxas that Inductor will name.

    The keys of kernels contain the version of ptxas. Inductor of 2.11 names another ptxas than
    Triton's own when it compiles its first kernel. Triton may have used its own ptxas before: then
    keys depend on the kernels that a process has compiled. (2.11; Inductor of 2.13 looks for a file
    that is not there.)
    """
    from torch._inductor.runtime import compile_tasks

    name = getattr(compile_tasks, "_set_triton_ptxas_path", None)
    if name is not None and torch.cuda.is_initialized():
        name()


def with_index(code: str, before: int, index: int | str) -> str:
    """Code of Inductor or of a graph, changed from the GPU with index `before` to `index`."""
    return re.sub(_INDEX.format(before), rf"\g<1>{index}", code)


def move_entry(entry: Entry, before: int | None, index: int | None) -> None:
    """Move an entry that was compiled for one GPU to another."""
    if before is None or index is None or before == index:
        return
    for part in (entry.compiled_fw, entry.compiled_bw):
        if part is not None:
            _move_graph(part.result, before, index)
    facts = entry.runtime_metadata  # names the GPU of the random states
    if facts.graphsafe_rng_state_index == before:
        facts.graphsafe_rng_state_index = index
    device = getattr(facts, "graphsafe_rng_device", None)  # since 2.12
    if device == torch.device("cuda", before):
        facts.graphsafe_rng_device = torch.device("cuda", index)
    if entry.serialized_bw_module is not None:  # for compiled autograd
        attributes = entry.serialized_bw_module.args[0]
        attributes["_code"] = with_index(attributes["_code"], before, index)


def _move_graph(graph: Any, before: int, index: int) -> None:
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.triton_bundler import TritonBundle, TritonKernelArtifacts

    graph.source_code = with_index(graph.source_code, before, index)
    graph.cache_key, _ = PyCodeCache.write(graph.source_code)
    graph.device_idxs = type(graph.device_idxs)([index])
    for name, constant in (graph.constants or {}).items():
        if constant.device == torch.device("cuda", before):
            graph.constants[name] = constant.to(index)
    bundle = graph._triton_bundle
    if bundle is not None:
        kernels = [
            TritonKernelArtifacts(kernel.kernel_hash, index, kernel.artifacts)
            for kernel in bundle.kernel_artifacts
        ]
        graph._triton_bundle = TritonBundle(kernels, [])
