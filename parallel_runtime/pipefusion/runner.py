"""One evaluation of a staged transformer on one pipeline: forwards, and the messages between its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..denoising.predict import Call, own_calls
from ..errors import RequestError
from ..mesh.links import Inbox, Links, Outbox, pack, unpack
from ..mesh.mesh import Layout
from ..networks.absent_blocks import stages_of
from ..networks.batch import gather_batch
from ..networks.diffusers.spec import ModelSpec
from ..networks.key_slots import Slots
from ..networks.latent_cut import Patch, cut_patches
from ..networks.shares import split_sizes
from ..requests.conditioning import Conditioning, hollow
from ..said import said
from .stage import Stage


@dataclass(frozen=True)
class Part:
    """One forward of this rank in every evaluation.

    Args:
        rows: which items of the stacked CFG branches it computes.
        slots: the split of its tokens.
    """

    rows: torch.Tensor
    conditioning: Conditioning
    slots: Slots


class StageRunner:
    """Runs one stage of one request.

    Args:
        branches: conditioning of each CFG branch.
        x: what a branch's forward sees, (B, C, ...); only shape, dtype and device are read.
        patches: that the latent is to be cut into.
        keep: whether keys and values are kept from evaluation to evaluation.

    Raises:
        RequestError: the latent cannot be cut so.
    """

    def __init__(
        self,
        stage: Stage,
        links: Links,
        branches: Sequence[Conditioning],
        x: torch.Tensor,
        patches: int,
        keep: bool,
    ):
        self.stage, self.spec, self.mesh = stage, stage.spec, stage.mesh
        self.batch, self.total = x.shape[0], x.shape[0] * len(branches)
        self.inbox, self.outbox = Inbox(links.previous, x.device), Outbox(links.following)
        self.first = self.mesh.coordinate["pipe"] == 0
        self.last = self.mesh.coordinate["pipe"] == self.mesh.plan.pipe - 1
        self._skip_inbox = Inbox(links.mirror, x.device) if links.mirror and stage.skips_taken else None
        self._skip_outbox = Outbox(links.mirror) if links.mirror and stage.skips_given else None
        self._dtype, self._keep, self._shape = x.dtype, keep, tuple(x.shape)
        self.patches, self._parts = lay_out(self.spec, stage.config, self.mesh, branches, x, patches)
        if keep:
            stage.begin(self.patches, *((len(part.rows), part.slots) for part in self._parts))

    def expect(self, patch: Patch | None) -> None:
        """Post the receives of an evaluation of that patch, or of all at once; not on the first stage."""
        for part in self._parts:
            sizes = {
                name: torch.Size(shape).numel()
                for name, shape in self._shapes(part, patch, self.stage.streams_in).items()
            }
            if not self.first:
                self.inbox.expect(sum(sizes.values()), self._dtype)
            if self._skip_inbox is not None:
                image = sizes[stages_of(self.spec).image]  # no text runs through blocks with skip connections
                self._skip_inbox.expect(len(self.stage.skips_taken) * image, self._dtype)

    def evaluate(
        self, inputs: Sequence[torch.Tensor], timestep: torch.Tensor, patch: Patch | None
    ) -> list[torch.Tensor] | None:
        """Run this stage for one patch, or for all at once. Collective over the pipeline's neighbours in turn.

        Args:
            inputs: per CFG branch what the transformer sees, (B, C, ...) in its dtype, the whole latent; on later
                stages only its shape counts.
            timestep: (B,) float32.

        Returns:
            On the last stage the prediction of every branch, rows flattened: of the patch or of the whole. Else None.
        """
        stacked, timesteps = torch.cat(list(inputs)), timestep.repeat(len(inputs))
        outputs = []
        for number, part in enumerate(self._parts):
            shapes = self._shapes(part, patch, self.stage.streams_in)
            received = {} if self.first else unpack(self.inbox.take(), shapes)
            x = stacked[part.rows]
            arguments = self.spec.adapter.to_transformer(
                x, timesteps[part.rows], part.conditioning.context, self.stage.config, **part.conditioning.extras
            )
            skips = self._take_skips(part, patch)
            made = self.stage.forward(
                arguments,
                received,
                patch,
                patches=self.patches,
                slots=part.slots,
                call=number,
                keep=self._keep,
                skips=skips,
            )
            if self._skip_outbox is not None:
                self._skip_outbox.send(torch.cat([skip.reshape(-1) for skip in made.skips.values()]))
            if made.output is not None:
                outputs.append(_band(self.spec.adapter.from_transformer(made.output, x), patch))
            elif made.streams is not None:
                self.outbox.send(pack({name: made.streams[name] for name in self.stage.streams_out}))
        if not self.last:
            return None
        local = torch.cat(outputs) if outputs else self._nothing(stacked, patch)
        return list(gather_batch(local, self.total, self.mesh).split(self.batch))

    def output_shape(self) -> tuple[int, ...]:
        """Of what the transformer predicts for a branch."""
        return self.spec.adapter.output_shape(self._shape, self.stage.config)

    def finish(self) -> None:
        """A run is over."""
        self.stage.finish()

    def flush(self) -> None:
        """Wait until everything that was sent has gone."""
        self.outbox.flush()
        if self._skip_outbox is not None:
            self._skip_outbox.flush()

    def _take_skips(self, part: Part, patch: Patch | None) -> dict[int, torch.Tensor]:
        if self._skip_inbox is None:
            return {}
        image = stages_of(self.spec).image
        shape = self._shapes(part, patch, (image,))[image]
        skips = self._skip_inbox.take().reshape(-1, *shape)
        return dict(zip(self.stage.skips_taken, skips, strict=True))

    def _shapes(self, part: Part, patch: Patch | None, streams: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """Of what one stage hands to the next: this rank's tokens of every stream; no text behind the first patch."""
        slots, rank = part.slots, self.mesh.sequence_index
        image = (slots.shares() if patch is None else slots.bands(patch.index))[rank]
        text = split_sizes(slots.text, slots.degree)[rank] if patch is None or patch.has_text else 0
        stages = stages_of(self.spec)
        width = self.spec.heads(self.stage.config) * self.stage.config.attention_head_dim
        if streams == (stages.image,):
            image += text  # one stream of both, or no text at all
        return {stream: (len(part.rows), image if stream == stages.image else text, width) for stream in streams}

    def _nothing(self, stacked: torch.Tensor, patch: Patch | None) -> torch.Tensor:
        shape = self.spec.adapter.output_shape(tuple(stacked.shape), self.stage.config)
        return _band(stacked.new_empty((0, *shape[1:])), patch)


def lay_out(
    spec: ModelSpec, config: Any, layout: Layout, branches: Sequence[Conditioning], x: torch.Tensor, patches: int
) -> tuple[tuple[Patch, ...], tuple[Part, ...]]:
    """Cut the latent, and assign the branches' items and tokens to this rank. Pure; runs on meta tensors too.

    Raises:
        RequestError: the latent cannot be cut so.
    """
    numbers = torch.arange(x.shape[0] * len(branches)).split(x.shape[0])
    calls = [Call(n, n.float(), branch) for n, branch in zip(numbers, branches, strict=True)]
    cut: tuple[Patch, ...] = ()
    slots: list[Slots] = []
    for call in calls:  # all of them, so that every rank refuses alike
        image, text = _count_tokens(spec, config, call, x)
        cut = cut_patches(tuple(x.shape), stages_of(spec).patch_size, patches, image)
        slots.append(_slots(cut, text, layout, spec))
    parts = []
    for own in own_calls(calls, layout):
        rows = own.x if x.device.type == "meta" else own.x.to(x.device)
        parts.append(Part(rows, own.conditioning, slots[int(own.x[0]) // x.shape[0]]))
    return cut, tuple(parts)


def _slots(patches: Sequence[Patch], text: int, layout: Layout, spec: ModelSpec) -> Slots:
    """The slots of one forward's tokens.

    Raises:
        RequestError: a patch has fewer tokens than the sequence group has ranks.
    """
    stages = stages_of(spec)
    slots = Slots(
        tuple(patch.length for patch in patches), text, layout.plan.ring, layout.plan.ulysses, stages.text_first
    )
    if min(slots.patches) < slots.degree:
        raise RequestError(
            said(
                "A patch of {patches} tokens cannot be split over {degree} ranks.",
                patches=min(slots.patches),
                degree=slots.degree,
            ),
            "Use fewer patches or a larger picture.",
        )
    return slots


def _count_tokens(spec: ModelSpec, config: Any, call: Call, x: torch.Tensor) -> tuple[int | None, int]:
    """Image tokens (None where an embedding makes them) and text tokens of a forward."""
    shapes = call.conditioning.hollow()
    arguments = spec.adapter.to_transformer(hollow(x), hollow(call.timestep), shapes.context, config, **shapes.extras)
    dims = spec.sequence_inputs.get("", {})
    image = spec.attended[0]
    text = next((name for name in stages_of(spec).text if name in dims), None)
    return (
        arguments[image].shape[dims[image]] if image in dims else None,
        arguments[text].shape[dims[text]] if text else 0,
    )


def flatten_rows(latent: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) as it is; (B, C, F, H, W) -> (B, C, F·H, W)."""
    return latent.flatten(2, -2)


def _band(latent: torch.Tensor, patch: Patch | None) -> torch.Tensor:
    rows = flatten_rows(latent)
    return rows if patch is None else rows[:, :, slice(*patch.rows)]
