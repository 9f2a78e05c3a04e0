r"""Lift architectures that other libraries define, and compare with back-propagation.

    python benchmarks/zoo.py results/zoo --library transformers --limit 20 --steps 200

Every architecture is built tiny, with random weights. For each one it measures whether the lifted
model computes the same outputs, the cosine of its gradient to the plain one (at the start, after 3
steps of AdamW, and at the end), what ``report()`` says, and what a walk through autograd's graph
finds that still has its own derivative. Each runs in a process of its own, and writes one line of
JSON to ``<folder>/<library>.jsonl``; rerun the same call to resume. ``--show`` prints a summary,
as of ``benchmarks/results/zoo``, where single measurements were taken with earlier builds of 0.1.0.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import inspect
import json
import math
import os
import random
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpom
from lpom.methods import Batch, Problem

#: Operations of autograd that are affine in each of their arguments, or only pick and arrange.
AFFINE = """
    GroupedMm ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D MseLoss Add
    Addmm Addmv Addbmm Baddbmm Sub Rsub Neg Mm Bmm Mv Dot Linear Convolution MkldnnConvolution
    ConvolutionOverrideable Sum SumBackward Mean Cumsum Cat Stack Split SplitWithSizes Unsafe
    UnsafeSplit UnsafeSplitWithSizes Chunk Unbind Select Slice Narrow Index IndexSelect Gather
    Scatter ScatterAdd IndexAdd IndexPut IndexCopy Take TakeAlongDim Embedding EmbeddingBag
    View UnsafeView Reshape ReshapeAlias Permute Transpose T Squeeze Unsqueeze Expand Repeat
    RepeatInterleave Roll Flip Clone Copy CopySlices CopyBackwards ToCopy Contiguous Alias
    Detach AsStrided Pad ConstantPad ConstantPadNd ReflectionPad ReplicationPad AvgPool1D
    AvgPool2D AvgPool3D AdaptiveAvgPool AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D
    MkldnnAdaptiveAvgPool2D Upsample UpsampleNearest1D UpsampleNearest2D UpsampleBilinear2D
    UpsampleBicubic2D UpsampleLinear1D UpsampleNearestExact2D UpsampleTrilinear3D PixelShuffle
    PixelUnshuffle Im2Col Col2Im Unfold UnfoldBackward Where MaskedFill MaskedScatter
    MaskedSelect Tril Triu Diag Diagonal DiagonalScatter SelectScatter SliceScatter Trace
    FftR2C FftC2R FftC2C ViewAsComplex ViewAsReal Real Imag Complex Conj Fill Zero Zeros
    Dropout NativeDropout Mul AccumulateGrad Lerp Addcmul Movedim Swapaxes Kron Outer Ger Vdot
    Einsum Bilinear GridSampler2D AffineGridGenerator LiftFresh Identity SparseMm Fold
    ResolveConj ResolveNeg ConjPhysical Grid Rot90 Atleast Broadcast ToDense Segment
    SegmentReduce Polar ChannelShuffle NativeChannelShuffle LinalgVectorNormFixed Tile
""".split()
#: Normalisation by the statistics of a batch, an edge with those given.
BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "BatchNorm")
#: Operations that choose among their arguments: affine where the choice stays as it is.
CHOICES = """
    MaxPool1D MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool1D
    AdaptiveMaxPool2D AdaptiveMaxPool3D Max Min Amax Amin Maximum Minimum Topk Sort Msort
    Kthvalue Median Cummax Cummin ScatterReduce IndexReduce Mode
""".split()
#: Where data that has no gradient itself comes in.
PRODUCTS = ("Convolution", "Addmm", "Mm", "Bmm", "Linear")
#: Seconds of a forward pass above which an architecture is left out.
SLOW = 5.0
#: Steps after which gradients are compared, beside the first and the last.
EARLY = 3


class Unavailable(Exception):
    """The architecture cannot be built tiny, or run on random inputs, without lifting."""


# architectures: each builder gives a model and the arguments of one batch


def transformers_entries() -> dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]]:
    _stand_in_for_torchvision()
    import transformers
    import transformers.generation
    import transformers.masking_utils
    import transformers.modeling_utils
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    causal, every = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    )
    entries = {}
    for name in sorted({*causal, *every}):
        auto = transformers.AutoModelForCausalLM if name in causal else transformers.AutoModel
        entries[name] = lambda name=name, auto=auto: _from_config(name, auto)
    return entries


#: What becomes of the settings of a configuration, by name; lists keep their length.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size embedding_dim "
        "projection_dim decoder_hidden_size hidden_dim attention_hidden_size encoder_hidden_dim "
        "conv_dim encoder_hidden_size decoder_hidden_dim lru_width fpn_hidden_size "
        "feature_size mask_feature_size out_hidden_size".split(),
        32,
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers decoder_num_hidden_layers num_blocks".split(),
        2,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head num_heads n_heads encoder_attention_heads "
        "decoder_attention_heads decoder_num_attention_heads attention_heads".split(),
        4,
    ),
    **dict.fromkeys(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size "
        "dim_feedforward feed_forward_hidden_size hidden_features decoder_intermediate_size "
        "d_inner pooler_hidden_size shared_intermediate_size".split(),
        64,
    ),
    **dict.fromkeys("vocab_size num_codevectors_per_group n_vocab".split(), 99),
    **dict.fromkeys(
        "max_position_embeddings n_positions max_source_positions n_ctx max_seq_len "
        "max_sequence_length max_target_positions".split(),
        64,
    ),
    **dict.fromkeys(
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts".split(),
        4,
    ),
    **dict.fromkeys("num_experts_per_tok moe_top_k moe_k".split(), 2),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 32),
    **dict.fromkeys("num_key_value_heads num_kv_heads n_group topk_group".split(), 2),
    **dict.fromkeys("mamba_n_heads mamba_num_heads n_mamba_heads".split(), 8),
    **dict.fromkeys(
        "mamba_head_dim head_dim d_kv attention_head_size mamba_d_head rotary_dim".split(), 8
    ),
    **dict.fromkeys("qk_rope_head_dim qk_nope_head_dim v_head_dim".split(), 8),
    **dict.fromkeys("kv_lora_rank q_lora_rank time_step_rank".split(), 16),
    **dict.fromkeys("state_size mamba_d_state ssm_state_size".split(), 8),
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "type_vocab_size": 2,
    "num_mel_bins": 16,
    "num_codebooks": 2,
    "num_queries": 6,
    "first_k_dense_replace": 1,
}
LISTS = {
    "depths": lambda n: [1] * n,
    "hidden_sizes": lambda n: [16 * (i + 1) for i in range(n)],
    "neck_hidden_sizes": lambda n: [16] * n,
    "embed_dims": lambda n: [16 * (i + 1) for i in range(n)],
    "num_heads": lambda n: [2] * n,
    "num_attention_heads": lambda n: [2] * n,
    "decoder_depths": lambda n: [1] * n,
    "conv_dim": lambda n: [16] * n,
}


def _shrink(config: Any, sizes: dict[str, Any], seen: tuple[Any, ...] = ()) -> Any:
    """Set what a configuration has of these sizes, in its parts too; what it refuses stays."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and not any(value is part for part in seen):
            _shrink(value, sizes, (*seen, config))
        elif isinstance(value, float) and "drop" in key:
            _try(config, key, 0.0)
        elif isinstance(value, list | tuple) and LISTS.get(key) and "hidden_size" in sizes:
            _try(config, key, LISTS[key](len(value)))
        elif key in sizes and type(value) is int:
            _try(config, key, min(sizes[key], value))
        elif key in ("vocab_size", "pad_token_id") and value is None:
            _try(config, key, SIZES[key])
    for key in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types"):
        layers = getattr(config, key, None)
        if isinstance(layers, list) and len(layers) > 2:
            kinds = list(dict.fromkeys(layers))  # one layer of every kind, and two at least
            kept = (kinds * 2)[: max(2, len(kinds))]
            _try(config, key, kept)
            _try(config, "num_hidden_layers", len(kept))
    return config


def _try(config: Any, key: str, value: Any) -> None:
    try:
        setattr(config, key, value)
    except Exception:
        return


#: Attempts to make a configuration small: what fits one family does not fit the next.
FEW = (
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth "
    "vocab_size num_experts num_local_experts n_routed_experts pad_token_id bos_token_id "
    "eos_token_id decoder_start_token_id"
).split()
ATTEMPTS: list[dict[str, Any]] = [
    SIZES,
    SIZES | {"num_key_value_heads": 4},
    {key: size for key, size in SIZES.items() if key not in ("image_size", "patch_size")},
    {key: SIZES[key] for key in FEW},
]


def _from_config(name: str, auto: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import CONFIG_MAPPING

    problems = []
    for sizes in ATTEMPTS:
        try:
            config = _shrink(CONFIG_MAPPING[name](), sizes)
            config.use_cache = False
            with torch.device("meta"):
                large = sum(p.numel() for p in auto.from_config(config).parameters()) > 5e6
            if large:
                raise Unavailable("it stays large")
            model = auto.from_config(config)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:150])
            continue
        for inputs in _inputs(model, config):
            try:
                _main(model(**inputs))
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}"[:150])
                continue
            return model, inputs
    raise Unavailable(problems[0] if problems else f"its main input is {model.main_input_name!r}")


def _inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Random inputs that a model may take, the likeliest first."""
    known, main = inspect.signature(model.forward).parameters, model.main_input_name
    vocabulary = getattr(config.get_text_config(), "vocab_size", 99) or 99
    words = torch.randint(3, max(vocabulary, 4), (2, 12))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", 3) or 3
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    drawn = {
        "input_ids": words,
        "pixel_values": torch.randn(2, channels, height, width),
        "input_values": torch.randn(2, 4000),
        "input_features": torch.randn(2, bins, 128),
    }
    more = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known:
        more["decoder_input_ids"] = words
    if "input_ids" in known and "pixel_values" in known:
        yield {"input_ids": words, "pixel_values": drawn["pixel_values"]} | more
    for key in dict.fromkeys((main, *drawn)):
        if key in known and key in drawn:
            yield {key: drawn[key]} | more
    if "input_values" in known:
        yield {"input_values": drawn["input_values"][:, None]} | more
        yield {"input_values": torch.randn(2, bins, 64)} | more
        yield {"input_values": torch.randn(2, 1024, bins)} | more
    if "input_features" in known:
        yield {"input_features": torch.randn(2, 64, bins)} | more


TIMM = """
    vit_tiny_patch16_224 deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 cait_xxs24_224
    beit_base_patch16_224 eva02_tiny_patch14_224 xcit_nano_12_p8_224 convit_tiny crossvit_9_240
    coat_lite_tiny levit_128s pit_ti_224 tnt_s_legacy_patch16_224 volo_d1_224 nest_tiny_jx
    twins_svt_small visformer_tiny poolformer_s12 caformer_s18 convformer_s18
    swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_ns_224 pvt_v2_b0
    gcvit_xxtiny davit_tiny focalnet_tiny_srf hiera_tiny_224 maxvit_rmlp_pico_rw_256
    coatnet_nano_rw_224 mobilevit_xxs mobilevitv2_050 edgenext_xx_small efficientformer_l1
    efficientformerv2_s0 fastvit_t8 tiny_vit_5m_224 repvit_m0_9 swiftformer_xs sequencer2d_s
    mixer_s32_224 gmixer_12_224 gmlp_ti16_224 resmlp_12_224 convmixer_768_32 convnext_atto
    convnextv2_atto inception_next_atto starnet_s1 rdnet_tiny resnet18 resnet26d resnetv2_18
    resnetv2_50x1_bit resnext26ts seresnet18 skresnet18 resnest14d res2net50_14w_8s regnetx_002
    regnety_002 regnetz_b16 nf_regnet_b0 nfnet_l0 dm_nfnet_f0 repvgg_a0 dla46x_c densenet121
    hrnet_w18_small vgg11 selecsls42 ese_vovnet19b_slim xception41 inception_v3 mobilenetv2_050
    mobilenetv3_small_050 mobilenetv4_conv_small_035 efficientnet_lite0 tf_efficientnetv2_b0
    efficientnet_b0 ghostnet_050 ghostnetv2_100 hardcorenas_a lcnet_035 mnasnet_small
    semnasnet_075 tinynet_e fbnetc_100 hgnetv2_b0 cspresnet50 cspdarknet53 darknet53 gernet_s
    lambda_resnet26t halonet26t botnet26t_256 bat_resnext26ts eca_resnet33ts gcresnext26ts
    haloregnetz_b vovnet39a mambaout_femto shvit_s1 test_vit test_convnext
""".split()


def timm_entries() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    _stand_in_for_torchvision()
    import timm

    def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        small = {"num_classes": 7, "drop_rate": 0.0}
        attempts: list[dict[str, Any]] = [
            {"img_size": 64, "depth": 2},
            {"img_size": 64},
            {"depth": 2},
            {},
        ]
        if not name.startswith(("vit", "deit", "cait", "beit", "eva", "xcit", "convit", "mixer")):
            attempts = attempts[1::2]
        problem: Exception | None = None
        for more in attempts:
            try:
                model = timm.create_model(name, **small, **more)
            except Exception as error:
                problem = error
                continue
            wanted = model.default_cfg.get("input_size", (3, 224, 224))[-1]
            sizes = [more["img_size"]] if "img_size" in more else [64, 96, wanted]
            for size in sizes:
                try:
                    with torch.no_grad():
                        model(torch.randn(2, 3, size, size))
                except Exception as error:
                    problem = error
                    continue
                return model, (torch.randn(2, 3, size, size),)
        raise Unavailable(str(problem))

    return {name: lambda name=name: build(name) for name in TIMM}


TORCHVISION = """
    alexnet squeezenet1_1 shufflenet_v2_x0_5 mnasnet0_5 mobilenet_v2 mobilenet_v3_small
    efficientnet_b0 regnet_y_400mf resnet18 densenet121 convnext_tiny swin_t maxvit_t
""".split()


def torchvision_entries() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    _stand_in_for_torchvision()
    from torchvision import models

    def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        size = 224 if name in ("maxvit_t",) else 64
        return models.get_model(name, num_classes=7), (torch.randn(2, 3, size, size),)

    return {name: lambda name=name: build(name) for name in TORCHVISION}


def segmentation_entries() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    _stand_in_for_torchvision()
    import segmentation_models_pytorch as smp

    encoders = {"resnet18": 64, "mobilenet_v2": 64, "timm-efficientnet-b0": 64}
    kinds = (
        "Unet UnetPlusPlus MAnet Linknet FPN PSPNet PAN DeepLabV3 DeepLabV3Plus UPerNet Segformer"
    )

    def build(kind: str, encoder: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        size = encoders[encoder]
        model = getattr(smp, kind)(encoder, encoder_weights=None, classes=3)
        return model, (torch.randn(2, 3, size, size),)

    entries = {f"{kind}-resnet18": (kind, "resnet18") for kind in kinds.split()}
    entries |= {f"Unet-{encoder}": ("Unet", encoder) for encoder in encoders}
    return {name: lambda pair=pair: build(*pair) for name, pair in entries.items()}


GRAPHS = """
    GCNConv ChebConv SAGEConv GraphConv GatedGraphConv ResGatedGraphConv GATConv GATv2Conv
    TransformerConv TAGConv GINConv ARMAConv SGConv APPNP MFConv FeaStConv LEConv ClusterGCNConv
    GENConv FiLMConv SuperGATConv FAConv EGConv GeneralConv LGConv SSGConv PNAConv EdgeConv
""".split()


def graph_entries() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    _stand_in_for_torchvision()
    from torch_geometric import nn as graphs

    def layer(name: str, n: int) -> nn.Module:
        kind = getattr(graphs, name)
        inner = nn.Sequential(nn.Linear(2 * n if name == "EdgeConv" else n, n), nn.GELU())
        more: dict[str, tuple[Any, ...]] = {
            "ChebConv": (n, n, 3),
            "GatedGraphConv": (n, 2),
            "GINConv": (inner,),
            "EdgeConv": (inner,),
            "APPNP": (3, 0.1),
            "FAConv": (n,),
            "LGConv": (),
            "SSGConv": (n, n, 0.1),
            "EGConv": (n, n, ["mean", "max", "std"]),
            "PNAConv": (n, n, ["mean", "max", "std"], ["identity"], torch.tensor([0, 4, 8])),
        }
        return kind(*more.get(name, (n, n)))

    class Network(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.layers = nn.ModuleList(layer(name, 16) for _ in range(2))
            self.norm, self.last = graphs.GraphNorm(16), nn.Linear(16, 4)
            self.twice = name == "FAConv"

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = start = torch.relu(self.first(x))
            for layer in self.layers:
                x = layer(x, start, edges) if self.twice else layer(x, edges)
                x = F.elu(self.norm(x))
            return self.last(x)

    def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        edges = torch.randint(20, (2, 80))
        return Network(name), (torch.randn(20, 8), edges)

    return {name: lambda name=name: build(name) for name in GRAPHS}


LIBRARIES = {
    "transformers": transformers_entries,
    "timm": timm_entries,
    "torchvision": torchvision_entries,
    "segmentation": segmentation_entries,
    "graphs": graph_entries,
}


@functools.cache
def _stand_in_for_torchvision() -> torch.library.Library:
    """Declare the operators that torchvision looks for, where its compiled part does not load."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # the operators are there as long as this is


# measurements


def measure(
    build: Callable[[], tuple[nn.Module, Any]],
    steps: int = 0,
    dtype: torch.dtype = torch.float32,
    displacement: float | None = None,
) -> dict[str, Any]:
    """All that is measured of one architecture."""
    _seed(0)
    try:
        model, inputs = build()
        model = _without_dropout(model.to(dtype)).train()
        inputs = _map(inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)
        _seed(1)
        start = time.perf_counter()
        outputs = _main(_call(model, inputs))
        if time.perf_counter() - start > SLOW:
            raise Unavailable("it is slow")
        if not outputs.requires_grad or not bool(outputs.isfinite().all()):
            raise Unavailable("its outputs are not finite, or have no gradient")
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    batches = [inputs, *(_other(inputs, seed) for seed in range(1, 4))]
    sizes = outputs.detach().std() + 1e-3
    targets = [sizes * torch.randn_like(outputs) for _ in batches]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    plain = outputs.detach()

    lifted = lpom.lift(model, displacement=displacement or "auto")
    _restore(model, buffers)
    _seed(1)
    outputs = _main(_call(lifted, inputs))
    size = float(plain.abs().max())
    measured: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward": float((outputs.detach() - plain).abs().max()) / max(size, 1e-30),
    }
    measured |= _compare(model, lifted, inputs, targets[0], buffers)
    measured["fit"] = _step_of_fit(model, lifted, inputs, targets[0], buffers)
    measured["report"] = str(lifted.report())
    measured["plain"] = audit(lifted, inputs, buffers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cosines = {0: measured["cosine"]}
    start = time.perf_counter()
    for step in range(1, steps + 1):
        k = step % len(batches)
        optimizer.zero_grad()
        loss = _loss(lifted, batches[k], targets[k])
        loss.backward()
        optimizer.step()
        if step in (EARLY, steps):
            found = _compare(model, lifted, batches[0], targets[0])
            cosines[step] = found["cosine"]
            measured["last"] = found
    measured["step_seconds"] = (time.perf_counter() - start) / max(steps, 1)
    return measured | {"cosines": cosines}


def _compare(
    model: nn.Module,
    lifted: nn.Module,
    inputs: Any,
    target: Tensor,
    buffers: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Gradients of the plain and of the lifted model on one batch."""
    buffers = copy.deepcopy(dict(model.named_buffers())) if buffers is None else buffers
    gradients = []
    for which in (model, lifted):
        _restore(model, buffers)
        model.zero_grad()
        _seed(1)
        _loss(which, inputs, target).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    _restore(model, buffers)
    model.zero_grad()
    plain, other = gradients
    a = torch.cat([g.flatten().double() for g in plain.values()])
    b = torch.cat([other[n].flatten().double() for n in plain if n in other])
    missing = sorted(set(plain) - set(other))
    if missing:
        return {"cosine": float("nan"), "missing": missing}
    each = {
        n: float(_cosine(plain[n], other[n]))
        for n in plain
        if float(plain[n].norm()) > 1e-4 * float(a.norm())
    }
    worst = sorted((cosine, name) for name, cosine in each.items())[:3]
    return {
        "cosine": float(_cosine(a, b)),
        "length": float(b.norm() / a.norm()),
        "worst": worst,
    }


def _step_of_fit(
    model: nn.Module, lifted: nn.Module, inputs: Any, target: Tensor, buffers: dict[str, Tensor]
) -> float:
    """How far the gradient of the default step of `lpom.fit` is from that of `lpom.lift`."""
    loss = lpom.losses.get("squared")
    gradients = []
    for by_fit in (True, False):
        _restore(model, buffers)
        before = copy.deepcopy(model.state_dict())
        model.zero_grad()
        _seed(1)
        given = inputs if isinstance(inputs, dict) or len(inputs) > 1 else inputs[0]
        batch = Batch(given, target)
        if by_fit:
            method = lpom.LPOM(weights=lpom.Adaptive("sgd", 1e-6), displacement=lifted.displacement)
            problem = Problem(model, loss, read=_main)
            method.step(problem, batch, method.init(problem))
        else:
            outputs = _main(_call(lifted, inputs))
            outputs.backward(loss.gradient(outputs.detach(), target) / batch.total)
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.load_state_dict(before)
    _restore(model, buffers)
    found, expected = gradients
    if found.keys() != expected.keys():
        return float("inf")
    apart = sum(float((found[n] - expected[n]).double().square().sum()) for n in found)
    size = sum(float(g.double().square().sum()) for g in expected.values())
    return math.sqrt(apart / max(size, 1e-60))


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.flatten().double(), b.flatten().double()
    if not bool(a.any() or b.any()):  # an output that has died
        return torch.ones(())
    return a @ b / (a.norm() * b.norm())


def audit(
    lifted: nn.Module, inputs: Any, buffers: dict[str, Tensor] | None = None
) -> dict[str, int]:
    """What autograd's graph has that bends and is not lifted: names of operations, and how many.

    Functions of weights alone do not count. Operations that choose (a maximum) do not either.
    """
    data = _map(inputs, lambda x: x.detach().requires_grad_(x.is_floating_point()))
    with torch.enable_grad():
        try:
            outputs = _main(_call(lifted, data))
        except RuntimeError:  # some models do this to their inputs themselves
            data = _map(inputs, torch.Tensor.detach)
            outputs = _main(_call(lifted, data))
    if buffers is not None:
        _restore(lifted, buffers)
    starts = {id(_leaf(x)) for x in _tensors(data) if x.requires_grad}
    nodes, stack = {}, [outputs.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and id(node) not in nodes:
            nodes[id(node)] = node
            stack += [below for below, _ in node.next_functions]
    of_data: dict[int, bool] = {}
    for node in _upwards(outputs.grad_fn):
        below = [of_data[id(n)] for n, _ in node.next_functions if n is not None]
        reads = _kind(node) in ("Embedding", "EmbeddingBag", *([] if starts else PRODUCTS))
        of_data[id(node)] = any(below) or reads or id(node) in starts
    found: Counter[str] = Counter()
    for node in nodes.values():
        if of_data[id(node)] and _bends(node, of_data):
            found[_kind(node)] += 1
    return dict(found)


def _upwards(top: Any) -> Iterator[Any]:
    """The nodes below ``top``, each after those that it reads."""
    done, stack = set(), [(top, False)]
    while stack:
        node, ready = stack.pop()
        if node is None or id(node) in done:
            continue
        if ready:
            done.add(id(node))
            yield node
        else:
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions]


def _bends(node: Any, of_data: dict[int, bool]) -> bool:
    if _is_lifted(node):
        return False
    kind = _kind(node)
    below = [n is not None and of_data[id(n)] for n, _ in node.next_functions]
    if kind == "Div":  # of a state by a number is affine; by a state it is not
        return below[-1]
    if kind == "Pow" and getattr(node, "_saved_exponent", None) in (1, 2, 3, 4):
        return False  # a product
    return kind not in (*AFFINE, *CHOICES, *BATCH_NORMS)


def _is_lifted(node: Any) -> bool:
    """Whether it is a function of this library: its backward is the rule."""
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__.split(".")[0] == "lpom"


def _kind(node: Any) -> str:
    """What autograd calls an operation, without "Backward0" and the like."""
    name = type(node).__name__.rstrip("0123456789")
    return name.removesuffix("Backward") or name


def _leaf(x: Tensor) -> Any:
    return x.view_as(x).grad_fn.next_functions[0][0]


def _loss(model: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    outputs = _main(_call(model, inputs))
    return (outputs - target).square().mean() / target.square().mean()


def _call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _main(outputs: Any) -> Tensor:
    """The logits, or the first floating tensor that has a gradient."""
    if hasattr(outputs, "get") and outputs.get("logits") is not None:
        outputs = outputs["logits"]
    for x in _tensors(outputs):
        if x.is_floating_point() and (x.requires_grad or not torch.is_grad_enabled()):
            return x
    raise Unavailable("no output has a gradient")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if hasattr(value, "values") else value
    if isinstance(value, list | tuple) or hasattr(value, "values"):
        return [x for part in values for x in _tensors(part)]
    return []


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: change(x) for key, x in value.items()}
    return tuple(change(x) for x in value)


def _other(inputs: Any, seed: int) -> Any:
    """Inputs of the same shapes: floats drawn anew, whole numbers in another order."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator).to(x.dtype)
        order = torch.randperm(x.numel(), generator=generator)
        return x.flatten()[order].view(x.shape)

    return _map(inputs, drawn)


def _seed(seed: int) -> None:
    """Of all that models draw from as they run."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("drop_prob", "layerdrop", "dropout", "attention_dropout", "p_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@torch.no_grad()
def _restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in getattr(model, "module", model).named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


# one process each


def run(library: str, folder: Path, options: argparse.Namespace) -> None:
    path = folder / f"{library}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {json.loads(line)["name"] for line in lines}
    entries = LIBRARIES[library]()
    names = [n for n in entries if fnmatch.fnmatchcase(n, options.name)]
    names = [n for n in names[:: options.every] if n not in done]
    left = options.limit
    for name in names:
        if left is not None and left <= 0:
            break
        result = _forked(
            functools.partial(
                measure, entries[name], options.steps, options.dtype, options.displacement
            ),
            options,
        )
        with path.open("a") as file:
            file.write(json.dumps({"name": name, **result}) + "\n")
        left = left if left is None or result["status"] == "unavailable" else left - 1
        print(f"{library} {name}: {_line(result)}", flush=True)


def _forked(work: Callable[[], dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What `work` gives in a child that may take `options.seconds`, or how it failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(options.seconds)
        result: dict[str, Any]
        try:
            result = {"status": "done", **work()}
        except Unavailable as error:
            result = {"status": "unavailable", "error": str(error)[:300]}
        except BaseException as error:
            where = traceback.format_exc().splitlines()[-12:]
            result = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:600]}
            result["where"] = where
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if text:
        return json.loads(text)
    return {"status": "failed", "error": f"the process ended with {status} (a signal if negative)"}


def _line(result: dict[str, Any]) -> str:
    if result["status"] != "done":
        return f"{result['status']}: {result['error'][:200]}"
    cosines = " ".join(f"{value:.5f}" for value in result["cosines"].values())
    return (
        f"cosines {cosines}, forward {result['forward']:.0e}, "
        f"fit {result.get('fit', math.nan):.0e}, "
        f"plain {result['plain'] or '-'}"
    )


def show(folder: Path) -> None:
    """A summary of every library, and what falls short."""
    for path in sorted(folder.glob("*.jsonl")):
        results = [json.loads(line) for line in path.read_text().splitlines()]
        done = [r for r in results if r["status"] == "done"]
        failed = [r for r in results if r["status"] == "failed"]
        least = {r["name"]: min(r["cosines"].values()) for r in done}
        good = [sum(c >= bound for c in least.values()) for bound in (0.98, 0.99, 0.999)]
        print(
            f"{path.stem}: {len(done)} lifted, {len(failed)} failed, cosine at least 0.98, 0.99, "
            f"0.999: {good}; something plain in {sum(bool(r['plain']) for r in done)}; the step "
            f"of fit is that of lift to 1e-5 in {sum(r.get('fit', 1) < 1e-5 for r in done)}"
        )
        for r in failed:
            print(f"  {r['name']}: {r['error'][:160]}")
        for r in done:
            if not least[r["name"]] >= 0.99 or r["plain"] or r["forward"] > 1e-4:
                print(f"  {r['name']}: {_line(r)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--library", choices=LIBRARIES, action="append")
    parser.add_argument("--name", default="*", help="a pattern of the architectures' names")
    parser.add_argument("--every", type=int, default=1, help="take every so many of them")
    parser.add_argument("--limit", type=int, help="how many to lift in this call, for each library")
    parser.add_argument("--steps", type=int, default=EARLY, help="of AdamW, on the lifted model")
    parser.add_argument("--seconds", type=int, default=120, help="for each architecture")
    parser.add_argument("--displacement", type=float)
    parser.add_argument("--float64", dest="dtype", action="store_const", const=torch.float64)
    parser.add_argument("--show", action="store_true", help="only print what is in the folder")
    parser.set_defaults(dtype=torch.float32)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not options.show:
        for library in options.library or LIBRARIES:
            run(library, options.folder, options)
    show(options.folder)


if __name__ == "__main__":
    main()
