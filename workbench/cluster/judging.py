"""Rewards on a cluster: the rows of a batch are judged by workers, side by side, in the rows' order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.ranks import RayRanks
from workbench.errors import EngineError, SettingError, WorkerLost, message
from workbench.rewards import BaseReward, Score, as_reward
from workbench.rewards.score import failed

if TYPE_CHECKING:
    from workbench.cluster.session import Cluster

JUDGE_SECONDS = 1800.0


class Judging:
    """What a worker holds: the reward itself, which keeps its own processes, time limits and records."""

    def __init__(self, reward: BaseReward) -> None:
        self.reward = reward

    def rows(self, views: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One record a row."""
        return self.reward.judge(views) if views else []

    def leave(self) -> None:
        """End the reward's own processes."""
        self.reward.close()


def judging(rank: int, size: int, *, reward: BaseReward) -> Judging:
    """The factory for `Cluster.ranks`."""
    return Judging(reward)


class PlacedReward(BaseReward):
    """A reward as any other; only where it is judged is different."""

    def __init__(self, cluster: Cluster, inner: BaseReward, workers: int, seats: Mapping[str, Any]) -> None:
        super().__init__(inner.name, inner.on_failure)
        self.inner = inner
        self.workers = workers
        self.reads = inner.reads
        self.streams = inner.streams
        self.in_process = inner.in_process
        self._cluster = cluster
        self._seats = dict(seats)
        self._group: RayRanks | None = None
        self._started()

    @property
    def source(self) -> str | None:
        """The inner one's."""
        return self.inner.source

    def settings(self) -> dict[str, Any]:
        """The inner one's, and how many workers."""
        return {**self.inner.settings(), "cluster_workers": self.workers}

    def check_signature(self, columns: Sequence[str]) -> None:
        """As the inner one."""
        self.inner.check_signature(columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """As the inner one."""
        self.inner.check_rows(rows)

    def _started(self) -> RayRanks:
        if self._group is None or self._group.closed is not None:
            name = f"reward-{self.name}"
            self._group = self._cluster.ranks(judging, self.workers, name=name, reward=self.inner, **self._seats)
        return self._group

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Rows are dealt out in turn, so that a slow kind of row is everybody's. A worker that dies is replaced and all rows are
        judged once more; where one dies again they are failures of the machinery, by policy.
        """
        places = [range(rank, len(rows), self.workers) for rank in range(self.workers)]
        each = [([rows[number] for number in place],) for place in places]
        error: EngineError | TimeoutError | None = None
        for _ in range(2):
            try:
                parts = self._started().call("rows", each=each, timeout=JUDGE_SECONDS)
            except (WorkerLost, TimeoutError) as lost:
                error = lost
                continue
            scores: dict[int, Score] = {}
            for place, part in zip(places, parts, strict=True):
                scores |= dict(zip(place, part, strict=True))
            return [scores[number] for number in range(len(rows))]
        why = "the worker that judged it died twice"
        return [failed(why, str(error).splitlines()[0])] * len(rows)

    def close(self) -> None:
        """End the workers."""
        if self._group is not None:
            self._group.close()
        self.inner.close()


def judge(
    cluster: Cluster, reward: Any, *, workers: int = 2, pool: str | None = None, cpus: float = 1.0
) -> PlacedReward:
    """A reward judged by workers on the cluster: `grpo(engine, reward=c.judge(my_reward, workers=8))`.

    `reward` is whatever a recipe takes; it must be able to travel (its function too). One that judges groups or whole batches is
    refused where `workers` > 1: its rows must stay together. Raises `SettingError` where there is no room.
    """
    inner = as_reward(reward)
    if workers > 1 and getattr(inner, "per", "row") != "row":
        raise SettingError(
            message(f"reward {inner.name!r} judges a {inner.per} at once", expected="workers=1", found=workers)  # type: ignore[attr-defined]
        )
    return PlacedReward(cluster, inner, workers, {"pool": pool} if pool is not None else {"cpus": cpus})
