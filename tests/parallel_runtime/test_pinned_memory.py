"""On a GPU: memory of the host that is registered, and let go before its addresses are another's."""

import gc

import pytest
import torch

from parallel_runtime.gpu_memory.cuda_driver import register, unregister
from parallel_runtime.streaming.board import FINISHED, LAUNCHED, Board

pytestmark = pytest.mark.gpu


def test_a_registration_that_fails_is_told_of_once():
    memory = torch.zeros(1 << 22, dtype=torch.uint8)
    assert register(memory)
    assert not register(memory)
    assert int(torch.ones(3, device="cuda").sum()) == 3  # nothing of it at the next launch
    unregister(memory.data_ptr())
    assert register(memory)
    unregister(memory.data_ptr())


def test_boards_that_follow_one_another_at_one_address_count_forwards():
    device = torch.device("cuda", torch.cuda.current_device())
    for number in range(1, 20):
        board = Board()
        board.words[LAUNCHED] = number
        board.count_finished(device)
        torch.cuda.synchronize(device)
        assert board.words[FINISHED] == number
        del board
        gc.collect()
