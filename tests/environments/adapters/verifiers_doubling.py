"""A taskset of verifiers: a number is to be doubled."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Doubling"]


class Number(vf.TaskData):
    answer: str


class Double(vf.Task[Number]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)


class Doubling(vf.Taskset[Double]):
    def load(self) -> Iterable[Double]:
        for number in range(4):
            answer = str(2 * number)
            yield Double(Number(prompt=f"Double {number}.", answer=answer), self.config.task)
