"""Installing ComfyUI's requirements for the host tests never names torch, and takes versions from the file of them."""

from __future__ import annotations

from tests.host.requirements import VERSIONS, wanted


def test_torch_and_torchaudio_are_left_out_and_their_namesakes_stay():
    listed = "torch\ntorch>=2.4 # core\ntorchsde\ntorchvision\ntorchaudio\n\nnumpy>=1.25\n"
    assert wanted(listed, "torch==2.13.0\n").split() == ["torchsde", "torchvision", "numpy>=1.25"]


def test_versions_of_the_file_stand_in_the_place_of_comfyuis():
    versions = VERSIONS.read_text(encoding="utf-8")
    asked = wanted("comfyui-workflow-templates==0.11.44\nother==1\n", versions).split()
    assert asked[1] == "other==1"
    assert asked[0].startswith("comfyui-workflow-templates==")
    assert asked[0] in versions
