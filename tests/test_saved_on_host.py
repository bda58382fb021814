"""Values that a memory budget has the forward save on the host: bits, streams, memory, order."""

import contextlib
from dataclasses import replace
from unittest import mock

import accelerator
import pytest
import torch
from models import Gated, compiled, seeded
from ranks import on_ranks

from shardc import fully_shard
from shardc.backend import graph_plan
from shardc.backend.graph_plan import graph_plans
from shardc.passes.context import Kept
from shardc.passes.trial import run_trial
from shardc.passes.recomputable import recomputable


@contextlib.contextmanager
def _choosing(part):
    """Have a compile save on the host what `part` picks of the values that could be."""
    found = []

    def choose(gm, ctx):
        kept = Kept()
        values = [each.saved for each in recomputable(run_trial(gm, ctx, kept)) if part(each.saved)]
        found.extend(values)
        names = {node.name: saved.unit for saved in values for node in saved.nodes}
        return replace(kept, offloaded=names)

    with mock.patch.object(graph_plan, "choose_kept", choose):
        yield found


@on_ranks(2, device="sim")
def test_scratch(mesh):
    x = torch.randn(2, 64, 32).to("sim")
    got = []
    for part in (lambda saved: False, lambda saved: print(saved.kind, saved.nbytes, [str(n) for n in saved.nodes]) or True):
        model = fully_shard(seeded(lambda: Gated(3)).to("sim"), mesh=mesh, units="auto")
        torch._dynamo.reset()
        call = compiled(model)
        with _choosing(part) as found, accelerator.recording() as log:
            call(x).backward()
        print(len(found), {s.kind for s in found})
        print([e for e in log if e.kind == "copy"][:3], sum(e.kind == "copy" for e in log))
        print([(p.phase, p.liveness.peak) for p in list(graph_plans)[-2:]])
        accelerator.reset_peak()
        call(x).backward()
        print(accelerator.peak_bytes())
        got.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))
    raise AssertionError
