"""Steps of tokens (see `steps`)."""

from __future__ import annotations

from benchmarks.faults.steps import tokens

SPLIT_HEADS = (
    "q, k, v = (t.unflatten(-1, ({k}, -1)).transpose(1, 2) for t in self.a{n}(h).chunk(3, -1))\n"
)
JOIN_HEADS = "h = h + self.b{n}(o.transpose(1, 2).flatten(2))"
QKV = "self.a{n}, self.b{n} = nn.Linear({D}, 3 * {D}), nn.Linear({D}, {D})"
BLOCK = (
    "nn.Sequential(nn.LayerNorm({D}), nn.Linear({D}, 2 * {D}), nn.GELU(), nn.Linear(2 * {D}, {D}))"
)

TOKEN_STEPS = (
    tokens("linear", "self.l{n} = nn.Linear({D}, {E})", "h = {act}(self.l{n}(h))", out="T, E"),
    tokens(
        "linear without bias",
        "self.l{n} = nn.Linear({D}, {E}, bias=False)",
        "h = self.l{n}(h)",
        out="T, E",
    ),
    tokens(
        "residual mlp",
        "self.u{n}, self.d{n} = nn.Linear({D}, 2 * {D}), nn.Linear(2 * {D}, {D})",
        "h = h + self.d{n}({act}(self.u{n}(h)))",
    ),
    tokens("layer norm", "self.n{n} = nn.LayerNorm({D})", "h = self.n{n}(h)"),
    tokens("rms norm", "self.n{n} = nn.RMSNorm({D})", "h = self.n{n}(h)"),
    tokens("layer norm of two dims", "self.n{n} = nn.LayerNorm(({T}, {D}))", "h = self.n{n}(h)"),
    tokens(
        "batch norm",
        "self.n{n} = nn.BatchNorm1d({D})",
        "h = self.n{n}(h.transpose(1, 2)).transpose(1, 2)",
    ),
    tokens(
        "batch norm of rows",
        "self.n{n} = nn.BatchNorm1d({D})",
        "h = self.n{n}(h.flatten(0, 1)).view_as(h)",
    ),
    tokens(
        "group norm",
        "self.n{n} = nn.GroupNorm(2, {D})",
        "h = self.n{n}(h.transpose(1, 2)).transpose(1, 2)",
        needs="D % 2 == 0",
    ),
    tokens("instance norm", "", "h = F.instance_norm(h.transpose(1, 2)).transpose(1, 2)"),
    tokens(
        "attention", QKV, SPLIT_HEADS + "o = F.scaled_dot_product_attention(q, k, v)\n" + JOIN_HEADS
    ),
    tokens(
        "causal attention",
        QKV,
        SPLIT_HEADS + "o = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n" + JOIN_HEADS,
    ),
    tokens(
        "attention, padding mask",
        QKV,
        SPLIT_HEADS
        + "o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])\n"
        + JOIN_HEADS,
    ),
    tokens(
        "attention, additive bias",
        QKV + "\nself.c{n} = nn.Parameter(torch.randn({k}, {T}, {T}))",
        SPLIT_HEADS
        + "o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.c{n})\n"
        + JOIN_HEADS,
    ),
    tokens(
        "attention by hand",
        QKV,
        SPLIT_HEADS
        + "s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep[:, None, None], -1e4)\n"
        "o = s.softmax(-1) @ v\n" + JOIN_HEADS,
    ),
    tokens(
        "attention, one key head",
        "self.a{n}, self.b{n}, self.c{n} = nn.Linear({D}, {D}), nn.Linear({D}, {D}), "
        "nn.Linear({D}, 2 * ({D} // {k}))",
        "q = self.a{n}(h).unflatten(-1, ({k}, -1)).transpose(1, 2)\n"
        "k, v = (t.unsqueeze(1).expand_as(q) for t in self.c{n}(h).chunk(2, -1))\n"
        "o = F.scaled_dot_product_attention(q, k, v)\n" + JOIN_HEADS,
    ),
    tokens(
        "linear attention",
        QKV,
        SPLIT_HEADS + "q, k = F.elu(q) + 1, F.elu(k) + 1\n"
        "o = q @ (k.mT @ v) / ((q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-3)\n"
        + JOIN_HEADS,
    ),
    tokens(
        "multihead attention",
        "self.a{n} = nn.MultiheadAttention({D}, {k}, batch_first=True)",
        "h = h + self.a{n}(h, h, h, need_weights=False)[0]",
    ),
    tokens(
        "multihead attention, weights",
        "self.a{n} = nn.MultiheadAttention({D}, {k}, batch_first=True)",
        "o, s = self.a{n}(h, h, h, key_padding_mask=~keep)\nh = h + o + s.mean()",
    ),
    tokens(
        "encoder layer",
        "self.a{n} = nn.TransformerEncoderLayer({D}, {k}, 2 * {D}, dropout=0.0, batch_first=True)",
        "h = self.a{n}(h)",
    ),
    tokens(
        "rotary",
        "",
        "a, b = h.chunk(2, -1)\nt = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * 0.1\n"
        "h = torch.cat([a * t.cos() - b * t.sin(), a * t.sin() + b * t.cos()], -1)",
        needs="D % 2 == 0",
    ),
    tokens(
        "gated unit",
        "self.l{n} = nn.Linear({D}, 2 * {E})",
        "h = F.glu(self.l{n}(h), -1)",
        out="T, E",
    ),
    tokens(
        "gates by chunk",
        "self.l{n} = nn.Linear({D}, 2 * {E})",
        "a, b = self.l{n}(h).chunk(2, -1)\nh = F.silu(a) * b",
        out="T, E",
    ),
    tokens(
        "einsum",
        "self.w{n} = nn.Parameter(torch.randn({D}, {E}) / 4)",
        "h = torch.einsum('btd,de->bte', h, self.w{n})",
        out="T, E",
    ),
    tokens(
        "einsum of heads",
        "self.w{n} = nn.Parameter(torch.randn({D}, {k}, 4) / 4)",
        "h = torch.einsum('btd,dhe->bthe', h, self.w{n}).flatten(2)",
        out="T, 4 * k",
    ),
    tokens(
        "bilinear over tokens",
        "",
        "h = torch.einsum('bts,bsd->btd', torch.einsum('btd,bsd->bts', h, h).softmax(-1), h)",
    ),
    tokens(
        "mixing of tokens",
        "self.l{n} = nn.Linear({T}, {T})",
        "h = h + self.l{n}(h.transpose(1, 2)).transpose(1, 2)",
    ),
    tokens(
        "conv",
        "self.c{n} = nn.Conv1d({D}, {E}, 3, padding=1)",
        "h = self.c{n}(h.transpose(1, 2)).transpose(1, 2)",
        out="T, E",
    ),
    tokens(
        "causal depthwise conv",
        "self.c{n} = nn.Conv1d({D}, {D}, 3, groups={D})",
        "h = h + self.c{n}(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)",
    ),
    tokens(
        "strided conv",
        "self.c{n} = nn.Conv1d({D}, {E}, 2, stride=2)",
        "h = self.c{n}(h.transpose(1, 2)).transpose(1, 2)",
        out="T // 2, E",
        needs="T >= 4",
    ),
    tokens("cumsum", "", "h = h.cumsum(1) / 4"),
    tokens(
        "mean so far",
        "",
        "h = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None]",
    ),
    tokens("sort", "", "h = h.sort(-1).values"),
    tokens(
        "sort of tokens", "", "h = h.gather(1, h[..., 0].argsort(1).unsqueeze(-1).expand_as(h))"
    ),
    tokens("topk", "", "h = h.topk(4, -1).values", out="T, 4"),
    tokens(
        "topk kept",
        "",
        "h = torch.zeros_like(h).scatter(-1, h.topk(3, -1).indices, h.topk(3, "
        "-1).values) + 0.1 * h",
    ),
    tokens(
        "topk of tokens",
        "",
        "i = h.square().sum(-1).topk(3, 1).indices\n"
        "h = h.gather(1, i.unsqueeze(-1).expand(-1, -1, h.shape[-1]))",
        out="3, D",
        needs="T >= 3",
    ),
    tokens("flip and roll", "", "h = h + 0.5 * h.flip(1) + 0.25 * h.roll(1, 1)"),
    tokens("masked fill", "", "h = h.masked_fill(~keep.unsqueeze(-1), 0.0)"),
    tokens("where", "", "h = torch.where(h > 0, h, 0.1 * h)"),
    tokens("embedding added", "self.e{n} = nn.Embedding(11, {D})", "h = h + self.e{n}(ids)"),
    tokens(
        "positions added",
        "self.e{n} = nn.Embedding({T} + 3, {D})",
        "h = h + self.e{n}(torch.arange(h.shape[1]))",
    ),
    tokens(
        "one hot", "self.l{n} = nn.Linear(11, {D})", "h = h + self.l{n}(F.one_hot(ids, 11).to(h))"
    ),
    tokens(
        "embedding tied with a head",
        "self.e{n} = nn.Embedding(11, {D})",
        "h = F.linear(h + self.e{n}(ids), self.e{n}.weight)",
        out="T, 11",
    ),
    tokens(
        "table gathered", "self.w{n} = nn.Parameter(torch.randn(11, {D}))", "h = h * self.w{n}[ids]"
    ),
    tokens(
        "lstm", "self.r{n} = nn.LSTM({D}, {E}, batch_first=True)", "h = self.r{n}(h)[0]", out="T, E"
    ),
    tokens(
        "gru in two directions",
        "self.r{n} = nn.GRU({D}, {D}, batch_first=True, bidirectional=True)",
        "h = self.r{n}(h)[0]",
        out="T, 2 * D",
    ),
    tokens(
        "recurrent cell",
        "self.r{n} = nn.GRUCell({D}, {D})",
        "s = torch.zeros_like(h[:, 0])\no = []\nfor t in range(h.shape[1]):\n"
        "    s = self.r{n}(h[:, t], s)\n    o.append(s)\nh = torch.stack(o, 1)",
        needs="T <= 6",
    ),
    tokens("dropout", "self.p{n} = nn.Dropout(0.2)", "h = self.p{n}(h)"),
    tokens("writes in place", "", "h = h.clone()\nh[:, 0] = 0.5\nh[..., :2] *= 2\nh += 0.1"),
    tokens(
        "activation in place", "", "h = F.leaky_relu_(F.relu(h + 0.01, inplace=True) * 1.5, 0.2)"
    ),
    tokens("masked write", "", "h = h.clone()\nh[~keep] = 0.25"),
    tokens(
        "autocast",
        "self.l{n} = nn.Linear({D}, {D})",
        "with torch.autocast('cpu', torch.bfloat16):\n    o = self.l{n}(h)\nh = h + o.float()",
    ),
    tokens(
        "casts",
        "self.l{n} = nn.Linear({D}, {D})",
        "h = h + self.l{n}(h).double().tanh().to(h.dtype)",
    ),
    tokens(
        "checkpoint",
        "self.s{n} = " + BLOCK,
        "h = h + checkpoint(self.s{n}, h, use_reentrant=False)",
    ),
    tokens(
        "equal layers",
        "self.s{n} = nn.ModuleList(" + BLOCK + " for _ in range(3))",
        "for block in self.s{n}:\n    h = h + block(h)",
    ),
    tokens(
        "equal layers in a dict",
        "self.s{n} = nn.ModuleDict({{f'layer_{{i}}': " + BLOCK + " for i in range(3)}})",
        "for block in self.s{n}.values():\n    h = h + block(h)",
    ),
    tokens(
        "a layer used twice", "self.s{n} = " + BLOCK, "h = h + self.s{n}(h)\nh = h + self.s{n}(h)"
    ),
    tokens(
        "weights tied by name",
        "self.a{n}, self.b{n} = nn.Linear({D}, {D}), nn.Linear({D}, {D})\n"
        "self.b{n}.weight = self.a{n}.weight",
        "h = h + self.b{n}(torch.relu(self.a{n}(h)))",
    ),
    tokens(
        "frozen layer",
        "self.l{n} = nn.Linear({D}, {D}).requires_grad_(False)",
        "h = h + self.l{n}(h)",
    ),
    tokens(
        "weight norm",
        "self.l{n} = nn.utils.parametrizations.weight_norm(nn.Linear({D}, {D}))",
        "h = h + self.l{n}(h)",
    ),
    tokens(
        "running mean",
        "self.register_buffer('m{n}', torch.zeros({D}))",
        "if self.training:\n    self.m{n}.mul_(0.9).add_(h.detach().mean((0, 1)), "
        "alpha=0.1)\nh = h - self.m{n}",
    ),
    tokens(
        "buffer of a count",
        "self.register_buffer('m{n}', torch.zeros((), dtype=torch.long))",
        "self.m{n} += 1\nh = h / self.m{n}",
    ),
    tokens(
        "uneven split",
        "",
        "a, b = h.split([2, h.shape[-1] - 2], -1)\nh = torch.cat([b, a.tanh()], -1)",
    ),
    tokens(
        "split of tokens",
        "",
        "a, b = h[:, :2], h[:, 2:]\nh = torch.cat([b * 2, a], 1)",
        needs="T >= 3",
    ),
    tokens("stack", "", "h = torch.stack([h, h.tanh(), h.flip(-1)], 1).mean(1)"),
    tokens("repeat", "", "h = h.repeat_interleave(2, 1)[:, : h.shape[1]] + h"),
    tokens(
        "interpolate",
        "",
        "h = F.interpolate(h.transpose(1, 2), scale_factor=2, mode='linear').transpose(1, 2)",
        out="2 * T, D",
        needs="T <= 6",
    ),
    tokens("pad", "", "h = F.pad(h, (1, 2))", out="T, D + 3", needs="D < 16"),
    tokens("slice", "", "h = h[..., 1:] - h[..., :-1]", out="T, D - 1", needs="D > 4"),
    tokens("every second token", "", "h = h[:, ::2]", out="(T + 1) // 2, D", needs="T >= 3"),
    tokens("normalize", "", "h = F.normalize(h, dim=-1)"),
    tokens("softmax over tokens", "", "h = h * h.softmax(1)"),
    tokens(
        "scatter add",
        "",
        "h = h + torch.zeros(h.shape[0], 11, h.shape[2], dtype=h.dtype)"
        ".scatter_add(1, ids.unsqueeze(-1).expand_as(h), h).gather(1, "
        "ids.unsqueeze(-1).expand_as(h))",
    ),
    tokens(
        "index add",
        "",
        "h = torch.zeros_like(h).index_add(1, torch.tensor([1, 0]), h[:, :2]) + h",
        needs="T >= 2",
    ),
    tokens(
        "experts, all computed",
        "self.g{n} = nn.Linear({D}, 3)\n"
        "self.s{n} = nn.ModuleList(nn.Linear({D}, {D}) for _ in range(3))",
        "g = self.g{n}(h).softmax(-1)\n"
        "h = h + sum(g[..., i : i + 1] * f(h) for i, f in enumerate(self.s{n}))",
    ),
    tokens(
        "experts, two picked",
        "self.g{n} = nn.Linear({D}, 4)\nself.w{n} = nn.Parameter(torch.randn(4, {D}, {D}) / 4)",
        "g, i = self.g{n}(h).softmax(-1).topk(2, -1)\n"
        "h = h + (torch.einsum('btd,btkde->btke', h, self.w{n}[i]) * g.unsqueeze(-1)).sum(2)",
    ),
    tokens(
        "outer product",
        "self.l{n} = nn.Linear({D}, 3)",
        "h = (h.unsqueeze(-1) * self.l{n}(h).unsqueeze(-2)).flatten(2)",
        out="T, 3 * D",
        needs="D <= 8",
    ),
    tokens("fourier", "", "h = torch.fft.fft(h, dim=1).real / 4"),
    tokens("permuted view", "", "h = h.permute(1, 0, 2).contiguous().tanh().permute(1, 0, 2)"),
    tokens(
        "reshaped heads",
        "self.n{n} = nn.LayerNorm({D} // {k})",
        "h = self.n{n}(h.reshape(h.shape[0], -1, {k}, {D} // {k})).reshape(h.shape)",
        needs="D // k > 1",
    ),
    tokens("unfold", "", "h = h.unfold(1, 2, 1).mean(-1)", out="T - 1, D", needs="T >= 3"),
    tokens(
        "to vector by flatten",
        "",
        "h = h.flatten(1)",
        out="T * D",
        to="vector",
        needs="T * D <= 96",
    ),
    tokens("to vector by mean", "", "h = h.mean(1)", out="D", to="vector"),
    tokens(
        "to vector by masked mean",
        "",
        "h = (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)",
        out="D",
        to="vector",
    ),
    tokens("to vector by max", "", "h = h.amax(1)", out="D", to="vector"),
    tokens("to vector by last", "", "h = h[:, -1]", out="D", to="vector"),
    tokens(
        "to vector by length",
        "",
        "h = h[torch.arange(h.shape[0]), lengths - 1]",
        out="D",
        to="vector",
    ),
    tokens(
        "to vector by length, gather",
        "",
        "h = h.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, h.shape[2])).squeeze(1)",
        out="D",
        to="vector",
    ),
)
