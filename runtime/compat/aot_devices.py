"""Entries of AOT autograd's cache serve every GPU of a kind, whichever index a process has it by.

Inductor writes the index of the GPU into its code. Keys leave out the one of the process that
compiles, and an entry of another is changed over when it is loaded: its code, and the folder that
Triton looks for its kernels in. What Inductor keeps of kernels beside their binaries is left out:
it is made anew from the code.
"""

import re
from typing import Any, TypeAlias

import torch

Entry: TypeAlias = Any
"""What AOT autograd keeps of a graph; its class is another in each version of torch."""

_INDEX = (
    r"(cuda:|type='cuda', index=|_DeviceGuard\(|cuda\.set_device\(|cuda\.device\(|"
    r"get_raw_stream\(|default_generators\[|\braw_stream|\bstream)({})(?!\d)"
)
"""Where code of Inductor has the index of a GPU, and names its streams by it."""


def own_gpu() -> int | None:
    """The index of the GPU that this process works on; None where it works on none."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def name_ptxas() -> None:
    """Give Triton from the start the ptxas that Inductor will name.

    Keys of kernels have its version. Inductor of 2.11 names another than Triton's own once it
    compiles its first kernel, and Triton may have been asked before: then keys depend on what a
    process has compiled. (2.11; Inductor of 2.13 looks for one where there is none.)
    """
    from torch._inductor.runtime import compile_tasks

    name = getattr(compile_tasks, "_set_triton_ptxas_path", None)
    if name is not None and torch.cuda.is_initialized():
        name()


def with_index(code: str, before: int, index: int | str) -> str:
    """Code of Inductor or a graph that is for one GPU, for another."""
    return re.sub(_INDEX.format(before), rf"\g<1>{index}", code)


def move_entry(entry: Entry, before: int | None, index: int | None) -> None:
    """Move an entry that was compiled for one GPU to another."""
    if before is None or index is None or before == index:
        return
    for part in (entry.compiled_fw, entry.compiled_bw):
        if part is not None:
            _move_graph(part.result, before, index)
    facts = entry.runtime_metadata  # whose random states a backward repeats
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
