"""The vision models: sizes, masks, resampling, compiled and exported forms."""

from typing import Any

import pytest
import timm
import torch
from helpers import assert_close, fixes_trained_sizes, randn
from timm.layers import get_notrace_functions, get_notrace_modules
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torchvision.models.feature_extraction import create_feature_extractor

from aft_vision.models.aft_vit import checkpoint_filter_fn, pool_tokens
from aft_vision.models.attention_block import AttentionBlock

SMALL: dict[str, Any] = dict(embed_dim=48, depth=2, num_classes=7)
FAMILIES: dict[str, dict[str, Any]] = {
    'aft_conv_tiny': dict(num_heads=48, kernel_size=5),
    'aft_conv_tiny_k11_h32': dict(num_heads=4, kernel_size=5),
    'aft_full_tiny': dict(bias_dim=16),
    'aft_simple_tiny': {},
    'aft_conv_tiny onehot': dict(num_heads=4, mixer='onehot'),
    'aft_axial_tiny': dict(num_heads=4, window_size=(3, 5)),
    'aft_axial_tiny hybrid': dict(num_heads=4, window_size=4, local_conv=True, attention_blocks=[0]),
}
GRID_MODELS = ('aft_conv', 'aft_axial')
# Models of different graphs, by their depth: neither the number of heads nor a second block of a kind changes one,
# AFT-full resamples the position embedding of AFT-simple, and the hybrid has a block of AFT-axial and one of attention.
GRAPHS = {
    'aft_conv_tiny': 1,
    'aft_full_tiny': 1,
    'aft_conv_tiny onehot': 1,
    'aft_axial_tiny hybrid': 2,
}
ON_GRID = [name for name in FAMILIES if name.startswith(GRID_MODELS)]
SIZES = [(224, 224), (192, 192), (240, 240), (32, 480), (208, 112), (16, 16), (16, 48), (96, 96), (400, 176)]
SIZES += [(1024, 768)]
GRIDS = [(224, 224), (96, 96), (128, 160), (64, 224), (192, 208), (320, 80), (112, 112), (240, 272)]


def make(name: str, **kwargs: Any) -> nn.Module:
    """A small model of the family with position biases that matter."""
    torch.manual_seed(0)
    model = timm.create_model(name.split()[0], **{**SMALL, **FAMILIES[name], **kwargs}).eval()
    for key, p in model.named_parameters():
        if 'position_bias' in key or key.endswith(('gamma', 'beta', 'attn.weight')):
            nn.init.normal_(p, std=0.5)
    for offset in model.buffers():
        offset.random_(-2, 3)
    return model


def dynamic(name: str) -> dict[str, Any]:
    return {} if name.startswith(GRID_MODELS) else {'dynamic_img_size': True}


def images(*size: int, batch: int = 2) -> Tensor:
    return randn(batch, 3, *size, seed=5, dtype=torch.float32)


@torch.inference_mode()
def assert_takes(model: nn.Module, sizes: list[tuple[int, int]]) -> None:
    for size in sizes:
        y = model(images(*size, batch=1))
        assert y.shape == (1, 3)
        assert torch.isfinite(y).all(), size


@pytest.mark.parametrize('name', FAMILIES)
def test_each_family_takes_any_image_size(name: str):
    assert_takes(make(name, num_classes=3, **dynamic(name)), SIZES)


# The tests of the exported programs, in which a size may be no constant at all, have the others, and AFT-conv trains at
# two sizes below.
@pytest.mark.parametrize('name', ['aft_full_tiny', 'aft_axial_tiny hybrid'])
def test_eight_grids_make_at_most_two_graphs(name: str):
    torch._dynamo.reset()
    model = make(name, depth=GRAPHS[name], **dynamic(name))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for size in GRIDS:
            assert_close(compiled(images(*size)), model(images(*size)), 1e-5)
    assert counter.frame_count <= 2


def export_of_any_size(model: nn.Module) -> torch.export.ExportedProgram:
    height, width = torch.export.Dim('height', min=2, max=64), torch.export.Dim('width', min=2, max=64)
    sizes = {'x': {2: 16 * height, 3: 16 * width}}
    with torch.no_grad():
        return torch.export.export(model, (images(224, 192),), dynamic_shapes=sizes)


@pytest.mark.parametrize(
    ('name', 'depth', 'fused'), [*((name, depth, False) for name, depth in GRAPHS.items()), ('aft_conv_tiny', 1, True)]
)
def test_one_exported_program_serves_every_grid(name: str, depth: int, fused: bool):
    model = make(name, depth=depth, **dynamic(name))
    if fused:
        model = timm.utils.reparameterize_model(model)
    program = export_of_any_size(model).module()
    with torch.no_grad():
        for size in GRIDS[:5]:
            assert_close(program(images(*size)), model(images(*size)), 1e-5)


@pytest.mark.parametrize('bias', [dict(bias_dim=16), dict(bias_dim=None, factorize_bias=False)], ids=str)
def test_one_exported_program_of_aft_local_serves_every_grid(bias: dict[str, Any]):
    model = make('aft_full_tiny', mixer='local', window_size=5, depth=1, dynamic_img_size=True, **bias)
    program = export_of_any_size(model).module()
    with torch.no_grad():
        # The smallest has fewer tokens than one block of the band.
        for size in [*GRIDS[:2], (32, 48)]:
            assert_close(program(images(*size)), model(images(*size)), 1e-5)


# The tests of the export have AFT-conv and AFT-axial, also as ONNX files.
@pytest.mark.parametrize('name', ['aft_conv_tiny onehot', 'aft_axial_tiny'])
def test_an_exportable_model_is_a_program_of_torch_s_own_operators_for_every_grid(name: str, tmp_path):
    model = make(name, depth=1, exportable=True)
    exported = export_of_any_size(model)
    operators = {str(node.target) for node in exported.graph.nodes if node.op == 'call_function'}
    assert operators
    assert not [operator for operator in operators if operator.startswith('aft_vision')]
    runs = [exported.module()]
    if 'onehot' in name:
        pytest.importorskip('onnxscript')
        runtime = pytest.importorskip('onnxruntime')
        torch.onnx.export(exported, f=str(tmp_path / 'model.onnx'), dynamo=True, verbose=False)
        session = runtime.InferenceSession(tmp_path / 'model.onnx')
        runs.append(lambda x: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]))
    with torch.no_grad():
        for size in GRIDS[:3]:
            for run in runs:
                assert_close(run(images(*size)), model(images(*size)), 1e-5)


def assert_trains_as_compiled(module: nn.Module, *inputs: Any, **options: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, **options)
    want, got = (
        torch.autograd.grad(run(*inputs).square().sum(), list(module.parameters())) for run in (module, compiled)
    )
    for (key, _), a, b in zip(module.named_parameters(), got, want, strict=True):
        # That of the bias of keys cancels: rounding noise, measured against its neighbours'.
        assert_close(a, b, 1e-3, key, floor=b.norm().item() if key.endswith('qkv.bias') else 0.0)


# AFT-conv trains in a compiled graph below; the gradients of the other operators there are those of torch's opcheck in
# tests/ops.
def test_a_compiled_model_trains_to_the_same_gradients():
    name = 'aft_axial_tiny hybrid'
    assert_trains_as_compiled(make(name, depth=GRAPHS[name], img_size=64), images(64, 64), backend='aot_eager')


def test_a_mixer_compiled_by_inductor_trains_to_the_same_gradients():
    mixer = make('aft_conv_tiny', depth=1, img_size=64).blocks[0].attn
    # Without vector instructions, whose headers take a third of the time of the compiler.
    options = {'cpp.simdlen': 1, 'cpp.vec_isa_ok': True}
    assert_trains_as_compiled(mixer, randn(2, 16, 48, dtype=torch.float32), (4, 4), options=options)


# A gumbel kernel, in the graph of a fixed one; factors, resampled as the band of AFT-local and the position embedding
# of AFT-simple are. A first size whose sides differ makes the graph of all.
@pytest.mark.parametrize(
    ('name', 'kwargs', 'backend', 'graphs'),
    [
        ('aft_conv_tiny', dict(gumbel=True, straight_through=True), 'aot_eager', 1),
        # torch's own gradients, as inductor's do not compile with an open size.
        pytest.param('aft_full_tiny', {}, 'eager', 2, marks=fixes_trained_sizes),
    ],
    ids=str,
)
def test_a_model_compiled_for_open_sizes_trains_at_several(
    name: str, kwargs: dict[str, Any], backend: str, graphs: int
):
    torch._dynamo.reset()
    model = make(name, depth=1, **dynamic(name), **kwargs).train()
    counter = CompileCounterWithBackend(backend)
    compiled, counts = torch.compile(model, fullgraph=True, backend=counter, dynamic=True), set()
    for size in [(48, 80), (64, 64)]:
        got, want = [], []
        for forward, gradients in ((model, want), (compiled, got)):
            torch.manual_seed(3)
            found = torch.autograd.grad(forward(images(*size)).square().sum(), list(model.parameters()))
            gradients += [x.flatten() for x in found]
        assert_close(torch.cat(got), torch.cat(want), 1e-4)
        counts.add(counter.frame_count)
    assert len(counts) == graphs


@pytest.mark.parametrize('name', FAMILIES)
def test_a_scripted_model_gives_the_same(name: str):
    with timm.layers.set_scriptable(True):
        model = make(name, img_size=64)
    x = images(64, 64)
    assert_close(torch.jit.script(model)(x), model(x), 1e-6)


VARIANTS = [
    dict(query_gate=False, global_context=False, local_conv=True),
    dict(gumbel=True, straight_through=True),
    dict(name='aft_axial_tiny', window_size=3, resample_bias=True),
]


@pytest.mark.parametrize('kwargs', VARIANTS, ids=str)
def test_variants_of_the_mixers_script_and_compile(kwargs: dict[str, Any]):
    torch._dynamo.reset()
    model = make(**{'name': 'aft_conv_tiny', 'depth': 1, **kwargs})
    x = images(64, 96)
    with torch.no_grad():
        assert_close(torch.jit.script(model)(x), model(x), 1e-6)
        assert_close(torch.compile(model, fullgraph=True, backend='aot_eager')(x), model(x), 1e-5)


@pytest.mark.parametrize('straight_through', [False, True])
def test_a_gumbel_model_in_training_scripts_compiles_and_traces(straight_through: bool):
    torch._dynamo.reset()
    model = make('aft_conv_tiny', depth=1, gumbel=True, straight_through=straight_through).train()
    x = images(64, 96)

    def seeded(forward) -> Tensor:
        torch.manual_seed(3)
        return forward(x).detach()

    expected = seeded(model)
    assert_close(seeded(torch.jit.script(model)), expected, 1e-6)
    assert_close(seeded(torch.compile(model, fullgraph=True, backend='eager')), expected, 1e-6)
    leaves = dict(leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions())
    traced = create_feature_extractor(model, return_nodes=['head'], tracer_kwargs=leaves, suppress_diff_warning=True)
    assert_close(seeded(lambda x: traced(x)['head']), expected, 1e-6)


def test_a_temperature_that_changes_at_each_update_is_compiled_at_most_twice():
    torch._dynamo.reset()
    model = make('aft_conv_tiny', depth=1, gumbel=True).train()
    counter = CompileCounter()
    compiled, x = torch.compile(model, backend=counter, fullgraph=True), images(64, 64)
    outputs = []
    for update in range(6):
        for block in model.blocks:
            block.attn.tau = 0.5 * 0.7**update
        for forward in (model, compiled):
            torch.manual_seed(1)
            outputs.append(forward(x).detach())
        assert_close(outputs[-1], outputs[-2], 1e-6)
    # Once with the first temperature as a constant, once with any.
    assert counter.frame_count <= 2
    assert not torch.allclose(outputs[0], outputs[-1], rtol=1e-3)


@pytest.mark.parametrize('name', FAMILIES)
def test_the_residual_stream_is_contiguous(name: str):
    seen: list[Tensor] = []
    model = make(name)
    model.blocks[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(images(224, 224, batch=1))
    assert seen[0].is_contiguous()


@pytest.mark.parametrize('name', ON_GRID)
def test_a_mask_makes_a_padded_batch_equal_each_image_alone(name: str):
    model = make(name)
    sizes = [(96, 64), (64, 128), (16, 16), (112, 128)]
    batch, mask = torch.zeros(len(sizes), 3, 112, 128), torch.zeros(len(sizes), 7, 8, dtype=torch.bool)
    for i, (height, width) in enumerate(sizes):
        batch[i, :, :height, :width] = images(height, width, batch=1)[0]
        mask[i, : height // 16, : width // 16] = True
    with torch.no_grad():
        for pool in ('avg', 'max', 'avgmax'):
            model.global_pool = pool
            y = model(batch, attn_mask=mask)
            assert_close(model(batch, attn_mask=mask.flatten(1)), y, 1e-6)
            for i, (height, width) in enumerate(sizes):
                assert_close(y[i : i + 1], model(images(height, width, batch=1)), 1e-5)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize('pool_type', ['avg', 'avgmax'])
def test_a_masked_mean_of_many_tokens_keeps_its_digits(pool_type: str, dtype: torch.dtype):
    # The sum of 9216 tokens near 8 is beyond float16.
    x, mask = (8 + randn(2, 9216, 5)).to(dtype), torch.arange(9216).expand(2, -1) < 9000
    y = pool_tokens(x, mask, pool_type, 0, True)
    assert y.dtype == dtype
    kept = x[:, :9000].double()
    expected = kept.mean(1) if pool_type == 'avg' else 0.5 * (kept.mean(1) + kept.amax(1))
    # One or two roundings to the type of the tokens.
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps + 1e-12, atol=0)


def test_attention_pooling_has_heads_that_divide_any_width():
    model = make('aft_conv_tiny', embed_dim=200, num_heads=8, global_pool='map')
    assert model(images(64, 64)).shape == (2, model.num_classes)


@pytest.mark.parametrize('padding', [7.0, float('nan')])
@pytest.mark.parametrize('name', FAMILIES)
def test_masked_tokens_are_not_seen(name: str, padding: float):
    model = make(name, **dynamic(name))
    mask = torch.ones(2, 6, 4, dtype=torch.bool)
    mask[:, :, 2:] = False
    x = images(96, 64)
    changed = x.clone()
    # Attention multiplies values by weights of 0.
    changed[:, :, :, 32:] = 7.0 if any(isinstance(block, AttentionBlock) for block in model.blocks) else padding
    with torch.no_grad():
        assert_close(model(changed, attn_mask=mask), model(x, attn_mask=mask), 1e-5)
        assert not torch.allclose(model(changed), model(x), rtol=1e-3)


@pytest.mark.parametrize('name', ['aft_full_tiny', 'aft_simple_tiny'])
def test_set_input_size_equals_dynamic_resampling(name: str):
    flexible = make(name, dynamic_img_size=True)
    fixed = make(name)
    fixed.load_state_dict(flexible.state_dict())
    fixed.set_input_size((160, 96))
    x = images(160, 96)
    with torch.no_grad():
        assert_close(fixed(x), flexible(x), 1e-5)
        assert fixed(x).shape == (2, 7)


def test_set_input_size_keeps_frozen_parameters_frozen():
    model = make('aft_full_tiny').requires_grad_(False)
    model.set_input_size((128, 96))
    assert model.blocks[1].attn.position_bias.u.shape == (49, 16)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize('kwargs', [{}, {'factorize_bias': False, 'bias_dim': None}], ids=['factors', 'whole bias'])
def test_a_checkpoint_of_another_size_is_resampled(kwargs: dict[str, Any]):
    source, target = make('aft_full_tiny', img_size=160, **kwargs), make('aft_full_tiny', img_size=(96, 128), **kwargs)
    target.load_state_dict(checkpoint_filter_fn(source.state_dict(), target))
    source.set_input_size((96, 128))
    assert_close(target(images(96, 128)), source(images(96, 128)), 1e-5)


@pytest.mark.parametrize('size', [dict(img_size=(96, 128)), dict(img_size=80, patch_size=8)], ids=str)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_what_a_checkpoint_in_half_precision_is_resampled_to_is_not_rounded(dtype: torch.dtype, size: dict[str, Any]):
    source, target = make('aft_full_tiny', img_size=160).to(dtype), make('aft_full_tiny', **size)
    found = checkpoint_filter_fn(source.state_dict(), target)
    expected = checkpoint_filter_fn(source.float().state_dict(), target)
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert torch.equal(found[name].float(), x), name


def test_weights_of_the_models_own_grid_are_not_resampled_by_the_default_size_of_its_name(tmp_path):
    size = dict(depth=1, num_classes=3, img_size=(112, 448))
    source = timm.create_model('aft_full_tiny', **size)
    torch.save(source.state_dict(), tmp_path / 'own.pth')
    # 14 x 14 tokens, the grid of 224 px, are as many as 7 x 28.
    overlay = dict(file=str(tmp_path / 'own.pth'), num_classes=3)
    loaded = timm.create_model('aft_full_tiny', pretrained=True, pretrained_cfg_overlay=overlay, **size)
    torch.testing.assert_close(loaded.state_dict(), source.state_dict(), rtol=0, atol=0)
    overlay |= {'input_size': (3, 64, 784)}
    loaded = timm.create_model('aft_full_tiny', pretrained=True, pretrained_cfg_overlay=overlay, **size)
    assert not torch.equal(loaded.pos_embed, source.pos_embed)


def test_a_checkpoint_of_another_patch_size_is_resampled():
    source, target = make('aft_full_tiny', img_size=64), make('aft_full_tiny', img_size=32, patch_size=8)
    target.load_state_dict(checkpoint_filter_fn(source.state_dict(), target))
    assert torch.equal(target.blocks[0].attn.position_bias.u, source.blocks[0].attn.position_bias.u)
    assert target.patch_embed.proj.weight.shape == (48, 3, 8, 8)


def test_a_fused_model_exports_what_was_loaded_last():
    fused = timm.utils.reparameterize_model(make('aft_full_tiny', img_size=64))
    other = make('aft_full_tiny', img_size=64)
    nn.init.normal_(other.blocks[0].attn.position_bias.u)
    fused.load_state_dict(other.state_dict())
    with torch.no_grad():
        program = torch.export.export(fused, (images(64, 64),)).module()
        assert_close(program(images(64, 64)), other(images(64, 64)), 1e-5)
        assert_close(torch.jit.script(fused)(images(64, 64)), other(images(64, 64)), 1e-5)


@pytest.mark.parametrize('name', FAMILIES)
def test_a_model_runs_on_the_meta_device(name: str):
    with torch.device('meta'):
        model = timm.utils.reparameterize_model(make(name, img_size=64))
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize('name', FAMILIES)
def test_an_empty_batch_gives_empty_logits(name: str):
    assert make(name, img_size=64)(images(64, 64, batch=0)).shape == (0, 7)


@pytest.mark.parametrize('pool', ['avg', 'max', 'avgmax'])
def test_an_image_without_patches_is_pooled_to_zero(pool: str):
    model = make('aft_conv_tiny', global_pool=pool)
    logits = model(images(64, 64), attn_mask=torch.zeros(2, 4, 4, dtype=torch.bool))
    assert_close(logits[0], model.head.bias, 1e-6)


@pytest.mark.parametrize('name', FAMILIES)
def test_a_model_trains_under_autocast_close_to_float32(name: str):
    model = make(name, img_size=64)
    x = images(64, 64)
    want = torch.autograd.grad(model(x).square().sum(), model.head.weight)[0]
    with torch.autocast('cpu', torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert_close(torch.autograd.grad(y.float().square().sum(), model.head.weight)[0], want, 5e-2)


@pytest.mark.parametrize('prefix', [True, False])
@pytest.mark.parametrize('only', [True, False])
def test_a_dict_of_intermediates_has_what_the_other_form_returns(prefix: bool, only: bool):
    model, options = make('aft_full_tiny', img_size=64), dict(return_prefix_tokens=prefix, intermediates_only=only)
    found = model.forward_intermediates(images(64, 64), **options)
    packed = model.forward_intermediates(images(64, 64), output_dict=True, **options)
    features, intermediates = (None, found) if only else found
    maps, prefixes = zip(*intermediates, strict=True) if prefix else (intermediates, ())
    expected = {'image_intermediates': maps, 'image_intermediates_prefix': prefixes, 'image_features': features}
    assert packed.keys() == {key for key, value in expected.items() if value is not None and len(value)}
    for key, value in packed.items():
        assert_close(torch.cat([*value]), torch.cat([*expected[key]]), 1e-6)


def test_the_ablations_change_the_parameters_they_name():
    def count(name: str, **kwargs: Any) -> int:
        with torch.device('meta'):
            return sum(p.numel() for p in timm.create_model(name, depth=2, **kwargs).parameters())

    conv, full = count('aft_conv_small'), count('aft_full_small')
    assert conv - count('aft_conv_small', query_gate=False) == 2 * (384 * 384 + 384)
    assert conv - count('aft_conv_small', standardize_kernel=False) == 2 * 2 * 384
    assert count('aft_conv_small', kernel_size=27) - conv == 2 * 384 * (27**2 - 11**2)
    assert count('aft_full_small', factorize_bias=False) - full == 2 * (197**2 - 2 * 197 * 128)
    assert count('aft_conv_small', global_context=False, gumbel=False) == conv


def test_an_odd_image_can_be_padded():
    model = timm.create_model('aft_conv_tiny', **SMALL, num_heads=48, dynamic_img_pad=True).eval()
    assert model(images(50, 71)).shape == (2, 7)
    features = model.forward_intermediates(images(50, 71), intermediates_only=True)
    assert features[-1].shape == (2, 48, 4, 5)


ATTENTION: dict[str, dict[str, Any]] = {
    name: FAMILIES[name] | {'attention_blocks': [1]} for name in ('aft_conv_tiny', 'aft_full_tiny', 'aft_simple_tiny')
}


@pytest.mark.parametrize('name', ATTENTION)
def test_an_attention_block_is_that_of_a_vit(name: str):
    model = make(name, embed_dim=128, img_size=64, **ATTENTION[name] | ({'num_heads': 4} if 'conv' in name else {}))
    vit = timm.create_model('vit_tiny_patch16_224', embed_dim=128, depth=2, num_heads=2).eval()
    block = vit.blocks[1]
    block.load_state_dict(model.blocks[1].state_dict())
    x = randn(2, 17, 128, dtype=torch.float32)
    mask = torch.arange(17).expand(2, -1) < 9
    assert_close(model.blocks[1](x, (4, 4), None), block(x), 1e-6)
    assert_close(model.blocks[1](x, (4, 4), mask)[:, :9], block(x[:, :9]), 1e-5)


def test_an_attention_block_takes_the_arguments_of_attention():
    model = timm.create_model('aft_conv_tiny', **SMALL, num_heads=4, attention_blocks=(1,), qk_norm=True)
    assert isinstance(model.blocks[1].attn.q_norm, nn.LayerNorm)
    assert model(images(64, 64)).shape == (2, 7)


def test_a_mixer_that_no_block_has_needs_no_arguments():
    assert make('aft_simple_tiny', img_size=64, mixer='local', attention_blocks=[0, 1])(images(64, 64)).shape == (2, 7)


def test_a_batch_without_patches_passes_an_attention_block():
    model = make('aft_conv_tiny', num_heads=4, attention_blocks=[1])
    logits = model(images(64, 64), attn_mask=torch.zeros(2, 4, 4, dtype=torch.bool))
    assert_close(logits[0], model.head.bias, 1e-6)


def test_a_mask_of_patches_that_training_drops_is_an_error():
    model, mask = make('aft_simple_tiny', img_size=64, patch_drop_rate=0.5), torch.ones(2, 4, 4, dtype=torch.bool)
    assert_close(model(images(64, 64), attn_mask=mask), model(images(64, 64)), 1e-5)
    with pytest.raises(ValueError, match='attn_mask needs patch_drop_rate = 0 in training'):
        model.train()(images(64, 64), attn_mask=mask)
    patches = {'patches': torch.zeros(2, 4, 768), 'patch_coord': torch.zeros(2, 4, 2), 'patch_valid': mask[:, 0]}
    with pytest.raises(ValueError, match='a dict of patches needs patch_drop_rate = 0 in training'):
        model(patches)


def test_arguments_of_a_mixer_are_those_of_the_model_or_a_dict():
    sizes = dict(num_heads=4, kernel_size=3, standardize_kernel=False)
    flat, nested = make('aft_conv_tiny', **sizes), make('aft_conv_tiny', mixer_args=sizes)
    nested.load_state_dict(flat.state_dict())
    assert torch.equal(nested(images(32, 32)), flat(images(32, 32)))


@pytest.mark.parametrize(
    'name', ['aft_conv_nano', 'aft_full_nano', 'aft_simple_nano', 'aft_axial_nano', 'aft_pyramid_nano']
)
def test_plain_torch_fx_traces_a_model(name: str):
    model, x = timm.create_model(name, img_size=32 if 'pyramid' not in name else None).eval(), images(32, 32)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize('name', ['aft_full_nano', 'aft_simple_nano', 'aft_full_tiny'])
def test_the_size_of_an_overlay_is_that_of_a_fixed_model(name: str):
    model = timm.create_model(name, depth=1, pretrained_cfg_overlay=dict(input_size=(3, 64, 32)))
    assert timm.data.resolve_model_data_config(model)['input_size'] == (3, 64, 32)
    assert model(images(64, 32)).shape == (2, model.num_classes)


REJECTED = [
    (ValueError, lambda: make('aft_conv_tiny')(images(70, 64)), 'multiples of the patch size 16 x 16, got 70 x 64'),
    (ValueError, lambda: make('aft_full_tiny')(images(64, 64)), 'takes images of 224 x 224 pixels, got 64 x 64'),
    (ValueError, lambda: timm.create_model('aft_conv_tiny', class_token=True), 'does not support class_token'),
    (ValueError, lambda: timm.create_model('aft_full_tiny', num_heads=3), 'num_heads must be 1, got 3'),
    (ValueError, lambda: timm.create_model('aft_conv_tiny', patch_drop_rate=0.5), 'patch_drop_rate must be 0'),
    (
        TypeError,
        lambda: timm.create_model('aft_conv_tiny', resample_bias=True, bias_dim=8),
        "mixer='conv' has no bias_dim, resample_bias; it takes num_heads, local_conv, kernel_size, ",
    ),
    (
        TypeError,
        lambda: timm.create_model('aft_full_tiny', mixer='local'),
        "missing 1 required positional argument: 'window_size'",
    ),
    (
        TypeError,
        lambda: timm.create_model('aft_full_tiny', mixer_args={'width': 3}),
        "mixer='full' has no width; it takes factorize_bias, bias_dim",
    ),
    (ValueError, lambda: timm.create_model('aft_conv_tiny', mixer='attention'), "mixer must be one of full, .*'atten"),
    (TypeError, lambda: timm.create_model('aft_conv_tiny', qk_norm=True), 'qk_norm is an argument of attention'),
    (ValueError, lambda: timm.create_model('aft_conv_tiny', attention_blocks=[12]), r'0 to 11, got \[12\]'),
    (
        ValueError,
        lambda: make('aft_conv_tiny')(images(64, 64), attn_mask=torch.ones(2, 15, dtype=torch.bool)),
        r'attn_mask must be a bool tensor of shape \(B, 4, 4\) or \(B, 16\)',
    ),
    (ValueError, lambda: timm.create_model('aft_full_tiny', dynamic_img_pad=True), 'needs dynamic_img_size=True'),
    (
        ValueError,
        lambda: checkpoint_filter_fn(
            make('aft_full_tiny', img_size=(96, 160)).state_dict(), make('aft_full_tiny', img_size=64)
        ),
        "the checkpoint's 60 positions are no square grid",
    ),
]


@pytest.mark.parametrize(('error', 'call', 'message'), REJECTED, ids=[message for *_, message in REJECTED])
def test_a_wrong_input_is_named(error: type[Exception], call, message: str):
    with pytest.raises(error, match=message):
        call()
