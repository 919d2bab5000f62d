"""What one call of a compiled graph really takes, counted in its forward and in each piece of its backward.

Between forward and backward, and between pieces of the backward, others run, and a session of the meter must end in the
call in which it began. So each is counted by itself, over what is known to lie there when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..errors import RematError
from ..meter import Session, is_metering, metering


class Weighing:
    """Bytes over those at the start of the forward.

    Args:
        device: whose memory counts.
        tangent_bytes: what arrives with the backward.
        passing: numbers of gradients that are added into `.grad` and freed once they are handed out.
        done: told of this once the backward is over, unless something could not be counted.

    Attributes:
        peak_bytes: most bytes so far.
        kept_bytes: when the forward was over.
    """

    def __init__(
        self, device: torch.device, tangent_bytes: int, passing: frozenset[int], done: Callable[[Weighing], None]
    ) -> None:
        self.device = device
        self.tangent_bytes = tangent_bytes
        self.passing = passing
        self.done = done
        self.peak_bytes = 0
        self.kept_bytes = 0
        self._now_bytes = 0
        self._counted = True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward."""
        with self._session() as session:
            yield
        self._add(session)
        self.kept_bytes = self._now_bytes
        self._now_bytes += self.tangent_bytes

    @contextmanager
    def piece(self, found: list[tuple[int, object]]) -> Iterator[None]:
        """Around a piece of the backward, which appends (number, gradient) to `found`."""
        with self._session() as session:
            yield
        self._add(session)
        handed = [value for number, value in found if number in self.passing and isinstance(value, torch.Tensor)]
        self._now_bytes -= sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in handed}.values())

    def finish(self) -> None:
        """The backward is over."""
        if self._counted:
            self.done(self)

    @contextmanager
    def _session(self) -> Iterator[Session | None]:
        """A session, unless somebody else is counting: nested in theirs, theirs would be lost in autograd's threads."""
        with ExitStack() as stack:
            session = None
            try:
                session = None if is_metering() else stack.enter_context(metering(self.device))
            except RematError:  # a profiler of the user's is active
                session = None
            self._counted = self._counted and session is not None
            yield session

    def _add(self, session: Session | None) -> None:
        if session is not None:
            self.peak_bytes = max(self.peak_bytes, self._now_bytes + session.peak_bytes)
            self._now_bytes += session.net_bytes
