"""Every family's adapter: ComfyUI's own forward is the oracle, and what cannot be computed is refused by name."""

from __future__ import annotations

import pytest

from parallel_runtime.errors import RequestError
from parallel_runtime.loading.checkpoint import open_checkpoint
from tests.comfyui_checkout import HOW, find_comfyui
from tests.family_calls import CALLS
from tests.family_refusals import REFUSED
from tests.parallel_runtime.comfyui_forward import output_of, run_comfyui
from tests.parallel_runtime.model_forward import comfyui_call, relative_error

COMFYUI = find_comfyui()
IN_CI = ("FLUX.1", "SDXL")
FAMILIES = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in CALLS]
CHANGES = [
    pytest.param(family, changes, named, id=f"{family}: {named}")
    for family, refused in REFUSED.items()
    for changes, named in refused.changes
]
WIDTHS = [
    pytest.param(family, changes, named, id=f"{family}: {', '.join(changes)}")
    for family, refused in REFUSED.items()
    for changes, named in refused.widths
]


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.skipif(COMFYUI is None, reason=HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loaded_model_and_adapter_give_what_comfyui_gives(tmp_path, family):
    calls = CALLS[family]
    calls.write(tmp_path)
    module = "comfyui_unet" if family == "SDXL" else "comfyui_forward"
    found = run_comfyui(COMFYUI, tmp_path, calls.cases, module)
    expected = {name: recognised for name, (recognised, _, _) in calls.files.items() if recognised}
    assert {name: found[name] for name in expected} == expected
    for case, (file, call) in calls.cases.items():
        path = tmp_path / file
        output, own = comfyui_call(path, call), output_of(tmp_path, case)
        assert own.std() > 0.1, case
        assert output.shape == own.shape, case
        assert output.shape == calls.model.output_shape(call["x"].shape, open_checkpoint(path).config), case
        assert relative_error(output, own) < 3e-5, case


@pytest.mark.parametrize(("family", "changes", "named"), CHANGES)
def test_calls_that_cannot_be_computed_are_refused_by_name(family, changes, named):
    refused = REFUSED[family]
    refused.model.to_transformer(**refused.call, config=refused.config)
    with pytest.raises(RequestError) as error:
        refused.model.to_transformer(**{**refused.call, **changes}, config=refused.config)
    assert named in str(error.value)


@pytest.mark.parametrize(("family", "changes", "named"), WIDTHS)
def test_inputs_of_another_model_are_refused_from_their_shapes_alone(family, changes, named):
    spec, config = REFUSED[family].model, REFUSED[family].config
    call = {name: tensor.to("meta") for name, tensor in {**REFUSED[family].call, **changes}.items()}
    arguments = spec.to_transformer(**call, config=config)
    with pytest.raises(RequestError, match=named or None):
        spec.check_widths(arguments, config)
