"""Files of a hub folder that load a model where this package and timm are not installed."""

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_input_data_config
from timm.layers import DropPath, LayerNorm, LayerScale, Mlp, PatchDropout
from timm.layers.activations import GELU, GELUTanh
from timm.models.vision_transformer import Attention
from torch import nn

from aft_vision.export.network import ACTIVATIONS, Architecture, Network
from aft_vision.export.network import MIXERS as NETWORK_MIXERS
from aft_vision.export.program import TOLERANCE
from aft_vision.export.verify import Check, check_logits
from aft_vision.inline import inline
from aft_vision.layers import (
    AFTBlock,
    AFTPatchEmbed,
    AxisBias,
    FactorizedBias,
    PairwiseBias,
    StandardizedKernel,
)
from aft_vision.layers.fused import FusedConv2d, FusedLinear, InplaceGELU, InplaceHardswish
from aft_vision.layers.mixers import MIXERS
from aft_vision.models import AFTVisionTransformer
from aft_vision.models.attention_block import AttentionBlock

MODELING = 'modeling_aft_vision'
# The oldest version for which the modelling file is tested, that of the `text` extra.
TRANSFORMERS = '5.24'
# Entries of config.json by which transformers finds the classes of the modelling file.
AUTO_MAP = {
    'AutoConfig': f'{MODELING}.AFTVisionConfig',
    'AutoModel': f'{MODELING}.AFTVisionModel',
    'AutoModelForImageClassification': f'{MODELING}.AFTVisionForImageClassification',
}
ACTIVATION_NAMES = {
    nn.GELU: 'gelu',
    GELU: 'gelu',
    GELUTanh: 'gelu_tanh',
    InplaceGELU: 'gelu',
    nn.ReLU: 'relu',
    nn.ReLU6: 'relu6',
    nn.SiLU: 'silu',
    nn.Hardswish: 'hard_swish',
    InplaceHardswish: 'hard_swish',
}
NORMS = (LayerNorm, nn.LayerNorm)
# Modules that `Network` has too, or that do nothing in evaluation.
PARTS = (
    *(AFTVisionTransformer, AFTPatchEmbed, AFTBlock, AttentionBlock, Attention, Mlp, LayerScale),
    *(StandardizedKernel, AxisBias, FactorizedBias, PairwiseBias),
    *(nn.Sequential, nn.Conv2d, nn.Linear, FusedConv2d, FusedLinear, nn.Identity, nn.Dropout, DropPath, PatchDropout),
    *(*(MIXERS[name] for name in NETWORK_MIXERS), *ACTIVATION_NAMES, *NORMS),
)
# The argument of the model by which a part of another type is avoided, by the last name of that part.
FIXES = {
    'act': f'act_layer of {", ".join(ACTIVATIONS)}',
    'mlp': 'the default mlp_layer',
    'attn_pool': "global_pool='avg', 'max', 'avgmax' or 'token'",
    'patch_embed': 'the default embed_layer',
}
# Filters of PIL, by the names of timm.
RESAMPLE = {'nearest': 0, 'lanczos': 1, 'bilinear': 2, 'bicubic': 3, 'box': 4, 'hamming': 5}

HEADER = '''"""{architecture}: the evaluation network of a model of aft_vision, without that package and timm.

Use it through transformers' Auto classes with trust_remote_code=True, or hubconf.py.
Both need transformers >= {transformers}.
An attention-free vision transformer: https://arxiv.org/abs/2105.14103. For training, use aft_vision: dropout,
stochastic depth and Gumbel noise are left out here.
"""

'''
HUBCONF = '''"""torch.hub.load(FOLDER, {name!r}, source='local'), with FOLDER the path of this folder.

It needs transformers >= {transformers}.
"""

import importlib.util
import sys
from pathlib import Path

dependencies = ['torch', 'transformers', 'safetensors']


def {name}():
    """Load the model: images (B, {channels}, H, W), and attn_mask where images are padded, to logits (B, {classes})."""
    folder = Path(__file__).parent
    # Another folder in the same process has another file of this name.
    name = f'{modeling}_{{abs(hash(folder))}}'
    spec = importlib.util.spec_from_file_location(name, folder / '{modeling}.py')
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AFTVisionForImageClassification.from_pretrained(folder).network.eval()
'''


class UnsupportedError(ValueError):
    """A model has a part without a standalone network."""

    def __init__(self, part: str, fix: str) -> None:
        super().__init__(f'{part} has no form without aft_vision: expected {fix}, or an export without the code')


def hub_name(architecture: str) -> str:
    """Return the name of a model in hubconf.py."""
    return ''.join(x if x.isalnum() else '_' for x in architecture)


def write_code(model: AFTVisionTransformer, folder: Path, size: tuple[int, int]) -> list[Check]:
    """Write the modelling file, hubconf.py and preprocessor_config.json, and enter them into the folder's config.json.

    Args:
        model: The model whose config.json is in the folder.
        size: (H, W) in pixels of preprocessed images.

    Returns:
        The comparisons with the model on random images.

    Raises:
        UnsupportedError: a part of the model has no standalone network; the message names the fix.
        ValueError: the standalone network differs from the model.
    """
    arch = describe(model)
    checks = compare(model, arch, TOLERANCE)
    cfg: Any = model.pretrained_cfg
    architecture = cfg['architecture']
    processor = image_processor(model, size)
    classes = ['AFTVisionModel', 'AFTVisionForImageClassification']
    if processor is not None:
        classes.insert(0, 'AFTVisionImageProcessor')
    # Only the model's mixer, and what it needs, is in the file.
    mixers = f'MIXERS: dict[str, Callable[..., Mixer]] = {{{arch.mixer!r}: {arch.mixer.capitalize()}Mixer}}'
    text = HEADER.format(architecture=architecture, transformers=TRANSFORMERS) + inline(
        *(f'aft_vision.export.{MODELING}:{name}' for name in classes), replace={'MIXERS': mixers}
    )
    (folder / f'{MODELING}.py').write_text(text, encoding='utf-8')
    hubconf = HUBCONF.format(
        name=hub_name(architecture),
        channels=arch.in_chans,
        classes=model.num_classes,
        modeling=MODELING,
        transformers=TRANSFORMERS,
    )
    (folder / 'hubconf.py').write_text(hubconf, encoding='utf-8')
    path = folder / 'config.json'
    config = json.loads(path.read_text(encoding='utf-8'))
    config.update(auto_map=AUTO_MAP, network=asdict(arch))
    if processor is not None:
        config['auto_map'] = {**AUTO_MAP, **processor['auto_map']}
        (folder / 'preprocessor_config.json').write_text(json.dumps(processor, indent=2), encoding='utf-8')
    path.write_text(json.dumps(config, indent=2), encoding='utf-8')
    return checks


def describe(model: AFTVisionTransformer) -> Architecture:
    """Return the architecture of a model.

    Raises:
        UnsupportedError: a part of the model has no standalone network; the message names the fix.
    """
    _check_parts(model)
    patch: Any = model.patch_embed
    blocks: list[Any] = list(model.blocks)
    attention = [index for index, block in enumerate(blocks) if isinstance(block, AttentionBlock)]
    # All blocks but those have the same mixer, unless `compare` finds a difference.
    block = next(block for block in blocks if not isinstance(block, AttentionBlock))
    mixer = block.attn
    return Architecture(
        img_size=tuple(patch.img_size),
        patch_size=tuple(patch.patch_size),
        in_chans=patch.proj.in_channels,
        embed_dim=model.embed_dim,
        depth=len(blocks),
        hidden_dim=block.mlp.fc1.out_features,
        mixer=mixer.name,
        mixer_args=mixer.describe(),
        query_gate=mixer.query_gate,
        qkv_bias=mixer.qkv.bias is not None,
        proj_bias=mixer.proj.bias is not None,
        attention_blocks=tuple(attention),
        attention_args=_attention_args(blocks[attention[0]].attn) if attention else {},
        activation=_activation(block.mlp.act),
        norm_eps=block.norm1.eps,
        layer_scale=isinstance(block.ls1, LayerScale),
        any_size=bool(model.dynamic_img_size),
        pad=bool(patch.dynamic_img_pad),
        embed_bias=patch.proj.bias is not None,
        embed_norm=_is_norm(patch.norm),
        class_token=model.cls_token is not None,
        reg_tokens=0 if model.reg_token is None else model.reg_token.shape[1],
        pos_embed=model.pos_embed is not None,
        no_embed_class=bool(model.no_embed_class),
        pre_norm=_is_norm(model.norm_pre),
        mlp_norm=bool(attention) and _is_norm(blocks[attention[0]].mlp.norm),
        final_norm=_is_norm(model.norm),
        fc_norm=_is_norm(model.fc_norm),
        global_pool=model.global_pool,
        pool_include_prefix=bool(model.pool_include_prefix),
    )


@torch.no_grad()
def compare(model: AFTVisionTransformer, arch: Architecture, tolerance: float) -> list[Check]:
    """Compare the standalone network with the model, at two sizes if it takes any, with and without a mask.

    Raises:
        ValueError: they differ by more than the tolerance, or have other parameters.
    """
    model = copy.deepcopy(model).cpu().float().eval()
    network = Network(arch, model.num_classes).eval()
    try:
        network.load_state_dict(model.state_dict())
    except RuntimeError as error:
        raise UnsupportedError('a model with blocks of several kinds', 'one mixer and one kind of MLP') from error
    checks = []
    rows, columns = arch.grid
    for number, grid in enumerate([(rows, columns), (rows + 1, columns + 3)][: 1 + arch.any_size]):
        size = grid[0] * arch.patch_size[0], grid[1] * arch.patch_size[1]
        images = torch.randn(2, arch.in_chans, *size, generator=torch.Generator().manual_seed(number))
        mask = torch.ones(2, *grid, dtype=torch.bool)
        mask[1, :, grid[1] // 2 + 1 :] = False
        for attn_mask in (None, mask):
            expected = model(images, attn_mask=attn_mask)
            checks.append(check_logits(network(images, attn_mask), expected, size, tolerance))
    return checks


def image_processor(model: nn.Module, size: tuple[int, int]) -> dict[str, Any] | None:
    """Return the configuration of transformers' image processor for a model's evaluation transform.

    With the modelling file its pixels are those of timm's transform. Without it, in BitImageProcessor, they are
    within two grey levels; where the crop would start between two pixels, it may start one pixel earlier.

    Args:
        size: (H, W) in pixels.

    Returns:
        The content of preprocessor_config.json; None if no image processor has such a transform.
    """
    config = resolve_input_data_config(model)
    # Those of transformers give three channels.
    if config['input_size'][0] != 3:
        return None
    scaled = tuple(math.floor(side / config['crop_pct']) for side in size)
    mode = config.get('crop_mode') or 'center'
    if mode == 'squash':
        resized = {'height': scaled[0], 'width': scaled[1]}
    elif mode == 'center' and scaled[0] == scaled[1]:
        resized = {'shortest_edge': scaled[0]}
    else:
        return None
    if config['interpolation'] not in RESAMPLE:
        return None
    return {
        'auto_map': {'AutoImageProcessor': f'{MODELING}.AFTVisionImageProcessor'},
        'image_processor_type': 'BitImageProcessor',
        'do_convert_rgb': True,
        'do_resize': True,
        'size': resized,
        'resample': RESAMPLE[config['interpolation']],
        'do_center_crop': True,
        'crop_size': {'height': size[0], 'width': size[1]},
        'do_rescale': True,
        'rescale_factor': 1 / 255,
        'do_normalize': True,
        'image_mean': list(config['mean']),
        'image_std': list(config['std']),
    }


def _check_parts(model: AFTVisionTransformer) -> None:
    for name, module in model.named_modules():
        if type(module) not in PARTS:
            fix = FIXES.get(name.rpartition('.')[2], "norm_layer='layernorm' and no other layers of your own")
            raise UnsupportedError(f'{type(module).__name__} ({name or "the model"})', fix)
    norms: list[Any] = [module for module in model.modules() if isinstance(module, NORMS)]
    if len({norm.eps for norm in norms}) > 1 or not all(
        norm.elementwise_affine and norm.bias is not None for norm in norms
    ):
        raise UnsupportedError('a mixture of norms', 'one norm_layer, with weights, for all')
    if not model.num_classes:
        raise UnsupportedError('a model without classifier', 'num_classes of at least 1')
    if all(isinstance(block, AttentionBlock) for block in model.blocks):
        raise UnsupportedError('softmax attention in every block', 'one that is not in attention_blocks')


def _attention_args(attention: Any) -> dict[str, Any]:
    names = {'qk_norm': attention.q_norm, 'scale_norm': attention.norm}
    return {'num_heads': attention.num_heads, **{name: _is_norm(norm) for name, norm in names.items()}}


def _activation(act: nn.Module) -> str:
    return 'gelu_tanh' if getattr(act, 'approximate', '') == 'tanh' else ACTIVATION_NAMES[type(act)]


def _is_norm(module: nn.Module) -> bool:
    return not isinstance(module, nn.Identity)
