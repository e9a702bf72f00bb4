"""Configuration models: frozen, extra keys forbidden, every number with a range, a sentence and the paper's value."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from pflsec.core.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """Base of every configuration. Values are checked when it is built; NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_switches(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is due: Python would count them as 1 and 0."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)} and bool not in {kind, *get_args(kind)}:
            raise ValueError("it must be a number")
        return value


def at_least(low: float, *, default: Any, about: str = "", **cited: Any) -> Any:
    """Declare a number >= low. `cited` holds published values by source, e.g. paper=10, pfllib=1."""
    return Field(default=default, ge=low, description=about, json_schema_extra={"cited": cited})


def above(low: float, *, default: Any, about: str = "", **cited: Any) -> Any:
    """Declare a number > low."""
    return Field(default=default, gt=low, description=about, json_schema_extra={"cited": cited})


def between(low: float, high: float, *, default: Any, about: str = "", **cited: Any) -> Any:
    """Declare a number in [low, high]."""
    return Field(default=default, ge=low, le=high, description=about, json_schema_extra={"cited": cited})


def option(*, default: Any, about: str = "", **cited: Any) -> Any:
    """Declare a choice or a switch; the annotation says what is allowed."""
    return Field(default=default, description=about, json_schema_extra={"cited": cited})


C = TypeVar("C", bound=BaseModel)


def build(model: type[C], values: Mapping[str, Any], where: str, source: str = "the command line") -> C:
    """Return model(**values); every mistake becomes one ConfigError sentence.

    where   how the reader knows the thing that is configured, e.g. "fedprox" or "train"
    source  where the values came from, e.g. "grid.toml"
    """
    try:
        return model(**values)
    except ValidationError as error:
        problems = "; ".join(sentence(model, dict(problem), where) for problem in error.errors())
        raise ConfigError(f"{problems} From {source}.") from None


def sentence(model: type[BaseModel], problem: Mapping[str, Any], where: str) -> str:
    """Return what is wrong with one value, from a problem as pydantic describes it."""
    name = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(model.model_fields)) or "none"
        return f"{where} has no setting '{name}'{did_you_mean(name, model.model_fields)} It has: {known}."
    rule = problem["msg"].removeprefix("Value error, ")
    rule = rule.replace("Input should be", "it must be").replace("a finite number", "a finite number (no nan, no inf)")
    if problem["loc"]:
        return f"{where}: {name} is {problem['input']!r}; {rule}."
    return f"{where}: {rule}."
