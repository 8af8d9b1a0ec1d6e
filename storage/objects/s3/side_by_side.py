"""Runs many coroutines, of which only a few are under way at a time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

A = TypeVar("A")
T = TypeVar("T")


async def side_by_side(limit: int, work: Callable[[A], Coroutine[Any, Any, T]], items: Iterable[A]) -> list[T]:
    """Return the results of `work` for all items, in order. At most `limit` calls are under way at a time. The first
    failure cancels the others."""
    turn = asyncio.Semaphore(limit)

    async def one(item: A) -> T:
        async with turn:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
