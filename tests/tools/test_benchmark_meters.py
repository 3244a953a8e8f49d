import pytest
import torch
from helpers import randn

from aft_vision import ops
from tools.benchmark.meters import _allocations, peak_memory, peak_resident, saved_memory

CPU = torch.device('cpu')
# A tensor of so many float32 is a mebibyte.
MIB = 2**18


def test_the_peak_is_that_of_the_tensors_alive_at_once():
    def call():
        one = torch.empty(3 * MIB)
        two = torch.empty(2 * MIB)
        del one
        three = torch.empty(2 * MIB)
        return two, three

    # 3 and 2, then 2 and 2.
    assert peak_memory(call, CPU) == 5 * 2**20


def test_memory_of_before_the_call_counts_neither_when_held_nor_when_freed():
    held = [torch.empty(5 * MIB)]

    def call():
        held.append(torch.empty(2 * MIB))
        held.pop(0)
        held.append(torch.empty(MIB))
        held.pop()

    # What the call before it left is freed between the two.
    assert peak_memory(call, CPU) == 3 * 2**20
    assert peak_memory(held[0].zero_, CPU) == 0


def test_the_peak_of_a_backward_counts_what_the_forward_left():
    x = torch.ones(MIB, requires_grad=True)
    # The exponential, saved, and the product with it; the gradient of x is there since the first call.
    peak = peak_memory(lambda: x.exp().backward(torch.ones(()).expand(MIB)), CPU)
    assert 2 * 2**20 <= peak < 2 * 2**20 + 4096


def test_allocations_inside_our_operators_count():
    q, k, v, bias = randn(1, 256, 8), randn(1, 256, 8), randn(1, 256, 8), randn(256, 256)
    peak = peak_memory(lambda: ops.aft_full(q, k, v, bias), CPU)
    # The exponentiated bias, and the result.
    assert bias.nbytes + q.nbytes <= peak <= 2 * bias.nbytes + 16 * q.nbytes


def test_the_memory_of_the_process_grows_by_what_a_call_touches_even_if_it_frees_it():
    def call():
        # Zeros alone are pages that nothing has touched.
        torch.ones(64 * MIB)

    if (found := peak_resident(call)) is None:
        pytest.skip('this system does not tell the peak of a process')
    again = peak_resident(call)
    for size in (found, again):
        assert 60 * 2**20 < size < 80 * 2**20


def test_saved_memory_counts_each_storage_once_and_whole():
    x, weight = torch.ones(4 * MIB, requires_grad=True), torch.ones(MIB, requires_grad=True)

    def call():
        # Its own result, which both products save a part of.
        y = x.exp()
        return y[:MIB] * weight, y[MIB : 2 * MIB] * weight

    assert saved_memory(call) == 5 * 2**20
    assert saved_memory(call, leave_out=[weight]) == 4 * 2**20
    with torch.no_grad():
        assert saved_memory(call, leave_out=[weight.view(2, -1)]) == 4 * 2**20


def test_nothing_that_was_saved_stays_in_memory():
    x = torch.ones(MIB, requires_grad=True)
    # The node of the exponential saves its own result.
    found = _allocations(lambda: saved_memory(lambda: x.exp()))
    assert sum(size > 0 for size, _ in found) == 1
    assert sum(size for size, _ in found) == 0


def test_what_our_operators_save_counts():
    q, k, v = (randn(2, 64, 8, seed=seed).requires_grad_() for seed in range(3))
    bias = randn(64, 64).requires_grad_()
    saved = saved_memory(lambda: ops.aft_full(q, k, v, bias), leave_out=[q, k, v, bias])
    # The result and the denominators.
    assert saved == 2 * q.nbytes


@pytest.mark.gpu
def test_the_peak_is_known_on_a_cuda_device():
    device = torch.device('cuda')
    assert peak_memory(lambda: [torch.empty(n * MIB, device=device) for n in (2, 3)], device) == 5 * 2**20
