"""Wrong uses: each is refused at once, by name, value and way out, and nothing has changed."""

import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import shardc
from shardc import MixedPrecisionPolicy, ShardTensor, fully_shard, strict
from shardc.backend.options import Options
from shardc.passes.estimate.hardware import current_profile


def _build():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(4, 6), inner, nn.Linear(6, 2))


def _sharded(mesh):
    return fully_shard(_build(), mesh=mesh, units="auto")


def _values(model):
    return {
        name: (value.full_tensor() if isinstance(value, ShardTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def _looks(model):
    """What a refusal must leave as it is, beside values."""
    units = {id(m): m._shardc_unit for m in model.modules() if hasattr(m, "_shardc_unit")}
    return (
        [type(module) for module in model.modules()],
        [(name, type(param), id(param)) for name, param in model.named_parameters()],
        [(repr(u.settings), u.asked_reshard, u.settings.forward_prefetch) for u in units.values()],
        current_profile("cpu"),
    )


def _trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    return _values(model)


def _check(use, model, error, words):
    before, values = _looks(model), _values(model)
    with pytest.raises(error) as caught:
        use(model)
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert _looks(model) == before
    after = _values(model)
    assert all(torch.equal(values[name], after[name]) for name in values)
    plain = _trained(_build())
    trained = _trained(model)
    assert all(torch.equal(trained[name], value) for name, value in plain.items())
    assert not torch.equal(trained["0.weight"], values["0.weight"])


def _with(**kwargs):
    return lambda model: fully_shard(model, **kwargs)


def _mp(**kwargs):
    return _with(mp_policy=MixedPrecisionPolicy(**kwargs))


_stranger = nn.Parameter(torch.ones(3))
_NOT_A_MODULE = "module must be a module or a list of modules, got "
_UNITS = "'auto', a module class, a tuple of classes, a callable or None"
_PROFILE = "must be a Profile, a text or None"

ON_PLAIN = {
    "a name": (lambda m: fully_shard("model"), TypeError, [_NOT_A_MODULE + "'model'"]),
    "a class": (lambda m: fully_shard(nn.Linear), TypeError, [_NOT_A_MODULE + "the class Linear"]),
    "sparse": (
        lambda m: fully_shard(nn.ModuleDict({"e": nn.Embedding(4, 4, sparse=True)})),
        NotImplementedError, ["'e.weight'", "Embedding", "set sparse=False", "ignored_params"],
    ),
    "sparse bag": (
        lambda m: fully_shard(nn.EmbeddingBag(4, 4, sparse=True)), NotImplementedError,
        ["'weight'", "EmbeddingBag", "set sparse=False", "ignored_params"],
    ),
    "max_norm": (
        lambda m: fully_shard(nn.Embedding(4, 4, max_norm=1.0)), NotImplementedError,
        ["'weight'", "max_norm=1.0", "writes to the table", "ignored_params"],
    ),
    "no modules": (lambda m: fully_shard([]), ValueError, ["module", "got []"]),
    "mesh=group": (
        lambda m: fully_shard(m, mesh=dist.group.WORLD), TypeError,
        ["mesh must be a DeviceMesh or None, got", "ProcessGroup"],
    ),
    "dp_mesh_dims=str": (
        _with(dp_mesh_dims="dp"), ValueError, ["dp_mesh_dims", "DataParallelMeshDims", "'dp'"],
    ),
    "reshard=str": (
        _with(reshard_after_forward="yes"), TypeError,
        ["reshard_after_forward must be True, False, None or a divisor", "got 'yes'"],
    ),
    "reshard=3": (_with(reshard_after_forward=3), ValueError, ["of the world size 1, got 3"]),
    "mp=dtype": (
        _with(mp_policy=torch.bfloat16), TypeError, ["mp_policy", "a MixedPrec", "torch.bfloat16"],
    ),
    "mp=complex": (_mp(reduce_dtype=torch.complex64), ValueError, ["reduce_dtype", "complex64"]),
    "mp=float8": (
        _mp(param_dtype=torch.float8_e4m3fn), ValueError,
        ["param_dtype must be torch.float16, bfloat16, float32, float64 or None", "float8_e4m3fn"],
    ),
    "mp=cast": (
        _mp(cast_forward_inputs="x"), TypeError,
        ["cast_forward_inputs must be True or False, got 'x'"],
    ),
    "mp=buffers": (_mp(buffer_dtype="bf16"), TypeError, ["buffer_dtype must be", "'bf16'"]),
    "offload=True": (_with(offload_policy=True), TypeError, ["offload_policy", "got True"]),
    "offload pins": (
        _with(offload_policy=CPUOffloadPolicy(pin_memory="no")), TypeError, ["pin_memory", "'no'"],
    ),
    "ignored=name": (_with(ignored_params="0.weight"), TypeError, ["ignored_params", "0.weight"]),
    "ignored=names": (
        _with(ignored_params=["0.weight"]), TypeError, ["ignored_params", "['str']", "get_param"],
    ),
    "ignored=stranger": (
        _with(ignored_params=[_stranger], units="auto"), ValueError,
        ["ignored_params contains a Parameter of shape (3,)", "not in the Sequential"],
    ),
    "ignored=strange module": (
        _with(ignored_params=[nn.Linear(2, 2)], units="auto"), ValueError,
        ["ignored_params contains a Linear module", "not in the Sequential"],
    ),
    "placement": (
        _with(shard_placement_fn=5), TypeError, ["shard_placement_fn must be a function", "got 5"],
    ),
    "units='Auto'": (_with(units="Auto"), ValueError, ["units must be", _UNITS, "'Auto'"]),
    "units=5": (_with(units=5), TypeError, ["units must be", _UNITS, "got 5"]),
    "units=()": (_with(units=()), ValueError, ["units must be", _UNITS, "got ()"]),
    "units=absent": (
        _with(units=nn.Conv2d), ValueError, ["units=the class Conv2d", "it has Linear, Sequential"],
    ),
    "units gives str": (_with(units=lambda m: "yes"), TypeError, ["units=", "Linear", "'yes'"]),
    "units gives option": (
        _with(units=lambda m: {"reshard": True}), ValueError, ["'reshard'; known: reshard_after"],
    ),
    "units gives reshard": (
        _with(units=lambda m: {"reshard_after_forward": 7}), ValueError, ["reshard_after", "got 7"],
    ),
    "init=5": (_with(param_init_fn=5), TypeError, ["param_init_fn must be a function", "got 5"]),
    "sync=str": (
        _with(sync_module_states="no"), TypeError,
        ["sync_module_states must be True or False, got 'no'"],
    ),
    "describe": (
        lambda m: shardc.describe(m), ValueError, ["describe", "Sequential", "fully_shard"],
    ),
    "units_of": (lambda m: shardc.units_of(5), TypeError, ["model must be a Module, got 5"]),
    "report": (lambda m: shardc.report(None), ValueError, ["report", "None", "fully_shard"]),
    "materialize": (lambda m: shardc.materialize(5), TypeError, ["model must be a Module, got 5"]),
    "materialize by 5": (
        lambda m: shardc.materialize(m, init_fn=5), TypeError, ["init_fn", "got 5"],
    ),
    "summon": (
        lambda m: shardc.summon_full_params(5), TypeError, ["module must be a Module, got 5"],
    ),
    "same values": (
        lambda m: shardc.check_same_values(5), TypeError, ["model must be a Module, got 5"],
    ),
    "same values on": (
        lambda m: shardc.check_same_values(m, mesh="x"), TypeError, ["mesh must be", "'x'"],
    ),
    "calibrate": (lambda m: shardc.calibrate(5), TypeError, ["mesh must be", "got 5"]),
    "hybrid_mesh 0": (
        lambda m: shardc.hybrid_mesh(0), ValueError, ["devices_per_node", "at least 1"],
    ),
    "get_profile": (
        lambda m: shardc.get_profile(None), TypeError, ["name must be a text, got None"],
    ),
    "set_profile": (lambda m: shardc.set_profile(5), TypeError, [_PROFILE, "got 5"]),
    "set_profile name": (
        lambda m: shardc.set_profile("x"), ValueError, ["unknown profile 'x'", "h100-ib"],
    ),
    "share_comm_ctx": (
        lambda m: shardc.share_comm_ctx([m]), ValueError,
        ["modules must have been given to fully_shard", "modules[0] is a Sequential module"],
    ),
    "share_comm_ctx 5": (
        lambda m: shardc.share_comm_ctx(5), TypeError, ["share_comm_ctx: modules", "got 5"],
    ),
    "compare": (
        lambda m: shardc.compare_with_profile(m, "x.json"), TypeError,
        ["record must be a Record, got a Sequential module"],
    ),
    "explain": (lambda m: shardc.explain(5), TypeError, ["model must be a Module, got 5"]),
    "explain on": (
        lambda m: shardc.explain(m, world_size="4"), TypeError,
        ["world_size must be a whole number of at least 1 or None, got '4'"],
    ),
    "model state": (
        lambda m: shardc.get_model_state_dict(5), TypeError, ["model must be", "got 5"],
    ),
    "rekey": (
        lambda m: shardc.rekey_optimizer_state_dict({}, "idx", m), ValueError,
        ["keys must be 'names' or 'ids', got 'idx'"],
    ),
    "rekey nothing": (
        lambda m: shardc.rekey_optimizer_state_dict({}, "ids", m), ValueError,
        ["state_dict has no 'state', got []", "optimizer.state_dict()"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_PLAIN)
@on_ranks(1)
def test_on_a_plain_model(mesh, case):
    use, error, words = ON_PLAIN[case]
    _check(use, _build(), error, words)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


_BACKEND = ["compiled by a backend that does not gather", "torch.compile() backend='shardc'"]


def _with_block_by(backend, model):
    """Run a model, one block of which another backend compiles; the block is uncompiled after."""
    model[1].compile(backend=backend)
    try:
        with warnings.catch_warnings(record=True, action="always") as told:
            model(torch.ones(3, 4)).sum().backward()
    finally:
        model[1]._compiled_call_impl = None
        stacks = [each for each in told if "Error detected in" in str(each.message)]
        assert not stacks, "autograd prints its stacks"


_MODULES = "modules must be a list of sharded modules"

ON_SHARDED = {
    "again": (lambda m: fully_shard(m), ValueError, ["already called on this Sequential"]),
    "inside": (
        lambda m: fully_shard(m[0]), ValueError,
        ["already called on the Sequential around this Linear", "inner modules first"],
    ),
    "FSDP2 too": (
        lambda m: torch.distributed.fsdp.fully_shard(m), AssertionError,
        ["fully_shard has already been applied to the following module"],
    ),
    "export": (
        lambda m: torch.export.export(m, (torch.ones(3, 4),)), NotImplementedError,
        ["torch.export cannot export a sharded Linear", "get_model_state_dict"],
    ),
    "divide 0": (
        lambda m: m.set_gradient_divide_factor(0), ValueError,
        ["set_gradient_divide_factor: factor must be a positive finite number, got 0"],
    ),
    "divide inf": (
        lambda m: m.set_gradient_divide_factor(float("inf")), ValueError, ["factor", "got inf"],
    ),
    "divide True": (
        lambda m: m.set_gradient_divide_factor(True), TypeError, ["factor", "got True"],
    ),
    "sync": (
        lambda m: m.set_requires_gradient_sync("no"), TypeError,
        ["requires_gradient_sync must be True or False, got 'no'"],
    ),
    "recurse": (
        lambda m: m.set_requires_all_reduce(True, recurse="x"), TypeError, ["recurse", "got 'x'"],
    ),
    "reshard": (
        lambda m: m.set_reshard_after_forward("x"), TypeError,
        ["set_reshard_after_forward: reshard_after_forward must be True", "got 'x'"],
    ),
    "prefetch plain": (
        lambda m: m.set_modules_to_forward_prefetch([m[0], nn.Linear(1, 1)]), ValueError,
        ["set_modules_to_forward_prefetch: modules", "modules[0] is a Linear module"],
    ),
    "prefetch one": (
        lambda m: m.set_modules_to_forward_prefetch(m), ValueError, [_MODULES, "a Sequential mod"],
    ),
    "prefetch None": (
        lambda m: m.set_modules_to_backward_prefetch(None), TypeError, [_MODULES, "got None"],
    ),
    "buffers 0": (
        lambda m: m.set_reduce_scatter_max_input_buffers(0), ValueError,
        ["max_input_buffers must be a whole number of at least 1, got 0"],
    ),
    "buffers 2.5": (
        lambda m: m.set_reduce_scatter_max_input_buffers(2.5), TypeError,
        ["max_input_buffers must be a whole number of at least 1, got 2.5"],
    ),
    "hook": (
        lambda m: m.set_all_reduce_hook(5), TypeError,
        ["set_all_reduce_hook: hook must be a function or None, got 5"],
    ),
    "hook's stream": (
        lambda m: m.set_all_reduce_hook(lambda g: None, stream=1), ValueError, ["stream", "None"],
    ),
    "reduce": (
        lambda m: m.set_custom_reduce(5), TypeError,
        ["set_custom_reduce: function must be a function or None, got 5"],
    ),
    "gather": (
        lambda m: m.set_custom_all_gather(5), ValueError,
        ["set_custom_all_gather: comm must be an object that can be called and has allocate()"],
    ),
    "scatter": (
        lambda m: m.set_custom_reduce_scatter(print), ValueError,
        ["set_custom_reduce_scatter: comm must be", "<built-in function print>"],
    ),
    "symmetric": (
        lambda m: m.set_symm_mem_for_comm("x"), ValueError, ["'NCCL', 'CUDA' or 'NVSHMEM', got"],
    ),
    "event": (
        lambda m: m.set_post_optim_event(5), ValueError, ["event must be", "torch.Event", "got 5"],
    ),
    "async": (lambda m: m.unshard("x"), TypeError, ["async_op must be True or False, got 'x'"]),
    "separate": (
        lambda m: m.set_separate_reduce_scatter_group("x"), TypeError, ["enable", "got 'x'"],
    ),
    "load None": (
        lambda m: shardc.set_model_state_dict(m, None), TypeError,
        ["the state dict to load must be a Mapping, got None"],
    ),
    "load list": (
        lambda m: shardc.set_model_state_dict(m, [1]), TypeError,
        ["model_state_dict must be a Mapping or None, got [1]"],
    ),
    "load optimizer None": (
        lambda m: shardc.set_optimizer_state_dict(m, _sgd(m), None), TypeError,
        ["the state dict to load must be a Mapping, got None"],
    ),
    "no optimizer": (
        lambda m: shardc.get_optimizer_state_dict(m, None), TypeError,
        ["optimizers must be an Optimizer or an Iterable, got None"],
    ),
    "no optimizers": (
        lambda m: shardc.set_optimizer_state_dict(m, [5], {}), TypeError,
        ["optimizers: each must be an Optimizer, got 5"],
    ),
    "options": (
        lambda m: shardc.get_model_state_dict(m, options="full"), TypeError,
        ["options must be a StateDictOptions or None, got 'full'"],
    ),
    "summon": (
        lambda m: shardc.summon_full_params(m, writeback="no"), TypeError,
        ["summon_full_params: writeback must be True or False, got 'no'"],
    ),
}  # fmt: skip


def _lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    finally:
        optimizer.zero_grad()


def _strictly(act):
    """`act`, with ops that need whole tensors refused."""

    def call(model):
        strict()
        try:
            act(model)
        finally:
            strict(False)

    return call


_HERE = f"from {__file__}:"
_FULL = "options=StateDictOptions(full_state_dict=True"

OF_PARAMETERS = {
    "median": (
        _strictly(lambda m: m[0].weight.median()), NotImplementedError,
        ["aten.median.default", f"(called at {__file__}:", "Call .full_tensor() (on every rank)"],
    ),
    "DDP": (
        lambda m: nn.parallel.DistributedDataParallel(m), NotImplementedError,
        ["aten.cat.default", "torch.distributed.utils._sync", _HERE, "(replicate, shard)"],
    ),
    "LBFGS": (
        _strictly(_lbfgs), NotImplementedError,
        ["aten.cat", "torch.optim.lbfgs._gather_flat_grad", _HERE, "shardc.WholeTensorOptimizer"],
    ),
    "safetensors": (
        lambda m: safetensors.torch.save(dict(m.state_dict())), RuntimeError,
        [".storage()", "safetensors.torch", _HERE, f"get_model_state_dict(model, {_FULL}"],
    ),
    "to a vector": (
        _strictly(lambda m: nn.utils.parameters_to_vector(m.parameters())), NotImplementedError,
        ["aten.cat", "parameters_to_vector", _HERE, "with shardc.summon_full_params(model)"],
    ),
    "asarray": (
        lambda m: np.asarray(m[0].weight.detach()), RuntimeError,
        [".numpy() is not supported on a ShardTensor of shape (6, 4)", "Call .full_tensor()"],
    ),
    "tolist": (
        lambda m: m[0].weight.tolist(), RuntimeError,
        [".tolist() is not supported on parameter '0.weight'", "Call .full_tensor()"],
    ),
    "dtype of .data": (
        lambda m: setattr(m[0].weight, "data", torch.ones(6, 4, dtype=torch.int64)), RuntimeError,
        ["'0.weight' of shape (6, 4) is torch.float32", "torch.int64", "model.to(dtype)"],
    ),
    "prune": (
        lambda m: nn.utils.prune.l1_unstructured(m[0], "weight", 0.5), NotImplementedError,
        ["'0.weight' is sharded", "in Linear as 'weight_orig'", "before fully_shard"],
    ),
    "prune all of it": (
        lambda m: nn.utils.prune.global_unstructured(
            [(m[0], "weight")], nn.utils.prune.L1Unstructured, amount=0.5
        ),
        NotImplementedError, ["aten.cat", "torch.nn.utils.", _HERE, "Prune before"],
    ),
    "weight_norm": (
        lambda m: nn.utils.parametrizations.weight_norm(m[0]), NotImplementedError,
        ["'weight' of Linear is sharded", "before fully_shard"],
    ),
    "old spectral_norm": (
        lambda m: nn.utils.spectral_norm(m[0]), NotImplementedError,
        ["'weight' of Linear is sharded", "before fully_shard"],
    ),
    "script": (
        lambda m: torch.jit.script(m), NotImplementedError,
        ["torch.jit.script", "sharded Sequential", "torch.compile"],
    ),
    "ShardTensor()": (
        lambda m: ShardTensor(torch.ones(3), (3,), None), TypeError, ["by fully_shard", "None"],
    ),
    "ShardedModule()": (
        lambda m: shardc.ShardedModule(), TypeError, ["ShardedModule", "fully_shard(module)"],
    ),
    "forward method": (
        lambda m: shardc.register_fsdp_forward_method(m, "nope"), ValueError,
        ["method_name", "Sequential has no method 'nope'"],
    ),
    "Inductor": (lambda m: torch.compile(m)(torch.ones(3, 4)), RuntimeError, _BACKEND),
    "eager": (
        lambda m: torch.compile(m, backend="eager")(torch.ones(3, 4)), RuntimeError, _BACKEND,
    ),
    "eager block": (lambda m: _with_block_by("eager", m), RuntimeError, _BACKEND),
    "aot_eager block": (lambda m: _with_block_by("aot_eager", m), RuntimeError, _BACKEND),
    "Inductor block, no gradients": (
        torch.no_grad()(lambda m: _with_block_by("inductor", m)), RuntimeError, _BACKEND,
    ),
    "options of compile()": (
        lambda m: m.compile(backend="shardc", options={"fold": "x"}), TypeError,
        ["option 'fold' must be True or False, got 'x'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*ON_SHARDED, *OF_PARAMETERS])
@on_ranks(1)
def test_on_a_sharded_model(mesh, case):
    use, error, words = (ON_SHARDED | OF_PARAMETERS)[case]
    _check(use, _sharded(mesh), error, words)


OPTIONS = [
    ({"executor": "x"}, ValueError, "'executor' must be 'inductor' or 'eager', got 'x'"),
    ({"excutor": "eager"}, ValueError, "option 'excutor'; did you mean 'executor'?"),
    ({5: 1}, ValueError, "unknown shardc option 5 (known: executor, "),
    (["fold"], TypeError, "options must be a dict or None, got ['fold']"),
    ({"fallback": "no"}, TypeError, "'fallback' must be True or False, got 'no'"),
    ({"fold": "x"}, TypeError, "'fold' must be True or False, got 'x'"),
    ({"inductor": 5}, TypeError, "'inductor' must be a dict of settings of torch._inductor.config"),
    ({"inductor": {"max_autotun": 1}}, ValueError, "did you mean 'max_autotune'?"),
    ({"schedule": "off"}, TypeError, "'schedule' must be True or False, got 'off'"),
    ({"profile": 5}, TypeError, f"'profile' {_PROFILE}, got 5"),
    ({"profile": "h900"}, ValueError, "unknown profile 'h900'"),
    ({"prefetch": -1}, ValueError, "count of units, got -1"),
    ({"prefetch": True}, TypeError, "'prefetch' must be 'auto' or a count of units, got True"),
    (
        {"backward_prefetch": "PRE"}, ValueError,
        "'backward_prefetch' must be 'auto', 'pre', 'post' or None, got 'PRE'",
    ),
    ({"coalesce": "x"}, TypeError, "'coalesce' must be True, False or None, got 'x'"),
    ({"memory_budget": [1]}, TypeError, "'70GB' or '16GiB', or a fraction"),
    ({"memory_budget": "0GB"}, ValueError, "got '0GB'"),
    ({"memory_budget": "10XB"}, ValueError, "got '10XB'"),
    ({"memory_budget": 1.5}, ValueError, "in (0, 1], got 1.5"),
    ({"memory_budget": True}, TypeError, "got True"),
    ({"memory_budget": 10, "schedule": False}, ValueError, "needs schedule=True, not False"),
    ({"optimizer_states": -2}, ValueError, "'optimizer_states' must be a number of at least 0"),
    ({"optimizer_states": "adam"}, TypeError, "a number of at least 0, got 'adam'"),
    (
        {"agreement_timeout": -1}, ValueError,
        "'agreement_timeout' must be a positive number of seconds or None, got -1",
    ),
    ({"agreement_timeout": "x"}, TypeError, "a positive number of seconds or None, got 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), OPTIONS)
def test_options(options, error, words):
    with pytest.raises(error) as caught:
        Options.parse(options)
    assert words in str(caught.value), caught.value
