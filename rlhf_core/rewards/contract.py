"""What a reward function hands back when a plain float is not enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core.errors import RewardError

Status = Literal["ok", "failed_infra", "invalid_data"]


@dataclass(frozen=True)
class RewardResult:
    """The score of one row, or why there is none. A missing score is never 0.

    ``ok`` needs a finite ``value``. ``failed_infra``: a server or another outside thing failed, asking again may help.
    ``invalid_data``: this row can never be scored (no answer, an answer that cannot be read); it is kept and counted.
    """

    value: float | None = None
    status: Status = "ok"
    error: str | None = None
    """The reason, for people."""

    def __post_init__(self) -> None:
        if self.status not in ("ok", "failed_infra", "invalid_data"):
            raise RewardError(f"RewardResult.status = {self.status!r}: use 'ok', 'failed_infra' or 'invalid_data'")
        if (self.status == "ok") != (self.value is not None):
            raise RewardError(
                f"RewardResult(value={self.value!r}, status={self.status!r}): "
                "a value goes with the status 'ok', and only with it"
            )


#: What a function says of one row. None: it has nothing to say, and the other functions decide alone.
Answer = RewardResult | None
