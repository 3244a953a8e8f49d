"""The mixers: projections around the operations, fusing, and what they refuse."""

import copy
import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from helpers import assert_close, generator, randn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aft_vision import layers, ops
from aft_vision.layers import (
    AFTAxial,
    AFTBlock,
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTMixer,
    AFTOnehot,
    AFTSimple,
    AxisBias,
    CausalFull,
    CausalLocal,
    CausalSimple,
    position_bias,
    register_mixer,
)

GRID = (3, 4)
MAKERS: dict[str, Callable[..., AFTMixer]] = {
    'full': lambda **kw: AFTFull(8, num_tokens=12, bias_dim=4, grid=GRID, **kw),
    'full_whole_bias': lambda **kw: AFTFull(8, num_tokens=12, factorize_bias=False, grid=GRID, **kw),
    'full_causal': lambda **kw: CausalFull(8, num_tokens=12, bias_dim=4, **kw),
    'local': lambda **kw: AFTLocal(8, num_tokens=12, window_size=3, bias_dim=4, grid=GRID, **kw),
    'local_whole_bias': lambda **kw: AFTLocal(8, num_tokens=12, window_size=3, factorize_bias=False, grid=GRID, **kw),
    'local_causal': lambda **kw: CausalLocal(8, num_tokens=12, window=3, bias_dim=4, **kw),
    'simple': lambda **kw: AFTSimple(8, **kw),
    'simple_causal': lambda **kw: CausalSimple(8, **kw),
    'conv': lambda **kw: AFTConv(8, num_heads=2, kernel_size=5, **kw),
    'conv_raw': lambda **kw: AFTConv(8, num_heads=2, kernel_size=5, standardize_kernel=False, **kw),
    'conv_gumbel': lambda **kw: AFTConv(8, num_heads=2, kernel_size=5, gumbel=True, **kw),
    'onehot': lambda **kw: AFTOnehot(8, num_heads=2, **kw),
    'conv_local': lambda **kw: AFTConv(8, num_heads=2, kernel_size=5, local_conv=True, **kw),
    'onehot_local': lambda **kw: AFTOnehot(8, num_heads=2, local_conv=True, **kw),
    'axial': lambda **kw: AFTAxial(8, num_heads=2, window_size=(2, 4), **kw),
    'axial_raw': lambda **kw: AFTAxial(8, num_heads=2, window_size=3, standardize_kernel=False, **kw),
    'axial_resampled': lambda **kw: AFTAxial(8, num_heads=2, window_size=6, resample_bias=True, **kw),
    'axial_local': lambda **kw: AFTAxial(8, num_heads=2, window_size=(2, 4), local_conv=True, **kw),
    'conv_straight_through': lambda **kw: AFTConv(
        8, num_heads=2, kernel_size=5, gumbel=True, straight_through=True, **kw
    ),
}
FUSED = [name for name in MAKERS if not name.startswith(('simple', 'onehot'))]


def randomized(mixer: nn.Module, scale: float = 0.5) -> nn.Module:
    """Every parameter drawn at a scale where the position bias matters, and every offset."""
    for i, p in enumerate(mixer.parameters()):
        p.data.copy_(randn(*p.shape, seed=i, scale=scale))
    if isinstance(mixer, AFTOnehot):
        mixer.offset.random_(-2, 3, generator=generator(6))
    return mixer


def call(mixer: AFTMixer, x: Tensor) -> Tensor:
    return mixer(x, GRID if mixer.on_grid else None)


def fused_module(mixer: AFTMixer) -> nn.Module:
    if isinstance(mixer, AFTAxial):
        return mixer.column_bias
    return mixer.kernel if isinstance(mixer, AFTConv) else mixer.position_bias


def bias_of(module: nn.Module) -> Tensor:
    return module(4) if isinstance(module, AxisBias) else module()


@pytest.mark.parametrize('name', MAKERS)
def test_every_parameter_of_a_mixer_gets_a_gradient(name: str):
    mixer = MAKERS[name](dtype=torch.float64)
    y = call(mixer, randn(2, 12, 8))
    assert y.shape == (2, 12, 8)
    y.square().sum().backward()
    assert [key for key, p in mixer.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize('name', MAKERS)
def test_a_mixer_is_made_on_the_given_device_and_in_the_given_dtype(name: str):
    mixer = MAKERS[name](device='meta', dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in mixer.parameters()} == {('meta', torch.bfloat16)}


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', MAKERS)
def test_a_fresh_mixer_is_finite_in_half_precision(name: str, dtype: torch.dtype):
    y = call(MAKERS[name](dtype=dtype), randn(2, 12, 8).to(dtype))
    assert y.dtype == dtype
    assert torch.isfinite(y).all()


def test_aft_full_projects_mixes_and_projects():
    mixer = randomized(MAKERS['full'](dtype=torch.float64))
    x = randn(2, 12, 8)
    q, k, v = mixer.qkv(x).chunk(3, dim=-1)
    bias = mixer.position_bias.u @ mixer.position_bias.v.T
    assert_close(mixer(x), mixer.proj(ops.aft_full(q, k, v, bias)), 1e-12)


def test_aft_conv_standardizes_its_kernel():
    mixer = randomized(MAKERS['conv'](dtype=torch.float64))
    x = randn(2, 12, 8)
    q, k, v = mixer.qkv(x).split([8, 2, 8], dim=-1)
    kernel = ops.standardized_kernel(mixer.kernel.weight, mixer.kernel.gamma, mixer.kernel.beta)
    assert_close(mixer(x, GRID), mixer.proj(ops.aft_conv(q, k, v, kernel, GRID)), 1e-12)


def test_aft_axial_standardizes_each_bias():
    mixer = randomized(MAKERS['axial'](dtype=torch.float64))
    x = randn(2, 12, 8)
    q, k, v = mixer.qkv(x).split([8, 2, 8], dim=-1)
    rows, columns = (
        ops.standardized_kernel(axis.weight[:, None], axis.gamma, axis.beta)[:, 0]
        for axis in (mixer.row_bias, mixer.column_bias)
    )
    assert_close(mixer(x, GRID), mixer.proj(ops.aft_axial(q, k, v, rows, columns, GRID)), 1e-12)


@pytest.mark.parametrize('name', ['axial', 'axial_resampled'])
def test_the_kernel_of_aft_axial_is_its_bias_at_every_offset(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64))
    conv = randomized(AFTConv(8, num_heads=2, kernel_size=7, standardize_kernel=False, dtype=torch.float64))
    conv.qkv, conv.proj = mixer.qkv, mixer.proj
    # A square of offsets, of which the grid has some.
    conv.kernel.weight.data.copy_(nn.functional.pad(mixer.kernel(GRID), [0, 0, 1, 1]))
    x = randn(2, 12, 8)
    assert_close(mixer(x, GRID), conv(x, GRID), 1e-12)


def test_a_resampled_axis_keeps_its_middle_and_its_ends():
    axis = randomized(AxisBias(2, 4, standardize=False, resample=True, dtype=torch.float64))
    for length in (2, 4, 9):
        bias = axis(length)
        assert bias.shape == (2, 2 * length - 1)
        for place in (0, length - 1, -1):
            assert_close(bias[:, place], axis.weight[:, 3 if place == length - 1 else place], 1e-12)
    assert_close(axis(4), axis.weight, 1e-12)


@pytest.mark.parametrize('name', ['conv_local', 'onehot_local', 'axial_local'])
def test_a_local_convolution_adds_to_the_result_behind_the_gate(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64))
    plain = MAKERS[name.removesuffix('_local')](dtype=torch.float64)
    plain.load_state_dict({key: x for key, x in mixer.state_dict().items() if 'local_conv' not in key})
    mask = torch.arange(12).expand(2, -1) < 7
    x = randn(2, 12, 8)
    v = mixer.qkv(x)[..., -8:].masked_fill(~mask[..., None], 0.0)
    maps = nn.functional.pad(v.transpose(1, 2).unflatten(2, GRID), [1, 1, 1, 1])
    taps, near = mixer.local_conv.weight, torch.zeros(2, 8, *GRID, dtype=torch.float64)
    for dy in range(3):
        for dx in range(3):
            near += taps[:, 0, dy, dx, None, None] * maps[:, :, dy : dy + GRID[0], dx : dx + GRID[1]]
    near = (near + mixer.local_conv.bias[:, None, None]).flatten(2).transpose(1, 2)
    assert_close(mixer(x, GRID, mask), plain(x, GRID, mask) + near @ mixer.proj.weight.T, 1e-12)


@pytest.mark.parametrize('kind', [AFTConv, AFTOnehot, AFTAxial])
def test_a_fresh_aft_conv_is_aft_simple(kind: type[AFTMixer]):
    conv, simple = kind(8, dtype=torch.float64), AFTSimple(8, dtype=torch.float64)
    simple.qkv, simple.proj = conv.qkv, conv.proj
    x = randn(2, 12, 8)
    assert_close(conv(x, GRID), simple(x), 1e-12)


@pytest.mark.parametrize('name', ['conv', 'conv_raw', 'conv_gumbel'])
def test_the_evaluated_bias_gives_the_output_of_evaluation(name):
    mixer = randomized(MAKERS[name](dtype=torch.float64)).eval()
    plain = randomized(MAKERS['conv_raw'](dtype=torch.float64)).eval()
    plain.load_state_dict({key: x for key, x in mixer.state_dict().items() if key in plain.state_dict()})
    with torch.no_grad():
        plain.kernel.weight.copy_(mixer.evaluated_bias())
    x = randn(2, 12, 8)
    assert_close(mixer(x, GRID), plain(x, GRID), 1e-12)


def test_gumbel_samples_in_training_and_keeps_the_largest_in_evaluation():
    mixer = randomized(MAKERS['conv_gumbel'](dtype=torch.float64))
    x = randn(2, 12, 8)
    assert not torch.equal(mixer(x, GRID), mixer(x, GRID))
    mixer.eval()
    q, k, v = mixer.qkv(x).split([8, 2, 8], dim=-1)
    hard = ops.hard_kernel(mixer.kernel())
    assert_close(mixer(x, GRID), mixer.proj(ops.aft_conv(q, k, v, hard, GRID)), 1e-12)


def test_aft_onehot_is_aft_conv_with_its_kernel():
    onehot = randomized(AFTOnehot(8, num_heads=2, kernel_size=7, dtype=torch.float64))
    conv = AFTConv(8, num_heads=2, kernel_size=7, standardize_kernel=False, dtype=torch.float64)
    conv.qkv, conv.proj = onehot.qkv, onehot.proj
    conv.kernel.weight.data.copy_(onehot.kernel())
    assert onehot.kernel().count_nonzero() == 2
    x = randn(2, 12, 8)
    assert_close(onehot(x, GRID), conv(x, GRID), 1e-12)


@pytest.mark.parametrize(('kernel_size', 'size'), [(None, 7), (5, 7), (11, 11)])
def test_the_kernel_of_aft_onehot_holds_every_offset(kernel_size: int | None, size: int):
    mixer = AFTOnehot(4, kernel_size=kernel_size)
    mixer.offset.copy_(torch.tensor([[0, 0], [-3, 1], [2, -2], [0, 3]]))
    nn.init.ones_(mixer.weight)
    kernel = mixer.kernel()
    assert kernel.shape == (4, size, size)
    assert torch.equal(kernel.nonzero()[:, 1:] - size // 2, mixer.offset)


def test_straight_through_biases_the_one_offset_that_is_sampled():
    mixer = randomized(MAKERS['conv_straight_through'](dtype=torch.float64))
    x = randn(2, 12, 8)
    torch.manual_seed(0)
    y = mixer(x, GRID)
    q, k, v = mixer.qkv(x).split([8, 2, 8], dim=-1)
    kernel = mixer.kernel()
    torch.manual_seed(0)
    place = ops.gumbel_kernel(kernel, straight_through=True).flatten(1).abs().argmax(1, keepdim=True)
    hard = torch.zeros_like(kernel.flatten(1)).scatter(1, place, kernel.flatten(1).gather(1, place)).view_as(kernel)
    assert_close(y, mixer.proj(ops.aft_conv(q, k, v, hard, GRID)), 1e-12)
    y.sum().backward()
    # The other offsets learn too, by the sample.
    assert (mixer.kernel.weight.grad != 0).all()


@pytest.mark.parametrize('name', MAKERS)
def test_a_mixer_without_query_has_no_query_weights(name: str):
    mixer = randomized(MAKERS[name](query_gate=False, dtype=torch.float64)).eval()
    with_query = MAKERS[name](dtype=torch.float64)
    assert with_query.qkv.out_features - mixer.qkv.out_features == 8
    assert torch.isfinite(call(mixer, randn(2, 12, 8))).all()


@pytest.mark.parametrize('name', ['full', 'full_whole_bias', 'local', 'local_whole_bias'])
def test_another_grid_resamples_the_bias_and_its_own_grid_does_not(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64))
    x = randn(2, 12, 8)
    assert torch.equal(mixer(x, GRID), mixer(x))
    other = randn(2, 30, 8)
    assert mixer(other, (5, 6)).shape == (2, 30, 8)
    expected = mixer(other, (5, 6))
    mixer.set_grid((5, 6))
    assert_close(mixer(other), expected, 1e-6)


@pytest.mark.parametrize('name', ['full', 'full_whole_bias'])
def test_resampling_keeps_the_rows_of_prefix_tokens(name: str):
    factorize = name == 'full'
    mixer = randomized(AFTFull(8, num_tokens=14, bias_dim=4, factorize_bias=factorize, grid=GRID))
    before, after = mixer.position_bias(), mixer.position_bias((6, 8))
    assert after.shape == (50, 50)
    assert_close(after[:2, :2], before[:2, :2], 1e-5)


@pytest.mark.parametrize('name', ['full_causal', 'local_causal'])
def test_a_shorter_sequence_uses_the_first_rows_of_the_bias(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64))
    x = randn(2, 12, 8)
    assert_close(mixer(x[:, :7]), mixer(x)[:, :7], 1e-12)


@pytest.mark.parametrize('name', FUSED)
def test_a_fused_mixer_gives_the_same_and_reads_its_cache(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64)).eval()
    x = randn(2, 12, 8)
    expected = call(mixer, x)
    assert mixer.fuse() is mixer
    with torch.no_grad():
        assert torch.equal(call(mixer, x), expected)
        fused_module(mixer).fused.zero_()
        assert not torch.equal(call(mixer, x), expected)


@pytest.mark.parametrize('name', FUSED)
@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'not fused'])
@torch.no_grad()
def test_writing_to_a_returned_bias_does_not_change_the_mixer(name: str, fused: bool):
    mixer, x = randomized(MAKERS[name](dtype=torch.float64)).eval(), randn(2, 12, 8)
    if fused:
        mixer.fuse()
    has_other_grids = name in ('full', 'full_whole_bias', 'local', 'local_whole_bias')
    grids = [GRID, (2, 6)] if has_other_grids else []
    expected = [call(mixer, x), *(mixer(x, grid) for grid in grids)]
    returned = [bias_of(fused_module(mixer)), *(mixer.position_bias(grid) for grid in grids)]
    if isinstance(mixer, AFTConv | AFTAxial):
        returned += [mixer.kernel()]
    if isinstance(mixer, AFTConv):
        returned += [mixer.evaluated_bias()]
    for bias in returned:
        bias.zero_()
    assert torch.equal(call(mixer, x), expected[0])
    # The last other grid first, while its bias is still the one kept.
    for grid, y in zip(reversed(grids), reversed(expected[1:]), strict=True):
        assert torch.equal(mixer(x, grid), y)


@pytest.mark.parametrize('name', ['full', 'full_whole_bias', 'local', 'local_whole_bias'])
def test_a_fused_mixer_keeps_the_bias_of_the_last_other_grid(name: str):
    mixer, x = randomized(MAKERS[name](dtype=torch.float64)).eval(), randn(2, 20, 8)
    expected = mixer(x, (4, 5))
    mixer.fuse()
    with torch.inference_mode():
        bias = mixer.position_bias((4, 5), copy=False)
        assert mixer.position_bias((4, 5), copy=False) is bias
        assert torch.equal(mixer(x, (4, 5)), expected)
        # A copy, like a file, has it not.
        assert copy.deepcopy(mixer).position_bias.resized is None
        assert mixer.position_bias((2, 6)).shape[0] == 12
        assert_close(mixer.position_bias((4, 5)), bias, 1e-12)


def test_a_fused_block_overwrites_hidden_values_only_without_gradients():
    block = AFTBlock(8, 'conv', num_heads=2, kernel_size=3).eval()
    x, kept = randn(2, 12, 8).float(), []
    expected = block(x, GRID)
    block.fuse()
    block.mlp.fc1.register_forward_hook(lambda module, inputs, output: kept.append(output))
    block.mlp.act.register_forward_hook(lambda module, inputs, output: kept.append(output))
    assert_close(block(x, GRID), expected.double(), 1e-6)
    with torch.no_grad():
        assert_close(block(x, GRID), expected.double(), 1e-6)
    before, after, overwritten, last = kept
    assert not torch.equal(before, after)
    assert overwritten is last
    exact = AFTBlock(8, 'conv', num_heads=2, kernel_size=3, act_layer=nn.ReLU).fuse()
    assert type(exact.mlp.act) is nn.ReLU


def test_training_what_is_fused_is_an_error_and_changes_nothing():
    block, x = randomized(AFTBlock(8, 'full', num_tokens=12, bias_dim=4)).eval(), randn(2, 12, 8).float()
    expected, plain = block(x), copy.deepcopy(block)
    block.fuse()
    for module in (block, block.attn, block.mlp):
        with pytest.raises(ValueError, match='is fused for inference and cannot be trained: train the model that'):
            module.train()
    block.eval()
    assert_close(block(x), expected.double(), 1e-6)
    # Gradients of images reach them; the constant bias has none.
    y = block(x.requires_grad_())
    assert torch.autograd.grad(y.sum(), x)[0].any()
    assert not any(p.requires_grad for p in block.attn.position_bias.parameters())
    plain.load_state_dict(block.state_dict())
    assert all(p.requires_grad for p in plain.train().parameters())


@pytest.mark.parametrize('name', FUSED)
def test_a_fused_mixer_follows_its_parameters(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64)).eval().fuse()
    other = randomized(MAKERS[name](dtype=torch.float64), scale=0.7).eval()
    x = randn(2, 12, 8)
    with torch.no_grad():
        stale = call(mixer, x)
        mixer.load_state_dict(other.state_dict())
        assert torch.equal(call(mixer, x), call(other, x))
        assert not torch.equal(call(mixer, x), stale)
        mixer.float()
        assert_close(call(mixer, x.float()), call(other, x), 1e-5)


# Mixers whose kernels take weights of the bias; the large one has a head per channel.
WEIGHED: dict[str, Callable[..., AFTMixer]] = {
    **{name: MAKERS[name] for name in ('full', 'full_whole_bias', 'conv')},
    'conv_depthwise': lambda **kw: AFTConv(72, kernel_size=5, **kw),
}


def weighed(name: str, seed: int = 0) -> tuple[AFTMixer, nn.Module, Tensor]:
    """Return a mixer in evaluation, the module of its bias, and an image of it."""
    mixer = randomized(WEIGHED[name](), scale=0.5 + seed / 10).eval()
    return mixer, fused_module(mixer), randn(1, 12, mixer.qkv.in_features).float()


@pytest.mark.parametrize('name', WEIGHED)
@torch.no_grad()
def test_a_fused_mixer_makes_the_weights_of_its_bias_once(name: str, monkeypatch: pytest.MonkeyPatch):
    mixer, module, x = weighed(name)
    expected, calls = mixer(x, GRID), []
    mixer.fuse()
    make = position_bias.bias_weights
    monkeypatch.setattr(position_bias, 'bias_weights', lambda *args: calls.append(args[0]) or make(*args))
    for _ in range(3):
        assert torch.equal(mixer(x, GRID), expected)
    assert calls == [module.operator]


@pytest.mark.parametrize('name', WEIGHED)
@torch.no_grad()
def test_the_weights_of_a_fused_mixer_follow_its_parameters(name: str):
    mixer, _, x = weighed(name)
    mixer.fuse()(x, GRID)
    other, _, _ = weighed(name, seed=3)
    mixer.load_state_dict(other.state_dict())
    assert torch.equal(mixer(x, GRID), other(x, GRID))
    assert torch.equal(mixer(x, (2, 6)), other(x, (2, 6)))
    assert torch.equal(mixer(x, GRID), other(x, GRID))
    mixer.bfloat16(), other.bfloat16()
    assert torch.equal(mixer(x.bfloat16(), GRID), other(x.bfloat16(), GRID))
    mixer.double(), other.double()
    assert torch.equal(mixer(x.double(), GRID), other(x.double(), GRID))


@pytest.mark.parametrize('name', WEIGHED)
@torch.no_grad()
def test_files_and_copies_of_a_fused_mixer_have_no_weights(name: str):
    mixer, _, x = weighed(name)
    mixer.fuse()

    def size() -> int:
        file = io.BytesIO()
        torch.save(mixer, file)
        return file.tell()

    before, expected = size(), mixer(x, GRID)
    mixer(x, (2, 6))
    assert abs(size() - before) < 100
    assert list(mixer.state_dict()) == list(WEIGHED[name]().state_dict())
    assert torch.equal(copy.deepcopy(mixer)(x, GRID), expected)


def jvp_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def grad_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: function(y).square().sum())(x)


@pytest.mark.parametrize('grid', [GRID, (2, 6)], ids=str)
@pytest.mark.parametrize('transform', [jvp_of, grad_of])
@pytest.mark.parametrize('name', WEIGHED)
def test_a_transform_of_a_fused_mixer_is_that_of_the_mixer(name: str, transform, grid: tuple[int, int]):
    mixer, _, x = weighed(name)
    mixer.requires_grad_(False)
    expected, y = transform(lambda each: mixer(each, grid), x), mixer(x, grid)
    mixer.fuse()
    for _ in range(2):
        # Before its weights are made, and after.
        assert_close(transform(lambda each: mixer(each, grid), x), expected.double(), 1e-5)
        assert torch.equal(mixer(x, grid), y)


@pytest.mark.parametrize('grid', [GRID, (2, 6)], ids=str)
@pytest.mark.parametrize('name', WEIGHED)
@torch.no_grad()
def test_fake_tensors_leave_a_fused_mixer_as_it_is(name: str, grid: tuple[int, int]):
    mixer, _, x = weighed(name)
    y = mixer(x, grid)
    mixer.fuse()
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert mixer(torch.empty(x.shape), grid).shape == y.shape
        assert torch.equal(mixer(x, grid), y)


@torch.no_grad()
def test_threads_share_the_weights_of_a_fused_mixer():
    mixer, _, x = weighed('full')
    grids = [(3, 4), (4, 3), (2, 6), (6, 2)]
    expected = [mixer(x, grid) for grid in grids]
    mixer.fuse()

    def run(i: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(mixer(x, grids[j % 4]), expected[j % 4]) for j in range(i, i + 50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(8)))


@pytest.mark.parametrize('name', MAKERS)
def test_reset_parameters_restores_a_poisoned_mixer(name: str):
    mixer = MAKERS[name]()
    for p in mixer.parameters():
        p.data.fill_(float('nan'))
    for buffer in mixer.buffers():
        buffer.fill_(-7)
    mixer.reset_parameters()
    assert all(torch.isfinite(p).all() for p in mixer.parameters())
    assert not any(buffer.any() for buffer in mixer.buffers())


@pytest.mark.parametrize(
    'name', ['full', 'local', 'simple', 'conv', 'conv_gumbel', 'conv_local', 'onehot', 'axial', 'axial_resampled']
)
def test_the_exportable_form_gives_the_same(name: str):
    mixer = randomized(MAKERS[name](dtype=torch.float64)).eval()
    with timm.layers.set_exportable(True):
        exportable = MAKERS[name](dtype=torch.float64).eval()
    exportable.load_state_dict(mixer.state_dict())
    x = randn(2, 12, 8)
    mask = torch.arange(12).expand(2, -1) < 7
    assert_close(exportable(x, GRID), mixer(x, GRID), 1e-12)
    assert_close(exportable(x, GRID, mask), mixer(x, GRID, mask), 1e-12)


@pytest.mark.parametrize('name', ['full', 'local', 'simple', 'conv', 'conv_gumbel', 'axial', 'axial_resampled'])
def test_the_exportable_form_has_no_clamp_with_one_bound_for_which_pnnx_writes_what_ncnn_cannot_load(name: str):
    with timm.layers.set_exportable(True):
        mixer = randomized(MAKERS[name]()).eval()
    graph = torch.export.export(mixer, (randn(2, 12, 8).float(), GRID)).graph
    clamps = [node for node in graph.nodes if 'clamp' in str(node.target)]
    assert clamps
    assert all(None not in node.args and len(node.args) == 3 for node in clamps)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', ['full', 'local', 'simple', 'conv', 'onehot', 'axial'])
def test_the_exportable_form_keeps_its_exponentials_in_float32(name: str, dtype: torch.dtype):
    mixer = randomized(MAKERS[name](dtype=torch.float64), scale=1.5).eval()
    with timm.layers.set_exportable(True):
        exportable = MAKERS[name](dtype=dtype).eval()
    exportable.load_state_dict(mixer.state_dict())
    mixer.load_state_dict(exportable.state_dict())  # the rounded parameters
    x = randn(2, 12, 8).to(dtype)
    assert_close(call(exportable, x), call(mixer, x.double()), 5e-2 if dtype == torch.bfloat16 else 1e-2)


@pytest.mark.parametrize('name', FUSED)
def test_autocast_rounds_no_position_bias(name: str):
    mixer = randomized(MAKERS[name]()).eval()
    module = fused_module(mixer)
    expected = bias_of(module)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(bias_of(module), expected)
        mixer.fuse()
    with torch.no_grad():
        assert torch.equal(bias_of(module), expected)


def test_fusing_in_inference_mode_keeps_an_ordinary_tensor():
    mixer = randomized(MAKERS['full']()).eval().requires_grad_(False)
    with torch.inference_mode():
        mixer.fuse()
    x = randn(2, 12, 8).float().requires_grad_()
    mixer(x).sum().backward()
    assert x.grad is not None


def test_parameters_made_in_inference_mode_are_read_again_when_loaded_or_fused():
    with torch.inference_mode():
        mixer = randomized(MAKERS['full']()).eval().fuse()
        other = randomized(MAKERS['full'](), scale=0.7).eval()
        x = randn(2, 12, 8).float()
        bias = mixer.position_bias(copy=False)
        assert mixer.position_bias(copy=False) is bias
        mixer.load_state_dict(other.state_dict())
        assert torch.equal(mixer(x), other(x))
        # Such a parameter does not count the writes to it.
        for each in (mixer, other):
            each.position_bias.u.mul_(3)
        assert torch.equal(mixer.fuse()(x), other(x))


def test_a_window_wider_than_the_grid_is_remembered_for_a_larger_one():
    local = randomized(AFTLocal(8, num_tokens=12, window_size=50, bias_dim=4, grid=GRID, dtype=torch.float64))
    full = randomized(AFTFull(8, num_tokens=12, bias_dim=4, grid=GRID, dtype=torch.float64))
    assert_close(local(randn(2, 12, 8)), full(randn(2, 12, 8)), 1e-12)
    assert_close(local(randn(2, 35, 8), (5, 7)), full(randn(2, 35, 8), (5, 7)), 1e-12)


def test_a_block_is_two_residual_branches():
    block = AFTBlock(8, mixer='conv', num_heads=2, kernel_size=3, init_values=0.5, dtype=torch.float64)
    x = randn(2, 12, 8)
    y = x + 0.5 * block.attn(block.norm1(x), GRID)
    assert_close(block(x, GRID), y + 0.5 * block.mlp(block.norm2(y)), 1e-12)


REJECTED = [
    (lambda: AFTAxial(8, window_size=0), 'window_size must be at least 1, got 0'),
    (lambda: AFTAxial(8, window_size=(4, 4, 4)), r'one number, or \(rows, columns\), got \(4, 4, 4\)'),
    (lambda: AFTLocal(8, num_tokens=4, window_size=(2, 2)), 'must be one number'),
    (lambda: AFTLocal(8, num_tokens=12, window_size=0), "mixer='simple'"),
    (lambda: AFTConv(8)(randn(1, 12, 8).float()), r'AFTConv needs the token grid \(H, W\)'),
    (lambda: AFTOnehot(8)(randn(1, 12, 8).float()), r'AFTOnehot needs the token grid \(H, W\)'),
    (lambda: AFTAxial(8)(randn(1, 12, 8).float()), r'AFTAxial needs the token grid \(H, W\)'),
    (lambda: AFTConv(8, num_heads=3), 'num_heads must divide dim = 8, got 3'),
    (lambda: AFTConv(8, kernel_size=4), 'kernel_size must be odd and positive, got 4'),
    (lambda: AFTOnehot(8, kernel_size=4), 'kernel_size must be odd and positive, got 4'),
    (lambda: AFTConv(8, gumbel=True, global_context=False), 'needs global_context=True'),
    (lambda: AFTConv(8, straight_through=True), 'needs gumbel=True, got gumbel=False'),
    (lambda: AFTConv(8, gumbel=True, tau=math.nan), 'tau must be positive, got nan'),
    (lambda: AFTConv(8, tau=0.3), 'tau=0.3 needs gumbel=True, got gumbel=False'),
    (lambda: AFTFull(8, num_tokens=12)(randn(1, 12, 8).float(), (3, 4)), 'made without a grid'),
    (lambda: AFTFull(8, num_tokens=11, grid=(3, 4)), r'more than the num_tokens = 11'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for *_, message in REJECTED])
def test_a_wrong_argument_is_named(call: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mixer_whose_biases_no_picture_can_read_is_not_registered():
    class Unread(AFTMixer):
        name, bias_names = 'unread', ('bias',)

    with pytest.raises(ValueError, match=r'Unread has position biases, bias: it must define learned_bias\(\)'):
        register_mixer(Unread)


def test_two_mixers_of_one_name_are_not_registered():
    class Simpler(AFTSimple):
        name = 'simple'

    with pytest.raises(ValueError, match="the mixer 'simple' is registered: AFTSimple; choose another name"):
        register_mixer(Simpler)


def test_names_of_before_build_and_find_mixers():
    mixer = layers.create_mixer('conv', 8, num_heads=2, kernel_size=3)
    assert isinstance(mixer, AFTConv)
    assert layers.aft_mixers(nn.Sequential(mixer)) == layers.token_mixers(nn.Sequential(mixer)) == [mixer]
    with pytest.raises(ValueError, match='nothing'):
        layers.create_mixer('nothing', 8)
