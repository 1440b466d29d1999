"""What fine-tuning scripts do to the modules of linformer-pytorch, each by its effect; the original's own numbers."""

from __future__ import annotations

import copy
import io
from importlib import import_module

import older
import pytest
import torch
from torch import nn

from longspan.compat import faithful
from longspan.compat import linformer_pytorch as ours
from longspan.compat.linformer_pytorch import linformer_pytorch as inner

SIZES = {"input_size": 11, "channels": 12, "dim_k": 4, "dim_ff": 10, "nhead": 3, "depth": 2}
STILL = {"dropout": 0.0, "dropout_ff": 0.0}
LM_STILL = STILL | {"dropout_tokens": 0.0}
TREES = [
    *({"parameter_sharing": name} for name in ("layerwise", "kv", "headwise", "none")),
    {"method": "convolution"},
    {"method": "no_params", "parameter_sharing": "none"},
    {"full_attention": True, "causal": True},
    {"decoder_mode": True, "w_o_intermediate_dim": 7},
    {"ff_intermediate": 9, "parameter_sharing": "kv", "depth": 3},
    {"include_ff": False, "causal": True, "checkpoint_level": "C2"},
]


def model(**options) -> ours.LinformerLM:
    torch.manual_seed(0)
    return ours.LinformerLM(num_tokens=13, **SIZES | LM_STILL | options)


def tokens(length: int = 11) -> torch.Tensor:
    return torch.randint(13, (2, length), generator=torch.Generator().manual_seed(1))


def enc_dec(**more):
    sizes = SIZES | STILL | {"num_tokens": 13}
    return {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()} | more


@pytest.mark.parametrize("options", TREES, ids=str)
def test_the_tree_is_the_originals(options: dict) -> None:
    theirs = older.original("linformer_pytorch")
    older.assert_same_tree(theirs.Linformer(**SIZES | options), ours.Linformer(**SIZES | options))
    for more in ({}, {"emb_dim": 8}, {"return_emb": True}):
        arguments = {"num_tokens": 13, **SIZES, **options, **more}
        older.assert_same_tree(theirs.LinformerLM(**arguments), ours.LinformerLM(**arguments))


def test_the_tree_of_an_encoder_and_decoder_is_the_originals() -> None:
    for more in ({}, {"enc_channels": 15, "enc_emb_dim": 12, "enc_dim_d": 5, "dec_parameter_sharing": "none"}):
        theirs = older.original("linformer_pytorch").LinformerEncDec(**enc_dec(**more))
        older.assert_same_tree(theirs, ours.LinformerEncDec(**enc_dec(**more)))


def test_every_name_is_here() -> None:
    names = older.defined_names("linformer_pytorch")
    assert len(names) == 15
    for name in names:
        submodule, _, attribute = name.partition(".")
        assert callable(getattr(import_module(f"longspan.compat.linformer_pytorch.{submodule}"), attribute)), name


def test_helpers_agree() -> None:
    theirs, x = older.original("linformer_pytorch.linformer_pytorch"), torch.randn(2, 7, 12)
    assert inner.identity(3, 4, key=5) == theirs.identity(3, 4, key=5) == 3
    for name in ("gelu", "relu", "tanh", None):
        assert inner.get_act(name) is theirs.get_act(name)
    for arguments in ((11, 4), (3, 7), (5, 2, True)):
        assert torch.equal(inner.gen_causal_mask(*arguments), theirs.gen_causal_mask(*arguments))
    for method in ("learnable", "convolution", "no_params"):
        made = [module.get_EF(11, 4, method, 5) for module in (theirs, inner)]
        assert type(made[0]) is type(made[1])
    builds = [
        lambda m: m.Residual(nn.Linear(12, 12), 12, 12),
        lambda m: m.Residual(nn.Linear(12, 5), 12, 5),
        lambda m: m.ProjectInOut(nn.Linear(5, 5), 12, 5),
        lambda m: m.ProjectInOut(nn.Linear(5, 5), 12, 5, project_out=False),
    ]
    for build in builds:
        older.assert_parity(build(theirs), build(inner), lambda module: (module(x), {}))


def test_the_originals_optimizer_goes_on() -> None:
    theirs, mine, x = (
        older.original("linformer_pytorch").LinformerLM(num_tokens=13, **SIZES | LM_STILL),
        model(),
        tokens(),
    )
    older.assert_optimizer_continues(theirs, mine, x)


def test_a_replaced_head_is_used_and_only_the_last_layer_trains() -> None:
    net, x = model(), tokens()
    net.to_logits = nn.Linear(12, 5)
    for parameter in net.parameters():
        parameter.requires_grad = False
    for part in (net.linformer.seq[-1], net.to_logits):
        for parameter in part.parameters():
            parameter.requires_grad = True
    hidden = []
    handle = net.linformer.register_forward_hook(lambda module, args, out: hidden.append(out))
    out = net(x)
    handle.remove()
    torch.testing.assert_close(out, net.to_logits(hidden[0]))
    out.sum().backward()
    trained = {name for name, p in net.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in net.named_parameters() if n.startswith(("linformer.seq.3.", "to_logits."))}
    with pytest.raises(ValueError, match=r"cannot be converted, because to_logits\.weight has another shape"):
        net.to_longspan()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"full_attention": True}, {"method": "convolution"}], ids=str
)
def test_hooks_fire_on_every_module(options: dict) -> None:
    net, x, mask = model(**options), tokens(), torch.arange(11).expand(2, -1) < 8
    plain, called, fused = net(x), set(), net(x, input_mask=mask)
    for name, module in net.named_modules():
        # A causal head needs the projections themselves, of which a hook would see nothing.
        if not (options.get("causal") and (name.endswith((".E", ".F")) or (".heads." in name and "dropout" in name))):
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    torch.testing.assert_close(net(x), plain)
    torch.testing.assert_close(net(x, input_mask=mask)[mask], fused[mask])
    silent = {name for name, m in net.named_modules() if isinstance(m, nn.ModuleList)}
    if options.get("full_attention"):
        silent |= {name for name, _ in net.named_modules() if name.endswith((".E", ".F"))}
    missing = {name for name, _ in net.named_modules()} - silent - called
    assert all(options.get("causal") and ".heads." in name for name in missing), missing


def test_a_hook_on_a_projection_of_a_causal_model_is_refused() -> None:
    net = model(causal=True)
    net.linformer.seq[0].fn.heads[0].E.register_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match="a causal head compresses prefixes, for which E and F must be layers of get_EF"
    ):
        net(tokens())
    net = model(causal=True)
    net.linformer.seq[0].fn.heads[0].dropout = nn.Hardtanh()
    with pytest.raises(ValueError, match=r"must be an nn\.Dropout without hooks, got Hardtanh"):
        net(tokens())
    net.linformer.seq[0].fn.heads[0].dropout = nn.Identity()
    torch.testing.assert_close(net(tokens()), model(causal=True)(tokens()))


@pytest.mark.parametrize("options", [{}, {"parameter_sharing": "none"}, {"method": "convolution"}], ids=str)
def test_heads_are_read_and_replaced(options: dict) -> None:
    theirs = older.original("linformer_pytorch").LinformerLM(num_tokens=13, **SIZES | LM_STILL | options)
    mine, x = model(**options), tokens()
    mine.load_state_dict(theirs.state_dict())
    for net in (theirs, mine):
        attention = net.linformer.seq[0].fn
        with torch.no_grad():
            attention.to_q[1].weight.mul_(2)
            attention.heads[0].E.weight.add_(0.3)
    older.assert_close(mine(x), theirs(x))
    torch.manual_seed(2)
    low, other = nn.Linear(12, 4, bias=True), nn.Sequential(nn.Linear(11, 4), nn.Tanh())
    for net in (theirs, mine):
        attention = net.linformer.seq[2].fn
        attention.to_v[2] = copy.deepcopy(low)
        attention.heads[1].F = attention.heads[1].E = copy.deepcopy(other)
        attention.heads[0].dropout = nn.Hardtanh(0.2, 0.3)
        net.linformer.seq[3].fn = nn.Identity()
    older.assert_parity(theirs, mine, lambda net: (net(x), {}))
    assert torch.equal(
        mine.linformer.seq[0].fn.heads[0].E.weight, mine.state_dict()["linformer.seq.0.fn.heads.0.E.weight"]
    )


def test_types_of_modules_and_of_projections() -> None:
    net = model()
    kinds = [type(module) for module in net.modules()]
    assert kinds.count(ours.MHAttention) == 2
    assert kinds.count(ours.LinearAttentionHead) == 6
    assert kinds.count(ours.FeedForward) == 2
    assert isinstance(ours.get_EF(11, 4), nn.Linear)
    assert isinstance(net.linformer.seq[0].fn.heads[0].E, nn.Linear)
    assert net.linformer.seq[0].fn.heads[0].E is net.linformer.seq[2].fn.heads[1].F


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"method": "no_params"}], ids=str)
def test_copies_files_and_dtypes(options: dict) -> None:
    net, x = model(**options).eval(), tokens()
    net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), net(x))
        with torch.no_grad():
            other.to_logits.bias.add_(1)
            other.linformer.seq[0].fn.to_q[0].weight.mul_(3)
        assert not torch.equal(other(x) - 1, net(x))
    assert torch.equal(copy.deepcopy(net).to_longspan().eval()(x), net(x))
    older.assert_close(copy.deepcopy(net).double()(x).float(), net(x))
    older.assert_close(copy.deepcopy(net).bfloat16()(x).float(), net(x), tolerance=0.06)
    with torch.autocast("cpu", torch.bfloat16):
        older.assert_close(net(x).float(), copy.deepcopy(net)(x).float(), tolerance=0.06)


def test_a_checkpoint_with_another_head() -> None:
    net, other = model(), model()
    held = {name: x + 1 for name, x in net.state_dict().items() if not name.startswith("to_logits")}
    other.to_logits = nn.Linear(12, 5)
    result = other.load_state_dict(held, strict=False)
    assert result.missing_keys == ["to_logits.weight", "to_logits.bias"]
    assert torch.equal(other.linformer.seq[2].fn.heads[2].F.weight, net.linformer.seq[0].fn.heads[0].E.weight + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for to_logits\.weight"):
        other.load_state_dict(net.state_dict())


def test_groups_of_parameters_by_name() -> None:
    net = model()
    groups = {True: [], False: []}
    for name, p in net.named_parameters():
        groups["heads" in name].append(p)
    before = copy.deepcopy(net.state_dict())
    net(tokens()).square().mean().backward()
    torch.optim.SGD([{"params": groups[True], "lr": 0.5}, {"params": groups[False], "lr": 0.0}]).step()
    for name, x in net.state_dict().items():
        assert torch.equal(x, before[name]) == ("heads" not in name), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "parameter_sharing": "none"}, {"full_attention": True}], ids=str
)
def test_it_compiles(options: dict) -> None:
    net, x = model(**options), tokens(7)
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
    older.assert_close(compiled(x), net(x))


def test_new_models_have_the_scale_of_longspans() -> None:
    torch.manual_seed(0)
    sizes = {"num_tokens": 97, "input_size": 101, "channels": 64, "dim_k": 31, "dim_ff": 53, "nhead": 4, "depth": 3}
    for options in ({}, {"parameter_sharing": "none", "method": "convolution"}, {"w_o_intermediate_dim": 29}):
        older.assert_same_scale(ours.LinformerLM(**sizes, **options))


@pytest.mark.parametrize(
    "options", [{}, {"parameter_sharing": "none"}, {"method": "convolution"}, {"method": "no_params"}], ids=str
)
def test_hidden_tokens_keep_their_slots(options: dict) -> None:
    """The mask of a hole or of left padding, beside the original, whose masks set keys and values to zero."""
    theirs = older.original("linformer_pytorch").Linformer(**SIZES | STILL | options)
    mine = ours.Linformer(**SIZES | STILL | options)
    if options.get("method") == "no_params":
        for layer, other in zip(theirs.seq[::2], mine.seq[::2], strict=True):
            for head, given in zip(layer.fn.heads, other.fn.heads, strict=True):
                head.E, head.F = given.E, given.F
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 11, 12)
    for hidden in (torch.arange(11) < 1, torch.arange(11) % 5 == 2):  # of a window of two at most one
        mask = ~hidden.expand(2, -1)
        filled = x.masked_fill(~mask[..., None], float("nan"))
        older.assert_close(mine(filled, input_mask=mask)[mask], theirs(x, input_mask=mask)[mask])
        handle = mine.seq[0].fn.register_forward_hook(lambda *_: None)
        apart = mine.seq[0].fn.heads[0].register_forward_hook(lambda *_: None)
        older.assert_close(mine(filled, input_mask=mask)[mask], theirs(x, input_mask=mask)[mask], "heads apart")
        handle.remove()
        apart.remove()


FAITHFUL = [
    {"causal": True},
    {"causal": True, "method": "convolution", "dim_k": 5},
    {"causal": True, "decoder_mode": True},
    {"causal": True, "decoder_mode": True, "full_attention": True},
    {"full_attention": True},
    {"method": "convolution"},
    {"decoder_mode": True},
    {"k_reduce_by_layer": 2, "depth": 3},
]


@pytest.mark.parametrize("options", FAITHFUL, ids=str)
def test_faithful_gives_the_originals_numbers(options: dict) -> None:
    theirs = older.original("linformer_pytorch").Linformer(**SIZES | STILL | options)
    with faithful():
        within = ours.Linformer(**SIZES | STILL | options)
    mine = ours.Linformer(**SIZES | STILL | options, faithful=True)
    corrected = ours.Linformer(**SIZES | STILL | options, faithful=False)
    for net in (within, mine):
        net.load_state_dict(theirs.state_dict())
    older.assert_same_tree(theirs, mine)
    x, embeddings = torch.randn(2, 2, 11, 12)
    masks = {"input_mask": torch.arange(11).expand(2, -1) < 7}
    context = {}
    if options.get("decoder_mode"):
        context["embeddings"] = embeddings
        masks["embeddings_mask"] = torch.arange(11).expand(2, -1) < 6

    def call(net):
        given = {"tensor": x.clone().requires_grad_()}
        return net(**given, **context, **masks), given

    older.assert_parity(theirs, mine, call)
    for arguments in (context, context | masks):
        assert (within(x, **arguments) - theirs(x, **arguments)).abs().max() < 2e-6
    if "k_reduce_by_layer" not in options:
        corrected.load_state_dict(theirs.state_dict())
        assert (corrected(x, **context, **masks) - theirs(x, **context, **masks)).abs().max() > 1e-3
    with pytest.raises(
        ValueError, match="cannot convert this Linformer: faithful=True keeps what no longspan model does"
    ):
        mine.to_longspan()
    for net in (theirs, mine):
        net(x, **context, visualize=True)
    older.assert_close(mine.seq[0].fn.heads[1].P_bar, theirs.seq[0].fn.heads[1].P_bar)


def test_faithful_padder_positions_and_encoder() -> None:
    theirs = older.original("linformer_pytorch")
    arguments = {"num_tokens": 13, **SIZES, **LM_STILL}
    pair = theirs.LinformerLM(**arguments), ours.LinformerLM(**arguments, faithful=True)
    older.copy_weights(*pair)
    x = tokens(7)
    wanted = theirs.Padder(pair[0])(x)
    assert (ours.Padder(pair[1])(x) - wanted).abs().max() < 2e-6
    corrected = ours.LinformerLM(**arguments)
    older.copy_weights(pair[0], corrected)
    assert (ours.Padder(corrected)(x) - wanted).abs().max() > 1e-3
    vectors = theirs.Linformer(**SIZES, **STILL), ours.Linformer(**SIZES, **STILL, faithful=True)
    older.copy_weights(*vectors)
    v = torch.randn(2, 7, 12)
    assert (ours.Padder(vectors[1])(v) - theirs.Padder(vectors[0])(v)).abs().max() < 2e-6
    positions = theirs.PositionalEmbedding(64).bfloat16(), ours.PositionalEmbedding(64, faithful=True).bfloat16()
    long = torch.zeros(1, 2048, 64)
    assert (positions[0](long).float() - positions[1](long).float()).abs().max() < 1e-2
    assert len(positions[1](long)[0].unique(dim=0)) < 1000
    sides = theirs.LinformerEncDec(**enc_dec()).eval(), ours.LinformerEncDec(**enc_dec(), faithful=True).eval()
    older.copy_weights(*sides)
    y, mask = torch.randint(13, (2, 11)), torch.arange(11).expand(2, -1) < 6
    assert (sides[0](tokens(), y, input_mask=mask) - sides[1](tokens(), y, input_mask=mask)).abs().max() < 5e-6
