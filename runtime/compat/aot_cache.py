"""AOT autograd's cache of compiled graphs; a guest takes part in each lookup and each save.

An entry holds all that AOT autograd makes of a Dynamo graph: Inductor's forward and backward, and
the code around them. Its key covers the graph, the inputs, the settings and the keys of our passes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast
from unittest import mock

import torch
from torch.fx import GraphModule

from shardc.runtime.compat.aot import functorch_config
from shardc.runtime.compat.aot_devices import Entry, move_entry, name_ptxas, own_gpu, with_index
from shardc.runtime.compat.cpp_kernels import (
    compiling_no_header,
    noting_libraries,
    remembering_probes,
    write_libraries,
)

_FUNCTIONS = ("shardc.runtime.comm.unshard.unshard", "shardc.runtime.comm.unshard.look_up")
"""Our functions in Dynamo graphs that are not ops: AOT autograd traces through them."""

Found = tuple[Entry, bytes] | None
"""An entry and its pickled bytes; None where there is no entry."""

Wrap = Callable[[Any], object]
"""Changes a loaded graph in place."""

Compiled = Callable[..., object]
"""A compiled graph, as a function."""


class Guest(Protocol):
    """The interface to AOT autograd's cache during a compile.

    Either `look` or `bypassed` is called, once.
    """

    def look(self, key: str, find: Callable[[str], Found]) -> Found:
        """The entry for a key; None lets AOT autograd compile the graph. `find` looks on disk."""

    def bypassed(self) -> None:
        """The graph cannot be cached."""

    def missed(self, gm: GraphModule) -> None:
        """The Dynamo graph `gm` is compiled now; it may still be changed in place."""

    def keep(self, entry: Entry, save: Callable[[str], None]) -> None:
        """A graph was compiled: `save` keeps its entry on disk, under a key."""


def can_cache() -> bool:
    """Whether the user's settings of torch allow a cache of compiled graphs."""
    import torch.compiler.config
    from torch._inductor import config

    functorch = functorch_config()
    wanted = functorch.enable_autograd_cache and config.fx_graph_cache
    return bool(wanted and not torch.compiler.config.force_disable_caches)


@contextlib.contextmanager
def aot_cache(guest: Guest | None) -> Iterator[None]:
    """Inside, AOT autograd's cache works through `guest`; without a guest it is off.

    An entry stands alone: it holds the code of the forward and the backward, which are compiled
    together, and the libraries of their C++ kernels. The guest's keys cover the versions of our
    Python functions that graphs call.
    """
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import config

    AOTAutogradCache = autograd_cache.AOTAutogradCache
    if guest is None:
        with functorch_config().patch(enable_autograd_cache=False):
            yield
        return
    name_ptxas()
    check_one = autograd_cache.check_cacheable
    names = ("try_load", "_lookup", "make_entry", "save")
    theirs = {name: getattr(AOTAutogradCache, name) for name in names}
    asked = False

    def check_whole(gm: GraphModule) -> None:
        """Also check the bodies that `gm` calls: the key does not tell meshes in them apart."""
        for module in gm.modules():
            if isinstance(module, GraphModule):
                check_one(module)

    def try_load(mod: torch.nn.Module, *args: object, **kwargs: object) -> object:
        result = theirs["try_load"](mod, *args, **kwargs)
        if not asked:
            guest.bypassed()
        if (result[0] if isinstance(result, tuple) else result) is None:  # 2.11 gives no tuple
            whole = mod if isinstance(mod, GraphModule) else mod.gm
            guest.missed(cast(GraphModule, whole))
        return result

    def lookup(key: str, *args: object, **kwargs: object) -> Found:
        nonlocal asked
        asked = True
        entry = guest.look(key, lambda own_key: find(own_key, *args, **kwargs))
        if entry is not None:
            stack.enter_context(compiling_no_header())
        return entry

    def find(key: str, *args: object, **kwargs: object) -> Found:
        found: Found = theirs["_lookup"](key, *args, **kwargs)
        if found is not None:
            move_entry(found[0], found[0].shardc_gpu, own_gpu())
            write_libraries(found[0].shardc_libraries, cache_folder())
        return found

    def make_entry(*args: object, **kwargs: object) -> Entry:
        try:
            entry = theirs["make_entry"](*args, **kwargs)
        except AssertionError:  # a graph is not from Inductor: it runs op by op
            return None
        entry.shardc_gpu = own_gpu()
        entry.shardc_libraries = libraries()
        return entry

    def save(key: str, entry: Entry, *args: object, **kwargs: object) -> None:
        if entry is None:
            return
        guest.keep(entry, lambda own_key: theirs["save"](own_key, entry, *args, **kwargs))

    cacheable = {"unsafe_marked_cacheable_functions": dict.fromkeys(_FUNCTIONS, "")}
    with (
        functorch_config().patch(enable_autograd_cache=True, bundled_autograd_cache=True),
        config.patch(cacheable),
        mock.patch.object(autograd_cache, "check_cacheable", check_whole),
        _stable_keys(),
        remembering_probes(),
        noting_libraries(cache_folder()) as libraries,
        contextlib.ExitStack() as stack,
    ):
        for name, ours in zip(names, (try_load, lookup, make_entry, save), strict=True):
            stack.enter_context(
                mock.patch.object(AOTAutogradCache, name, staticmethod(cast(Compiled, ours)))
            )
        yield


@contextlib.contextmanager
def _stable_keys() -> Iterator[None]:
    """Inside, the key of a graph is the same in all processes that compile it.

    Pickle looks for a memory format by its name "torch.contiguous_format", in all modules that have
    an attribute "torch": the key would depend on the modules that a process has imported. A key
    holds the name alone. An entry holds the memory format, because a backward compares with it. A
    key leaves out the index of the process's own GPU; a loaded entry is moved to the own GPU.
    A key leaves out whether shapes are dynamic, which torch infers from the first input without
    values: `precompile` gives all inputs so, a job few. Sizes are in the key by themselves.
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler as Pickler
    from torch._functorch._aot_autograd.schemas import AOTConfig

    dumps, reduce_config = Pickler.dumps, Pickler._reduce_aot_config

    def stable_config(self: Pickler, config: AOTConfig) -> object:
        return reduce_config(self, dataclasses.replace(config, dynamic_shapes=False))

    def stable_dumps(self: Any, value: object) -> bytes:
        self.dispatch_table[torch.memory_format] = lambda known: (str, (str(known),))
        own = own_gpu()
        if own is None:
            return dumps(self, value)
        named = {torch.device("cuda", own): "cuda:own"}
        self.dispatch_table[torch.device] = lambda known: (str, (named.get(known, str(known)),))
        pickled: bytes = dumps(self, value)  # contains the code of the graph
        return with_index(pickled.decode("latin-1"), own, "own").encode("latin-1")

    with (
        mock.patch.object(Pickler, "_reduce_aot_config", stable_config),
        mock.patch.object(Pickler, "dumps", stable_dumps),
    ):
        yield


def cache_counts() -> tuple[int, int]:
    """The number of Dynamo graphs that this process found in the cache, and the number it saved."""
    from torch._dynamo.utils import counters

    counted = counters["aot_autograd"]
    return counted["autograd_cache_hit"], counted["autograd_cache_saved"]


def cache_folder() -> str:
    """The folder of compiled graphs."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return str(cache_dir())


def write_entry(key: str, content: bytes) -> None:
    """Write a pickled entry of another rank into this process's cache."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    AOTAutogradCache._write_to_local_cache(key, content)


def wrap_entry(entry: Entry, forward: Wrap, backward: Wrap) -> None:
    """Wrap the graphs of an entry once they are loaded."""
    entry.compiled_fw = _Wrapping(entry.compiled_fw, forward)
    if entry.compiled_bw is not None:
        entry.compiled_bw = _Wrapping(entry.compiled_bw, backward)


class _Wrapping:
    """A graph of an entry, given to `wrap` once it is loaded."""

    def __init__(self, loadable: Any, wrap: Wrap) -> None:
        self._loadable = loadable
        self._wrap = wrap

    def post_compile(self, *args: object) -> object:
        loaded = self._loadable.post_compile(*args)
        innermost = loaded
        while hasattr(innermost, "__wrapped__"):
            innermost = innermost.__wrapped__
        self._wrap(innermost)
        return loaded

    def __getattr__(self, name: str) -> object:
        return getattr(self._loadable, name)


def wrap_compiled(output: Any, wrap: Callable[[Compiled], Compiled]) -> object:
    """Put `wrap` around the function that a graph compiled by Inductor calls.

    A graph without calls, which only passes inputs on, is a plain function: it stays unchanged.
    """
    if not hasattr(output, "current_callable"):
        return output
    output.current_callable = wrap(output.current_callable)
    return output
