"""A case as a program: plain text that trains the model unsharded and sharded and compares them.

The fuzzer runs this text, and prints it where it fails, so what is printed is what failed.
"""

from pathlib import Path

from fuzz.case import PRECISIONS, Block, Case, Unit, all_blocks, mesh_shape, paths, to_json
from fuzz.kinds import KINDS, LINEAR, RECOMPUTE
from fuzz.training import training

HARNESS = Path(__file__).with_name("harness.py").read_text()


RECOMPILES = 64
"""How often Dynamo may compile one code: blocks of one class share theirs."""


def script(case: Case) -> str:
    """The whole program."""
    dims = ', mesh_dim_names=("replicate", "shard")' if case.replicas else ""
    return f'''"""Train a model unsharded and sharded, and compare.

Run with `torchrun --nproc-per-node {case.world} FILE`, or with python, which does the same.
The case: {to_json(case)}
"""
{HARNESS.split('"""', 2)[2]}

{_model(case)}

{_shard(case)}

{training(case)}

if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "{case.world}", __file__]
        sys.exit(subprocess.call(command))
    dist.init_process_group("gloo")
    torch._dynamo.config.recompile_limit = {RECOMPILES}
    main(init_device_mesh("cpu", {mesh_shape(case)}{dims}))
    dist.destroy_process_group()
    print("equal")
'''


# -- the model -------------------------------------------------------------------------------------


def _model(case: Case) -> str:
    classes: dict[str, str] = {}
    body = [_class_of(block, classes) for block in case.blocks]
    top = _container("Model", case.blocks, body)
    ties = _ties(case)
    dtype = PRECISIONS[case.precision][0]
    names = ["D"] if "D" in "".join(classes) + top else []
    text = [f"{name} = {case.width}" for name in names]
    if any(block.kind == "function" for block in all_blocks(case.blocks)):
        text.append(TIMES)
    text += [source.replace("CLASS", name) for source, name in classes.items()]
    text.append(top)
    hooked = [
        line
        for path, block in paths(case.blocks)
        if block.hooked and not block.gives and block.recompute != "wrapper"
        for line in (
            f"    model.{path}.register_forward_pre_hook(before_it)",
            f"    model.{path}.register_forward_hook(after_it)",
        )
    ]
    if hooked:
        text.append(HOOKS)
    frozen = [
        f"    for parameter in model.{path}.parameters():\n        parameter.requires_grad_(False)"
        for path, block in paths(case.blocks)
        if block.frozen
    ]
    build = [
        "def build(other=0):",
        f"    torch.manual_seed({case.seed} + other)",
        "    before = torch.get_default_dtype()",
        f"    torch.set_default_dtype({dtype})",
        "    model = Model()",
        "    torch.set_default_dtype(before)",
        *ties,
        *frozen,
        *hooked,
        "    return model",
    ]
    return "\n\n\n".join([*text, "\n".join(build)])


TIMES = """class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad"""


HOOKS = """def before_it(module, args):
    return (0.9 * args[0], *args[1:])


def after_it(module, args, output):
    return output + 0.1 * args[0]"""


def _class_of(block: Block, classes: dict[str, str]) -> str:
    """The name of the class of `block`, which is made once for equal ones."""
    if block.kind == "nest":
        inside = [_class_of(child, classes) for child in block.children]
        source = _container("CLASS", block.children, inside)
    else:
        begin, forward = (text.replace("H", str(block.size)) for text in KINDS[block.kind])
        lines = [_break(block), forward]
        source = _module("CLASS", begin, "\n".join(filter(None, lines)))
    if block.gives:
        whole, _, _ = source.rpartition("return x")
        source = whole + ("return (x,)" if block.gives == "tuple" else 'return {"out": x}')
    return classes.setdefault(source, f"{block.kind.title().replace('_', '')}{len(classes)}")


def _break(block: Block) -> str:
    return "torch._dynamo.graph_break()" if block.breaks else ""


def _module(name: str, begin: str, forward: str) -> str:
    def indented(text: str) -> str:
        return "\n".join(8 * " " + line for line in text.splitlines())

    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{indented(begin)}\n\n    def forward(self, x, flag=False):\n{indented(forward)}\n"
        "        return x"
    )


def _container(name: str, blocks: tuple[Block, ...], classes: list[str]) -> str:
    begin, forward = [], []
    for index, (block, kind) in enumerate(zip(blocks, classes, strict=True)):
        made = f"checkpoint_wrapper({kind}())" if block.recompute == "wrapper" else f"{kind}()"
        options = RECOMPUTE.get(block.recompute)
        if block.kind == "nest" and block.breaks:
            forward.append(_break(block))

        taken = {"": "", "tuple": "[0]", "dict": '["out"]'}[block.gives]

        def call(module: str, options: str | None = options, taken: str = taken) -> str:
            if not options:
                return f"x = {module}(x, flag){taken}"
            return f"x = checkpoint({module}, x, flag, {options}){taken}"

        if block.copies > 1:
            begin.append(f"self.b{index} = nn.ModuleList({made} for _ in range({block.copies}))")
            forward.append(f"for block in self.b{index}:\n    {call('block')}")
        else:
            begin.append(f"self.b{index} = {made}")
            forward.append(call(f"self.b{index}"))
    return _module(name, "\n".join(begin), "\n".join(forward))


def _ties(case: Case) -> list[str]:
    """Lines that give "tied" and "outside" blocks the layer that they use of another."""
    lines, linear = [], []
    for path, block in paths(case.blocks):
        other = linear[block.ref % len(linear)] if linear else None
        if other and block.kind == "tied":
            lines.append(f"    model.{path}.lin.weight = model.{other}.lin.weight")
        if block.kind == "outside":
            open_there = [p for p in linear if _is_open(p, path, case)]
            if open_there:
                other = open_there[block.ref % len(open_there)]
                lines.append(f"    model.{path}.of = [model.{other}.lin]")
        if block.kind in LINEAR and not (block.kind == "tied" and other):
            linear.append(path)
    return lines


def _is_open(used: str, user: str, case: Case) -> bool:
    """Whether the parameters of block `used` are gathered while block `user` runs uncompiled: those
    of units around it are; another unit's are not, as in FSDP2."""
    if case.made in ("auto", "apart"):
        return False
    units = [path for path, block in paths(case.blocks) if block.unit]
    around = [path for path in units if f"{used}.".startswith(f"{path}.")]
    return all(f"{user}.".startswith(f"{path}.") for path in around)


# -- sharding --------------------------------------------------------------------------------------


def _shard(case: Case) -> str:
    policy = PRECISIONS[case.precision][1]
    common = ["mesh=mesh"]
    if policy:
        common.append(f"mp_policy=MixedPrecisionPolicy({policy})")
    if case.offload:
        common.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
    if case.start == "sync":
        common.append("sync_module_states=True")
    ignored = [f"*model.{path}.parameters()" for path, b in paths(case.blocks) if b.ignored]
    if ignored:
        common.append(f"ignored_params=[{', '.join(ignored)}]")
    options = ", ".join(common)
    lines = ["def shard(model, mesh):"]
    if case.hierarchical:
        lines.append("    mesh = shardc.hierarchical_mesh(2)")
    apart = case.made == "apart"
    if case.split or apart:
        lines.append(f"    shardc.set_profile({'QUICK' if case.split else repr(_GPU)})")
    if apart:
        lines += [
            "    unit_plan = shardc.sharding.unit_plan",
            "    large, unit_plan._LARGE = unit_plan._LARGE, 1",
        ]
    lines += _UNITS[case.made](case, options)
    if apart:
        lines.append("    unit_plan._LARGE = large")
    if case.split or apart:
        lines.append("    shardc.set_profile(None)")
    text = "\n".join([*lines, "    return model"])
    return f"{QUICK}\n\n\n{text}" if case.split else text


_GPU = "h100-nvlink"
"""The profile of a device with memory of its own."""

QUICK = """from shardc.passes.estimate.hardware import Link

QUICK = shardc.Profile(  # links without latency, for which units are split into many buckets
    "quick", "made up", (("float32", 1e7),), 1e9, 1e9, 1, Link(1e-12, 1e9), Link(1e-12, 1e9),
    message=1e-12,
)"""


def _units(case: Case, options: str) -> list[str]:
    lines, done = [], set()
    units = [(path, block) for path, block in paths(case.blocks) if block.unit]
    for index, (path, block) in enumerate(units):
        if path in done:
            continue
        what = f"model.{path}"
        follower = units[index + 1] if index + 1 < len(units) else None
        if block.unit.together and follower and _parent(follower[0]) == _parent(path):
            what = f"[model.{path}, model.{follower[0]}]"
            done.add(follower[0])
        lines.append(f"    fully_shard({what}, {options}{_reshard(block.unit, case)})")
    if case.root or not lines:
        root = case.root or Unit()
        lines.append(f"    fully_shard(model, {options}{_reshard(root, case)})")
    return lines


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _units_by_policy(case: Case, options: str) -> list[str]:
    chosen = [
        f"model.{path}: {{'reshard_after_forward': {_reshard_value(block.unit, case)}}}"
        for path, block in paths(case.blocks)
        if block.unit
    ]
    root = _reshard(case.root or Unit(), case)
    return [
        f"    chosen = {{{', '.join(chosen)}}}",
        f"    fully_shard(model, {options}{root}, units=lambda m: chosen.get(m, False))",
    ]


def _units_by_size(case: Case, options: str) -> list[str]:
    root = _reshard(case.root or Unit(), case)
    return [f'    fully_shard(model, {options}{root}, units="auto")']


_UNITS = {
    "calls": _units, "policy": _units_by_policy, "auto": _units_by_size, "apart": _units_by_size,
}  # fmt: skip


def _reshard_value(unit: Unit, case: Case) -> bool | int | None:
    value, shards = unit.reshard, mesh_shape(case)[-1]
    if value is None or isinstance(value, bool):
        return value
    return value if shards % value == 0 else None


def _reshard(unit: Unit, case: Case) -> str:
    value = _reshard_value(unit, case)
    return "" if value is None else f", reshard_after_forward={value}"
