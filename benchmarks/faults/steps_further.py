"""Steps of vectors and images (see `steps`)."""

from __future__ import annotations

from benchmarks.faults.steps import image, vector
from benchmarks.faults.steps_of_tokens import TOKEN_STEPS

VECTOR_STEPS = (
    vector("linear", "self.l{n} = nn.Linear({D}, {E})", "h = {act}(self.l{n}(h))", out="E"),
    vector(
        "residual mlp",
        "self.u{n}, self.d{n} = nn.Linear({D}, 24), nn.Linear(24, {D})",
        "h = h + self.d{n}({act}(self.u{n}(h)))",
    ),
    vector("layer norm", "self.n{n} = nn.LayerNorm({D})", "h = self.n{n}(h)"),
    vector("batch norm", "self.n{n} = nn.BatchNorm1d({D})", "h = self.n{n}(h)"),
    vector(
        "batch norm without affine",
        "self.n{n} = nn.BatchNorm1d({D}, affine=False)",
        "h = self.n{n}(h)",
    ),
    vector(
        "batch norm without statistics",
        "self.n{n} = nn.BatchNorm1d({D}, track_running_stats=False)",
        "h = self.n{n}(h)",
    ),
    vector("bilinear", "self.b{n} = nn.Bilinear({D}, {D}, {E})", "h = self.b{n}(h, h)", out="E"),
    vector("embedding of a label", "self.e{n} = nn.Embedding(5, {D})", "h = h + self.e{n}(label)"),
    vector(
        "bag of embeddings",
        "self.e{n} = nn.EmbeddingBag(11, {D}, mode='mean')",
        "h = h + self.e{n}(ids)",
    ),
    vector("cumsum", "", "h = h.cumsum(-1) / 4"),
    vector("topk", "", "h = h.topk(4, -1).values", out="4"),
    vector("argmax one hot", "", "h = h * F.one_hot(h.argmax(-1), h.shape[-1])"),
    vector("dropout", "self.p{n} = nn.Dropout(0.3)", "h = self.p{n}(h)"),
    vector(
        "factorisation machine",
        "self.w{n} = nn.Parameter(torch.randn({D}, 4) / 4)",
        "h = torch.cat([h, ((h @ self.w{n}).square() - h.square() @ self.w{n}.square()) / 2], -1)",
        out="D + 4",
        needs="D <= 16",
    ),
    vector(
        "outer product",
        "",
        "h = torch.bmm(h.unsqueeze(2), h.unsqueeze(1)).flatten(1)",
        out="D * D",
        needs="D <= 8",
    ),
    vector("cross layer", "self.l{n} = nn.Linear({D}, {D})", "h0 = h\nh = h0 * self.l{n}(h) + h"),
    vector(
        "addmm",
        "self.w{n}, self.b{n} = nn.Parameter(torch.randn({D}, {E}) / 4), "
        "nn.Parameter(torch.zeros({E}))",
        "h = torch.addmm(self.b{n}, h, self.w{n})",
        out="E",
    ),
    vector(
        "equal layers",
        "self.s{n} = nn.ModuleList(nn.Linear({D}, {D}) for _ in range(4))",
        "for f in self.s{n}:\n    h = h + torch.tanh(f(h))",
    ),
    vector(
        "attention over a batch's own table",
        "self.w{n} = nn.Parameter(torch.randn(7, {D}))",
        "h = h + (h @ self.w{n}.t()).softmax(-1) @ self.w{n}",
    ),
    vector(
        "integer bins",
        "self.e{n} = nn.Embedding(8, {D})",
        "h = h + self.e{n}((h.detach()[:, 0] * 2).long().clamp(0, 7))",
    ),
    vector("norm of rows", "", "h = h / (h.norm(dim=-1, keepdim=True) + 1e-3)"),
    vector(
        "max out",
        "self.l{n} = nn.Linear({D}, 3 * {E})",
        "h = self.l{n}(h).unflatten(-1, (3, {E})).amax(1)",
        out="E",
    ),
    vector(
        "to tokens by unflatten",
        "",
        "h = h.unflatten(1, (-1, {D} // 4))",
        out="4, D // 4",
        to="tokens",
        needs="D % 4 == 0 and D >= 16",
    ),
    vector(
        "to tokens by expand",
        "self.w{n} = nn.Parameter(torch.randn(6, {D}))",
        "h = h.unsqueeze(1) + self.w{n}",
        out="6, D",
        to="tokens",
        needs="D <= 24",
    ),
    vector(
        "to image",
        "self.l{n} = nn.Linear({D}, 64)",
        "h = self.l{n}(h).view(-1, 4, 4, 4)",
        out="4, 4, 4",
        to="image",
    ),
)

IMAGE_STEPS = (
    image(
        "conv",
        "self.c{n} = nn.Conv2d({C}, {E}, 3, padding=1)",
        "h = {act}(self.c{n}(h))",
        out="E, H, W",
    ),
    image(
        "conv of ones",
        "self.c{n} = nn.Conv2d({C}, {E}, 1, bias=False)",
        "h = self.c{n}(h)",
        out="E, H, W",
    ),
    image(
        "strided conv",
        "self.c{n} = nn.Conv2d({C}, {E}, 3, stride=2, padding=1)",
        "h = self.c{n}(h)",
        out="E, (H + 1) // 2, (W + 1) // 2",
        needs="H >= 4 and W >= 4",
    ),
    image(
        "depthwise conv",
        "self.c{n} = nn.Conv2d({C}, {C}, 3, padding=1, groups={C})",
        "h = h + self.c{n}(h)",
    ),
    image(
        "grouped conv",
        "self.c{n} = nn.Conv2d({C}, {C}, 3, padding=1, groups=2)",
        "h = self.c{n}(h)",
        needs="C % 2 == 0",
    ),
    image(
        "dilated conv",
        "self.c{n} = nn.Conv2d({C}, {C}, 3, padding=2, dilation=2)",
        "h = h + self.c{n}(h)",
    ),
    image(
        "transposed conv",
        "self.c{n} = nn.ConvTranspose2d({C}, {E}, 2, stride=2)",
        "h = self.c{n}(h)",
        out="E, 2 * H, 2 * W",
        needs="H <= 4",
    ),
    image("batch norm", "self.n{n} = nn.BatchNorm2d({C})", "h = self.n{n}(h)"),
    image(
        "batch norm and relu in place",
        "self.n{n} = nn.BatchNorm2d({C})",
        "h = F.relu(self.n{n}(h), inplace=True)",
    ),
    image("group norm", "self.n{n} = nn.GroupNorm(2, {C})", "h = self.n{n}(h)", needs="C % 2 == 0"),
    image(
        "instance norm",
        "self.n{n} = nn.InstanceNorm2d({C}, affine=True)",
        "h = self.n{n}(h)",
        needs="H * W > 1",
    ),
    image(
        "layer norm of channels",
        "self.n{n} = nn.LayerNorm({C})",
        "h = self.n{n}(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
    ),
    image(
        "residual block",
        "self.a{n}, self.b{n} = nn.Conv2d({C}, {C}, 3, padding=1), nn.BatchNorm2d({C})",
        "h = torch.relu(h + self.b{n}(self.a{n}(h)))",
    ),
    image(
        "equal blocks",
        "self.s{n} = nn.ModuleList(nn.Conv2d({C}, {C}, 3, padding=1) for _ in range(3))",
        "for f in self.s{n}:\n    h = h + torch.relu(f(h))",
    ),
    image(
        "squeeze and excite",
        "self.a{n}, self.b{n} = nn.Linear({C}, 3), nn.Linear(3, {C})",
        "h = h * torch.sigmoid(self.b{n}(torch.relu(self.a{n}(h.mean((2, 3))))))[:, :, None, None]",
    ),
    image(
        "max pool", "", "h = F.max_pool2d(h, 2)", out="C, H // 2, W // 2", needs="H >= 4 and W >= 4"
    ),
    image(
        "overlapping max pool",
        "",
        "h = F.max_pool2d(h, 3, stride=2, padding=1)",
        out="C, (H + 1) // 2, (W + 1) // 2",
        needs="H >= 3 and W >= 3",
    ),
    image("average pool", "", "h = F.avg_pool2d(h, 3, stride=1, padding=1)"),
    image(
        "adaptive pool",
        "",
        "h = F.adaptive_avg_pool2d(h, (2, 2))",
        out="C, 2, 2",
        needs="H >= 2 and W >= 2",
    ),
    image(
        "interpolate, bilinear",
        "",
        "h = F.interpolate(h, scale_factor=2, mode='bilinear', align_corners=False)",
        out="C, 2 * H, 2 * W",
        needs="H <= 4",
    ),
    image(
        "interpolate, nearest",
        "",
        "h = F.interpolate(h, size=(6, 6), mode='nearest')",
        out="C, 6, 6",
    ),
    image(
        "pixel shuffle",
        "",
        "h = F.pixel_shuffle(h, 2)",
        out="C // 4, 2 * H, 2 * W",
        needs="C % 4 == 0 and C >= 8 and H <= 4",
    ),
    image(
        "reflection pad",
        "",
        "h = F.pad(h, (1, 1, 1, 1), mode='reflect')[:, :, 1:-1, 1:-1] + h",
        needs="H >= 2 and W >= 2",
    ),
    image(
        "circular pad and conv",
        "self.c{n} = nn.Conv2d({C}, {C}, 3, padding=1, padding_mode='circular')",
        "h = self.c{n}(h)",
    ),
    image(
        "channel shuffle",
        "",
        "h = h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)",
        needs="C % 2 == 0",
    ),
    image("dropout of channels", "self.p{n} = nn.Dropout2d(0.2)", "h = self.p{n}(h)"),
    image("flip", "", "h = h + h.flip(-1) * 0.5"),
    image(
        "concatenated features",
        "self.c{n} = nn.Conv2d({C}, 4, 3, padding=1)",
        "h = torch.cat([h, torch.relu(self.c{n}(h))], 1)",
        out="C + 4, H, W",
        needs="C <= 12",
    ),
    image("channels last", "", "h = (h.to(memory_format=torch.channels_last) * 1.5).contiguous()"),
    image(
        "to tokens",
        "",
        "h = h.flatten(2).transpose(1, 2)",
        out="H * W, C",
        to="tokens",
        needs="2 <= H * W <= 36 and C >= 4",
    ),
    image(
        "to tokens by patches",
        "self.c{n} = nn.Conv2d({C}, {E}, 2, stride=2)",
        "h = self.c{n}(h).flatten(2).mT",
        out="(H // 2) * (W // 2), E",
        to="tokens",
        needs="H >= 4 and W >= 4",
    ),
    image("to vector by mean", "", "h = h.mean((2, 3))", out="C", to="vector", needs="C >= 4"),
    image(
        "to vector by flatten",
        "",
        "h = torch.flatten(h, 1)",
        out="C * H * W",
        to="vector",
        needs="4 <= C * H * W <= 96",
    ),
)

STEPS = {f"{step.kind}: {step.name}": step for step in (*TOKEN_STEPS, *VECTOR_STEPS, *IMAGE_STEPS)}
