"""Patches of ComfyUI's nodes, made again from what would travel: the same call gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from nodes.carried_patches import CarriedPatches
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.live_patches import LivePatches
from parallel_runtime.networks.comfyui.module_tree import build_module, describe_module
from parallel_runtime.requests.conditioning import ConditioningStore, refer
from parallel_runtime.requests.patches import attached_in

SIGMA = 0.5


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _filled(module: Any) -> Any:
    for number, parameter in enumerate(module.parameters()):
        parameter.data = 0.1 * _random(*parameter.shape, seed=number)
    return SimpleNamespace(model=module.eval().requires_grad_(False))


class _Vae:
    def __init__(self, frames: bool = False):
        self._frames = frames

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, H, W, 3) -> (B, 16, [1,] H / 8, W / 8)."""
        latent = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8).repeat(1, 6, 1, 1)[:, :16]
        return latent[:, :, None] if self._frames else latent


def travel(options: Mapping[str, Any], x: torch.Tensor) -> dict[str, Any]:
    """The options as a rank has them, after all that is done on the way but the socket."""
    carried = CarriedPatches().carry(options, x)
    store = ConditioningStore()
    for network in attached_in(carried):
        parts: list[torch.Tensor] = []
        form = describe_module(network.module, parts)
        store.attached[network.number] = build_module(form, [part.clone() for part in parts])
    reference, tensors = refer(1, {"options": carried})
    (given,) = store.take([reference], {name: tensor.clone() for name, tensor in tensors.items()})
    return LivePatches(torch.device("cpu")).put_in(given.arguments["options"])


def _qwen() -> Any:
    import comfy.ops
    from comfy_extras.nodes_model_patch import DiffSynthCnetPatch, QwenImageBlockWiseControlNet

    network = QwenImageBlockWiseControlNet(2, dim=32, operations=comfy.ops.manual_cast)
    return DiffSynthCnetPatch(_filled(network), _Vae(frames=True), _random(1, 24, 40, 3).abs(), 0.7)


def _z_image() -> Any:
    import comfy.ops
    from comfy.ldm.lumina.controlnet import ZImage_Control
    from comfy_extras.nodes_model_patch import ZImageControlPatch

    network = ZImage_Control(
        dim=64, n_heads=2, n_kv_heads=2, multiple_of=32, n_control_layers=3, operations=comfy.ops.manual_cast
    )
    return ZImageControlPatch(_filled(network), _Vae(), _random(1, 24, 40, 3).abs(), 0.7)


def _style() -> Any:
    import comfy.ops
    from comfy_extras.nodes_model_patch import SigLIPMultiFeatProjModel, UsoStyleProjectorPatch

    network = SigLIPMultiFeatProjModel(9, 4, 24, 32, operations=comfy.ops.manual_cast)
    return UsoStyleProjectorPatch(_filled(network), _random(3, 1, 9, 24))


def _lllite() -> dict[str, Any]:
    import comfy.ops
    from comfy.ldm.anima import lllite

    shapes = {
        "lllite_conditioning1.conv1.weight": (8, 3, 4, 4), "lllite_conditioning1.conv3.weight": (16, 8, 4, 4),
        "lllite_conditioning1.proj.weight": (12, 16, 1, 1),
        **{f"lllite_dit_blocks_0_{name}.down.weight": (8, 32) for name in ("self_attn_q_proj", "mlp_layer1")},
        **{f"lllite_dit_blocks_0_{name}.cond_to_film.weight": (16, 12) for name in ("self_attn_q_proj", "mlp_layer1")},
    }  # fmt: skip
    network = lllite.AnimaLLLite(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, {}, operations=comfy.ops.manual_cast
    )
    patch = lllite.AnimaLLLitePatch(_filled(network), _random(1, 30, 50, 3).abs(), None, 0.8, 0.9, 0.1)
    return {
        "post_input": [patch],
        "attn1_patch": [lllite.AnimaLLLiteAttentionPatch(patch, {"q": "self_attn_q_proj"})],
        "mlp_patch": [lllite.AnimaLLLiteMLPPatch(patch)],
    }


def _talk() -> Any:
    import comfy.ops
    from comfy.ldm.wan.model_multitalk import MultiTalkCrossAttnPatch, WanMultiTalkAttentionBlock

    blocks = torch.nn.ModuleList([WanMultiTalkAttentionBlock(80, 24, operations=comfy.ops.manual_cast)])
    network = torch.nn.Module()
    network.blocks = blocks
    return MultiTalkCrossAttnPatch(_filled(network), 0.9)


def _blocks_agree(patch: Any, arguments: Callable[[], dict[str, Any]], x: torch.Tensor, result: str) -> float:
    """Largest difference between a patch and its twin, over two blocks of two steps."""
    options = {"patches": {"double_block": [patch]}, "sigmas": torch.tensor([SIGMA])}
    (twin,) = travel(options, x)["patches"]["double_block"]
    largest, changed = 0.0, False
    for block in (0, 1) * 2:
        given = [{**arguments(), "x": x, "block_index": block} for _ in range(2)]
        kept = [each[result] for each in given]  # some write in place, and return nothing of it
        made = [each(one) for each, one in zip((patch, twin), given, strict=True)]
        one, other = (out.get(result, before) for out, before in zip(made, kept, strict=True))
        changed |= not torch.equal(one, arguments()[result])
        largest = max(largest, float((one - other).abs().max()))
    assert changed
    return largest


def agree(rank: int, world_size: int, comfyui: str) -> dict[str, float]:
    """name -> largest difference; without what an older ComfyUI has no module for."""
    use_comfyui(comfyui, {"cpu": True})
    import comfy.sd

    assert comfy.sd
    x = _random(1, 16, 6, 10)
    tokens, text = _random(1, 15, 32), _random(1, 5, 32)
    found = {
        "Qwen-Image DiffSynth": _blocks_agree(_qwen(), lambda: {"img": tokens.clone()}, x, "img"),
        "USO": _blocks_agree(_style(), lambda: {"txt": text.clone(), "txt_ids": torch.zeros(1, 5, 3)}, x, "txt"),
    }
    found["Z-Image Fun"] = _blocks_agree(
        _z_image(),
        lambda: {
            "img": _random(1, 15, 64), "img_input": _random(1, 15, 64, seed=2), "txt": _random(1, 5, 64),
            "pe": _random(1, 15, 1, 16, 2, 2, seed=3), "vec": _random(1, 64, seed=4), "block_type": "double",
        },
        x,
        "img",
    )  # fmt: skip
    for name, of_newer in (("LLLite", _lllite_agrees), ("Wan Animate 2", lambda: _poses_agree(x))):
        with suppress(ModuleNotFoundError):
            found[name] = of_newer()
    found |= _in_a_u_net()
    return found


def _poses_agree(x: torch.Tensor) -> float:
    """Largest difference between a cache of a pose's blocks and its twin, over a step that fills it and one after."""
    from comfy.ldm.wan.model_animate2 import PoseBranchCache, WanAnimate2Model

    from tests.comfyui_networks.tiny import build

    network = build(WanAnimate2Model, dim=48, ffn_dim=96, text_dim=24, num_heads=2, num_layers=2)
    given = {
        "context": _random(1, 13, 24), "clip_fea": _random(1, 257, 1280, seed=2),
        "pose_latents": _random(1, 16, 2, 6, 10, seed=3),
    }  # fmt: skip
    cache = PoseBranchCache()
    twin = travel({"animate2_cache": cache}, x)["animate2_cache"]
    largest = 0.0
    for step in (900.0, 500.0):
        latent = _random(1, 36, 3, 6, 10, seed=int(step))
        plain, one, other = (
            network(latent, torch.tensor([step]), **given, transformer_options=options)
            for options in ({}, {"animate2_cache": cache}, {"animate2_cache": twin})
        )
        assert (plain - one).abs().max() < 1e-4
        largest = max(largest, float((one - other).abs().max()))
    assert twin is not cache
    assert twin.filled(2)
    return largest


class _Recorder:
    """A MODEL of which a node's patches are read."""

    def __init__(self) -> None:
        config = SimpleNamespace(unet_config={"model_channels": 8})
        self.model = SimpleNamespace(model_config=config)
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.patches: dict[str, list[Any]] = {}

    def clone(self) -> _Recorder:
        return self

    def get_model_object(self, name: str) -> Any:
        return SimpleNamespace(percent_to_sigma=lambda percent: 1.0 - percent)

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return lambda patch: self.patches.setdefault(name.removeprefix("set_model_"), []).append(patch)


def _in_a_u_net() -> dict[str, float]:
    from comfy_extras.nodes_freelunch import FreeU, FreeU_V2
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale

    found = {}
    h, skipped = _random(2, 32, 6, 10), _random(2, 8, 6, 10, seed=1)
    options = {"block": ("input", 3), "sigmas": torch.tensor([SIGMA])}
    for node in (FreeU, FreeU_V2):
        node.execute(recorder := _Recorder(), 1.3, 1.4, 0.9, 0.2)
        found[node.__name__] = _largest(recorder, "output_block_patch", (h, skipped, options))
    PatchModelAddDownscale.execute(recorder := _Recorder(), 3, 2.0, 0.0, 0.9, True, "bicubic", "bilinear")
    found["downscale"] = _largest(recorder, "input_block_patch_after_skip", (h, options))
    found["upscale"] = _largest(recorder, "output_block_patch", (h[..., :3, :5], skipped, options))
    beyond = {"patches": recorder.patches, "sigmas": torch.tensor([0.05])}
    assert set(CarriedPatches().carry(beyond, h)["carried"]["patches"]) == {"output_block_patch"}
    return found


def _largest(recorder: _Recorder, kind: str, arguments: tuple[Any, ...]) -> float:
    twin = travel({"patches": recorder.patches, "sigmas": torch.tensor([SIGMA])}, torch.zeros(1, 4, 6, 10))
    outputs = []
    for each in (recorder.patches, twin["patches"]):
        given = tuple(part.clone() if isinstance(part, torch.Tensor) else part for part in arguments)
        output = each[kind][0](*given)
        outputs.append(output if isinstance(output, tuple) else (output,))
    assert outputs[0][0].shape != arguments[0].shape or not torch.equal(outputs[0][0], arguments[0])
    return max(float((one - other).abs().max()) for one, other in zip(*outputs, strict=True))


def _lllite_agrees() -> float:
    patches = _lllite()
    x = _random(1, 16, 1, 8, 12)
    options = {"patches": patches, "sigmas": torch.tensor([SIGMA])}
    twin = travel(options, x)["patches"]
    assert twin["attn1_patch"][0].patch is twin["post_input"][0] is twin["mlp_patch"][0].patch
    beyond = CarriedPatches().carry({**options, "sigmas": torch.tensor([0.95])}, x)
    assert not beyond, "of patches that do nothing at this sigma, nothing travels"
    made = []
    for each in (patches, twin):
        inside = {"sigmas": torch.tensor([SIGMA]), "model_patch_data": {}, "block_index": 0}
        each["post_input"][0]({"x": x, "transformer_options": inside})
        q = _random(1, 24, 32, seed=5)
        made.append(each["attn1_patch"][0](q, q, q, extra_options=inside)["q"])
        made.append(each["mlp_patch"][0]({"x": q, "transformer_options": inside})["x"])
        assert not torch.equal(made[-1], q)
    return max(float((made[place] - made[place + 2]).abs().max()) for place in (0, 1))
