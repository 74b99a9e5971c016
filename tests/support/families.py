"""The catalogue for `architectures`: one tiny network of each family, by package.

Nothing is imported until a network is made, and nothing is downloaded: weights are random.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.architectures import MODES, Network

PACKAGES = (
    "timm",
    "transformers",
    "torchvision",
    "torch_geometric",
    "segmentation_models_pytorch",
    "monai",
)
B = 2
NETWORKS: list[Network] = []


def add(name: str, make: Callable[[], nn.Module], inputs: Callable, **options: Any) -> None:
    NETWORKS.append(Network(name, make, inputs, **options))


def randn(*shape: int) -> Callable[[torch.Generator], tuple[tuple, dict]]:
    return lambda g: ((torch.randn(shape, generator=g, dtype=torch.float64),), {})


def keyword(name: str, *shape: int, **others: Any) -> Callable:
    """The input by keyword, with others beside it."""
    return lambda g: ((), {name: torch.randn(shape, generator=g, dtype=torch.float64), **others})


def image(size: int, batch: int = B, channels: int = 3) -> Callable:
    return randn(batch, channels, size, size)


# ------------------------------------------------------------------------------------------- timm


def timm(family: str, name: str, size: int, **options: Any) -> None:
    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=4, **options)

    add(f"timm/{family}", make, image(size))


def timm_class(family: str, module: str, kind: str, size: int, **options: Any) -> None:
    """By its class, where the library's own constructors take no other sizes. An option that names
    something of the module's is that."""

    def make() -> nn.Module:
        library = importlib.import_module(f"timm.models.{module}")
        found = {k: getattr(library, v) if isinstance(v, str) else v for k, v in options.items()}
        return getattr(library, kind)(num_classes=4, **found)

    add(f"timm/{family}", make, image(size))


PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
ONE = (1, 1, 1, 1)
DIMS = (8, 16, 24, 32)

timm("vision_transformer", "vit_tiny_patch16_224", 32, **PLAIN)
timm("beit", "beit_base_patch16_224", 32, **PLAIN)
timm("byobnet", "test_byobnet", 64)
timm("cait", "cait_xxs24_224", 32, **PLAIN, depth_token_only=1)
timm("coat", "coat_lite_tiny", 64, embed_dims=DIMS, serial_depths=ONE, img_size=64)
timm("convit", "convit_tiny", 32, **PLAIN, local_up_to_layer=1)
timm_class("convmixer", "convmixer", "ConvMixer", 32, dim=16, depth=2, kernel_size=3, patch_size=8)
timm("convnext", "test_convnext", 64)
timm("convnextv2", "convnextv2_atto", 64, depths=ONE, dims=DIMS)
timm(
    "crossvit",
    "crossvit_tiny_240",
    120,
    img_size=120,
    embed_dim=(16, 24),
    num_heads=(2, 2),
    depth=([1, 1, 0], [1, 1, 0]),
)
timm("davit", "davit_tiny", 64, depths=ONE, embed_dims=DIMS, num_heads=(1, 2, 3, 4))
timm("deit", "deit_tiny_distilled_patch16_224", 32, **PLAIN)
timm("densenet", "densenet121", 64, block_config=(2, 2, 2, 2), growth_rate=8)
timm("dla", "dla46_c", 64)
timm("edgenext", "edgenext_xx_small", 64, dims=DIMS, depths=(1, 2, 2, 2))
timm(
    "efficientformer_v2",
    "efficientformerv2_s0",
    64,
    depths=(1, 1, 2, 2),
    embed_dims=DIMS,
    img_size=64,
)
timm("efficientnet", "test_efficientnet", 64)
timm("efficientvim", "efficientvim_m1", 64)
timm("efficientvit_mit", "efficientvit_b0", 64)
timm("efficientvit_msra", "efficientvit_m0", 64, img_size=64)
timm("eva", "eva02_tiny_patch14_224", 32, **PLAIN)
timm("fasternet", "fasternet_t0", 64, depths=ONE, embed_dim=8)
timm_class("focalnet", "focalnet", "FocalNet", 64, depths=ONE, embed_dim=8)
timm_class(
    "gcvit",
    "gcvit",
    "GlobalContextVit",
    64,
    img_size=64,
    depths=ONE,
    embed_dim=8,
    num_heads=(1, 2, 2, 4),
    window_size=(2, 2, 2, 2),
)
timm("ghostnet", "ghostnet_050", 64)
timm("hiera", "hiera_tiny_224", 64, img_size=(64, 64), stages=ONE, embed_dim=8, num_heads=1)
timm("inception_next", "inception_next_atto", 64, depths=ONE)
timm("lcnetv2", "lcnetv2_small", 64)
timm(
    "levit",
    "levit_128s",
    64,
    img_size=64,
    embed_dim=(16, 24, 32),
    num_heads=(2, 3, 4),
    depth=(1, 1, 1),
)
timm("mambaout", "test_mambaout", 64)
timm("maxvit", "maxvit_pico_rw_256", 64, img_size=64, depths=ONE, embed_dim=(32, 32, 32, 32))
timm("coatnet", "coatnet_pico_rw_224", 64, img_size=64, depths=ONE, embed_dim=(32, 32, 32, 32))
timm_class("poolformer", "metaformer", "MetaFormer", 64, depths=ONE, dims=DIMS)
MIXER = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 16}
timm_class("mlp_mixer", "mlp_mixer", "MlpMixer", 32, **MIXER)
timm_class(
    "gmlp",
    "mlp_mixer",
    "MlpMixer",
    32,
    **MIXER,
    mlp_ratio=2,
    block_layer="SpatialGatingBlock",
    mlp_layer="GatedMlp",
)
timm_class(
    "resmlp",
    "mlp_mixer",
    "MlpMixer",
    32,
    **MIXER,
    mlp_ratio=4,
    block_layer="ResBlock",
    norm_layer="Affine",
)
timm("mobilenetv3", "mobilenetv3_small_050", 64)
timm("mobilevit", "mobilevit_xxs", 64)
timm("mobilevitv2", "mobilevitv2_050", 64)
timm(
    "naflexvit", "naflexvit_base_patch16_gap", 32, embed_dim=24, depth=2, num_heads=2, patch_size=8
)
timm_class(
    "nest",
    "nest",
    "Nest",
    64,
    img_size=64,
    embed_dims=(8, 16, 24),
    depths=(1, 1, 1),
    num_heads=(1, 2, 2),
)
timm("nfnet", "test_nfnet", 64)
timm("pit", "pit_ti_224", 64, img_size=64, depth=(1, 1, 1), base_dims=(8, 8, 8))
timm("pvt_v2", "pvt_v2_b0", 64, depths=ONE, embed_dims=DIMS, num_heads=(1, 2, 3, 4))
timm("regnetx", "regnetx_002", 64)
timm("regnety", "regnety_002", 64)
timm("repghost", "repghostnet_050", 64)
timm("repvit", "repvit_m0_9", 64)
timm("res2net", "res2net50_14w_8s", 64, layers=ONE)
timm("resnest", "resnest14d", 64)
timm("resnet", "test_resnet", 64)
timm("ecaresnet", "ecaresnet26t", 64, layers=ONE)
timm("resnetv2", "resnetv2_18", 64, layers=ONE)
timm_class(
    "bit",
    "resnetv2",
    "ResNetV2",
    64,
    layers=ONE,
    channels=(128, 128, 128, 128),
    stem_chs=32,
    conv_layer="StdConv2d",
)
timm("rexnet", "rexnet_100", 64, width_mult=0.3)
timm("senet", "legacy_seresnet18", 64)
timm("sequencer", "sequencer2d_s", 64, layers=ONE, embed_dims=DIMS, hidden_sizes=(8, 8, 8, 8))
timm("shvit", "shvit_s1", 64)
timm("sknet", "skresnet18", 64, layers=ONE)
timm("starnet", "starnet_s050", 64)
timm("swiftformer", "swiftformer_xs", 64)
timm(
    "swin",
    "swin_tiny_patch4_window7_224",
    32,
    img_size=32,
    window_size=4,
    embed_dim=8,
    depths=(2, 2),
    num_heads=(2, 2),
)
timm(
    "swinv2",
    "swinv2_tiny_window8_256",
    32,
    img_size=32,
    window_size=4,
    embed_dim=8,
    depths=(2, 2),
    num_heads=(2, 2),
)
timm(
    "swinv2_cr",
    "swinv2_cr_tiny_224",
    32,
    img_size=32,
    window_size=4,
    embed_dim=8,
    depths=(2, 2),
    num_heads=(2, 2),
)
timm(
    "tiny_vit",
    "tiny_vit_5m_224",
    64,
    embed_dims=DIMS,
    depths=ONE,
    num_heads=(1, 2, 3, 4),
    window_sizes=(2, 2, 2, 2),
)
timm(
    "tnt",
    "tnt_s_patch16_224",
    32,
    img_size=32,
    embed_dim=24,
    inner_dim=8,
    depth=2,
    num_heads_inner=2,
    num_heads_outer=2,
)
timm(
    "twins",
    "twins_pcpvt_small",
    64,
    img_size=64,
    depths=ONE,
    embed_dims=DIMS,
    num_heads=(1, 2, 3, 4),
)
timm(
    "visformer",
    "visformer_tiny",
    64,
    img_size=64,
    init_channels=8,
    embed_dim=24,
    depth=(1, 1, 1),
    num_heads=2,
)
timm("vit_hybrid", "vit_tiny_r_s16_p8_224", 64, img_size=64, embed_dim=24, depth=2, num_heads=2)
timm("vit_relpos", "vit_relpos_small_patch16_224", 32, **PLAIN)
timm("vit_sam", "samvit_base_patch16", 32, **PLAIN, window_size=2, global_attn_indexes=(1,))
timm_class(
    "volo",
    "volo",
    "VOLO",
    64,
    img_size=64,
    layers=ONE,
    embed_dims=(24, 32, 32, 32),
    num_heads=(2, 2, 2, 2),
)
timm("vovnet", "ese_vovnet19b_slim_dw", 64)
timm("xcit", "xcit_nano_12_p16_224", 32, img_size=32, embed_dim=24, depth=2, num_heads=2)
timm("mixnet", "mixnet_s", 64)
timm("tinynet", "tinynet_e", 64)
timm("lcnet", "lcnet_035", 64)
timm("mobileone", "mobileone_s0", 64)


# ----------------------------------------------------------------------------------- transformers

# What a tiny configuration has in place of its defaults, under all the names that occur.
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size",
                     "hidden_dim", "decoder_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads",
                     "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff",
                     "d_inner", "n_inner", "moe_intermediate_size", "ffn_hidden_size",
                     "shared_expert_intermediate_size", "dim_feedforward"), 24),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim",
                     "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "n_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_size": 16,
    "patch_size": 8,
    "use_cache": False,
}  # fmt: skip


def transformer(
    kind: str, inputs: Callable, wrt: str, output: Any = "last_hidden_state",
    model: str | None = None, **options: Any,
) -> None:  # fmt: skip
    """kind: the model type; options: of its configuration, beside `TINY`."""

    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        known = library.CONFIG_MAPPING[kind]().to_dict()
        tiny = {k: v for k, v in TINY.items() if k in known}
        tiny["experts_implementation"] = "batched_mm"  # the default takes no float64
        config = library.CONFIG_MAPPING[kind](**{**tiny, **options})
        if model is not None:
            return getattr(library, model)(config)
        return library.AutoModel.from_config(config)

    add(f"transformers/{kind}", make, inputs, wrt=wrt, output=output)


def text(kind: str, length: int = 5, width: int = 16, **options: Any) -> None:
    transformer(kind, keyword("inputs_embeds", B, length, width), "inputs_embeds", **options)


def encoder_decoder(kind: str, **options: Any) -> None:
    g = torch.Generator().manual_seed(2)
    decoded = torch.randn(B, 4, 16, generator=g, dtype=torch.float64)
    inputs = keyword("inputs_embeds", B, 5, 16, decoder_inputs_embeds=decoded)
    transformer(kind, inputs, "inputs_embeds", **options)


def vision(kind: str, size: int = 16, **options: Any) -> None:
    transformer(kind, keyword("pixel_values", B, 3, size, size), "pixel_values", **options)


text("albert")
text("bert")
text("big_bird")
text("biogpt")
text("bitnet")
text("bloom")
text("canine")
text("cohere2")
text("convbert")
text("deberta")
text("deberta-v2")
text("deepseek_v3")
text("diffllama")
text("distilbert")
text("doge")
text("electra")
text("esm")
text("falcon")
text("falcon_mamba")
text("fnet")
text("gemma")
text("gemma3_text")
text("gpt2")
text("gpt_bigcode")
text("gpt_neox")
text("gpt_oss")
text("granitemoe")
text("ibert")
text("jamba")
text("jetmoe")
text("lfm2")
text("llama")
text("mamba")
text("minicpm3")
text("mixtral")
text("mobilebert")
text("modernbert")
text("mpnet")
text("mpt")
text("nanochat")
text("nomic_bert")
text("nystromformer")
text("olmoe")
text("opt")
text("phi")
text("qwen2_moe")
text("qwen3")
text("roberta")
text("roformer")
text("rwkv")
text("squeezebert")
text("stablelm")
text("xlm")
text("xlnet")
text("yoso")

encoder_decoder("bart")
encoder_decoder("led")
encoder_decoder("m2m_100")
encoder_decoder("prophetnet")
encoder_decoder("switch_transformers")
encoder_decoder("t5")

vision("beit", 32)
vision("bit", 32, num_groups=4)
vision("clip_vision_model")
vision("convnextv2", 64)
vision("dinov2", 32)
vision("dinov3_vit", 32)
vision("focalnet", 32)
vision("hgnet_v2", 32, output="logits", model="HGNetV2ForImageClassification")
vision("mobilenet_v2", 32)
vision("mobilevit", 32)
vision("mobilevitv2", 256)
vision("poolformer", 32)
vision("pvt_v2", 32, num_attention_heads=[1, 2, 2, 2], hidden_sizes=[8, 16, 16, 16])
vision("segformer", 32, num_attention_heads=[1, 2, 2, 2], hidden_sizes=[8, 16, 16, 16])
vision("swiftformer", 32)
vision("textnet", 32)
vision("vit")


# -------------------------------------------------------------------------------- torch-geometric

# Two graphs, of four and three nodes; every edge in both directions.
EDGES = ((0, 1), (0, 2), (1, 2), (2, 3), (4, 5), (5, 6), (4, 6))
NODES, GRAPHS, WIDTH, EDGE_WIDTH = 7, 2, 6, 3


class Graph(nn.Module):
    """Two layers of one kind on fixed edges and a sum over each graph: fewer rows come out than
    go in. arguments: which of the edges' features the layer takes, by name; sums: the last layer
    sums by itself."""

    def __init__(
        self,
        layer: Callable[[int], nn.Module],
        arguments: dict[str, str],
        first: bool,
        sums: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 2)
        self.arguments, self.first, self.sums = arguments, first, sums
        both = torch.tensor(EDGES).T
        g = torch.Generator().manual_seed(4)
        count = 2 * len(EDGES)
        self.register_buffer("edge_index", torch.cat([both, both.flip(0)], 1))
        self.register_buffer("batch", torch.tensor([0, 0, 0, 0, 1, 1, 1]))
        self.register_buffer("weight", torch.rand(count, generator=g) + 0.5)
        self.register_buffer("feature", torch.rand(count, EDGE_WIDTH, generator=g))
        self.register_buffer("kind", torch.randint(0, 2, (count,), generator=g))
        self.register_buffer("node_kind", torch.randint(0, 2, (NODES,), generator=g))
        self.register_buffer("position", torch.randn(NODES, 3, generator=g))

    def forward(self, x: Tensor) -> Tensor:
        features = {name: getattr(self, which) for name, which in self.arguments.items()}
        h = x
        for layer in self.layers:
            given = (h, x) if self.first else (h,)
            h = layer(*given, edge_index=self.edge_index, **features)
            h = torch.tanh(h[0] if isinstance(h, tuple) else h)
        if not self.sums:
            h = torch.zeros(GRAPHS, WIDTH, dtype=h.dtype).index_add(0, self.batch, h)
        return self.last(h)


def graph(
    kind: str, make: Callable[[Any, int], nn.Module], first: bool = False, **arguments: str
) -> None:
    """make(torch_geometric.nn, width): a layer that keeps the width; first: it takes the network's
    input beside its own."""

    def build() -> nn.Module:
        library = importlib.import_module("torch_geometric.nn")
        return Graph(lambda width: make(library, width), arguments, first)

    add(f"torch_geometric/{kind}", build, randn(NODES, WIDTH))


def dense(width: int, into: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, into or width))


graph("AGNNConv", lambda n, w: n.AGNNConv())
graph("APPNP", lambda n, w: n.APPNP(2, 0.1))
graph("ARMAConv", lambda n, w: n.ARMAConv(w, w, num_stacks=2))
graph("AntiSymmetricConv", lambda n, w: n.AntiSymmetricConv(w))
graph("CGConv", lambda n, w: n.CGConv(w, EDGE_WIDTH), edge_attr="feature")
graph("ChebConv", lambda n, w: n.ChebConv(w, w, 2))
graph("ClusterGCNConv", lambda n, w: n.ClusterGCNConv(w, w))
graph("EGConv", lambda n, w: n.EGConv(w, w, num_heads=2, num_bases=2))
graph("EdgeConv", lambda n, w: n.EdgeConv(dense(2 * w, w)))
graph("FAConv", lambda n, w: n.FAConv(w), first=True)
graph("FastRGCNConv", lambda n, w: n.FastRGCNConv(w, w, 2), edge_type="kind")
graph("FeaStConv", lambda n, w: n.FeaStConv(w, w, 2))
graph("FiLMConv", lambda n, w: n.FiLMConv(w, w))
graph("GATConv", lambda n, w: n.GATConv(w, w, 2, concat=False))
graph("GATv2Conv", lambda n, w: n.GATv2Conv(w, w, 2, concat=False))
graph("GCN2Conv", lambda n, w: n.GCN2Conv(w, 0.1), first=True)
graph("GCNConv", lambda n, w: n.GCNConv(w, w), edge_weight="weight")
graph("GENConv", lambda n, w: n.GENConv(w, w, learn_t=True))
graph("GINConv", lambda n, w: n.GINConv(dense(w), train_eps=True))
graph("GINEConv", lambda n, w: n.GINEConv(dense(w), edge_dim=EDGE_WIDTH), edge_attr="feature")
graph("GMMConv", lambda n, w: n.GMMConv(w, w, EDGE_WIDTH, 2), edge_attr="feature")
graph("GPSConv", lambda n, w: n.GPSConv(w, n.GCNConv(w, w), heads=2), batch="batch")
graph("GatedGraphConv", lambda n, w: n.GatedGraphConv(w, 2))
graph("GeneralConv", lambda n, w: n.GeneralConv(w, w, attention=True))
graph("GraphConv", lambda n, w: n.GraphConv(w, w), edge_weight="weight")
graph(
    "HEATConv",
    lambda n, w: n.HEATConv(w, w, 2, 2, 3, EDGE_WIDTH, 3, heads=2, concat=False),
    node_type="node_kind", edge_type="kind", edge_attr="feature",
)  # fmt: skip
graph("LEConv", lambda n, w: n.LEConv(w, w))
graph("LGConv", lambda n, w: n.LGConv())
graph("MFConv", lambda n, w: n.MFConv(w, w))
graph("MixHopConv", lambda n, w: n.MixHopConv(w, w // 3, [0, 1, 2]))
graph("NNConv", lambda n, w: n.NNConv(w, w, dense(EDGE_WIDTH, w * w)), edge_attr="feature")
graph("PDNConv", lambda n, w: n.PDNConv(w, w, EDGE_WIDTH, 4), edge_attr="feature")
graph(
    "PNAConv",
    lambda n, w: n.PNAConv(
        w, w, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([0, 1, 4, 2])
    ),
)
graph("PointNetConv", lambda n, w: n.PointNetConv(dense(w + 3, w)), pos="position")
graph("PointTransformerConv", lambda n, w: n.PointTransformerConv(w, w), pos="position")
graph("RGATConv", lambda n, w: n.RGATConv(w, w, 2), edge_type="kind")
graph("RGCNConv", lambda n, w: n.RGCNConv(w, w, 2), edge_type="kind")
graph("ResGatedGraphConv", lambda n, w: n.ResGatedGraphConv(w, w))
graph("SAGEConv", lambda n, w: n.SAGEConv(w, w, aggr="max"))
graph("SGConv", lambda n, w: n.SGConv(w, w, 2))
graph("SSGConv", lambda n, w: n.SSGConv(w, w, 0.1, 2))
graph("SuperGATConv", lambda n, w: n.SuperGATConv(w, w, 2, concat=False, is_undirected=True))
graph("TAGConv", lambda n, w: n.TAGConv(w, w, 2))
graph("TransformerConv", lambda n, w: n.TransformerConv(w, w, 2, concat=False))


class Molecules(nn.Module):
    """Energies of two molecules from positions, whose gradient is the force."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.register_buffer("z", torch.tensor([1, 6, 8, 1, 6, 1, 1]))
        self.register_buffer("batch", torch.tensor([0, 0, 0, 0, 1, 1, 1]))

    def forward(self, pos: Tensor) -> Tensor:
        return self.net(self.z, pos, self.batch)


def schnet() -> nn.Module:
    library = importlib.import_module("torch_geometric.nn")
    both = torch.tensor(EDGES).T
    both = torch.cat([both, both.flip(0)], 1)

    def near(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return both, (pos[both[0]] - pos[both[1]]).norm(dim=-1)

    return Molecules(library.SchNet(8, 8, 2, num_gaussians=6, cutoff=6.0, interaction_graph=near))


add("torch_geometric/SchNet", schnet, randn(NODES, 3))


def whole_graph(
    kind: str, make: Callable[[Any], nn.Module], sums: bool = False, **arguments: str
) -> None:
    """A model of the library's that takes nodes and edges as a whole."""

    def build() -> nn.Module:
        library = importlib.import_module("torch_geometric.nn")
        net = Graph(lambda width: nn.Identity(), arguments, False, sums)
        net.layers = nn.ModuleList([make(library)])
        return net

    add(f"torch_geometric/{kind}", build, randn(NODES, WIDTH))


whole_graph(
    "AttentiveFP",
    lambda n: n.AttentiveFP(WIDTH, 8, WIDTH, EDGE_WIDTH, 2, 2), sums=True,
    edge_attr="feature", batch="batch",
)  # fmt: skip
whole_graph(
    "DeepGCN", lambda n: n.DeepGCNLayer(n.GCNConv(WIDTH, WIDTH), n.LayerNorm(WIDTH), nn.ReLU())
)
whole_graph("EdgeCNN", lambda n: n.EdgeCNN(WIDTH, 8, 2, WIDTH))
whole_graph("PNA", lambda n: n.GIN(WIDTH, 8, 3, WIDTH, jk="lstm"))


# ------------------------------------------------------------------------------------ torchvision


def torchvision(kind: str, make: Callable[[Any], nn.Module], inputs: Any = 64, **options: Any):
    """make(torchvision.models)"""

    def build() -> nn.Module:
        return make(importlib.import_module("torchvision.models"))

    inputs = image(inputs) if isinstance(inputs, int) else inputs
    add(f"torchvision/{kind}", build, inputs, **options)


def two_images(g: torch.Generator) -> tuple[tuple, dict]:
    first, second = (torch.rand(1, 3, 128, 128, generator=g).double() * 2 - 1 for _ in range(2))
    return (first, second), {"num_flow_updates": 2}


def raft(models: Any) -> nn.Module:
    """Its grid of coordinates is float32 by name: in float64 here, in a process of our own."""
    library = importlib.import_module("torchvision.models.optical_flow.raft")
    grid = library.make_coords_grid
    library.make_coords_grid = lambda *args, **kwargs: grid(*args, **kwargs).double()
    return models.optical_flow.raft_small()


NARROW = {"num_classes": 4, "width_mult": 0.25}
torchvision(
    "convnext",
    lambda m: m.ConvNeXt(
        [m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)], num_classes=4
    ),
)
torchvision(
    "deeplabv3",
    lambda m: m.segmentation.deeplabv3_mobilenet_v3_large(weights_backbone=None, num_classes=3),
    output="out",
)
torchvision("densenet", lambda m: m.DenseNet(4, (2, 2), 8, num_classes=4))
torchvision("efficientnet", lambda m: m.efficientnet_b0(num_classes=4))
torchvision(
    "fcn",
    lambda m: m.segmentation.FCN(
        m._utils.IntermediateLayerGetter(m.resnet18(), {"layer2": "out"}),
        m.segmentation.fcn.FCNHead(128, 3),
    ),
    output="out",
)
torchvision("googlenet", lambda m: m.googlenet(num_classes=4, init_weights=False, aux_logits=False))
torchvision(
    "lraspp",
    lambda m: m.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=3),
    output="out",
)
torchvision("maxvit", lambda m: m.MaxVit((64, 64), 8, 2, [8, 16], [1, 1], 4, 0.1, num_classes=4))
torchvision("mnasnet", lambda m: m.MNASNet(0.25, num_classes=4))
torchvision("mobilenet_v2", lambda m: m.mobilenet_v2(**NARROW))
torchvision("mobilenet_v3", lambda m: m.mobilenet_v3_small(num_classes=4))
torchvision("raft", raft, two_images, output=1)
torchvision("regnet_x", lambda m: m.regnet_x_400mf(num_classes=4))
torchvision("regnet_y", lambda m: m.regnet_y_400mf(num_classes=4))
torchvision("resnet", lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4))
torchvision(
    "resnext",
    lambda m: m.ResNet(
        m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=4, groups=8, width_per_group=4
    ),
)
torchvision("shufflenet_v2", lambda m: m.shufflenet_v2_x0_5(num_classes=4))
torchvision("squeezenet", lambda m: m.squeezenet1_1(num_classes=4))
torchvision(
    "swin", lambda m: m.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=4), 32
)
torchvision(
    "swin3d",
    lambda m: m.video.SwinTransformer3d([2, 4, 4], 8, [2, 2], [2, 2], [2, 4, 4], num_classes=4),
    randn(B, 3, 4, 32, 32),
)
torchvision(
    "swin_v2",
    lambda m: m.SwinTransformer(
        [4, 4],
        8,
        [2, 2],
        [2, 2],
        [4, 4],
        num_classes=4,
        block=m.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=m.swin_transformer.PatchMergingV2,
    ),
    32,
)
torchvision(
    "vgg",
    lambda m: nn.Sequential(
        m.vgg.make_layers([8, "M", 8, "M"], True), nn.Flatten(), nn.Linear(512, 4)
    ),
    32,
)
torchvision(
    "video_resnet",
    lambda m: m.video.VideoResNet(
        m.video.resnet.BasicBlock,
        [m.video.resnet.Conv3DSimple] * 4,
        [1, 1, 1, 1],
        m.video.resnet.BasicStem,
        num_classes=4,
    ),
    randn(B, 3, 4, 32, 32),
)
torchvision("vit", lambda m: m.VisionTransformer(32, 8, 2, 2, 24, 32, num_classes=4), 32)


# --------------------------------------------------------------------- segmentation-models-pytorch


def segmentation(kind: str, encoder: str = "tu-test_resnet", **options: Any) -> None:
    def make() -> nn.Module:
        library = importlib.import_module("segmentation_models_pytorch")
        return getattr(library, kind)(encoder, encoder_weights=None, classes=3, **options)

    add(f"segmentation_models_pytorch/{kind}", make, image(64))


segmentation("DeepLabV3", decoder_channels=16, decoder_atrous_rates=(1, 2, 3))
segmentation("DeepLabV3Plus", decoder_channels=16, decoder_atrous_rates=(1, 2, 3))
segmentation("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32)
segmentation("Linknet")
segmentation("MAnet", decoder_channels=(16, 16, 8, 8, 8))
segmentation("PSPNet", psp_out_channels=16)
segmentation("Segformer", decoder_segmentation_channels=16)
segmentation("UPerNet", decoder_channels=16)
segmentation("Unet", decoder_channels=(16, 16, 8, 8, 8))
segmentation("UnetPlusPlus", decoder_channels=(16, 16, 8, 8, 8))


# ------------------------------------------------------------------------------------------ MONAI


def monai(
    kind: str,
    *args: Any,
    inputs: Any = None,
    output: Any = None,
    modes: Any = MODES,
    **options: Any,
) -> None:
    def make() -> nn.Module:
        return getattr(importlib.import_module("monai.networks.nets"), kind)(*args, **options)

    add(f"monai/{kind}", make, inputs or image(32, channels=1), output=output, modes=modes)


def with_time(g: torch.Generator) -> tuple[tuple, dict]:
    return (torch.randn(B, 1, 16, 16, generator=g).double(), torch.tensor([3, 700])), {}


monai("AttentionUnet", 2, 1, 2, (4, 8, 8), (2, 2))
monai("AutoEncoder", 2, 1, 1, (4, 8), (2, 2), inter_channels=(8, 8))
monai("AutoencoderKL", spatial_dims=2, channels=(8, 8), num_res_blocks=(1, 1), norm_num_groups=4,
      attention_levels=(False, True), latent_channels=2, output=0)  # fmt: skip
monai("BasicUNet", 2, 1, 2, (4, 4, 8, 8, 8, 4))
monai("BasicUNetPlusPlus", 2, 1, 2, (4, 4, 8, 8, 8, 4), output=0)
monai("Classifier", (1, 32, 32), 3, (4, 8), (2, 2))
monai("Critic", (1, 32, 32), (4, 8), (2, 2))
monai("DenseNet", 2, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2))
monai("DiffusionModelUNet", spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 8),
      num_res_blocks=1, norm_num_groups=4, attention_levels=(False, True), num_head_channels=4,
      inputs=with_time)  # fmt: skip
monai("Discriminator", (1, 32, 32), (4, 8), (2, 2))
monai("DynUNet", 2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8])
monai("FullyConnectedNet", 6, 2, (8, 8), inputs=randn(4, 6))
monai("HighResNet", 2, 1, 2)
monai("LocalNet", 2, 1, 4, (0, 1, 2))
monai("MedNeXt", 2, 4, 1, 2, encoder_expansion_ratio=2, decoder_expansion_ratio=2,
      bottleneck_expansion_ratio=2, blocks_down=(1, 1), blocks_bottleneck=1,
      blocks_up=(1, 1))  # fmt: skip
monai("MultiScalePatchDiscriminator", num_d=1, num_layers_d=2, spatial_dims=2, channels=4,
      in_channels=1, out_channels=1, kernel_size=3, minimum_size_im=32, output=(0, 0))  # fmt: skip
monai("PatchDiscriminator", 2, 4, 1, num_layers_d=2, output=-1)
monai("RegUNet", 2, 1, 4, 2)
monai("Regressor", (1, 32, 32), (2,), (4, 8), (2, 2))
monai("ResNet", "basic", [1, 1, 1, 1], [4, 4, 8, 8], 2, 1, num_classes=2)
monai("SENet", 2, 1, "se_bottleneck", (1, 1, 1, 1), 1, 8, inplanes=8, num_classes=2)
monai("SegResNet", 2, 8, blocks_down=(1, 1), blocks_up=(1,))
monai("SegResNetDS", 2, 8, blocks_down=(1, 1, 1))
monai("UNETR", 1, 2, 32, feature_size=4, hidden_size=16, mlp_dim=16, num_heads=2, spatial_dims=2)
monai("UNet", 2, 1, 2, (4, 8, 8), (2, 2), num_res_units=1)
monai("VNet", 2, 1, 2)
# in evaluation it adds to the result of exp in place, and autograd raises
monai("VarAutoEncoder", 2, (1, 16, 16), 1, 4, (4, 8), (2, 2), inputs=image(16, channels=1),
      output=0, modes=("train",))  # fmt: skip
monai("ViT", 1, 16, 8, 24, 32, 2, 2, classification=True, num_classes=3, spatial_dims=2,
      inputs=image(16, channels=1), output=0)  # fmt: skip
monai("ViTAutoEnc", 1, 16, 4, hidden_size=24, mlp_dim=32, num_layers=2, num_heads=2,
      spatial_dims=2, inputs=image(16, channels=1), output=0)  # fmt: skip

BY_NAME = {network.name: network for network in NETWORKS}
