"""The decorator that declares a section of the settings, and the types of numbers in it."""

from typing import Annotated, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def settings(cls: type[T]) -> type[T]:
    """Declare a class as a section of the settings: frozen, with keyword arguments only. Unknown names and numbers that
    are not finite are refused."""
    strict = ConfigDict(extra="forbid", allow_inf_nan=False)
    return dataclass(config=strict, frozen=True, kw_only=True)(cls)  # pyright: ignore[reportReturnType]


Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Patience = Annotated[float, Field(ge=0, le=1e9)]  # in seconds; 0 switches the alarm off
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=1e-9, le=1e9)]  # rewards are divided by it, and the quotients squared in float32
Reward = Annotated[float, Field(ge=-1e300, le=1e300)]
Tempering = Annotated[float, Field(ge=1e-3, le=1e3)]
Temperature = Annotated[float, Field(ge=0.001, le=10)]
TopP = Annotated[float, Field(gt=0, le=1)]
