"""C++ kernels: kept with the graph that calls them, and loaded without a compiler.

Inductor compiles each kernel to a library in its folder. An entry of AOT autograd's cache holds
the kernel's source only: a rank with another folder would compile the kernel anew.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from unittest import mock

V = TypeVar("V")

Libraries = dict[str, bytes]
"""The contents of libraries, by path in Inductor's folder."""


@contextlib.contextmanager
def noting_libraries(folder: str) -> Iterator[Callable[[], Libraries]]:
    """Inside, loaded kernels are noted; gives a function that returns their libraries."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels

    known, noted = Kernels.cache, _Noting(Kernels.cache)

    def libraries() -> Libraries:
        found = [path for key in noted.read for path in Path(folder, key[1:3]).glob(f"{key}.*so")]
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    Kernels.cache = noted
    try:
        yield libraries
    finally:
        Kernels.cache = known
        known.update(noted)


class _Noting(dict[str, V]):
    """A dict that records the keys that have been read, in order."""

    def __init__(self, known: dict[str, V]) -> None:
        super().__init__(known)
        self.read: dict[str, None] = {}

    def __getitem__(self, key: str) -> V:
        self.read[key] = None
        return super().__getitem__(key)


def write_libraries(libraries: Libraries, folder: str) -> None:
    """Write the libraries that the folder lacks, each as a whole or not at all."""
    from torch._inductor.codecache import write_atomic

    for name, content in libraries.items():
        path = Path(folder, name)
        if not path.exists():
            write_atomic(str(path), content, make_dirs=True)


@contextlib.contextmanager
def compiling_no_header() -> Iterator[None]:
    """Inside, Inductor does not precompile the header of kernels: it should compile no kernel."""
    from torch._inductor import codecache

    def as_it_is(header: str, *settings: object, **more: object) -> str:
        _, path = codecache.write(f"#include <{header}>\n", "h")
        return path

    with mock.patch.object(codecache, "_precompile_header", as_it_is):
        yield


@contextlib.contextmanager
def remembering_probes() -> Iterator[None]:
    """Inside, Inductor probes each library for vector instructions only once (2.13 to 2.15).

    A probe starts a process that loads a library, to find the CPU's vector instructions. The name
    of the library depends on the compiler, its settings and the version of torch.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, "_probe_load", None)
    if probe is None:
        yield
        return

    def load(isa: VecISA, library: str) -> bool:
        loaded = Path(f"{library}.loaded")
        if not loaded.exists() and not probe(isa, library):
            return False
        loaded.touch()
        return True

    with mock.patch.object(VecISA, "_probe_load", load):
        yield
