"""Whose rows of a picture are whose, and how ranks tell each other of theirs.

All tensors of a VAE have rows in dim -2, at several scales: a rank's share of a tensor is in proportion to its share of
the one that was cut, so nobody has to ask how many rows the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Border = tuple[torch.Tensor | None, torch.Tensor | None]
"""Rows of the neighbour above and of the one below; None at the picture's border."""


@dataclass(frozen=True)
class Rows:
    """A rank's place among those that share the rows of a picture: `shares` are rows of the tensor that was cut, by
    rank, of the pool's first ranks. `vote`, before each exchange, raises where another rank failed and would not come
    to it."""

    rank: int
    shares: tuple[int, ...]
    vote: Callable[[], None]
    group: dist.ProcessGroup | None = None

    @property
    def shared(self) -> bool:
        """Whether there are others."""
        return len(self.shares) > 1

    def shares_of(self, own: int) -> list[int]:
        """Rows of all ranks in a tensor in which this rank has so many; errors as of `share_out`."""
        return share_out(own, self.shares[self.rank], self.shares)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that is the same on all ranks."""
        shares = share_out(whole.shape[-2], sum(self.shares), self.shares)
        return whole.narrow(-2, sum(shares[: self.rank]), shares[self.rank]).contiguous()

    def border(self, x: torch.Tensor, above: int, below: int) -> Callable[[], Border]:
        """Begin to exchange rows with the neighbours, so many of each; what is returned waits for them. Every rank gets
        those of all, which are few: one collective costs the host less than half of what messages do."""
        x = x.movedim(1, -1)  # as they lie in memory behind a norm of channels_last.py
        # The neighbour above wants the first rows, the one below the last.
        own = torch.cat((x.narrow(-3, 0, below), x.narrow(-3, x.shape[-3] - above, above)), -3).contiguous()
        of_all, arrived = self.exchange(own)
        rows, has_next = of_all.movedim(-1, 2), self.rank + 1 < len(self.shares)

        def wait() -> Border:
            arrived()
            return (
                rows[self.rank - 1].narrow(-2, below, above) if self.rank and above else None,
                rows[self.rank + 1].narrow(-2, 0, below) if has_next and below else None,
            )

        return wait

    def exchange(self, own: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Begin to give every rank a tensor of each, of the same shape on all, contiguous: (ranks, *shape), and what
        waits until they are there."""
        if not self.shared:
            return own.unsqueeze(0), lambda: None
        of_all = own.new_empty((len(self.shares), *own.shape))
        # As bytes: gloo does not know all types.
        sent, received = (each.view(torch.uint8).flatten() for each in (own, of_all))
        self.vote()
        return of_all, dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True).wait

    def gather(self, x: torch.Tensor, to: int | None = None) -> torch.Tensor | None:
        """All rows, on every rank or on one; None on the others."""
        own, here = x.contiguous(), to in (None, self.rank)
        parts, operations = list[torch.Tensor](), list[dist.P2POp]()
        for rank, rows in enumerate(self.shares_of(x.shape[-2])):
            other = rank != self.rank
            if other and to in (None, rank):
                operations.append(dist.P2POp(dist.isend, own, rank, self.group))
            if here:
                parts.append(own.new_empty([*own.shape[:-2], rows, own.shape[-1]]) if other else own)
                operations += [dist.P2POp(dist.irecv, parts[-1], rank, self.group)] if other else []
        self.vote()
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return torch.cat(parts, -2) if here else None

    def add(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        if not self.shared:
            return numbers
        self.vote()
        dist.all_reduce(numbers, group=self.group)
        return numbers


def share_out(rows: int, of: int, shares: Sequence[int]) -> list[int]:
    """Shares of a tensor that has `rows` rows where the one that was cut so has `of`; ValueError: no whole numbers."""
    if any(share * rows % of for share in shares):
        raise ValueError(f"{rows} rows for {of} cannot be shared out as {list(shares)}")
    return [share * rows // of for share in shares]
