"""Installing ComfyUI's requirements for the host tests never names torch."""

from __future__ import annotations

from tests.host.requirements import without_torch


def test_torch_and_torchaudio_are_left_out_and_their_namesakes_stay():
    listed = "torch\ntorch>=2.4 # core\ntorchsde\ntorchvision\ntorchaudio\nnumpy>=1.25\n"
    assert without_torch(listed).split() == ["torchsde", "torchvision", "numpy>=1.25"]
