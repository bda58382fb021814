"""How a case trains: the functions of its program that run steps of both models."""

from collections.abc import Iterator

from fuzz.around import ADDED, AROUND, GRADIENTS, REPLACED, called
from fuzz.case import PRECISIONS, Case, Micro, Step, paths, tolerance_of

WAYS = ("uncompiled", "eager", "inductor", "blocks", "in place", "mixed")

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.05)",
    "momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01, eps=0.01)",
    "fused": "torch.optim.AdamW(parameters, lr=0.01, eps=0.01, fused=True)",
}

WAITS = {
    # name: what is called on each outermost unit before a micro-batch, with whether it is the last
    "sync": "set_requires_gradient_sync({last})",
    "all_reduce": "set_requires_all_reduce({last})",
    "keep": "set_reshard_after_backward({last})",
}

NO_SYNC = [
    "    with contextlib.ExitStack() as stack:",
    "        for unit in roots(model):",
    "            stack.enter_context(unit.no_sync())",
]

MICRO = {
    "plain": "loss = loss_of(call({x})) / {share}\nloss.backward()",
    "retained": "loss = loss_of(call({x})) / {share}\n"
    "loss.backward(retain_graph=True)\nloss.backward()",
    "two": "first, second = loss_of(call({x})), loss_of(call({y}))\n"
    "loss = (first + 2 * second) / {share}\nloss.backward()",
    "two backwards": "first, second = loss_of(call({x})), loss_of(call({y}))\n"
    "first.backward()\nloss = second / {share}\nloss.backward()",
    "abandoned": "call({y})\nloss = loss_of(call({x})) / {share}\nloss.backward()",
    "evaluated": "model.eval()\nwith torch.no_grad():\n    seen.append(call({y}))\nmodel.train()\n"
    "loss = loss_of(call({x})) / {share}\nloss.backward()",
    "inference": "with torch.inference_mode():\n    seen.append(call({y}).clone())\n"
    "loss = loss_of(call({x})) / {share}\nloss.backward()",
    "summoned": "with shardc.summon_full_params(model) if roots(model) else "
    "contextlib.nullcontext():\n    seen.append(call({y}).detach())\n"
    "loss = loss_of(call({x})) / {share}\nloss.backward()",
    "unsharded": "for unit in roots(model):\n    unit.unshard()\n"
    "loss = loss_of(call({x})) / {share}\nloss.backward()",
    "penalty": "out = call({x})\n"
    "(grad,) = torch.autograd.grad(loss_of(out), x, create_graph=True)\n"
    "loss = grad.square().sum() / {share}\nloss.backward()",
}

START = {
    "": ["    plain, ours = build(), shard(build(), mesh)"],
    "sync": ["    plain, ours = build(), shard(build(other=dist.get_rank()), mesh)"],
    "meta": [
        "    plain = build()",
        '    with torch.device("meta"):',
        "        ours = build()",
        '    shard(ours, mesh).to_empty(device="cpu")',
        "    ours.load_state_dict(plain.state_dict())",
    ],
}

THEN = {
    # name: what is done with the sharded model, its call and its optimizer after a step
    "keep": "for unit in roots(ours):\n    unit.set_reshard_after_forward(False)",
    "reshard": "for unit in roots(ours):\n    unit.set_reshard_after_forward(True)",
    "divide": "for unit in roots(ours):\n"
    "    unit.set_gradient_divide_factor(float(dist.get_world_size()))",
    "freeze": "for model in (plain, ours):\n"
    "    for parameter in [p for p in model.parameters() if p.requires_grad][1::2]:\n"
    "        parameter.requires_grad_(False)",
    "save": "share_buffers(plain, ours)\npath = save(ours, optimizer)\nspoil(ours)\n"
    "load(ours, optimizer, path)",
    "reload": "share_buffers(plain, ours)\npath = save(ours, optimizer)\n"
    "ours = build()\nfor new, old in zip(ours.parameters(), plain.parameters(), strict=True):\n"
    "    new.requires_grad_(old.requires_grad)\n"
    "shard(ours, mesh)\nplain.zero_grad()\n"
    "call, optimizer = caller(ours), make_optimizer(ours)\n"
    "load(ours, optimizer, path)",
    "full": "share_buffers(plain, ours)\nsave_and_load_full(ours)",
    "state_dict": "state = {name: value.clone() for name, value in ours.state_dict().items()}\n"
    "spoil(ours)\nours.load_state_dict(state)",
    "deepcopy": "ours, old = copy.deepcopy(ours), optimizer\nplain.zero_grad()\n"
    "call, optimizer = caller(ours), renewed(old, ours)",
}


OPTIONS = '"fallback": False, "embedding_rows": True'
COMPILE = {
    "eager": 'torch.compile(model, backend="shardc", options={"executor": "eager", '
    f"{OPTIONS}}}%s)",
    "inductor": f'torch.compile(model, backend="shardc", options={{{OPTIONS}}}%s)',
}


def _caller(case: Case) -> str:
    dynamic = "" if case.dynamic is None else f", dynamic={case.dynamic}"
    in_place = f'compile(backend="shardc", options={{"executor": "eager", {OPTIONS}}}'
    lines = ["def caller(model):"]
    if case.way in COMPILE:
        lines.append(f"    return {COMPILE[case.way] % dynamic}")
    elif case.way == "mixed":
        lines.append(f"    compiled = {COMPILE['eager'] % dynamic}")
        lines.append("    ways = itertools.cycle([model, compiled])")
        lines.append("    return lambda *args: next(ways)(*args)")
    else:
        if case.way == "in place":
            lines.append(f"    model.{in_place}{dynamic})")
        if case.way == "blocks":
            lines += [
                f"    model.{path}.{in_place}{dynamic})"
                for path, _ in paths(case.blocks)
                if "." not in path
            ]
        lines.append("    return model")
    return "\n".join(lines)


def training(case: Case) -> str:
    if case.whole:
        return _whole(case)
    count = len(case.steps)
    dtypes = _dtypes(case)
    steps = [_step(case, n, step, dtypes[n]) for n, step in enumerate(case.steps)]
    tolerance = tolerance_of(case)
    lines = [
        "def main(mesh):",
        *START[case.start],
        f"    check_that_they_differ(plain, ours, {case.replicas or 1})",
        *(["    tie(plain)", "    tie(ours)"] if case.tied else []),
        "    call = caller(ours)",
        "    theirs, optimizer = make_optimizer(plain), make_optimizer(ours)",
    ]
    for number, step in enumerate(case.steps):
        lines += [
            f"    want, got = step_{number}(plain, plain), step_{number}(ours, call)",
            f"    compare_outputs({number}, want, got, {tolerance})",
            "    average(plain)",
            "    average(ours)",
            f"    compare_gradients({number}, plain, ours, {tolerance})",
        ]
        if step.clip:
            lines += [
                "    want, got = (",
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
                "        for model in (plain, ours)",
                "    )",
                f'    compare_outputs("{number}, norm", [want], [whole(got)], {tolerance})',
                f'    compare_gradients("{number}, clipped", plain, ours, {tolerance})',
            ]
        lines += _of_gradients(number, step, tolerance)
        keep = "set_to_none=False" if step.keep_zeros else ""
        lines += [
            "    for one in (theirs, optimizer):",
            "        one.step()",
            f"        one.zero_grad({keep})",
            f"    compare_states({number}, plain, ours, {tolerance})",
        ]
        if PRECISIONS[case.precision][1]:
            lines.append("    take_over(plain, ours)")
        if step.then and number < count - 1:
            lines += ["    " + line for line in THEN[step.then].splitlines()]
        lines += _around(case, number, step, dtypes[number + 1])
    lines.append("    check()")
    text = [_caller(case), _optimizer(case), *steps, "\n".join(lines)]
    return "\n\n\n".join([*called("\n".join(text)), *text])


def _whole(case: Case) -> str:
    """Train by the separate step and by `compile_step`, whose graph runs from the third call on."""
    dtype, seed = PRECISIONS[case.precision][0], 100 * (case.seed + 1)
    ahead = case.seed % 2 == 1 and not PRECISIONS[case.precision][1] and not case.tied
    lines = [
        "def main(mesh):",
        "    def train(whole):",
        *("    " + line for line in START[case.start]),
        *(["        tie(ours)"] if case.tied else []),
        "        call, optimizer = caller(ours), make_optimizer(ours)",
        "",
        "        def step(x):",
        "            loss = loss_of(call(x))",
        "            loss.backward()",
        "            optimizer.step()",
        "            optimizer.zero_grad()",
        "            return loss.detach()",
        "",
        f"        ahead = {ahead}",
        "        run = shardc.compile_step(step, gather_ahead=ahead) if whole else step",
        "        losses = []",
        "        for number in range(5):",
        "            torch.manual_seed(number)",
        f"            x = batch({seed} + number, 3, {case.width}, {dtype}).detach()",
        "            losses.append(run(x).clone())",
        "        return values_of(ours, losses)",
        "",
        "    compare_bits(train(False), train(True))",
        "    check()",
    ]
    text = [_caller(case), _optimizer(case), "\n".join(lines)]
    return "\n\n\n".join([*called("\n".join(text)), *text])


def _optimizer(case: Case) -> str:
    lines = [
        "def make_optimizer(model):",
        "    parameters = list(model.parameters())  # also those that are frozen for a while",
        f"    return {OPTIMIZERS[case.optimizer]}",
    ]
    return "\n".join(lines)


def _dtypes(case: Case) -> list[str]:
    """The dtype of the models before each step, and after the last."""
    dtypes = [PRECISIONS[case.precision][0]]
    for step in case.steps:
        dtypes.append("torch.float64" if "double" in step.around else dtypes[-1])
    return dtypes


def _of_gradients(number: int, step: Step, tolerance: float) -> list[str]:
    lines = []
    for name in step.gradients:
        function, what = GRADIENTS[name], f'"{number}, {name}"'
        lines += [
            f"    compare_outputs({what}, {function}(plain), {function}(ours), {tolerance})",
            f"    compare_gradients({what}, plain, ours, {tolerance})",
        ]
    return lines


def _around(case: Case, number: int, step: Step, dtype: str) -> list[str]:
    lines, tolerance = [], tolerance_of(case)
    if any(name in AROUND for name in step.around):
        seed = 100 * (case.seed + 1) + 10 * number + 8
        lines.append(f"    x = batch({seed}, 3, {case.width}, {dtype})")
    for name in sorted(step.around, key=lambda name: name != "double"):
        what = f'"{number}, {name}"'
        if name in REPLACED:
            lines += ["    " + line for line in REPLACED[name].splitlines()]
        else:
            lines += [
                f"    want = {AROUND[name]}(plain, plain, theirs, x)",
                f"    got = {AROUND[name]}(ours, call, optimizer, x)",
                f"    compare_outputs({what}, want, got, {tolerance})",
            ]
        lines.append(f"    compare_states({what}, plain, ours, {tolerance})")
    return lines


def _step(case: Case, number: int, step: Step, dtype: str) -> str:
    lines = [f"def step_{number}(model, call):", "    seen = []"]
    for index, micro in enumerate(step.micro):
        last = index == len(step.micro) - 1
        if step.waits in WAITS and len(step.micro) > 1:
            lines += [
                "    for unit in roots(model):",
                f"        unit.{WAITS[step.waits].format(last=last)}",
            ]
        text = ["    " + line for line in _micro(case, number, index, micro, dtype, step)]
        if step.waits == "no_sync" and not last:
            lines += NO_SYNC
            text = ["    " + line for line in text]
        lines += text
    return "\n".join([*lines, "    return seen"])


def _micro(
    case: Case, number: int, index: int, micro: Micro, dtype: str, step: Step
) -> Iterator[str]:
    seed = 100 * (case.seed + 1) + 10 * number + 2 * index
    ragged = ", ragged=True" if micro.ragged else ""
    body = MICRO[micro.kind]
    for name, offset in (("x", 0), ("y", 1)):
        if f"{{{name}}}" in body:
            shape = f"{micro.rows + offset}, {case.width}, {dtype}{ragged}"
            yield f"{name} = batch({seed + offset}, {shape})"
    flag = ", True" if micro.flag else ""
    text = body.format(x=f"x{flag}", y=f"y{flag}", share=len(step.micro))
    if micro.added:
        before, backward, after = text.partition("loss.backward")
        text = f"{before}loss = loss + 0.01 * {ADDED[micro.added]}\n{backward}{after}"
    yield from text.splitlines()
    yield "seen += [loss.detach(), x.grad]"
