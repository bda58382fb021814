"""Compiled graphs on disk: the next start loads them, and one rank compiles them for all.

Ranks that come to a graph at the same time compare its key. Where the key is equal on all of them,
one rank compiles (another rank from graph to graph) and the others wait for its entry. Where keys
differ, because a rank has shapes of its own, every rank compiles its own graph. A rank that may be
alone compares nothing: the first rank to come compiles, and a rank that comes meanwhile waits.

An entry is AOT autograd's (`compat.aot_cache`), and also holds the decisions of our passes. A
loaded graph agrees, reports and names its failures like a graph that this rank compiled.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

import shardc.passes
import shardc.runtime
from shardc.backend.executor import eager_executor
from shardc.backend.graph_plan import Call, CompilePlan
from shardc.backend.options import Options
from shardc.backend.recorded import recorded
from shardc.backend.stages import RANKS
from shardc.passes import pipeline
from shardc.passes.dump import is_wanted
from shardc.runtime import compat
from shardc.runtime.watch.agreement import Statement
from shardc.runtime.watch.entering import BoxedGraph, naming_failures
from shardc.runtime.watch.hand_over import HandOver
from shardc.runtime.watch.progress import progress

_NOT_KEPT = "-"
"""The note of a rank with a graph that cannot be kept, in place of a key."""


@dataclass(eq=False)
class CompileCache:
    """The guest of AOT autograd's cache for one Dynamo graph.

    Attributes:
        plan: the plan of the graph.
        group: the ranks that come to the graph together; None where they are not one group.
        alone: whether this rank may be the only one to come to the graph.
        hints: the dynamic sizes of the inputs, on which the schedule depends.
    """

    plan: CompilePlan
    group: dist.ProcessGroup | None
    alone: bool
    hints: str
    _key: str = field(default="", init=False)
    _find: Callable[[str], compat.Found] = field(init=False)
    _hand_over: HandOver | None = field(default=None, init=False)

    def look(self, key: str, find: Callable[[str], compat.Found]) -> compat.Found:
        """The entry for a graph, from this rank or another; None: this rank compiles the graph."""
        key = _digest(key, _version(), self.plan.facts(), self.hints)
        self._find = find
        found = find(key) if self.group is not None else None
        keys = self._compare(f"{key} {found is not None} {_folder()}")
        known = {note.split(" ")[0] for note in keys}
        everyone = self.plan.everyone
        if everyone and compat.is_fake_group(compat.resolve_group(everyone)):
            self.plan.agreements.settled = True  # all ranks are this one (`precompile`)
        if _NOT_KEPT in known:
            return None
        if self.group is None or len(known) > 1:
            self._key = _digest(key, *sorted(known)) if len(known) > 1 else key
            found = find(self._key)
            if found is None and self.alone:
                found = self._from_first()
            return self._use(found)
        self._key = key
        self.plan.agreements.settled = True
        self._hand_over = HandOver(self.group, key)
        folders = {note.split(" ")[2] for note in keys}
        if all(note.split(" ")[1] == "True" for note in keys):
            return self._use(found)
        if self._hand_over.leads:
            self._hand_over.begin(folders - {_folder()})
        elif found is None:
            content = self._taken(self._hand_over)
            found = find(key)
            if found is None and content:
                compat.write_entry(key, content)
                found = find(key)
        return self._use(found)

    def _from_first(self) -> compat.Found:
        """The entry of a rank that compiles the graph now; None where this rank is the first."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None or not compat.has_others(world):
            return None
        first = HandOver(world, f"{self._key} {_folder()}", together=False)
        if not first.leads:
            self._taken(first)
            return self._find(self._key)
        self._hand_over = first
        first.begin(())
        self.plan.agreements.before_comparing = lambda: first.give(None)
        return None

    def _taken(self, hand_over: HandOver) -> bytes | None:
        with self.plan.stages.stage(RANKS):
            return hand_over.take()

    def bypassed(self) -> None:
        """Tell the other ranks that this graph cannot be kept: each rank compiles it."""
        self._compare(_NOT_KEPT)

    def missed(self, gm: GraphModule) -> None:
        """Trace the bodies that the graph calls, because this rank compiles the graph."""
        self.plan.trace_bodies(gm)

    def keep(self, entry: Any, save: Callable[[str], None]) -> None:
        """Keep the entry of a compiled graph, and hand it over to the ranks that wait."""
        if not self._key:
            return
        plan = self.plan
        graphs = tuple(replace(each, buckets=(), options=Options()) for each in plan.graphs)
        decided = plan.joint, plan.kept, graphs
        entry.shardc = tuple(plan.agreements.made), decided, plan.calls
        save(self._key)
        if self._hand_over is not None and self._hand_over.leads:
            content: bytes | None = b""
            if self._hand_over.sends:
                found = self._find(self._key)
                content = found and found[1]
            self._hand_over.give(content)

    def give_up(self) -> None:
        """Let the ranks that wait for the entry go on, if none was handed over."""
        if self._hand_over is not None:
            self._hand_over.give(None)

    def _compare(self, note: str) -> frozenset[str]:
        """The notes of all ranks that come to the graph together."""
        if self.group is None:
            return frozenset([note])
        name = compat.group_name(self.group)
        stated = Statement("which compiled graphs exist", note=note)
        return self.plan.agreements.agree(name, stated, every_time=True)

    def _use(self, found: compat.Found) -> compat.Found:
        """The entry, if ranks agree on its facts again; the plan then takes over its decisions."""
        if found is None:
            return None
        entry, _ = found
        agreed, decided, known = entry.shardc
        if not self.plan.agreements.again(agreed):
            return None  # other ranks have other shapes now, so the schedule differs
        self.plan.load(*decided)
        calls = (known.get(phase, Call()) for phase in ("forward", "backward"))
        compat.wrap_entry(entry, *(functools.partial(around, call) for call in calls))
        self.plan.stages.load()
        return found


@contextlib.contextmanager
def cache_of(
    plan: CompilePlan, lowers: bool, group: dist.ProcessGroup | None, alone: bool, hints: str
) -> Iterator[CompileCache | None]:
    """A context around a compile: the cache to look in, or None where graphs are not kept.

    Only graphs that Inductor `lowers` are kept; the other ranks are told that a graph is not kept.
    """
    if not lowers or plan.options.executor != "inductor":
        yield None
        return
    cache = CompileCache(plan, group, alone, hints)
    keeps = _can_keep(plan)
    if not keeps:
        cache.bypassed()
    try:
        yield cache if keeps else None
    finally:
        cache.give_up()


def _can_keep(plan: CompilePlan) -> bool:
    """Whether the graphs of a plan may come from disk: no dump is wanted, and all passes are ours.

    A graph that calls objects of the user by a number of this process is compiled anew.
    """
    named = any(bucket.key.reading_code().names_objects for bucket in plan.buckets.values())
    return compat.can_cache() and pipeline.is_own() and not is_wanted() and not named


def around(call: Call, compiled: Any) -> Any:
    """Wrap Inductor's code of a graph: the tail runs behind it, a collective that fails is named
    with the missing ranks, and a step that is recorded has the call and the tail."""

    def wrap(code: BoxedGraph) -> BoxedGraph:
        head = recorded(None, naming_failures(code, call.groups, call.replayed), call.groups)
        return head if call.tail is None else _followed_by(head, call.tail.module, call)

    return compat.wrap_compiled(compiled, wrap)


def _followed_by(head: BoxedGraph, module: GraphModule, call: Call) -> BoxedGraph:
    tail = recorded(module, naming_failures(eager_executor(module), call.groups))

    def run(inputs: list[object]) -> object:
        names = progress.next_names
        results: Any = head(inputs)
        results = list(results)  # the tail empties it
        progress.next_names = names
        return tail(results)

    return run


@functools.cache
def _version() -> str:
    """The digest of the code that compiles: graphs that other code compiled are not loaded."""
    return _digest(*(file.read_text() for file in core_files()))


def core_files() -> list[Path]:
    """The files of the code that shapes compiled graphs, and of the classes kept with graphs.

    Other reports, commands, state dicts and optimizers are left out.
    """
    passes, runtime = (Path(part.__file__ or "").parent for part in (shardc.passes, shardc.runtime))
    own = Path(shardc.__file__ or "").parent
    folders = (own / "backend", own / "sharding", passes, runtime)
    found = {file for folder in folders for file in folder.rglob("*.py")}
    return sorted({*found, *(own / "reports" / name for name in ("graph.py", "record.py"))})


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@functools.cache
def _folder() -> str:
    """A text for the folder of compiled graphs: ranks with equal texts see the same files."""
    path = Path(compat.cache_folder()) / "shardc-folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)  # the first process gives the name, whole
        os.unlink(file.name)
        return path.read_text()
    except OSError:
        return uuid.uuid4().hex  # no other process has this text
