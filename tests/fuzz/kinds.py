"""What a block of a case may be, as the lines of its class."""

KINDS: dict[str, tuple[str, str]] = {
    # name: (what __init__ does, what forward does with `x` and `flag`); D, H: widths
    "linear": ("self.lin = nn.Linear(D, D)", "x = torch.tanh(self.lin(x))"),
    "nobias": ("self.lin = nn.Linear(D, D, bias=False)", "x = x + torch.tanh(self.lin(x))"),
    "mlp": (
        "self.norm = nn.LayerNorm(D)\nself.up = nn.Linear(D, H)\nself.down = nn.Linear(H, D)",
        "x = x + self.down(F.gelu(self.up(self.norm(x))))",
    ),
    "vector": ("self.scale = nn.Parameter(torch.rand(D) + 0.5)", "x = x * self.scale"),
    "scalar": ("self.scale = nn.Parameter(torch.tensor(0.7))", "x = x * self.scale"),
    "empty": (
        "self.rows = nn.Parameter(torch.empty(0, D))\nself.scale = nn.Parameter(torch.ones(1))",
        "x = torch.cat([x, self.rows]) * self.scale",
    ),
    "list": (
        "self.parts = nn.ParameterList(torch.rand(D) for _ in range(2))",
        "x = x * self.parts[0] + self.parts[1]",
    ),
    "dict": (
        'self.parts = nn.ParameterDict({"a": torch.rand(D), "b": torch.rand(D, D)})',
        'x = torch.sin(x @ self.parts["b"]) + self.parts["a"]',
    ),
    "batchnorm": ("self.norm = nn.BatchNorm1d(D)", "x = self.norm(x)"),
    "rmsnorm": ("self.norm = nn.RMSNorm(D)", "x = self.norm(x)"),
    "attention": (
        "self.attention = nn.MultiheadAttention(D, 1, batch_first=True)",
        "x = x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]",
    ),
    "lstm": ("self.lstm = nn.LSTM(D, D)", "x = x + self.lstm(x[:, None])[0][:, 0]"),
    "conv": (
        "self.conv = nn.Conv1d(1, H, 3, padding=1)",
        "x = x + torch.tanh(self.conv(x[:, None])).mean(1)",
    ),
    "embedding": (
        "self.embed = nn.Embedding(H, D)",
        "x = x + self.embed(torch.arange(x.shape[0]) % H)",
    ),
    "twice": ("self.lin = nn.Linear(D, D)", "x = torch.tanh(self.lin(self.lin(x)))"),
    "loop": (
        "self.lin = nn.Linear(D, D)",
        "for _ in range(H):\n    x = x + 0.3 * torch.tanh(self.lin(x))",
    ),
    "unused": (
        "self.lin = nn.Linear(D, D)\nself.unused = nn.Linear(D, H)",
        "x = torch.tanh(self.lin(x))",
    ),
    "choice": (
        "self.lin, self.other = nn.Linear(D, D), nn.Linear(D, D)",
        "x = torch.tanh(self.other(x) if flag else self.lin(x))",
    ),
    "maybe": ("self.lin = nn.Linear(D, D)", "if flag:\n    x = torch.tanh(self.lin(x))"),
    "tied": ("self.lin = nn.Linear(D, D)", "x = torch.sin(self.lin(x))"),
    "outside": (
        "self.bias = nn.Parameter(torch.zeros(D))\nself.of = []",
        "for module in self.of:\n    x = torch.tanh(F.linear(x, module.weight, self.bias))",
    ),
    "reads": (
        "self.lin = nn.Linear(D, D)",
        "x = torch.tanh(F.linear(x, self.lin.weight, self.lin.bias))",
    ),
    "function": (
        # Three of it make no values so large that a sine of one is rounding.
        "self.weight = nn.Parameter(torch.rand(D, D) / D)",
        "x = Times.apply(x, self.weight)",
    ),
    "weight_norm": (
        "self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
        "x = torch.tanh(self.lin(x))",
    ),
    "spectral_norm": (
        "self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))",
        "x = torch.tanh(self.lin(x))",
    ),
    "low": (
        "self.low = nn.Linear(D, D, dtype=torch.float32)",
        "x = x + torch.tanh(self.low(x.to(self.low.weight.dtype))).to(x.dtype)",
    ),
    "integers": (
        "self.order = nn.Parameter(torch.arange(D).flip(0), requires_grad=False)\n"
        "self.scale = nn.Parameter(torch.rand(D) + 0.5)",
        "x = x[:, self.order] * self.scale",
    ),
    "no_grad": (
        "self.lin = nn.Linear(D, D)",
        "with torch.no_grad():\n    y = self.lin(x)\nx = torch.tanh(self.lin(x) + y)",
    ),
    "slices": (
        "self.weight = nn.Parameter(torch.rand(2 * H, D))",
        "a, b = self.weight.chunk(2)\nx = x + 0.1 * torch.tanh(x @ a.t()) @ b",
    ),
    "experts": (
        "self.gate = nn.Linear(D, 2)\n"
        "self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
        "gate = self.gate(x).softmax(-1)\n"
        "x = x + sum(gate[:, i, None] * e(x) for i, e in enumerate(self.experts))",
    ),
    "routed": (
        "self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
        "even = torch.arange(x.shape[0]) % 2 == 0\ny = torch.empty_like(x)\n"
        "y[even], y[~even] = self.experts[0](x[even]), self.experts[1](x[~even])\n"
        "x = torch.tanh(y)",
    ),
    "vmap": (
        "self.stack = nn.Parameter(torch.rand(2, D, D))",
        "x = x + 0.2 * torch.vmap(lambda w: torch.tanh(x @ w))(self.stack).sum(0)",
    ),
    "inplace": ("self.lin = nn.Linear(D, D)", "x = self.lin(x).add_(1).relu_()"),
    "counted": (
        'self.lin = nn.Linear(D, D)\nself.register_buffer("count", torch.zeros(()))',
        "self.count += self.training\nx = torch.tanh(self.lin(x)) * (1 + 0.1 * self.count)",
    ),
    "einsum": (
        "self.weight = nn.Parameter(torch.rand(H, D, D) - 0.5)",
        'x = x + 0.3 * torch.einsum("nd,hde->nhe", x, self.weight).tanh().mean(1)',
    ),
    "second_order": (
        "self.lin = nn.Linear(D, D)",
        "x = torch.tanh(self.lin(x)) * (1 + self.lin.weight.square().mean())",
    ),
    "penalized": (
        "self.lin, self.scale = nn.Linear(D, D), nn.Parameter(torch.rand(D) + 0.5)",
        "penalty = sum(p.square().sum() for p in self.parameters())\n"
        "x = torch.tanh(self.lin(x * self.scale)) + 0.01 * x.mean() * penalty",
    ),
    "asks": (
        "self.scale = nn.Parameter(torch.rand(D) + 0.5)",
        'if hasattr(self, "scale") and isinstance(self.scale, nn.Parameter):\n'
        "    x = x * self.scale\n"
        'x = x if getattr(self, "missing", None) is None else x * 3',
    ),
    "named": (
        "self.lin, self.scale = nn.Linear(D, D), nn.Parameter(torch.rand(D) + 0.5)",
        "named = dict(self.named_parameters())\n"
        'x = F.linear(x * self._parameters["scale"], named["lin.weight"])\n'
        'x = torch.tanh(x + vars(self.lin)["_parameters"].get("bias"))',
    ),
}
LINEAR = ("linear", "nobias", "twice", "loop", "tied")  # kinds with a `lin` that others may use


RECOMPUTE = {
    "reentrant": "use_reentrant=True",
    "non-reentrant": "use_reentrant=False",
    "selective": "use_reentrant=False, context_fn=save_matmuls",
    "wrapper": "",
}
